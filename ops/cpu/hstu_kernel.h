// HSTU attention, O = (SiLU(alpha Q K^T + bias) masked) V, and the packing of keys and values into tiles.
//
// No include guard: each instruction set includes this file once, inside its own namespace and with its own
// VECTOR_BYTES (64, 32 or 16). One microkernel does both products: `ROWS` rows times up to COLUMNS vectors stay in
// registers, A is broadcast, B is streamed. 64-byte vectors want 6 x 4 registers, 32-byte ones 6 x 2, 16-byte ones 6 x 4.
//
// Exactness: an output element is one chain of fused multiply-adds over its keys in token order, and tiles begin at
// multiples of 64 tokens whatever was cached, so cached and full inference give the same bits.
//
// The relative bias costs little because time buckets are monotone in the time difference: where the earliest and the
// latest difference of a tile fall into one bucket, and the diagonal is at least `position_buckets` away, the bias of the
// whole tile is one number a head. Elsewhere buckets are computed once and looked up by every head.

constexpr int LANES = VECTOR_BYTES / 4;
constexpr int ROWS = 6;
constexpr int COLUMNS = VECTOR_BYTES == 32 ? 2 : 4;  // vectors
constexpr int TILE = NPU_GR_TILE;
constexpr int BLOCK_ROWS = 21 * ROWS;  // query rows that share a pass over the keys: Q, O and a tile stay in L2
constexpr int TIME_BUCKETS = 64;

typedef float V __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
typedef V UnalignedV __attribute__((aligned(4), may_alias));
typedef I UnalignedI __attribute__((aligned(4), may_alias));
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))  // no constant of the surrounding loop takes a register from the sums

INLINE V load(const float *p) { return *(const UnalignedV *)p; }
INLINE I load(const int32_t *p) { return *(const UnalignedI *)p; }
INLINE void store(float *p, V x) { *(UnalignedV *)p = x; }
INLINE void store(int32_t *p, I x) { *(UnalignedI *)p = x; }
INLINE V splat(float x) { return V{} + x; }
INLINE I splat(int32_t x) { return I{} + x; }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}
INLINE void narrow(float x, float *to) { *to = x; }
INLINE void narrow(float x, bf16 *to) {  // to nearest, ties to even; a NaN stays one
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  *to = x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls `use` with the compile-time constant min(n, N); n >= 1.
template <int N, class F>
INLINE void at_most(int64_t n, F use) {
  if constexpr (N > 1)
    if (n < N) return at_most<N - 1>(n, use);
  use(Constant<N>());
}

// ---- Rows of numbers

typedef uint16_t U16 __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef U16 UnalignedU16 __attribute__((aligned(2), may_alias));
typedef uint32_t U __attribute__((vector_size(VECTOR_BYTES)));

INLINE V load_row(const float *p) { return load(p); }
INLINE V load_row(const bf16 *p) { return (V)(__builtin_convertvector(*(const UnalignedU16 *)p, U) << 16); }
INLINE void store_row(float *p, V x) { store(p, x); }
INLINE void store_row(bf16 *p, V x) {  // as `narrow`
  const U bits = (U)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *(UnalignedU16 *)p = __builtin_convertvector(x != x ? U{} + 0x7fc0 : rounded, U16);
}

template <class From, class To>
INLINE void convert(const From *from, To *to, int64_t n, float factor) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store_row(to + i, load_row(from + i) * factor);
  for (; i < n; i++) narrow(widen(from[i]) * factor, to + i);
}

// ---- SiLU

#if VECTOR_BYTES == 64
INLINE V exp2_times(V x, float slope) {  // 2 ** (slope x), relative error 3e-7
  const __m512 y = x * slope, f = _mm512_reduce_ps(y, 0x09);  // y - floor(y)
  V p = f * 1.8775767e-3f + 8.9893397e-3f;
  p = p * f + 5.5826318e-2f;
  p = p * f + 2.4015361e-1f;
  p = p * f + 6.9315308e-1f;
  p = p * f + 9.9999994e-1f;
  return _mm512_scalef_ps(p, y);
}
#else
#if VECTOR_BYTES == 32
INLINE V clamp(V x, float low, float high) { return _mm256_max_ps(splat(low), _mm256_min_ps(splat(high), x)); }
#else
INLINE V clamp(V x, float low, float high) {
  x = x > splat(high) ? splat(high) : x;
  return x < splat(low) ? splat(low) : x;
}
#endif
INLINE V exp2_times(V x, float slope) {  // 2 ** (slope x), relative error 3e-7; saturates at 2 ** +-126
  const V y = clamp(x * slope, -126.0f, 126.0f);
  const V shifted = y + 12582912.0f;  // 1.5 * 2 ** 23: rounds to an integer, and leaves it in the low bits
  const V f = y - (shifted - 12582912.0f);
  V p = f * 1.3276472e-3f + 9.6755410e-3f;
  p = p * f + 5.5507131e-2f;
  p = p * f + 2.4022120e-1f;
  p = p * f + 6.9314694e-1f;
  p = p * f + 1.0000001f;
  return (V)((I)p + ((I)shifted << 23));
}
#endif

