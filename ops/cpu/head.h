// gathered_head: the head's logits at valid edges alone, row after row; beam_topk reads them as `values`.
#include "kernels.h"
#include "vec.h"

namespace {

constexpr int kDots = 4;  // weight rows at once, so that a row of hidden is read once for all of them

template <typename T>
NPU_GR_INLINE void dots(const T *hidden, const T *const (&weight)[kDots], int64_t dim, float (&out)[kDots]) {
  F32 sums[kDots] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const F32 h = load(hidden + d);
#pragma GCC unroll 4
    for (int w = 0; w < kDots; ++w) sums[w] += h * load(weight[w] + d);
  }
  for (int w = 0; w < kDots; ++w) {
    out[w] = sum_lanes(sums[w]);
    for (int64_t rest = d; rest < dim; ++rest) out[w] += widen(hidden[rest]) * widen(weight[w][rest]);
  }
}

template <typename T>
void gathered_rows(const HeadJob &job) {
  const T *weight = static_cast<const T *>(job.weight);
  for (int64_t row = 0; row < job.num_rows; ++row) {
    const T *hidden = static_cast<const T *>(job.hidden) + row * job.hidden_stride;
    const int32_t *codes = job.code + job.lo[row];
    const int64_t degree = job.degree[row];
    float *values = job.values + job.value_start[row];
    for (int64_t j = 0; j < degree; j += kDots) {
      const T *rows[kDots];
      for (int w = 0; w < kDots; ++w) rows[w] = weight + codes[j + w < degree ? j + w : j] * job.weight_stride;
      for (int64_t w = j + kDots; w < j + 2 * kDots && w < degree; ++w)
        __builtin_prefetch(weight + codes[w] * job.weight_stride);
      float found[kDots];
      dots(hidden, rows, job.dim, found);
      for (int w = 0; w < kDots && j + w < degree; ++w) values[j + w] = found[w] * job.scale;
    }
  }
}

void gathered_head(const HeadJob *job) {
  if (job->element == kBFloat16)
    gathered_rows<uint16_t>(*job);
  else
    gathered_rows<float>(*job);
}

}  // namespace
