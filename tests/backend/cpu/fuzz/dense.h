// Softmax attention of beams and linear layers, against the same in doubles.
#ifndef NPU_GR_FUZZ_DENSE_H
#define NPU_GR_FUZZ_DENSE_H

#include "fuzz.h"

namespace {

template <typename T>
class Beams {
 public:
  void run() {
    BeamJob job = {};
    job.q = q_.data();
    job.element = kElement<T>;
    job.num_rows = rows_;
    job.num_heads = heads_;
    job.num_kv_heads = kv_heads_;
    job.head_dim = dim_;
    job.scale = 0.3f;
    for (const auto &[k, v] : slabs_) {
      keys_.push_back(k->data());
      values_.push_back(v->data());
      tokens_.push_back(k->rows());
    }
    job.num_slabs = static_cast<int64_t>(slabs_.size());
    job.slab_keys = keys_.data();
    job.slab_values = values_.data();
    job.slab_tokens = tokens_.data();
    job.num_slots = slots_;
    job.own_keys = own_keys_.data();
    job.own_values = own_values_.data();
    job.own_row_stride = own_keys_.stride();
    for (int64_t i = 0; i < slots_ * rows_; i++) ancestry_.push_back(below(holders_));
    has_ancestry_ = below(2);
    job.ancestry = has_ancestry_ ? ancestry_.data() : nullptr;
    job.ancestry_stride = rows_;
    const Matrix<T> out(rows_, heads_ * dim_, heads_ * dim_);
    job.out = out.data();
    const Memory workspace(kernels.beam_attention_bytes(&job));
    job.workspace = workspace.at();
    kernels.beam_attention(&job);
    for (int64_t row = 0; row < rows_; row++)
      for (int64_t h = 0; h < heads_; h++) check(out, row, h);
  }

 private:
  typedef std::unique_ptr<Matrix<T>> Plane;
  static Plane plane(int64_t tokens, int64_t width) {
    return Plane(new Matrix<T>(Matrix<T>::contiguous(tokens, width)));
  }

  static std::vector<std::pair<Plane, Plane>> some_slabs(int64_t width) {
    std::vector<std::pair<Plane, Plane>> made;
    for (int64_t s = below(4); s > 0; s--) {
      const int64_t tokens = one_of({0, 1, 7, 63, 64, 65, 200});
      made.emplace_back(plane(tokens, width), plane(tokens, width));
    }
    return made;
  }

  int64_t tokens() const {
    int64_t count = 0;
    for (const auto &slab : slabs_) count += slab.first->rows();
    return count;
  }

  // All keys and values that a query reads, in order: `use(key, value)`, each a function of the dimension.
  template <typename F>
  void each_pair(int64_t row, int64_t kv_head, F use) const {
    const int64_t at = kv_head * dim_;
    for (const auto &[k, v] : slabs_)
      for (int64_t t = 0; t < k->rows(); t++)
        use([&, &k = *k](int64_t d) { return k(t, at + d); }, [&, &v = *v](int64_t d) { return v(t, at + d); });
    for (int64_t slot = 0; slot < slots_; slot++) {
      const int64_t holder = has_ancestry_ ? ancestry_[static_cast<size_t>(slot * rows_ + row)] : row;
      const int64_t own = slot * kv_heads_ * dim_ + at;
      use([&](int64_t d) { return own_keys_(holder, own + d); },
          [&](int64_t d) { return own_values_(holder, own + d); });
    }
  }

  void check(const Matrix<T> &out, int64_t row, int64_t h) const {
    const int64_t kv_head = h / (heads_ / kv_heads_);
    std::vector<double> sum(static_cast<size_t>(dim_)), size(sum);
    double total = 0;
    each_pair(row, kv_head, [&](auto key, auto value) {
      double x = 0;
      for (int64_t d = 0; d < dim_; d++) x += 0.3f * q_(row, h * dim_ + d) * key(d);
      total += exp(x);  // |x| < 300
      for (int64_t d = 0; d < dim_; d++) {
        sum[static_cast<size_t>(d)] += exp(x) * value(d);
        size[static_cast<size_t>(d)] += exp(x) * fabs(value(d));
      }
    });
    for (int64_t d = 0; d < dim_; d++) {
      const double want = sum[static_cast<size_t>(d)] / total, limit = 1e-4 * size[static_cast<size_t>(d)] / total;
      expect("beam attention", row, out(row, h * dim_ + d), want, limit + kRounding<T> * fabs(want) + 1e-6);
    }
  }

