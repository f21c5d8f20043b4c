// HSTU's microkernel: a few query rows against one tile of 64 keys, O += SiLU(alpha Q K^T + bias) V.
//
// Both products are one routine: kRows rows times up to kColumns vectors stay in registers, A is broadcast, B streams.
// 64-byte vectors want 6 x 4 registers, 32-byte ones 6 x 2, 16-byte ones 6 x 4: more would spill (20 times slower).
//
// Exactness: an output element is one chain of fused multiply-adds over its keys in token order, and tiles begin at
// multiples of 64 tokens whatever was cached, so cached and full inference give the same bits.
#ifndef NPU_GR_HSTU_TILE_H
#define NPU_GR_HSTU_TILE_H

#include "hstu_call.h"
#include "vec.h"

namespace {
namespace hstu {

typedef uint16_t bf16;
typedef I32 UnalignedI32 __attribute__((aligned(4), may_alias));

constexpr int kRows = 6;
constexpr int kColumns = NPU_GR_VECTOR_BYTES == 32 ? 2 : 4;  // vectors
constexpr int kTile = 64;

#define NPU_GR_APART __attribute__((noinline))  // no constant of the surrounding loop takes a register from the sums

NPU_GR_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
NPU_GR_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
NPU_GR_INLINE int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

using ::load;
using ::splat;
using ::store;
NPU_GR_INLINE I32 load(const int32_t *p) { return *reinterpret_cast<const UnalignedI32 *>(p); }
NPU_GR_INLINE void store(int32_t *p, I32 x) { *reinterpret_cast<UnalignedI32 *>(p) = x; }
NPU_GR_INLINE I32 splat(int32_t x) { return I32{} + x; }

NPU_GR_INLINE void store(bf16 *p, F32 x) {  // as `narrow`
  const U32 bits = as_bits(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *reinterpret_cast<UnalignedU16 *>(p) = __builtin_convertvector(x != x ? bits >> 16 | 0x40 : rounded, U16);
}
NPU_GR_INLINE void put(float *to, float x) { *to = x; }
NPU_GR_INLINE void put(bf16 *to, float x) { *to = narrow(x); }

template <class From, class To>
NPU_GR_INLINE void convert(const From *from, To *to, int64_t n, float factor) {
  int64_t i = 0;
  if constexpr (sizeof(From) == sizeof(To))
    if (factor == 1) return (void)memcpy(to, from, n * sizeof(To));
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * factor);
  for (; i < n; i++) put(to + i, widen(from[i]) * factor);
}

// Rows lie far apart, where no hardware prefetcher looks: ask for those of the 16 rows ahead.
template <class Row>
NPU_GR_INLINE void ahead(const Row *rows, int64_t step, int64_t count, int64_t width) {
  for (int64_t i = 16; i < 16 + count; i++)
    for (int64_t at = 0; at < width * (int64_t)sizeof(Row); at += 64)
      __builtin_prefetch((const void *)((uintptr_t)rows + i * step * sizeof(Row) + at));
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls `use` with the compile-time constant min(n, N); n >= 1.
template <int N, class F>
NPU_GR_INLINE void at_most(int64_t n, F use) {
  if constexpr (N > 1)
    if (n < N) return at_most<N - 1>(n, use);
  use(Constant<N>());
}

#if NPU_GR_VECTOR_BYTES == 64
NPU_GR_INLINE F32 exp2_times(F32 x, float slope) {            // 2 ** (slope x), relative error 3e-7
  const __m512 y = x * slope, f = _mm512_reduce_ps(y, 0x09);  // y - floor(y)
  F32 p = f * 1.8775767e-3f + 8.9893397e-3f;
  p = p * f + 5.5826318e-2f;
  p = p * f + 2.4015361e-1f;
  p = p * f + 6.9315308e-1f;
  p = p * f + 9.9999994e-1f;
  return _mm512_maskz_scalef_ps((__mmask16)-1, p, y);
}
#else
#if NPU_GR_VECTOR_BYTES == 32
NPU_GR_INLINE F32 clamp(F32 x, float low, float high) {
  return _mm256_max_ps(splat(low), _mm256_min_ps(splat(high), x));
}
#else
NPU_GR_INLINE F32 clamp(F32 x, float low, float high) {
  x = x > splat(high) ? splat(high) : x;
  return x < splat(low) ? splat(low) : x;
}
#endif
NPU_GR_INLINE F32 exp2_times(F32 x, float slope) {  // 2 ** (slope x), relative error 3e-7; saturates at 2 ** +-126
  const F32 y = clamp(x * slope, -126.0f, 126.0f);
  const F32 shifted = y + 12582912.0f;  // 1.5 * 2 ** 23: rounds to an integer, and leaves it in the low bits
  const F32 f = y - (shifted - 12582912.0f);
  F32 p = f * 1.3276472e-3f + 9.6755410e-3f;
  p = p * f + 5.5507131e-2f;
  p = p * f + 2.4022120e-1f;
  p = p * f + 6.9314694e-1f;
  p = p * f + 1.0000001f;
  return (F32)((I32)p + ((I32)shifted << 23));
}
#endif

NPU_GR_INLINE F32 silu(F32 x, float slope) {
  return x / (exp2_times(x, slope) + 1.0f);
}  // slope = -log2(e) * the factor on x

// The arithmetic of each storage dtype. A step consumes kUnits consecutive k of the product.

struct Float32 {
  typedef float A;     // broadcast operand: queries, weights of keys
  typedef float Tile;  // keys and values
  static constexpr int kUnits = 1;

  template <int R, int C>
  NPU_GR_INLINE static void step(F32 (&sum)[R][C], const A *a, int64_t a_stride, const Tile *b) {
    F32 column[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) column[c] = load(b + c * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] += a[r * a_stride] * column[c];
  }
  template <int C>
  NPU_GR_INLINE static void put(A *to, const F32 (&x)[C], float slope) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(to + c * kLanes, silu(x[c], slope));
  }
};

#if NPU_GR_BF16_DOT
struct Bfloat16Dot {  // VDPBF16PS: queries and weights are rounded to bfloat16, sums are float32
  typedef bf16 A;
  typedef bf16 Tile;
  static constexpr int kUnits = 2;

