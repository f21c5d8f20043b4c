// HSTU attention and packing, against sums in doubles over the tiles as hstu_call.h describes them.
#ifndef NPU_GR_FUZZ_HSTU_H
#define NPU_GR_FUZZ_HSTU_H

#include "fuzz.h"

namespace {
namespace hstu {

constexpr int64_t kTile = 64;

int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <typename T>
struct Run {
  static constexpr int64_t kScale = sizeof(T) == 1 ? 2 : 0;  // bytes behind the numbers of each token and head

  Run(int64_t num_tiles, int64_t heads, int64_t dq, int64_t dv)
      : num_tiles(num_tiles),
        heads(heads),
        dq(dq),
        dv(dv),
        k(num_tiles * heads * bytes(dq)),
        v(num_tiles * heads * bytes(dv)) {}

  static int64_t bytes(int64_t width) { return (width * static_cast<int64_t>(sizeof(T)) + kScale) * kTile; }

  double key(int64_t token, int64_t head, int64_t d) const {
    const char *tile = static_cast<const char *>(k.at()) + (token / kTile * heads + head) * bytes(dq);
    const int64_t at = sizeof(T) == 4 ? d * kTile + token % kTile : (d / 2 * kTile + token % kTile) * 2 + d % 2;
    return number_of(tile, at) * scale(tile, dq, token);
  }
  double value(int64_t token, int64_t head, int64_t d) const {
    const char *tile = static_cast<const char *>(v.at()) + (token / kTile * heads + head) * bytes(dv);
    const int64_t at = sizeof(T) == 4 ? token % kTile * dv + d : (token % kTile / 2 * dv + d) * 2 + token % 2;
    return number_of(tile, at) * scale(tile, dv, token);
  }
  TileRun address() const { return {k.at(), v.at(), num_tiles}; }

  int64_t num_tiles, heads, dq, dv;
  Memory k, v;

 private:
  static double number_of(const char *tile, int64_t at) {
    if constexpr (sizeof(T) == 1)
      return reinterpret_cast<const T *>(tile)[at];
    else
      return wide(reinterpret_cast<const T *>(tile)[at]);
  }
  static double scale(const char *tile, int64_t width, int64_t token) {
    return kScale ? wide(reinterpret_cast<const bf16 *>(tile + width * kTile)[token % kTile]) : 1;
  }
};

int64_t half_octave(int64_t seconds) {  // of seconds + 1 as fp32: twice the exponent, and the first bit behind it
  const float x = static_cast<float>((seconds < 0 ? 0 : seconds > 2147483647 ? 2147483647 : seconds) + 1);
  const int exponent = ilogbf(x);
  return 2 * exponent + (x >= ldexpf(1.5f, exponent));
}

template <typename Row, typename T>
struct Job {
  static constexpr bool kIsInt8 = sizeof(T) == 1;
  int64_t heads, qk_dim, v_dim, tokens, candidates, cut, gap;
  int64_t dq = up(qk_dim, 2), dv = up(v_dim, 16), first_run = tokens ? below((tokens + 63) / 64 + 1) : 0;
  Matrix<Row> k = rows(tokens, qk_dim), v = rows(tokens, v_dim);
  Run<T> runs[2] = {{first_run, heads, dq, dv}, {(tokens + 63) / 64 - first_run, heads, dq, dv}};
  Matrix<float> position = Matrix<float>::contiguous(heads, one_of({2, 3, 40, 130}));
  Matrix<float> time = Matrix<float>::contiguous(heads, 64);
  std::vector<int64_t> times = {};
  double alpha = 0.05 * static_cast<double>(1 + below(20));
  int64_t recent = one_of({0, 0, 1, 5, 64, 100}), first = one_of({0, 3, 64, 70});  // window
  bool is_rough = kernels.has_bf16_dot && sizeof(Row) == 2 && sizeof(T) == 2;      // weights are rounded to bf16

  Matrix<Row> rows(int64_t n, int64_t dim) const { return Matrix<Row>::filled(n, heads * dim, stride_of(heads * dim)); }
  Rows as_rows(const Matrix<Row> &x, int64_t dim, int64_t from = 0) const {
    return {x.data() + from * x.stride(), x.stride(), dim};
  }

