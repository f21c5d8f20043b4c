// How fast this CPU can compute and read: the roofs of `python -m benchmarks kernels`.
#include "vec.h"

namespace {

constexpr int kChains = 12;  // independent sums, enough to hide the latency of an FMA on every CPU so far
constexpr int64_t kProbeFlops = int64_t{kChains} * kLanes * 2 * 64;

float probe_fma_f32(int64_t repeats) {
  F32 sums[kChains], factor = splat(1.0000001f), addend = splat(1e-9f);
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) sums[c] = splat(1.0f + c);  // equal chains would be computed once
  for (int64_t i = 0; i < repeats * 64; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * factor + addend;
  }
  F32 total{};
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) total += sums[c];
  return sum_lanes(total);
}

#if NPU_GR_BF16_DOT
float probe_fma_bf16(int64_t repeats) {
  __m512 sums[kChains];
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) sums[c] = _mm512_set1_ps(1.0f + c);  // equal chains would be computed once
  __m512bh one = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  for (int64_t i = 0; i < repeats * 64; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], one, one);
  }
  __m512 total{};
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) total += sums[c];
  return sum_lanes(reinterpret_cast<F32>(total));
}
#else
float probe_fma_bf16(int64_t) { return 0; }
#endif

float probe_read(const float *data, int64_t count) {
  constexpr int kWide = 8;
  F32 sums[kWide] = {};
  int64_t i = 0;
  for (; i + kWide * kLanes <= count; i += kWide * kLanes)
#pragma GCC unroll 8
    for (int w = 0; w < kWide; ++w) sums[w] += load(data + i + w * kLanes);
  float total = 0;
  for (; i < count; ++i) total += data[i];
#pragma GCC unroll 8
  for (int w = 0; w < kWide; ++w) total += sum_lanes(sums[w]);
  return total;
}

}  // namespace
