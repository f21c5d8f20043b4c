// A ranker's whole pass, against the same in doubles; and numbers that contradict themselves, which must be rejected.
#ifndef NPU_GR_FUZZ_HSTU_PASS_H
#define NPU_GR_FUZZ_HSTU_PASS_H

#include "dense.h"
#include "hstu.h"

namespace {
namespace hstu {

typedef std::vector<double> Vector;

struct Norm {
  explicit Norm(int64_t width)
      : weight(Matrix<float>::contiguous(1, width)), bias(Matrix<float>::contiguous(1, width)) {}

  PassNorm address() const { return {weight.data(), bias.data(), 1e-3}; }
  void apply(double *x, int64_t n) const {
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < n; i++) mean += x[i] / static_cast<double>(n);
    for (int64_t i = 0; i < n; i++) variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(n);
    for (int64_t i = 0; i < n; i++) x[i] = (x[i] - mean) / sqrt(variance + 1e-3) * weight(0, i) + bias(0, i);
  }

  Matrix<float> weight, bias;
};

struct Linear {
  Linear(int64_t out, int64_t in) : weight(Matrix<float>::contiguous(out, in)), bias(biases(out)) {
    for (int64_t o = 0; o < out; o++)  // so that no sum grows from layer to layer
      for (int64_t i = 0; i < in; i++) weight.at(o, i) *= 0.5f / sqrtf(static_cast<float>(in));
    packed = packed_weight<float>(weight);
  }
  static Matrix<float> biases(int64_t out) { return Matrix<float>::contiguous(1, up(out, 64)); }

  PassLinear address(int64_t first = 0, int64_t count = 0) {
    if (!count) return {packed->at(), bias.data(), weight.width(), weight.rows(), kFloat32};
    parts.push_back(std::make_unique<Linear>(*this, first, count));
    return parts.back()->address();
  }
  Linear(const Linear &whole, int64_t first, int64_t count)
      : weight(count, whole.weight.width(), whole.weight.width()), bias(biases(count)) {
    for (int64_t o = 0; o < count; o++) {
      bias.at(0, o) = whole.bias.at(0, first + o);
      for (int64_t i = 0; i < weight.width(); i++) weight.at(o, i) = whole.weight.at(first + o, i);
    }
    packed = packed_weight<float>(weight);
  }
  Vector apply(const Vector &x, bool is_silu) const {
    Vector y(static_cast<size_t>(weight.rows()));
    for (int64_t o = 0; o < weight.rows(); o++) {
      double sum = bias(0, o);
      for (int64_t i = 0; i < weight.width(); i++) sum += weight(o, i) * x[static_cast<size_t>(i)];
      y[static_cast<size_t>(o)] = is_silu ? sum / (1 + exp(-sum)) : sum;
    }
    return y;
  }

  Matrix<float> weight, bias;
  std::unique_ptr<Memory> packed;
  std::vector<std::unique_ptr<Linear>> parts;
};

struct Layer {
  Layer(int64_t dim, int64_t uv, int64_t qk, int64_t heads, int64_t group, int64_t joined, int64_t buckets)
      : norm_in(dim),
        norm_attention(group),
        uvqk(2 * (uv + qk), dim),
        out(dim, joined * uv),
        position(Matrix<float>::contiguous(heads, buckets)),
        time(Matrix<float>::contiguous(heads, 64)) {}