  void pack_all() {
    const int64_t bounds[] = {0, cut, first_run * kTile, tokens};
    for (int64_t from = 0; from < tokens;) {
      int64_t to = tokens;
      for (int64_t bound : bounds)
        if (bound > from && bound < to) to = bound;
      const int64_t run = from >= first_run * kTile, first = from - run * first_run * kTile;
      const Pack call = {to - from,
                         heads,
                         qk_dim,
                         v_dim,
                         kElement<Row>,
                         kElement<T>,
                         as_rows(k, qk_dim, from),
                         as_rows(v, v_dim, from),
                         first,
                         runs[run].address()};
      kernels.pack_kv(&call);
      from = to;
    }
  }

  double key(int64_t j, int64_t h, int64_t d) const { return part(j).key(j - start(j), h, d); }
  double value(int64_t j, int64_t h, int64_t d) const { return part(j).value(j - start(j), h, d); }
  const Run<T> &part(int64_t j) const { return runs[j >= first_run * kTile]; }
  int64_t start(int64_t j) const { return j >= first_run * kTile ? first_run * kTile : 0; }

  // What a tile holds of x, and how far it may be off: half a step of the row's largest number in 8 bits.
  void expect_stored(const char *what, int64_t j, double got, const Matrix<Row> &x, int64_t column, int64_t d,
                     int64_t dim) const {
    if constexpr (sizeof(T) == 1) {
      double top = 0;
      for (int64_t i = 0; i < dim; i++) top = fmax(top, fabs(x(j, column + i)));
      expect(what, j, got, d < dim ? x(j, column + d) : 0, d < dim ? top / 127 * 0.51 : 0);
    } else {
      expect(what, j, got, d < dim ? wide(rounded<T>(static_cast<float>(x(j, column + d)))) : 0, 0);
    }
  }

  void check_tiles() const {
    for (int64_t j = 0; j < tokens; j++)
      for (int64_t h = 0; h < heads; h++) {
        for (int64_t d = 0; d < dq; d++) expect_stored("key", j, key(j, h, d), k, h * qk_dim, d, qk_dim);
        for (int64_t d = 0; d < dv; d++) expect_stored("value", j, value(j, h, d), v, h * v_dim, d, v_dim);
      }
    for (int64_t j = tokens; j < up(tokens, kTile); j++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; d < dv; d++) expect("value behind the last", j, value(j, h, d), 0, 0);
  }

  // One term of a row's sum, and how far the kernel may be off it.
  struct Sum {
    std::vector<double> total, limit;
    double largest = 0, terms = 0;  // |weight| times the largest value of its token
  };
  template <typename Key, typename Value>
  void add(Sum &sum, const Matrix<Row> &q, int64_t row, int64_t h, double bias, Key key_of, Value value_of,
           bool rough) const {
    double x = bias, size = fabs(bias);
    for (int64_t d = 0; d < qk_dim; d++) {
      x += alpha * q(row, h * qk_dim + d) * key_of(d);
      size += fabs(alpha * q(row, h * qk_dim + d) * key_of(d));
    }
    // in 8 bits queries and weights are rounded to 16, by the largest of a row and of a tile
    const double weight = x / (1 + exp(-x)), query = kIsInt8 ? alpha * static_cast<double>(qk_dim) * 4 : 0;
    const double off = 2e-5 * (size + query) + (rough ? 5e-3 : kIsInt8 ? 1e-4 : 2e-5) * fabs(weight);
    double top = 0;
    for (int64_t d = 0; d < v_dim; d++) {
      sum.total[d] += weight * value_of(d);
      sum.limit[d] += off * fabs(value_of(d));
      top = fmax(top, fabs(value_of(d)));
    }
    sum.largest = fmax(sum.largest, fabs(weight) * top);
    sum.terms += kIsInt8;
  }
  double bias(int64_t h, int64_t distance, int64_t seconds) const {
    return position(h, distance < position.width() ? distance : position.width() - 1) + time(h, half_octave(seconds));
  }
  void compare(const char *what, const Sum &sum, const Matrix<Row> &out, int64_t row, int64_t h) const {
    for (int64_t d = 0; d < v_dim; d++)
      expect(what, row, out(row, h * v_dim + d), sum.total[d],
             sum.limit[d] + sum.terms * sum.largest * 1.6e-5 + kRounding<Row> * fabs(sum.total[d]) + 1e-6);
  }
  void add_history(Sum &sum, const Matrix<Row> &q, int64_t row, int64_t h, int64_t place, int64_t seen,
                   int64_t now) const {
    for (int64_t j = 0; j < seen; j++)
      if (!recent || place - j < recent || j < first)
        add(
            sum, q, row, h, bias(h, place - j, now - times[static_cast<size_t>(j)]),
            [&](int64_t d) { return key(j, h, d); }, [&](int64_t d) { return value(j, h, d); }, is_rough);
  }

