// HSTU's microkernel over tiles in int8: both products in integers, 16 bits times 8.
//
// A tile's numbers are widened to 16 bits once for a block of rows. Queries are rounded to 16 bits with a scale for
// each row, the weights of a tile's keys with one for each row and tile: 1.5e-5 of the largest, less than a hundredth
// of the rounding of the tile itself. Two products and their sum are one instruction, which does twice the work of a
// fused multiply-add of float32.
//
// Exactness: sums of integers have no order, and none overflows. An output is one chain over tiles in token order.
#ifndef NPU_GR_HSTU_INT8_H
#define NPU_GR_HSTU_INT8_H

#include "hstu_tile.h"

namespace {
namespace hstu {

typedef int16_t I16 __attribute__((vector_size(kVectorBytes / 2)));
typedef I16 UnalignedI16 __attribute__((aligned(2), may_alias));
typedef int8_t I8 __attribute__((vector_size(kVectorBytes / 4)));
typedef I8 UnalignedI8 __attribute__((aligned(1), may_alias));

constexpr float kMostWeight = 32767;

struct IntegerDot {
  typedef int16_t A;
  typedef int16_t Tile;
  static constexpr int kUnits = 2;

  // sum + the products of two pairs of 16 bits in each lane
  NPU_GR_INLINE static I32 dot(I32 sum, I32 a, I32 b) {
#if NPU_GR_BF16_DOT
    return (I32)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif NPU_GR_VECTOR_BYTES == 64
    return sum + (I32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif NPU_GR_VECTOR_BYTES == 32
    return sum + (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return sum + (I32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
  }

  template <int R, int C>
  NPU_GR_INLINE static void multiply(I32 (&sum)[R][C], const A *a, int64_t a_stride, const Tile *b, int64_t b_stride,
                                     int64_t steps) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = I32{};
    for (int64_t s = 0; s < steps; s++, a += kUnits, b += b_stride) {
      I32 column[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) column[c] = load((const int32_t *)b + c * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const I32 pair = splat(*(const UnalignedInt *)(a + r * a_stride));
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c] = dot(sum[r][c], pair, column[c]);
      }
    }
  }

 private:
  typedef int32_t UnalignedInt __attribute__((aligned(2), may_alias));
};

// a * b + c with one rounding where the instruction set has it: which products the compiler fuses by itself depends on
// the code around them, and so on the number of rows at a time.
NPU_GR_INLINE F32 fused(F32 a, F32 b, F32 c) {
#if NPU_GR_VECTOR_BYTES == 64
  return _mm512_fmadd_ps(a, b, c);
#elif NPU_GR_VECTOR_BYTES == 32
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

NPU_GR_INLINE F32 to_float(I32 x) { return __builtin_convertvector(x, F32); }

// The larger of `so_far` and |x|, as bits, which are ordered as the numbers are: infinity and NaN are the largest.
NPU_GR_INLINE I32 largest_magnitude(I32 so_far, F32 x) {
  const I32 bits = (I32)x & splat((int32_t)0x7fffffff);
  return bits > so_far ? bits : so_far;
}

NPU_GR_INLINE float most_of(I32 bits) {  // as a number; NaN if it is not finite
  typedef int32_t I4 __attribute__((vector_size(16)));
  I4 part[kLanes / 4];
  memcpy(part, &bits, sizeof part);
#pragma GCC unroll 4
  for (int i = 1; i < kLanes / 4; i++) part[0] = part[i] > part[0] ? part[i] : part[0];
  const I4 far = __builtin_shuffle(part[0], I4{2, 3, 0, 1}), two = far > part[0] ? far : part[0];
  const I4 near = __builtin_shuffle(two, I4{1, 0, 3, 2}), all = near > two ? near : two;
  const int32_t most = all[0];
  float number;
  memcpy(&number, &most, sizeof number);
  return number - number == 0 ? number : NAN;
}

// 1 + 2 ** (slope x), relative error 7.5e-5: the weights are about to be rounded.
NPU_GR_INLINE F32 rough_denominator(F32 x, float slope) {
  F32 y = x * slope;
#if NPU_GR_VECTOR_BYTES == 64
  y = _mm512_maskz_min_ps((__mmask16)-1, y, splat(60.0f));
  const __m512 f = _mm512_reduce_ps(y, 0x08);  // y - round(y)
#else
  y = clamp(y, -120.0f, 60.0f);
  const F32 shifted = y + 12582912.0f;  // as in exp2_times
  const F32 f = y - (shifted - 12582912.0f);
#endif
  F32 p = fused(f, splat(5.5171710e-2f), splat(2.4261123e-1f));
  p = fused(p, f, splat(6.9326099e-1f));
  p = fused(p, f, splat(9.9992807e-1f));
#if NPU_GR_VECTOR_BYTES == 64
  return _mm512_maskz_scalef_ps((__mmask16)-1, p, y - f) + 1.0f;  // scalef rounds an exponent down: y - f is one
#else
  return (F32)((I32)p + ((I32)shifted << 23)) + 1.0f;
#endif
}

// x * factor, at most 32767, to the nearest 16-bit integers: 1.5 * 2 ** 23 leaves them in the low bits.
NPU_GR_INLINE void store_rounded(int16_t *to, F32 x, float factor) {
  const I32 shifted = (I32)fused(x, splat(factor), splat(12582912.0f));
  *reinterpret_cast<UnalignedI16 *>(to) = __builtin_convertvector(shifted, I16);
}

// to = x / unit, rounded; returns the unit, `limit` of which are the largest |x|. It is NaN if an x is not finite.
// n: a multiple of the lanes.
NPU_GR_INLINE float to_integers(const float *x, int16_t *to, int64_t n, float limit) {
  I32 largest{};
#pragma GCC unroll 8
  for (int64_t i = 0; i < n; i += kLanes) largest = largest_magnitude(largest, load(x + i));
  const float top = most_of(largest), steps = top > 1e-30f ? limit / top : 0;
#pragma GCC unroll 8
  for (int64_t i = 0; i < n; i += kLanes) store_rounded(to + i, load(x + i), steps);
  return top * (1.0f / limit);
}

template <class Row>
NPU_GR_INLINE float quantised_query(const Row *from, int64_t qk_dim, int64_t dq, int16_t *to) {
  // so that a sum of dq products with numbers of 8 bits stays below 2 ** 31
  const float limit = (float)least(32767, (int64_t)2147483647 / (127 * dq));
  constexpr int64_t kPart = 64;
  float x[kPart];
  I32 largest{};
  for (int64_t d = 0; d < qk_dim; d += kPart) {
    const int64_t n = least(kPart, qk_dim - d);
    convert(from + d, x, n, 1.0f);
    for (int64_t i = n; i < kPart; i++) x[i] = 0;
    for (int64_t i = 0; i < kPart; i += kLanes) largest = largest_magnitude(largest, load(x + i));
  }
  const float top = most_of(largest), steps = top > 1e-30f ? limit / top : 0;
  for (int64_t d = 0; d < dq; d++) {
    const float steps_of = d < qk_dim ? widen(from[d]) * steps : 0;  // rounded before it is rounded to an integer
    to[d] = (int16_t)lrintf(steps_of);
  }
  return top / limit;
}

NPU_GR_INLINE void widen_integers(const int8_t *from, int16_t *to, int64_t n) {  // n: a multiple of a tile
  for (int64_t i = 0; i < n; i += kLanes)
    *reinterpret_cast<UnalignedI16 *>(to + i) =
        __builtin_convertvector(*reinterpret_cast<const UnalignedI8 *>(from + i), I16);
}

template <int R, int C>
NPU_GR_APART void weigh_integers(const Work<IntegerDot> &w, int64_t column, float (&weights)[R][kTile]) {
  I32 sum[R][C];
  IntegerDot::multiply<R, C>(sum, w.q, w.dq, w.k + column * 2, kTile * 2, w.dq / 2);
  const auto finish = [&](auto bias) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      F32 x[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const int64_t at = column + c * kLanes;
        x[c] = fused(to_float(sum[r][c]), load(w.k_scale + at) * w.q_scale[r], bias(r, at));
      }
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const int64_t at = column + c * kLanes;
        store(&weights[r][at], x[c] / rough_denominator(x[c], w.slope) * load(w.v_scale + at));
      }
    }
  };
  if (w.bias) return finish([&](int, int64_t at) { return load(w.bias + at); });
  const Lookup time(w.time);
  finish([&](int r, int64_t at) { return time[load(w.bucket + r * kTile + at)] + load(w.position[r] + at); });
}

template <int R, int C>
NPU_GR_APART void gather_integers(const Work<IntegerDot> &w, int64_t column, int64_t steps,
                                  const int16_t (&weights)[R][kTile], const float (&unit)[R]) {
  I32 sum[R][C];
  IntegerDot::multiply<R, C>(sum, &weights[0][0], kTile, w.v + column * 2, w.dv * 2, steps);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      float *at = w.out + r * w.dv + column + c * kLanes;
      store(at, fused(to_float(sum[r][c]), splat(unit[r]), load(at)));
    }
}

template <int R>
void integer_tile(const Work<IntegerDot> &w) {
  alignas(64) float weights[R][kTile];
  alignas(64) int16_t integers[R][kTile];
  float unit[R];
  constexpr int kWidth = kColumns * kLanes;
  for (int64_t column = 0; column < w.limit; column += kWidth)
    at_most<kColumns>((w.limit - column + kLanes - 1) / kLanes,
                      [&](auto c) { weigh_integers<R, c.value>(w, column, weights); });
  for (int r = 0; r < R; r++) {
    hide(w, r, kTile, weights[r]);
    unit[r] = to_integers(weights[r], integers[r], kTile, kMostWeight);
  }
  for (int64_t column = 0; column < w.dv; column += kWidth)
    at_most<kColumns>((w.dv - column) / kLanes,
                      [&](auto c) { gather_integers<R, c.value>(w, column, (w.limit + 1) / 2, integers, unit); });
}

}  // namespace hstu
}  // namespace

#endif