  Norm norm_in, norm_attention;
  Linear uvqk, out;
  Matrix<float> position, time;
};

struct Asked {  // one request
  int64_t cached, added, candidates, keeps, query_time;
  std::vector<int64_t> runs, times, items, actions, shown;
};

template <typename T>
class Ranker {
 public:
  void run() {
    for (int64_t i = 1 + below(3); i > 0; i--) requests_.push_back(some_request());
    for (int64_t l = 0; l < num_layers_; l++) {
      layers_.emplace_back(new Layer(dim_, uv_, qk_, heads_, group_, joined_ ? 3 : 1, buckets_));
      Layer &at = *layers_.back();
      addresses_.push_back({at.norm_in.address(), at.norm_attention.address(), at.uvqk.address(),
                            at.uvqk.address(uv_, uv_), at.uvqk.address(2 * uv_ + qk_, qk_), at.out.address(),
                            at.position.data(), at.time.data()});
    }
    model_ = {dim_,     num_layers_, heads_, qk_dim_, v_dim_,  kElement<T>, group_,           joined_,
              is_silu_, buckets_,    alpha_, scale_,  recent_, first_,      addresses_.data()};
    head_ = {head_norm_.address(), has_hidden_ ? hidden_.address() : PassLinear{}, out_.address()};
    std::vector<Asked> before;
    for (const Asked &r : requests_) {
      Asked prefix = {0, r.cached, 0, 1, 0, r.runs, r.times, r.items, r.actions, {}};
      prefix.times.resize(static_cast<size_t>(r.cached));
      before.push_back(prefix);
    }
    compute(before);
    const std::vector<float> got = compute(requests_);
    size_t at = 0;
    for (const Asked &r : requests_)
      for (const Vector &logits : expected(r))
        for (double want : logits) {
          const double rough = sizeof(T) == 2 ? 1.0 : 2e-3;  // layers of bf16 add up; test_hstu_pass.py is closer
          expect("pass", static_cast<int64_t>(at), got[at], want, rough * (1 + fabs(want)));
          at++;
        }
    contradict();
    search();
  }

 private:
  Asked some_request() {
    Asked made = {one_of({0, 0, 1, 63, 64, 65, 70}),
                  one_of({0, 1, 5, 64, 66}),
                  one_of({0, 1, 6, 7}),
                  below(2),
                  0,
                  {},
                  {},
                  {},
                  {},
                  {}};
    const int64_t tokens = made.cached + made.added, pages = (tokens + 64 * page_tiles_ - 1) / (64 * page_tiles_);
    const int64_t cut = below(pages + 1);  // two runs, the second in front of the first in memory
    made.runs = {next_page_ + pages - cut, cut, next_page_, pages - cut};
    next_page_ += pages;
    const int64_t gap = one_of({1, 4, 1000, 100000});
    for (int64_t t = below(1 << 30); static_cast<int64_t>(made.times.size()) < tokens; t += below(gap) - gap / 4)
      made.times.push_back(t);
    made.query_time = (tokens ? made.times.back() : 0) + below(3) * gap;
    for (int64_t i = 0; i < tokens; i++) {
      made.items.push_back(below(items_.rows()));
      made.actions.push_back(below(actions_.rows()));
    }
    for (int64_t i = 0; i < made.candidates; i++) made.shown.push_back(below(items_.rows()));
    return made;
  }

  std::vector<int64_t> numbers(const std::vector<Asked> &asked) const {
    std::vector<int64_t> made;
    for (const Asked &r : asked) {
      const PassSegment is = {r.cached,
                              r.added,
                              r.candidates,
                              r.query_time,
                              r.keeps,
                              2,
                              reinterpret_cast<uint64_t>(keys_.at()),
                              reinterpret_cast<uint64_t>(values_.at()),
                              kPages * page_tiles_ * tile_k_,
                              kPages * page_tiles_ * tile_v_,
                              page_tiles_,
                              kPages,
                              0,
                              0};
      const auto *words = reinterpret_cast<const int64_t *>(&is);
      made.insert(made.end(), words, words + sizeof is / sizeof *words);
      made.insert(made.end(), r.runs.begin(), r.runs.end());
      made.insert(made.end(), r.times.begin(), r.times.end());
      made.insert(made.end(), r.items.begin() + r.cached, r.items.begin() + r.cached + r.added);
      made.insert(made.end(), r.actions.begin() + r.cached, r.actions.begin() + r.cached + r.added);
      made.insert(made.end(), r.shown.begin(), r.shown.end());
    }
    return made;
  }

