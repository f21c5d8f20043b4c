// Vectors of the instruction set's width by GCC's vector extensions: one source for SSE2, NEON, AVX2 and AVX-512.
#ifndef NPU_GR_VEC_H
#define NPU_GR_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr bool kHasBF16Dot = NPU_GR_BF16_DOT;

constexpr int kVectorBytes = NPU_GR_VECTOR_BYTES;
constexpr int kLanes = kVectorBytes / 4;

typedef float F32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t I32 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t U32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t U16 __attribute__((vector_size(kVectorBytes / 2)));
typedef float UnalignedF32 __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef uint16_t UnalignedU16 __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

#if defined(__x86_64__) && NPU_GR_VECTOR_BYTES == 16
#define NPU_GR_FMA 0
#else
#define NPU_GR_FMA 1
#endif
#define NPU_GR_INLINE inline __attribute__((always_inline))

NPU_GR_INLINE F32 load(const float *from) { return *reinterpret_cast<const UnalignedF32 *>(from); }
NPU_GR_INLINE void store(float *to, F32 x) { *reinterpret_cast<UnalignedF32 *>(to) = x; }
NPU_GR_INLINE F32 splat(float x) { return F32{} + x; }
NPU_GR_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
NPU_GR_INLINE F32 as_float(U32 bits) { return reinterpret_cast<F32>(bits); }
NPU_GR_INLINE U32 as_bits(F32 x) { return reinterpret_cast<U32>(x); }

// bf16 is the upper half of an fp32.
NPU_GR_INLINE F32 load(const uint16_t *from) {
  U16 half = *reinterpret_cast<const UnalignedU16 *>(from);
  return as_float(__builtin_convertvector(half, U32) << 16);
}

NPU_GR_INLINE float widen(float x) { return x; }
NPU_GR_INLINE float widen(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

// Round to nearest, ties to even; NaN stays NaN.
NPU_GR_INLINE uint16_t narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

NPU_GR_INLINE float sum_lanes(F32 x) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

NPU_GR_INLINE float max_lanes(F32 x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

NPU_GR_INLINE F32 min(F32 a, F32 b) { return a < b ? a : b; }

// Bit i is set where lane i of a comparison is true.
NPU_GR_INLINE uint32_t mask_bits(I32 is_true) {
#if defined(__x86_64__) && NPU_GR_VECTOR_BYTES == 64
  return static_cast<uint32_t>(_mm512_movepi32_mask(reinterpret_cast<__m512i>(is_true)));
#elif defined(__x86_64__) && NPU_GR_VECTOR_BYTES == 32
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(is_true)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(is_true)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(is_true[i] & 1) << i;
  return bits;
#endif
}

NPU_GR_INLINE bool any(I32 is_true) { return mask_bits(is_true) != 0; }

// exp(x) for x <= 88, relative error < 3e-7; exactly 1 at 0; below -87 it stays at exp(-87); NaN stays NaN.
// The minimax polynomial is of degree 5 on half a ln 2 either side of 0.
NPU_GR_INLINE F32 exponential(F32 x) {
  const F32 least = splat(-87.0f);
  x = max(least, x);  // NaN passes: it is not above
  // Adding 1.5 * 2**23 rounds to an integer, in the low bits; + 127, so that they are the exponent of 2**n.
  const F32 magic = splat(12583039.0f);
  F32 shifted = x * 1.44269504f + magic;
  F32 n = shifted - magic;
#if NPU_GR_FMA
  F32 r = x - n * 0.693147182f;  // one rounding
#else
  F32 r = x - n * 0.693359375f;  // exact, and the rest of ln 2
  r = r - n * -2.12194440e-4f;
#endif
  F32 p = splat(8.290272146e-3f);
  p = p * r + 4.189816025e-2f;
  p = p * r + 1.666763813e-1f;
  p = p * r + 4.999914784e-1f;
  p = p * r + 9.999997063e-1f;
  p = p * r + 1.0f;
  return p * as_float(as_bits(shifted) << 23);
}

}  // namespace

#endif