INLINE V silu(V x, float slope) { return x / (exp2_times(x, slope) + 1.0f); }  // slope = -log2(e) * the factor on x

// ---- The arithmetic of each storage dtype. A step consumes UNITS consecutive k of the product.

struct Float32 {
  typedef float A;     // broadcast operand: queries, weights of keys
  typedef float Tile;  // keys and values
  static constexpr int UNITS = 1;

  template <int R, int C>
  INLINE void step(V (&sum)[R][C], const A *a, int64_t a_stride, const Tile *b) {
    V column[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) column[c] = load(b + c * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] += a[r * a_stride] * column[c];
  }
  template <int C>
  INLINE void put(A *to, const V (&x)[C], float slope) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(to + c * LANES, silu(x[c], slope));
  }
};

#ifdef __AVX512BF16__
struct Bfloat16Dot {  // VDPBF16PS: queries and weights are rounded to bfloat16, sums are float32
  typedef bf16 A;
  typedef bf16 Tile;
  static constexpr int UNITS = 2;

  template <int R, int C>
  INLINE void step(V (&sum)[R][C], const A *a, int64_t a_stride, const Tile *b) {
    I column[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) column[c] = load((const int32_t *)b + c * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const I pair = (I)_mm512_set1_epi32(*(const int32_t *)(a + r * a_stride));
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)pair, (__m512bh)column[c]);
    }
  }
  // The weights are about to be rounded to 8 bits: a cubic and a 14-bit reciprocal, relative error 1.4e-4, are enough.
  INLINE V rough_silu(V x, float slope) {
    const __m512 y = x * slope, f = _mm512_reduce_ps(y, 0x09);  // y - floor(y)
    V p = f * 7.8024521e-2f + 2.2606716e-1f;
    p = p * f + 6.9583356e-1f;
    p = p * f + 9.9992520e-1f;
    return x * (V)_mm512_rcp14_ps(_mm512_scalef_ps(p, y) + 1.0f);
  }
  template <int C>
  INLINE void put(A *to, const V (&x)[C], float slope) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const __m256bh half = _mm512_cvtneps_pbh(rough_silu(x[c], slope));
      __builtin_memcpy(to + c * LANES, &half, sizeof half);
    }
  }
};
#endif

template <class M, int R, int C>
INLINE void multiply(V (&sum)[R][C], const typename M::A *a, int64_t a_stride, const typename M::Tile *b,
                     int64_t b_stride, int64_t steps) {  // strides in elements, b_stride of one step
  for (int64_t s = 0; s < steps; s++) M::template step<R, C>(sum, a + s * M::UNITS, a_stride, b + s * b_stride);
}

// ---- R rows against one tile of one head

template <class M>
struct Work {
  const typename M::A *q;  // [R, dq]
  int64_t dq, dv;          // padded
  const typename M::Tile *k, *v;
  const float *bias;       // [R or 1, TILE], divided by alpha
  int64_t bias_stride;     // 0: one row for all
  int64_t limit;           // columns that any row sees
  int64_t first_limit;     // columns that the first row sees; each further row sees `more` more, up to limit
  int64_t more;
  float slope;
  float *out;              // [R, dv]
};

template <class M, int R, int C>
APART void weigh(const Work<M> &w, int64_t column, typename M::A (&weights)[R][TILE]) {
  V sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = load(w.bias + r * w.bias_stride + column + c * LANES);
  multiply<M, R, C>(sum, w.q, w.dq, w.k + column * M::UNITS, TILE * M::UNITS, w.dq / M::UNITS);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) M::template put<C>(&weights[r][column], sum[r], w.slope);
}