  template <int R, int C>
  NPU_GR_INLINE static void step(F32 (&sum)[R][C], const A *a, int64_t a_stride, const Tile *b) {
    I32 column[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) column[c] = load((const int32_t *)b + c * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const I32 pair = (I32)_mm512_set1_epi32(*(const int32_t *)(a + r * a_stride));
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)pair, (__m512bh)column[c]);
    }
  }
  // The weights are about to be rounded to 8 bits: a cubic and a 14-bit reciprocal, relative error 1.4e-4, are enough.
  NPU_GR_INLINE static F32 rough_silu(F32 x, float slope) {
    const __m512 y = x * slope, f = _mm512_reduce_ps(y, 0x09);  // y - floor(y)
    F32 p = f * 7.8024521e-2f + 2.2606716e-1f;
    p = p * f + 6.9583356e-1f;
    p = p * f + 9.9992520e-1f;
    return x * (F32)_mm512_maskz_rcp14_ps((__mmask16)-1, _mm512_maskz_scalef_ps((__mmask16)-1, p, y) + 1.0f);
  }
  template <int C>
  NPU_GR_INLINE static void put(A *to, const F32 (&x)[C], float slope) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const __m256bh half = _mm512_cvtneps_pbh(rough_silu(x[c], slope));
      memcpy(to + c * kLanes, &half, sizeof half);
    }
  }
};
#endif

template <class M, int R, int C>
NPU_GR_INLINE void multiply(F32 (&sum)[R][C], const typename M::A *a, int64_t a_stride, const typename M::Tile *b,
                            int64_t b_stride, int64_t steps) {  // strides in elements, b_stride of one step
  for (int64_t s = 0; s < steps; s++) M::template step<R, C>(sum, a + s * M::kUnits, a_stride, b + s * b_stride);
}

class Lookup {  // in a table of 64
 public:
#if NPU_GR_VECTOR_BYTES == 64  // not __AVX512F__: GCC's target pragma defines no macros in C++
  explicit Lookup(const float *table)
      : a_(load(table)), b_(load(table + 16)), c_(load(table + 32)), d_(load(table + 48)) {}
  NPU_GR_INLINE F32 operator[](I32 index) const {
    const __m512i at = (__m512i)index;
    const F32 low = _mm512_permutex2var_ps(a_, at, b_), high = _mm512_permutex2var_ps(c_, at, d_);
    return (F32)_mm512_mask_mov_ps(low, _mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), high);
  }

 private:
  __m512 a_, b_, c_, d_;