  int64_t kv_heads_ = 1 + below(3), heads_ = kv_heads_ * (1 + below(3)), dim_ = one_of({1, 3, 16, 17, 64, 100});
  int64_t rows_ = one_of({0, 1, 5, 6, 7, 20}), holders_ = rows_ + 1 + below(3);
  std::vector<std::pair<Plane, Plane>> slabs_ = some_slabs(kv_heads_ * dim_);
  int64_t slots_ = tokens() ? below(4) : 1 + below(3), capacity_ = slots_ + below(2);  // something is seen
  Matrix<T> q_ = Matrix<T>::contiguous(rows_, heads_ *dim_);
  Matrix<T> own_keys_ = own(), own_values_ = own();
  std::vector<const void *> keys_, values_;
  std::vector<int64_t> tokens_, ancestry_;
  bool has_ancestry_ = false;

  Matrix<T> own() const { return Matrix<T>::contiguous(holders_, capacity_ * kv_heads_ * dim_); }
};

// A linear layer's weight as the kernels read it.
template <typename W>
std::unique_ptr<Memory> packed_weight(const Matrix<W> &weight) {
  const int64_t out = weight.rows(), in = weight.width(), tiles = (out + 63) / 64;
  const int64_t bytes = tiles * (in + in % 2) * 64 * static_cast<int64_t>(sizeof(W));
  std::unique_ptr<Memory> packed(new Memory(bytes));
  const Memory none(0);
  memset(packed->at(), 0, static_cast<size_t>(bytes));
  const Pack pack = {out,
                     1,
                     in,
                     0,
                     kElement<W>,
                     kElement<W>,
                     {weight.data(), weight.stride(), in},
                     {none.at(), 0, 0},
                     0,
                     {packed->at(), none.at(), tiles}};
  kernels.pack_kv(&pack);
  return packed;
}

template <typename X, typename W, typename Y>
void affine() {
  if (sizeof(W) == 2 && !kernels.has_bf16_dot) return;
  const bool is_huge = below(40) == 0;
  const int64_t rows = is_huge ? 200 : one_of({0, 1, 5, 6, 7, 97, 100}),
                in = is_huge ? 700 : one_of({1, 2, 7, 16, 33, 64});
  const int64_t out = is_huge ? 200 : one_of({1, 3, 15, 16, 17, 64, 65, 130}), tiles = (out + 63) / 64;
  const auto x = Matrix<X>::filled(rows, in, stride_of(in));
  const auto weight = Matrix<W>::contiguous(out, in);
  const auto bias = Matrix<float>::contiguous(1, tiles * 64);
  const Matrix<Y> y(rows, out, out);
  const std::unique_ptr<Memory> packed = packed_weight<W>(weight);
  Affine call = {rows,       in,           out,         kElement<X>, kElement<W>, kElement<Y>, x.data(),
                 x.stride(), packed->at(), bias.data(), below(2),    y.data(),    nullptr};
  const Memory scratch(kernels.affine_scratch_bytes(&call));
  call.scratch = scratch.at();
  kernels.affine(&call);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < out; o++) {
      double sum = bias(0, o), size = fabs(sum);
      for (int64_t i = 0; i < in; i++) {
        sum += x(r, i) * weight(o, i);
        size += fabs(x(r, i) * weight(o, i));
      }
      const double want = call.is_silu ? sum / (1 + exp(-sum)) : sum,
                   rounds_x = sizeof(W) < sizeof(X) ? 1.0 / 256 : 1e-5;
      expect("affine", r, y(r, o), want, rounds_x * 1.2 * size + kRounding<Y> * fabs(want) + 1e-6);
    }
}

}  // namespace

#endif