template <class M, int R, int C>
APART void gather(const Work<M> &w, int64_t column, int64_t steps, const typename M::A (&weights)[R][TILE]) {
  V sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = load(w.out + r * w.dv + column + c * LANES);
  multiply<M, R, C>(sum, &weights[0][0], TILE, w.v + column * M::UNITS, w.dv * M::UNITS, steps);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(w.out + r * w.dv + column + c * LANES, sum[r][c]);
}

template <class M, int R>
static void tile(const Work<M> &w) {
  alignas(64) typename M::A weights[R][TILE];
  constexpr int WIDTH = COLUMNS * LANES;
  for (int64_t column = 0; column < w.limit; column += WIDTH)
    at_most<COLUMNS>((w.limit - column + LANES - 1) / LANES, [&](auto c) { weigh<M, R, c.value>(w, column, weights); });
  const int64_t steps = (w.limit + M::UNITS - 1) / M::UNITS;
  for (int r = 0; r < R; r++)
    for (int64_t c = most(0, w.first_limit + r * w.more); c < steps * M::UNITS; c++) weights[r][c] = 0;
  for (int64_t column = 0; column < w.dv; column += WIDTH)
    at_most<COLUMNS>((w.dv - column) / LANES, [&](auto c) { gather<M, R, c.value>(w, column, steps, weights); });
}

template <class M>
INLINE void tile_of(int64_t rows, const Work<M> &w) {
  at_most<ROWS>(rows, [&](auto r) { tile<M, r.value>(w); });
}

// ---- Relative bias

INLINE int32_t time_bucket(int64_t delta) {  // half octaves; `time_bucket` of npu_gr/backend/base.py
  const int64_t limit = 2147483647;
  const float x = (float)((delta < 0 ? 0 : delta > limit ? limit : delta) + 1);
  int32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return (bits >> 22) - (127 << 1);
}

INLINE int64_t difference(int64_t a, int64_t b) {  // saturates
  int64_t d;
  return __builtin_sub_overflow(a, b, &d) ? (a < b ? INT64_MIN : INT64_MAX) : d;
}

INLINE I look_up_index(I delta) {  // buckets of differences below 2 ** 31 - 1
  delta = delta > 0 ? delta : splat(0);
  return ((I)__builtin_convertvector(delta + 1, V) >> 22) - (127 << 1);
}

INLINE void look_up(const float *table, const int32_t *index, const float *plus, float *to) {  // a row of TILE columns
#ifdef __AVX512F__
  const V a = load(table), b = load(table + 16), c = load(table + 32), d = load(table + 48);
  for (int i = 0; i < TILE; i += LANES) {
    const __m512i at = (__m512i)load(index + i);
    const V low = _mm512_permutex2var_ps(a, at, b), high = _mm512_permutex2var_ps(c, at, d);
    store(to + i, load(plus + i) + (V)_mm512_mask_mov_ps(low, _mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), high));
  }
#else
  for (int i = 0; i < TILE; i++) to[i] = table[index[i]] + plus[i];
#endif
}

struct Span {  // earliest and latest
  int64_t first, last;
};

INLINE Span span(const int64_t *times, int64_t n) {
  Span s = {times[0], times[0]};
  for (int64_t i = 1; i < n; i++) {
    s.first = times[i] < s.first ? times[i] : s.first;
    s.last = times[i] > s.last ? times[i] : s.last;
  }
  return s;
}

class Bias {  // tables divided by alpha, so that they can start the sums; position tables run towards the diagonal
 public:
  static int64_t floats(const NpuGrHstu &call, bool causal) {
    const int64_t tiles = (call.num_tokens + TILE - 1) / TILE;
    const int64_t tables = call.num_heads * (TIME_BUCKETS + position_length(call));
    return tables + (causal ? tiles * TILE + tiles * sizeof(Span) / 4 + BLOCK_ROWS * TILE : call.num_heads * tiles * TILE) + 64;
  }

  Bias(const NpuGrHstu &call, float *scratch) : call_(call), length_(position_length(call)) {
    const float unit = (float)(1.0 / call.alpha);
    const int64_t buckets = call.position_buckets;
    time_ = scratch;
    position_ = time_ + call.num_heads * TIME_BUCKETS;
    rest_ = position_ + call.num_heads * length_;
    for (int64_t i = 0; i < call.num_heads * TIME_BUCKETS; i++) time_[i] = call.time_bias[i] * unit;
    for (int64_t h = 0; h < call.num_heads; h++)
      for (int64_t x = 0; x < length_; x++) {  // distance of entry x: diagonal() - x
        const int64_t distance = diagonal() - x;
        const float *table = call.position_bias + h * buckets;
        position_[h * length_ + x] = unit * (distance < 0 ? 0 : table[distance < buckets ? distance : buckets - 1]);
      }
  }