  HstuPass call(const Memory &words, int64_t count, size_t num_requests, float *out) const {
    HstuPass made = {};
    made.model = &model_;
    made.head = &head_;
    made.numbers = static_cast<const int64_t *>(words.at());
    made.num_numbers = count;
    made.num_segments = static_cast<int64_t>(num_requests);
    made.items = items_.data();
    made.actions = actions_.data();
    made.num_items = items_.rows();
    made.num_actions = actions_.rows();
    made.tile_dtype = model_.dtype;
    made.out = out;
    return made;
  }

  static Memory copied(const std::vector<int64_t> &from) {
    Memory made(static_cast<int64_t>(from.size()) * 8);
    if (!from.empty()) memcpy(made.at(), from.data(), from.size() * 8);
    return made;
  }

  std::vector<float> compute(const std::vector<Asked> &asked) const {
    int64_t candidates = 0;
    for (const Asked &r : asked) candidates += r.candidates;
    const std::vector<int64_t> words = numbers(asked);
    const Memory given = copied(words), out(candidates * out_.weight.rows() * 4);
    HstuPass pass = call(given, static_cast<int64_t>(words.size()), asked.size(), static_cast<float *>(out.at()));
    const int64_t bytes = kernels.hstu_pass_bytes(&pass);
    if (bytes < 0) fail("bytes of a pass", 0, static_cast<double>(bytes), 0, 0);
    const Memory scratch(bytes);
    pass.scratch = scratch.at();
    kernels.hstu_pass(&pass);
    const auto *found = static_cast<const float *>(out.at());
    return std::vector<float>(found, found + candidates * out_.weight.rows());
  }

  // NEXT, the search and a rank of what it finds, in one call and one after the other: the same bits.
  void search() {
    Linear vector(dim_, dim_);
    const PassHead next = {head_norm_.address(), {}, vector.address()};
    const int64_t num = static_cast<int64_t>(requests_.size()), k = 1 + below(25), outputs = out_.weight.rows();
    std::vector<Asked> asked = requests_;
    std::vector<int64_t> wanted, least;
    int64_t total = 0;
    for (Asked &r : asked) {
      r.candidates = 1, r.shown = {items_.rows() - 1};
      wanted.push_back(below(k + 1)), least.push_back(below(22));
      total += wanted.back();
    }
    const auto table = Matrix<float>::contiguous(items_.rows() - 1, dim_);
    const std::vector<int64_t> words = numbers(asked);
    const Memory given = copied(words), want = copied(wanted), few = copied(least), u(num * dim_ * 4),
                 score(num * k * 4), item(num * k * 8), room((static_cast<int64_t>(words.size()) + total) * 8),
                 scored(num * 8), logits(total * outputs * 4), products(total * 4);
    HstuFind find = {};
    find.next = call(given, static_cast<int64_t>(words.size()), asked.size(), static_cast<float *>(u.at()));
    find.next.head = &next;
    find.items = {static_cast<float *>(u.at()),
                  table.data(),
                  num,
                  table.rows(),
                  dim_,
                  k,
                  nullptr,
                  nullptr,
                  nullptr,
                  static_cast<float *>(score.at()),
                  static_cast<int64_t *>(item.at())};
    const Memory workspace(kernels.best_items_bytes(&find.items));
    find.items.workspace = static_cast<uint64_t *>(workspace.at());
    find.head = &head_;
    find.wanted = static_cast<int64_t *>(want.at()), find.least = static_cast<int64_t *>(few.at());
    find.numbers = static_cast<int64_t *>(room.at()), find.num_scored = static_cast<int64_t *>(scored.at());
    find.logits = static_cast<float *>(logits.at()), find.products = static_cast<float *>(products.at());
    find.num_bytes = kernels.hstu_find_bytes(&find);
    if (find.num_bytes < 0) fail("bytes of a search", 0, static_cast<double>(find.num_bytes), 0, 0);
    const Memory scratch(find.num_bytes);
    find.next.scratch = scratch.at();
    if (kernels.hstu_find(&find)) fail("a search", 0, -1, 0, 0);

    std::vector<Asked> ranks;
    int64_t place = 0;
    for (int64_t i = 0; i < num; i++) {
      const int64_t *found = find.items.item + i * k, there = least_of(k, table.rows());
      const int64_t count = least_of(wanted[at(i)], there) < least[at(i)] ? 0 : least_of(wanted[at(i)], there);
      expect("how many are scored", i, static_cast<double>(find.num_scored[i]), static_cast<double>(count), 0);
      ranks.push_back(requests_[at(i)]);
      ranks.back().candidates = count;
      ranks.back().shown.assign(found, found + count);
      for (int64_t c = 0; c < count; c++, place++)
        expect("product", place, find.products[place], find.items.score[i * k + c], 0);
    }
    const std::vector<float> one_by_one = compute(ranks);
    for (size_t i = 0; i < one_by_one.size(); i++)
      expect("rank of what is found", static_cast<int64_t>(i), find.logits[i], one_by_one[i], 0);
    const Memory too_many = copied(std::vector<int64_t>(asked.size(), k + 1));
    find.wanted = static_cast<int64_t *>(too_many.at());
    if (kernels.hstu_find_bytes(&find) != kBadFind) fail("more than are found is rejected", 0, 0, kBadFind, 0);
  }

