// beam_attention: softmax attention of a request's beams over its prefix, which all share, and their own few tokens.
//
// Each KV head's prefix is laid out for the microkernel of hstu_tile.h once, then read for six queries at a time: every
// query head of every beam that reads that KV head. A beam's own tokens join the same softmax, so nothing is merged.
#ifndef NPU_GR_BEAM_H
#define NPU_GR_BEAM_H

#include "hstu_tile.h"
#include "kernels.h"

namespace {
namespace beam {

using namespace hstu;

template <class Q, class KV>
class Attention {
 public:
  explicit Attention(const BeamJob &job)
      : job_(job), group_(job.num_heads / job.num_kv_heads), wide_(padded(job.head_dim, kLanes)), tokens_(0) {
    for (int64_t s = 0; s < job.num_slabs; s++) tokens_ += job.slab_tokens[s];
    in_tiles_ = padded(tokens_, kTile);
    float *at = static_cast<float *>(job.workspace);
    keys_ = at, at += in_tiles_ * job.head_dim;
    values_ = at, at += in_tiles_ * wide_;
    queries_ = at, at += kRows * wide_;
    sums_ = at, at += kRows * wide_;
    weights_ = at;
  }

  static int64_t bytes(const BeamJob &job) {
    int64_t tokens = 0;
    for (int64_t s = 0; s < job.num_slabs; s++) tokens += job.slab_tokens[s];
    const int64_t wide = padded(job.head_dim, kLanes), in_tiles = padded(tokens, kTile);
    return 4 * (in_tiles * (job.head_dim + wide) + kRows * (2 * wide + in_tiles + job.num_slots));
  }

  void run() {
    const int64_t queries = job_.num_rows * group_;
    for (int64_t head = 0; head < job_.num_kv_heads; head++) {
      pack(head);
      for (int64_t first = 0; first < queries; first += kRows)
        at_most<kRows>(queries - first, [&](auto count) { attend<count.value>(head, first); });
    }
  }

 private:
  // Keys as [tile][dim][64], values as [token][wide_].
  void pack(int64_t head) {
    const int64_t dim = job_.head_dim, stride = job_.num_kv_heads * dim;
    int64_t token = 0;
    for (int64_t s = 0; s < job_.num_slabs; s++) {
      const KV *k = static_cast<const KV *>(job_.slab_keys[s]) + head * dim;
      const KV *v = static_cast<const KV *>(job_.slab_values[s]) + head * dim;
      for (int64_t t = 0; t < job_.slab_tokens[s]; t++, token++, k += stride, v += stride) {
        float *tile = keys_ + token / kTile * kTile * dim + token % kTile;
        for (int64_t d = 0; d < dim; d++) tile[d * kTile] = widen(k[d]);
        convert(v, values_ + token * wide_, dim, 1.0f);
        for (int64_t d = dim; d < wide_; d++) values_[token * wide_ + d] = 0;
      }
    }
    for (; token < in_tiles_; token++)
      for (int64_t d = 0; d < dim; d++) keys_[token / kTile * kTile * dim + token % kTile + d * kTile] = 0;
  }

  int64_t holder(int64_t slot, int64_t row) const {
    return job_.ancestry ? job_.ancestry[slot * job_.ancestry_stride + row] : row;
  }

  template <class Plane>
  const Plane *own(const void *plane, int64_t slot, int64_t row, int64_t head) const {
    return static_cast<const Plane *>(plane) + holder(slot, row) * job_.own_row_stride +
           (slot * job_.num_kv_heads + head) * job_.head_dim;
  }

  template <int R>
  void attend(int64_t head, int64_t first) {
    const int64_t dim = job_.head_dim, length = in_tiles_ + job_.num_slots;
    for (int r = 0; r < R; r++) {
      const int64_t row = (first + r) / group_, query = head * group_ + (first + r) % group_;
      convert(static_cast<const Q *>(job_.q) + (row * job_.num_heads + query) * dim, queries_ + r * wide_, dim,
              job_.scale);
    }
    constexpr int kWidth = kColumns * kLanes;
    for (int64_t at = 0; at < in_tiles_; at += kWidth) score<R>(at, length);
    float totals[R];
    for (int r = 0; r < R; r++) totals[r] = weigh_row(head, (first + r) / group_, r, length);
    for (int64_t column = 0; column < wide_; column += kWidth)
      at_most<kColumns>((wide_ - column) / kLanes, [&](auto count) { gather_values<R, count.value>(column, length); });
    for (int r = 0; r < R; r++) {
      const int64_t row = (first + r) / group_, query = head * group_ + (first + r) % group_;
      float *sum = sums_ + r * wide_;
      for (int64_t slot = 0; slot < job_.num_slots; slot++) {
        const KV *v = own<KV>(job_.own_values, slot, row, head);
        const float weight = weights_[r * length + in_tiles_ + slot];
        for (int64_t d = 0; d < dim; d++) sum[d] += weight * widen(v[d]);
      }
      convert(sum, static_cast<Q *>(job_.out) + (row * job_.num_heads + query) * dim, dim, 1.0f / totals[r]);
    }
  }

  template <int R>
  NPU_GR_APART void score(int64_t at, int64_t length) {
    F32 sum[R][kColumns] = {};
    multiply<Float32, R, kColumns>(sum, queries_, wide_, keys_ + at / kTile * kTile * job_.head_dim + at % kTile, kTile,
                                   job_.head_dim);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; c++) store(weights_ + r * length + at + c * kLanes, sum[r][c]);
  }

  // Scores of one query to exp(score - their maximum); returns the sum.
  float weigh_row(int64_t head, int64_t row, int r, int64_t length) {
    float *x = weights_ + r * length;
    for (int64_t slot = 0; slot < job_.num_slots; slot++) {
      const KV *k = own<KV>(job_.own_keys, slot, row, head);
      float dot = 0;
      for (int64_t d = 0; d < job_.head_dim; d++) dot += queries_[r * wide_ + d] * widen(k[d]);
      x[in_tiles_ + slot] = dot;
    }
    for (int64_t t = tokens_; t < in_tiles_; t++) x[t] = -__builtin_inff();
    F32 most = splat(-__builtin_inff()), total{};
    for (int64_t t = 0; t < in_tiles_; t += kLanes) most = ::max(load(x + t), most);
    float peak = max_lanes(most), rest = 0;
    for (int64_t t = in_tiles_; t < length; t++) peak = x[t] > peak ? x[t] : peak;
    for (int64_t t = 0; t < in_tiles_; t += kLanes) {
      const F32 weight = exponential(load(x + t) - peak);
      store(x + t, weight);
      total += weight;
    }
    for (int64_t t = in_tiles_; t < length; t++) rest += x[t] = expf(x[t] - peak);
    return sum_lanes(total) + rest;
  }

  template <int R, int C>
  NPU_GR_APART void gather_values(int64_t column, int64_t length) {
    F32 sum[R][C] = {};
    multiply<Float32, R, C>(sum, weights_, length, values_ + column, wide_, tokens_);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) store(sums_ + r * wide_ + column + c * kLanes, sum[r][c]);
  }

  const BeamJob &job_;
  int64_t group_, wide_, tokens_, in_tiles_;
  float *keys_, *values_, *queries_, *sums_, *weights_;
};

int64_t attention_bytes(const BeamJob *job) { return Attention<float, float>::bytes(*job); }

void attention(const BeamJob *job) {
  if (job->element == kBFloat16)
    Attention<bf16, bf16>(*job).run();
  else
    Attention<float, float>(*job).run();
}

}  // namespace beam
}  // namespace

#endif