  const float *time(int64_t head) const { return time_ + head * TIME_BUCKETS; }
  float *rest() const { return rest_; }

  // TILE entries for a row and the columns from first_column on
  const float *position(int64_t head, int64_t row, int64_t first_column) const {
    const int64_t x = diagonal() - (row - first_column);
    // before x = 0 every distance is beyond the last bucket; a row before the tile sees none of it
    return position_ + head * length_ + least(most(0, x), diagonal() + 1);
  }
  bool is_far(int64_t row, int64_t first_column) const {
    return row - (first_column + TILE - 1) >= call_.position_buckets - 1;
  }
  float far(int64_t head, int32_t bucket) const { return time(head)[bucket] + position_[head * length_]; }

 private:
  static int64_t position_length(const NpuGrHstu &call) { return 2 * TILE + call.position_buckets; }
  int64_t diagonal() const { return TILE + call_.position_buckets - 1; }

  const NpuGrHstu &call_;
  int64_t length_;
  float *time_, *position_, *rest_;
};

// Which bucket each row of a block sees in each column of a tile.
class Buckets {
 public:
  Buckets(const NpuGrHstu &call, float *scratch) : call_(call) {
    tiles_ = (call.num_tokens + TILE - 1) / TILE;
    spans_ = (Span *)(((uintptr_t)scratch + 7) & ~(uintptr_t)7);
    offsets_ = (int32_t *)(spans_ + tiles_);
    table_ = offsets_ + tiles_ * TILE;
    for (int64_t t = 0; t < tiles_; t++) {
      const int64_t left = call.num_tokens - t * TILE;
      spans_[t] = span(call.times + t * TILE, left < TILE ? left : TILE);
    }
    Span all = spans_[0];
    for (int64_t t = 1; t < tiles_; t++) {
      all.first = spans_[t].first < all.first ? spans_[t].first : all.first;
      all.last = spans_[t].last > all.last ? spans_[t].last : all.last;
    }
    is_short_ = (uint64_t)all.last - (uint64_t)all.first < 2147483647u;
    if (is_short_)
      for (int64_t i = 0; i < tiles_ * TILE; i++)
        offsets_[i] = i < call.num_tokens ? (int32_t)(call.times[i] - all.first) : 0;
  }

  // The one bucket of all of `rows` in a tile, or -1.
  int32_t one(Span rows, int64_t t) const {
    const int32_t least = time_bucket(difference(rows.first, spans_[t].last));
    return least == time_bucket(difference(rows.last, spans_[t].first)) ? least : -1;
  }

  void fill(int64_t row, int64_t count, int64_t t, int32_t *to) const {  // [count, TILE]
    for (int64_t r = row; r < row + count; r++, to += TILE) {
      const int32_t same = one(Span{call_.times[r], call_.times[r]}, t);
      for (int64_t c = 0; c < TILE; c += LANES)
        if (same >= 0)
          store(to + c, splat(same));
        else if (is_short_)
          store(to + c, look_up_index(splat(offsets_[r]) - load(offsets_ + t * TILE + c)));
        else
          for (int64_t i = c; i < c + LANES; i++)
            to[i] = t * TILE + i < call_.num_tokens ? time_bucket(difference(call_.times[r], call_.times[t * TILE + i])) : 0;
    }
  }
  int32_t *table() const { return table_; }

 private:
  const NpuGrHstu &call_;
  int64_t tiles_;
  Span *spans_;
  int32_t *offsets_, *table_;
  bool is_short_;
};

// ---- The two ops

template <class Row, class A>
static void queries(const NpuGrHstu &call, int64_t first, int64_t rows, int64_t dq, A *to) {  // [H, BLOCK_ROWS, dq]
  for (int64_t h = 0; h < call.num_heads; h++)
    for (int64_t r = 0; r < rows; r++) {
      const Row *from = (const Row *)call.q.data + (first + r) * call.q.row_stride + h * call.q.head_stride;
      A *row = to + (h * BLOCK_ROWS + r) * dq;
      convert(from, row, call.qk_dim, 1.0f);
      for (int64_t d = call.qk_dim; d < dq; d++) row[d] = 0;
    }
}