  // One number is replaced by a hostile one: either that is rejected, or it is none that a buffer hangs on.
  void contradict() const {
    std::vector<int64_t> words = numbers(requests_);
    const int64_t place = below(static_cast<int64_t>(words.size()));
    const int64_t field = place < 14 ? place : -1;
    if (field >= 6 && field <= 10) return;  // where the pages lie is the caller's word
    int64_t &word = words[static_cast<size_t>(place)];
    const int64_t before = word;
    word = one_of({-1, INT64_MIN, INT64_MAX, int64_t{1} << 62, int64_t{1} << 33, 1000000});
    const Memory given = copied(words);
    const HstuPass pass = call(given, static_cast<int64_t>(words.size()), requests_.size(), nullptr);
    const int64_t bytes = kernels.hstu_pass_bytes(&pass);
    const bool is_count = (field >= 0 && field < 3) || (field >= 12 && (word < 0 || word >= int64_t{1} << 40));
    if (is_count && bytes >= 0) fail("a count that contradicts is rejected", place, static_cast<double>(bytes), -1, 0);
    word = before;
    HstuPass cut = call(given, static_cast<int64_t>(words.size()) - 1, requests_.size(), nullptr);
    memcpy(given.at(), words.data(), words.size() * 8);
    if (kernels.hstu_pass_bytes(&cut) != kBadNumbers) fail("numbers that end too early", 0, 0, kBadNumbers, 0);
  }

  std::vector<Vector> expected(const Asked &r) const {
    const int64_t tokens = r.cached + r.added;
    std::vector<Vector> x;
    for (int64_t i = 0; i < tokens; i++) x.push_back(embedded(r.items[at(i)], r.actions[at(i)]));
    for (int64_t item : r.shown) x.push_back(embedded(item, actions_.rows() - 1));
    for (const auto &layer : layers_) {
      std::vector<Vector> mixed;
      for (Vector row : x) {
        layer->norm_in.apply(row.data(), dim_);
        mixed.push_back(layer->uvqk.apply(row, is_silu_));
      }
      for (int64_t i = 0; i < static_cast<int64_t>(x.size()); i++) {
        const Vector rows = layer->out.apply(gated(r, *layer, mixed, i), false);
        for (int64_t d = 0; d < dim_; d++) x[at(i)][at(d)] += rows[at(d)];
      }
    }
    std::vector<Vector> logits;
    for (int64_t c = 0; c < r.candidates; c++) {
      Vector row = x[at(tokens + c)];
      head_norm_.apply(row.data(), dim_);
      logits.push_back(out_.apply(has_hidden_ ? hidden_.apply(row, true) : row, false));
    }
    return logits;
  }

  Vector embedded(int64_t item, int64_t action) const {
    Vector row;
    for (int64_t d = 0; d < dim_; d++)
      row.push_back(wide(rounded<T>(static_cast<float>(items_(item, d) + actions_(action, d)))));
    return row;
  }