  Hstu call(const Matrix<Row> &q, const Matrix<Row> &out, const TileRun *at) const {
    Hstu made = {};
    made.num_rows = q.rows();
    made.num_heads = heads;
    made.qk_dim = qk_dim;
    made.v_dim = v_dim;
    made.row_dtype = kElement<Row>;
    made.tile_dtype = kElement<T>;
    made.q = as_rows(q, qk_dim);
    made.out = as_rows(out, v_dim);
    made.runs = at;
    made.num_runs = 2;
    made.num_tokens = tokens;
    made.times = times.data();
    made.position_bias = position.data();
    made.position_buckets = position.width();
    made.time_bias = time.data();
    made.alpha = alpha;
    made.recent = recent;
    made.first = first;
    return made;
  }

  void causal() const {
    const int64_t first = below(tokens);
    const Matrix<Row> q = rows(tokens - first, qk_dim), out(tokens - first, heads * v_dim, stride_of(heads * v_dim));
    const TileRun at[] = {runs[0].address(), runs[1].address()};
    Hstu made = call(q, out, at);
    const Memory scratch(kernels.hstu_scratch_bytes(&made, 1));
    made.scratch = scratch.at();
    kernels.hstu_causal(&made);
    for (int64_t row = 0; row < q.rows(); row++)
      for (int64_t h = 0; h < heads; h++) {
        Sum sum = {std::vector<double>(static_cast<size_t>(v_dim)), std::vector<double>(static_cast<size_t>(v_dim)), 0,
                   0};
        const int64_t place = first + row;
        add_history(sum, q, row, h, place, place + 1, times[static_cast<size_t>(place)]);
        compare("causal", sum, out, row, h);
      }
  }

  void targets() const {
    const Matrix<Row> q = rows(candidates, qk_dim), own_k = rows(candidates, qk_dim), own_v = rows(candidates, v_dim);
    const Matrix<Row> out(candidates, heads * v_dim, stride_of(heads * v_dim));
    const TileRun at[] = {runs[0].address(), runs[1].address()};
    Hstu made = call(q, out, at);
    const int64_t now = made.query_time = (tokens ? times.back() : 0) + below(3) * gap - 5;
    made.own_k = as_rows(own_k, qk_dim);
    made.own_v = as_rows(own_v, v_dim);
    const Memory scratch(kernels.hstu_scratch_bytes(&made, 0));
    made.scratch = scratch.at();
    kernels.hstu_targets(&made);
    for (int64_t row = 0; row < candidates; row++)
      for (int64_t h = 0; h < heads; h++) {
        Sum sum = {std::vector<double>(static_cast<size_t>(v_dim)), std::vector<double>(static_cast<size_t>(v_dim)), 0,
                   0};
        add_history(sum, q, row, h, tokens, tokens, now);
        add(
            sum, q, row, h, bias(h, 0, 0), [&](int64_t d) { return own_k(row, h * qk_dim + d); },
            [&](int64_t d) { return own_v(row, h * v_dim + d); }, false);
        compare("targets", sum, out, row, h);
      }
  }
};

template <typename Row, typename T>
void one() {
  const bool is_huge = below(40) == 0;
  const int64_t tokens = is_huge ? 200 + below(100) : one_of({0, 1, 2, 5, 17, 63, 64, 65, 127, 130});
  Job<Row, T> job = {is_huge ? 5 : 1 + below(3),
                     is_huge ? 130 : one_of({1, 2, 5, 8, 33}),
                     is_huge ? 100 : one_of({1, 3, 16, 20, 80}),
                     tokens,
                     is_huge ? 140 : one_of({0, 1, 2, 5, 6, 7, 13}),
                     below(tokens + 1),
                     one_of({1, 4, 1000, 100000, int64_t{1} << 40})};
  for (int64_t at = below(1 << 30); static_cast<int64_t>(job.times.size()) < tokens; at += below(job.gap) - job.gap / 4)
    job.times.push_back(at);
  job.pack_all();
  job.check_tiles();
  if (tokens) job.causal();
  job.targets();
}

}  // namespace hstu
}  // namespace

#endif