template <class Row>
static void finish(const NpuGrHstu &call, int64_t first, int64_t rows, int64_t dv, const float *sums) {
  const float alpha = (float)call.alpha;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < call.num_heads; h++) {
      Row *to = (Row *)call.out.data + (first + r) * call.out.row_stride + h * call.out.head_stride;
      convert(sums + (h * BLOCK_ROWS + r) * dv, to, call.v_dim, alpha);
    }
}

template <class Row>
static void see_themselves(const NpuGrHstu &call, const Bias &bias, int64_t first, int64_t rows, int64_t dv, float *sums) {
  const float slope = (float)(-1.4426950408889634 * call.alpha);
  for (int64_t h = 0; h < call.num_heads; h++) {
    const float own = bias.time(h)[0] + call.position_bias[h * call.position_buckets] * (float)(1.0 / call.alpha);
    for (int64_t r = 0; r < rows; r++) {
      const Row *q = (const Row *)call.q.data + (first + r) * call.q.row_stride + h * call.q.head_stride;
      const Row *k = (const Row *)call.own_k.data + (first + r) * call.own_k.row_stride + h * call.own_k.head_stride;
      const Row *v = (const Row *)call.own_v.data + (first + r) * call.own_v.row_stride + h * call.own_v.head_stride;
      float part[8] = {own};
      int64_t d = 0;
      for (; d + 8 <= call.qk_dim; d += 8)
        for (int i = 0; i < 8; i++) part[i] += widen(q[d + i]) * widen(k[d + i]);
      for (; d < call.qk_dim; d++) part[0] += widen(q[d]) * widen(k[d]);
      const float x = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
      const float weight = silu(splat(x), slope)[0];
      float *to = sums + (h * BLOCK_ROWS + r) * dv;
      for (d = 0; d < call.v_dim; d++) to[d] += weight * widen(v[d]);
    }
  }
}

template <class M>
static int64_t scratch_of(const NpuGrHstu &call, bool causal) {
  const int64_t dq = padded(call.qk_dim, 2), dv = padded(call.v_dim, 16);
  return 4 * Bias::floats(call, causal) + call.num_heads * BLOCK_ROWS * (dq * (int64_t)sizeof(typename M::A) + dv * 4) +
         (dq + dv) * TILE * 4 + 192;
}

template <class M, class Row, class T>  // arithmetic, rows, stored tiles
class Attention {
  typedef typename M::A A;
  typedef typename M::Tile Used;
  static constexpr bool WIDENS = sizeof(T) < sizeof(Used);  // a tile is widened once for all rows of a block

 public:
  explicit Attention(const NpuGrHstu &call)
      : call_(call), dq_(padded(call.qk_dim, 2)), dv_(padded(call.v_dim, 16)),
        sums_((float *)call.scratch), q_((A *)(sums_ + call.num_heads * BLOCK_ROWS * dv_)),
        wide_((Used *)(q_ + call.num_heads * BLOCK_ROWS * dq_)),
        bias_(call, (float *)(wide_ + (WIDENS ? (dq_ + dv_) * TILE : 0))) {
    work_.dq = dq_;
    work_.dv = dv_;
    work_.slope = (float)(-1.4426950408889634 * call.alpha);
  }