  Vector gated(const Asked &r, const Layer &layer, const std::vector<Vector> &mixed, int64_t row) const {
    const int64_t tokens = r.cached + r.added, seen = row < tokens ? row + 1 : tokens, place = least_of(row, tokens);
    const Vector &own = mixed[at(row)];
    Vector attention(at(uv_));
    const auto see = [&](int64_t j, int64_t distance, int64_t seconds) {
      for (int64_t h = 0; h < heads_; h++) {
        double score = layer.position(h, least_of(distance, buckets_ - 1)) + layer.time(h, half_octave(seconds));
        for (int64_t d = 0; d < qk_dim_; d++)
          score += alpha_ * own[at(2 * uv_ + h * qk_dim_ + d)] * mixed[at(j)][at(2 * uv_ + qk_ + h * qk_dim_ + d)];
        const double weight = scale_ * score / (1 + exp(-score));
        for (int64_t d = 0; d < v_dim_; d++)
          attention[at(h * v_dim_ + d)] += weight * mixed[at(j)][at(uv_ + h * v_dim_ + d)];
      }
    };
    const int64_t now = row < tokens ? r.times[at(row)] : r.query_time;
    for (int64_t j = 0; j < seen; j++)
      if (!recent_ || place - j < recent_ || j < first_) see(j, place - j, now - r.times[at(j)]);
    if (row >= tokens) see(row, 0, 0);
    Vector normed = attention, made;
    for (int64_t first = 0; first < uv_; first += group_) layer.norm_attention.apply(normed.data() + first, group_);
    Vector gate(own.begin(), own.begin() + uv_);
    if (!is_silu_)
      for (double &u : gate) u = u / (1 + exp(-u));
    if (joined_) {
      made = gate;
      made.insert(made.end(), attention.begin(), attention.end());
    }
    for (int64_t d = 0; d < uv_; d++) made.push_back(gate[at(d)] * normed[at(d)]);
    return made;
  }

  static size_t at(int64_t i) { return static_cast<size_t>(i); }
  static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

  static constexpr int64_t kPages = 9;
  int64_t heads_ = 1 + below(3), qk_dim_ = one_of({1, 2, 5, 8}), v_dim_ = one_of({1, 3, 16, 20});
  int64_t uv_ = heads_ * v_dim_, qk_ = heads_ * qk_dim_, dim_ = one_of({1, 7, 16, 33}), num_layers_ = 1 + below(3);
  int64_t group_ = below(2) ? uv_ : v_dim_, joined_ = below(2), is_silu_ = below(2), buckets_ = one_of({2, 40, 130});
  int64_t page_tiles_ = 1 + below(2), next_page_ = 0;
  int64_t tile_k_ = heads_ * up(qk_dim_, 2) * 64, tile_v_ = heads_ * up(v_dim_, 16) * 64;
  double alpha_ = 0.1 * static_cast<double>(1 + below(5)), scale_ = 0.02;
  bool has_hidden_ = below(2);
  Matrix<T> items_ = Matrix<T>::contiguous(20, dim_), actions_ = Matrix<T>::contiguous(4, dim_);
  Norm head_norm_ = Norm(dim_);
  Linear hidden_ = Linear(one_of({1, 24, 65}), dim_);
  Linear out_ = Linear(one_of({1, 2, 17}), has_hidden_ ? hidden_.weight.rows() : dim_);
  Memory keys_ = Memory(num_layers_ * kPages * page_tiles_ * tile_k_ * static_cast<int64_t>(sizeof(T)));
  Memory values_ = Memory(num_layers_ * kPages * page_tiles_ * tile_v_ * static_cast<int64_t>(sizeof(T)));
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<PassLayer> addresses_;
  std::vector<Asked> requests_;
  int64_t recent_ = one_of({0, 0, 1, 5, 64, 100}), first_ = one_of({0, 3, 64, 70});  // window
  PassModel model_;
  PassHead head_;
};

}  // namespace hstu
}  // namespace

#endif