#else
  explicit Lookup(const float *table) : table_(table) {}
  NPU_GR_INLINE F32 operator[](I32 index) const {
#if NPU_GR_VECTOR_BYTES == 32
    return (F32)_mm256_i32gather_ps(table_, (__m256i)index, 4);
#else
    return F32{table_[index[0]], table_[index[1]], table_[index[2]], table_[index[3]]};
#endif
  }

 private:
  const float *table_;
#endif
};

// R rows against one tile of one head.
template <class M>
struct Work {
  const typename M::A *q;  // [R, dq]
  int64_t dq, dv;          // padded
  const typename M::Tile *k, *v;
  const float *bias;      // [kTile] of every row, divided by alpha; null: each row's is looked up, time + position
  const float *time;      // [64] by bucket
  const int32_t *bucket;  // [R, kTile]
  const float *position[kRows];  // each row's [kTile]
  int64_t limit;                 // columns that any row sees
  int64_t first_limit;           // columns that the first row sees; each further row sees `more` more, up to limit
  int64_t more;
  int64_t hidden,
      first_seen;  // columns [hidden, first_seen) are hidden from the first row; further rows lose `more` more
  float slope;
  float *out;                                // [R, dv]
  const float *q_scale, *k_scale, *v_scale;  // of integers: [R], [kTile], [kTile]
};

// Makes the weights of columns that row r does not see zero, up to `end`.
template <class M, class A>
NPU_GR_INLINE void hide(const Work<M> &w, int r, int64_t end, A *weights) {
  for (int64_t c = most(0, w.first_limit + r * w.more); c < end; c++) weights[c] = 0;
  for (int64_t c = w.hidden, last = least(kTile, w.first_seen + r * w.more); c < last; c++) weights[c] = 0;
}

template <class M, int R, int C>
NPU_GR_APART void weigh(const Work<M> &w, int64_t column, typename M::A (&weights)[R][kTile]) {
  F32 sum[R][C];
  if (w.bias) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = load(w.bias + column + c * kLanes);
  } else {
    const Lookup time(w.time);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const int64_t at = column + c * kLanes;
        sum[r][c] = time[load(w.bucket + r * kTile + at)] + load(w.position[r] + at);
      }
  }
  multiply<M, R, C>(sum, w.q, w.dq, w.k + column * M::kUnits, kTile * M::kUnits, w.dq / M::kUnits);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) M::template put<C>(&weights[r][column], sum[r], w.slope);
}

template <class M, int R, int C>
NPU_GR_APART void gather(const Work<M> &w, int64_t column, int64_t steps, const typename M::A (&weights)[R][kTile]) {
  F32 sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = load(w.out + r * w.dv + column + c * kLanes);
  multiply<M, R, C>(sum, &weights[0][0], kTile, w.v + column * M::kUnits, w.dv * M::kUnits, steps);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(w.out + r * w.dv + column + c * kLanes, sum[r][c]);
}

template <class M, int R>
void tile(const Work<M> &w) {
  alignas(64) typename M::A weights[R][kTile];
  constexpr int kWidth = kColumns * kLanes;
  for (int64_t column = 0; column < w.limit; column += kWidth)
    at_most<kColumns>((w.limit - column + kLanes - 1) / kLanes,
                      [&](auto c) { weigh<M, R, c.value>(w, column, weights); });
  const int64_t steps = (w.limit + M::kUnits - 1) / M::kUnits;
  for (int r = 0; r < R; r++) hide(w, r, steps * M::kUnits, weights[r]);
  for (int64_t column = 0; column < w.dv; column += kWidth)
    at_most<kColumns>((w.dv - column) / kLanes, [&](auto c) { gather<M, R, c.value>(w, column, steps, weights); });
}

template <class M>
NPU_GR_INLINE void tile_of(int64_t rows, const Work<M> &w) {
  at_most<kRows>(rows, [&](auto r) { tile<M, r.value>(w); });
}

}  // namespace hstu
}  // namespace

#endif