  void causal() {
    const int64_t past = call_.num_tokens - call_.num_rows;
    Buckets buckets(call_, bias_.rest());
    for (int64_t first = 0; first < call_.num_rows; first += BLOCK_ROWS) {
      const int64_t rows = begin(first);
      Span spans[BLOCK_ROWS / ROWS];
      for (int64_t r = 0; r < rows; r += ROWS) spans[r / ROWS] = span(call_.times + past + first + r, least(ROWS, rows - r));
      each_tile([&](int64_t t, const T *k, const T *v) {
        const int64_t from = t * TILE, row0 = past + first;
        if (from >= row0 + rows) return false;
        int32_t one[BLOCK_ROWS / ROWS];
        for (int64_t r = 0; r < rows; r += ROWS) {
          one[r / ROWS] = bias_.is_far(row0 + r, from) ? buckets.one(spans[r / ROWS], t) : -1;
          if (one[r / ROWS] < 0) buckets.fill(row0 + r, least(ROWS, rows - r), t, buckets.table() + r * TILE);
        }
        for (int64_t h = 0; h < call_.num_heads; h++) {
          use_head(h, k, v);
          for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t count = least(ROWS, rows - r), row = row0 + r;
            if (row + count <= from) continue;
            alignas(64) float block[ROWS][TILE];
            if (one[r / ROWS] >= 0) {
              const V same = splat(bias_.far(h, one[r / ROWS]));
              for (int64_t c = 0; c < TILE; c += LANES) store(&block[0][c], same);
              work_.bias_stride = 0;
            } else {
              for (int64_t i = 0; i < count; i++)
                look_up(bias_.time(h), buckets.table() + (r + i) * TILE, bias_.position(h, row + i, from), block[i]);
              work_.bias_stride = TILE;
            }
            work_.bias = block[0];
            work_.limit = least(TILE, row + count - from);
            work_.first_limit = row + 1 - from;
            work_.more = 1;
            one_tile(h, r, count);
          }
        }
        return true;
      });
      finish<Row>(call_, first, rows, dv_, sums_);
    }
  }

  void targets() {
    const int64_t tiles = (call_.num_tokens + TILE - 1) / TILE;
    float *rows_of_bias = bias_.rest();  // [H, tiles * TILE]
    for (int64_t t = 0; t < tiles; t++) {
      int32_t index[TILE];
      for (int64_t c = 0; c < TILE; c++) {
        const int64_t j = t * TILE + c;
        index[c] = j < call_.num_tokens ? time_bucket(difference(call_.query_time, call_.times[j])) : 0;
      }
      for (int64_t h = 0; h < call_.num_heads; h++)
        look_up(bias_.time(h), index, bias_.position(h, call_.num_tokens, t * TILE), rows_of_bias + (h * tiles + t) * TILE);
    }
    work_.bias_stride = 0;
    work_.more = 0;
    for (int64_t first = 0; first < call_.num_rows; first += BLOCK_ROWS) {
      const int64_t rows = begin(first);
      each_tile([&](int64_t t, const T *k, const T *v) {
        work_.limit = work_.first_limit = least(TILE, call_.num_tokens - t * TILE);
        for (int64_t h = 0; h < call_.num_heads; h++) {
          work_.bias = rows_of_bias + (h * tiles + t) * TILE;
          use_head(h, k, v);
          for (int64_t r = 0; r < rows; r += ROWS) one_tile(h, r, least(ROWS, rows - r));
        }
        return true;
      });
      see_themselves<Row>(call_, bias_, first, rows, dv_, sums_);
      finish<Row>(call_, first, rows, dv_, sums_);
    }
  }

 private:
  int64_t begin(int64_t first) {
    const int64_t rows = least(BLOCK_ROWS, call_.num_rows - first);
    queries<Row, A>(call_, first, rows, dq_, q_);
    __builtin_memset(sums_, 0, sizeof(float) * call_.num_heads * BLOCK_ROWS * dv_);
    return rows;
  }

  template <class F>
  void each_tile(F use) {
    int64_t t = 0;
    for (int64_t i = 0; i < call_.num_runs; i++)
      for (int64_t n = 0; n < call_.runs[i].num_tiles; n++, t++)
        if (t * TILE >= call_.num_tokens || !use(t, (const T *)call_.runs[i].k + n * call_.num_heads * dq_ * TILE,
                                                 (const T *)call_.runs[i].v + n * call_.num_heads * dv_ * TILE))
          return;
  }

  void use_head(int64_t head, const T *k, const T *v) {
    k += head * dq_ * TILE;
    v += head * dv_ * TILE;
    next_k_ = k + dq_ * TILE;
    next_v_ = v + dv_ * TILE;
    if constexpr (WIDENS) {
      widen_pairs(k, wide_, dq_ / 2, TILE);
      widen_pairs(v, wide_ + dq_ * TILE, TILE / 2, dv_);
      work_.k = wide_;
      work_.v = wide_ + dq_ * TILE;
    } else {
      work_.k = k;
      work_.v = v;
    }
  }

  static void widen_pairs(const bf16 *from, float *to, int64_t rows, int64_t width) {  // [rows][width][2] -> [2 rows][width]
    for (int64_t r = 0; r < rows; r++, from += 2 * width, to += 2 * width)
      for (int64_t i = 0; i < width; i += LANES) {
        const I pair = load((const int32_t *)from + i);
        store(to + i, (V)(pair << 16));
        store(to + width + i, (V)(pair & splat((int32_t)0xffff0000)));
      }
  }

  static void prefetch(const T *from, int64_t width, int64_t share) {  // one of BLOCK_ROWS / ROWS shares
    const int64_t bytes = width * TILE * sizeof(T);
    for (int64_t at = share * 64; at < bytes; at += BLOCK_ROWS / ROWS * 64)
      __builtin_prefetch((const void *)((uintptr_t)from + at));
  }

  void one_tile(int64_t head, int64_t row, int64_t rows) {
    work_.q = q_ + (head * BLOCK_ROWS + row) * dq_;
    work_.out = sums_ + (head * BLOCK_ROWS + row) * dv_;
    prefetch(next_k_, dq_, row / ROWS);  // next in memory: the next head's part of the tile, or the next tile
    prefetch(next_v_, dv_, row / ROWS);
    tile_of<M>(rows, work_);
  }

  const NpuGrHstu &call_;
  int64_t dq_, dv_;
  float *sums_;
  A *q_;
  Used *wide_;  // keys, then values, of one tile of one head
  Bias bias_;
  Work<M> work_;
  const T *next_k_, *next_v_;
};

// Calls `use` with the arithmetic, a row element and a tile element of a call.
template <class F>
INLINE void with_types(const NpuGrHstu &call, F use) {
  const bool narrow_rows = call.row_dtype == NPU_GR_BFLOAT16;
  if (call.tile_dtype == NPU_GR_FLOAT32) return narrow_rows ? use(Float32(), bf16(), float()) : use(Float32(), float(), float());
  if (!narrow_rows) return use(Float32(), float(), bf16());
#ifdef __AVX512BF16__
  return use(Bfloat16Dot(), bf16(), bf16());
#else
  return use(Float32(), bf16(), bf16());
#endif
}

static int64_t hstu_scratch_bytes(const NpuGrHstu &call, bool causal) {
  int64_t bytes = 0;
  with_types(call, [&](auto math, auto, auto) { bytes = scratch_of<decltype(math)>(call, causal); });
  return bytes;
}

static void hstu_causal(const NpuGrHstu &call) {
  with_types(call, [&](auto math, auto row, auto stored) { Attention<decltype(math), decltype(row), decltype(stored)>(call).causal(); });
}

static void hstu_targets(const NpuGrHstu &call) {
  with_types(call, [&](auto math, auto row, auto stored) { Attention<decltype(math), decltype(row), decltype(stored)>(call).targets(); });
}

// ---- Packing

typedef int32_t I4 __attribute__((vector_size(16)));
typedef I4 UnalignedI4 __attribute__((aligned(2), may_alias));

// [4 tokens][n units of 32 bits] -> [n][TILE], 4 x 4 at a time; n a multiple of 4
INLINE void turn(const void *const from[4], int32_t *to, int64_t n) {
  for (int64_t d = 0; d < n; d += 4) {
    I4 row[4];
    for (int i = 0; i < 4; i++) row[i] = ((const UnalignedI4 *)from[i])[d / 4];
    const I4 low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
    const I4 a = __builtin_shuffle(row[0], row[1], low), b = __builtin_shuffle(row[2], row[3], low);
    const I4 c = __builtin_shuffle(row[0], row[1], high), e = __builtin_shuffle(row[2], row[3], high);
    *(UnalignedI4 *)(to + d * TILE) = __builtin_shuffle(a, b, left);
    *(UnalignedI4 *)(to + (d + 1) * TILE) = __builtin_shuffle(a, b, right);
    *(UnalignedI4 *)(to + (d + 2) * TILE) = __builtin_shuffle(c, e, left);
    *(UnalignedI4 *)(to + (d + 3) * TILE) = __builtin_shuffle(c, e, right);
  }
}

template <class T>
INLINE T &key_at(T *head, int64_t d, int64_t token) {
  return sizeof(T) == 4 ? head[d * TILE + token] : head[(d / 2 * TILE + token) * 2 + d % 2];
}
template <class T>
INLINE T &value_at(T *head, int64_t dv, int64_t token, int64_t d) {
  return sizeof(T) == 4 ? head[token * dv + d] : head[(token / 2 * dv + d) * 2 + token % 2];
}

// Rows lie far apart, where no hardware prefetcher looks: ask for those of the 16 rows ahead.
template <class Row>
INLINE void ahead(const Row *rows, int64_t step, int64_t count, int64_t width) {
  for (int64_t i = 16; i < 16 + count; i++)
    for (int64_t at = 0; at < width * (int64_t)sizeof(Row); at += 64)
      __builtin_prefetch((const void *)((uintptr_t)rows + i * step * sizeof(Row) + at));
}

template <class Row, class T>
static void pack_keys(const NpuGrPack &call, int64_t row, int64_t count, int64_t token, T *tile) {
  const int64_t dq = padded(call.qk_dim, 2), step = call.k.row_stride, units = call.qk_dim / (4 / sizeof(T)) / 4 * 4;
  const Row *from = (const Row *)call.k.data + row * step;
  for (int64_t i = 0; i < count;) {
    const bool is_four = sizeof(Row) == sizeof(T) && i + 4 <= count;
    ahead(from + i * step, step, is_four ? 4 : 1, call.num_heads * call.qk_dim);
    for (int64_t h = 0; h < call.num_heads; h++) {
      const Row *rows[4];
      for (int j = 0; j < 4; j++) rows[j] = from + (i + (is_four ? j : 0)) * step + h * call.k.head_stride;
      T *to = tile + h * dq * TILE;
      if (is_four) turn((const void *const *)rows, (int32_t *)to + token + i, units);
      for (int j = 0; j < (is_four ? 4 : 1); j++) {
        for (int64_t d = is_four ? units * (4 / sizeof(T)) : 0; d < call.qk_dim; d++)
          narrow(widen(rows[j][d]), &key_at(to, d, token + i + j));
        for (int64_t d = call.qk_dim; d < dq; d++) key_at(to, d, token + i + j) = 0;
      }
    }
    i += is_four ? 4 : 1;
  }
}

template <class Row, class T>
static void pack_values(const NpuGrPack &call, int64_t row, int64_t count, int64_t token, T *tile) {
  const int64_t dv = padded(call.v_dim, 16), step = call.v.row_stride;
  for (int64_t i = 0; i < count;) {
    const bool is_pair = sizeof(T) == 2 && sizeof(Row) == 2 && (token + i) % 2 == 0 && i + 1 < count;
    ahead((const Row *)call.v.data + (row + i) * step, step, is_pair ? 2 : 1, call.num_heads * call.v_dim);
    for (int64_t h = 0; h < call.num_heads; h++) {
      const Row *from = (const Row *)call.v.data + (row + i) * step + h * call.v.head_stride;
      T *to = &value_at(tile + h * dv * TILE, dv, token + i, 0);
      if (is_pair) {
        for (int64_t d = 0; d < call.v_dim; d++) {
          const uint32_t pair = (uint32_t)(uint16_t)from[d] | (uint32_t)(uint16_t)from[step + d] << 16;
          __builtin_memcpy(to + 2 * d, &pair, 4);
        }
        for (int64_t d = 2 * call.v_dim; d < 2 * dv; d++) to[d] = 0;
      } else if (sizeof(T) == 4) {
        convert(from, to, call.v_dim, 1.0f);
        for (int64_t d = call.v_dim; d < dv; d++) to[d] = 0;
      } else {
        for (int64_t d = 0; d < call.v_dim; d++) narrow(widen(from[d]), to + 2 * d);
        for (int64_t d = call.v_dim; d < dv; d++) to[2 * d] = 0;
      }
    }
    i += is_pair ? 2 : 1;
  }
  for (int64_t h = 0; h < call.num_heads; h++)  // a weight of zero must not meet a NaN
    for (int64_t t = token + count; t < TILE; t++)
      for (int64_t d = 0; d < dv; d++) value_at(tile + h * dv * TILE, dv, t, d) = 0;
}

template <class Row, class T>
static void pack(const NpuGrPack &call) {
  const int64_t dq = padded(call.qk_dim, 2), dv = padded(call.v_dim, 16);
  for (int64_t row = 0; row < call.num_rows;) {
    const int64_t at = call.first_token + row, token = at % TILE;
    const int64_t count = least(TILE - token, call.num_rows - row), tile = at / TILE * call.num_heads * TILE;
    pack_keys<Row, T>(call, row, count, token, (T *)call.into.k + tile * dq);
    pack_values<Row, T>(call, row, count, token, (T *)call.into.v + tile * dv);
    row += count;
  }
}

static void pack_kv(const NpuGrPack &call) {
  const bool narrow_rows = call.row_dtype == NPU_GR_BFLOAT16;
  if (call.tile_dtype == NPU_GR_FLOAT32)
    return narrow_rows ? pack<bf16, float>(call) : pack<float, float>(call);
  return narrow_rows ? pack<bf16, bf16>(call) : pack<float, bf16>(call);
}
