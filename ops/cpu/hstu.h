// The two ops of HSTU attention: history rows (causal) and candidates (targets). Contracts: npu_gr/backend/base.py.
//
// A block of query rows passes over all tiles once, every head inside, so that the pages stream from memory in order
// and the buckets of a tile serve every head.
#ifndef NPU_GR_HSTU_H
#define NPU_GR_HSTU_H

#include "hstu_bias.h"
#include "hstu_int8.h"

namespace {
namespace hstu {

// [H, kBlockRows, dq], and of integers the scales [H, kBlockRows]
template <class Row, class A>
void queries(const Hstu &call, int64_t first, int64_t rows, int64_t dq, A *to, [[maybe_unused]] float *scales) {
  const Row *at = (const Row *)call.q.data + first * call.q.row_stride;
  for (int64_t r = 0; r < rows; r++, at += call.q.row_stride) {
    ahead(at, call.q.row_stride, 1, call.num_heads * call.qk_dim);
    for (int64_t h = 0; h < call.num_heads; h++) {
      const Row *from = at + h * call.q.head_stride;
      A *row = to + (h * kBlockRows + r) * dq;
      if constexpr (std::is_same_v<A, IntegerDot::A>) {
        scales[h * kBlockRows + r] = quantised_query(from, call.qk_dim, dq, row);
      } else {
        convert(from, row, call.qk_dim, 1.0f);
        for (int64_t d = call.qk_dim; d < dq; d++) row[d] = 0;
      }
    }
  }
}

template <class Row>
void finish(const Hstu &call, int64_t first, int64_t rows, int64_t dv, const float *sums) {
  const float alpha = (float)call.alpha;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < call.num_heads; h++) {
      Row *to = (Row *)call.out.data + (first + r) * call.out.row_stride + h * call.out.head_stride;
      convert(sums + (h * kBlockRows + r) * dv, to, call.v_dim, alpha);
    }
}

template <class Row>
void see_themselves(const Hstu &call, const Bias &bias, int64_t first, int64_t rows, int64_t dv, float *sums) {
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
      float *to = sums + (h * kBlockRows + r) * dv;
      for (d = 0; d < call.v_dim; d++) to[d] += weight * widen(v[d]);
    }
  }
}

template <class M>
int64_t scratch_of(const Hstu &call, bool causal) {
  const int64_t dq = padded(call.qk_dim, 2), dv = padded(call.v_dim, 16);
  return 4 * Bias::floats(call, causal) +
         call.num_heads * kBlockRows * ((dq + 2) * (int64_t)sizeof(typename M::A) + dv * 4) +
         (dq + dv + 2) * kTile * 4 + 192;
}

template <class M, class Row, class T>  // arithmetic, rows, stored tiles
class Attention {
  typedef typename M::A A;
  typedef typename M::Tile Used;
  static constexpr bool kWidens = sizeof(T) < sizeof(Used);  // a tile is widened once for all rows of a block
  static constexpr bool kIsInt8 = sizeof(T) == 1;
  static constexpr int kScale = kIsInt8 ? sizeof(bf16) : 0;  // behind the numbers of each token and head

 public:
  explicit Attention(const Hstu &call)
      : call_(call),
        dq_(padded(call.qk_dim, 2)),
        dv_(padded(call.v_dim, 16)),
        sums_((float *)call.scratch),
        q_((A *)(sums_ + call.num_heads * kBlockRows * dv_)),
        wide_((Used *)(q_ + call.num_heads * kBlockRows * dq_)),
        scales_((float *)(wide_ + (kWidens ? (dq_ + dv_) * kTile : 0))),
        bias_(call, scales_ + (kIsInt8 ? 2 * kTile + call.num_heads * kBlockRows : 0)) {
    work_.dq = dq_;
    work_.dv = dv_;
    work_.slope = (float)(-1.4426950408889634 * call.alpha);
  }

  void causal() {
    const int64_t past = call_.num_tokens - call_.num_rows;
    Buckets buckets(call_, bias_.rest());
    for (int64_t first = 0, rows; first < call_.num_rows; first += rows) {
      const int64_t before_gap = call_.gap_at - past - first;
      rows = begin(first, before_gap > 0 ? before_gap : kBlockRows);
      Span spans[kBlockRows / kRows];
      for (int64_t r = 0; r < rows; r += kRows)
        spans[r / kRows] = span(call_.times + past + first + r, least(kRows, rows - r));
      each_tile([&](int64_t t, const T *k, const T *v) {
        const int64_t from = t * kTile, row0 = past + first;
        if (from >= row0 + rows) return false;
        const Window window(call_, t, row0);
        if (window.hides_all_from(row0)) return true;
        work_.hidden = window.hidden();
        int32_t one[kBlockRows / kRows];
        for (int64_t r = 0; r < rows; r += kRows) {
          one[r / kRows] = bias_.is_far(row0 + r + window.missing(), from) ? buckets.one(spans[r / kRows], t) : -1;
          if (one[r / kRows] < 0) buckets.fill(row0 + r, least(kRows, rows - r), t, buckets.table() + r * kTile);
        }
        for (int64_t h = 0; h < call_.num_heads; h++) {
          use_head(h, k, v);
          for (int64_t r = 0; r < rows; r += kRows) {
            const int64_t count = least(kRows, rows - r), row = row0 + r;
            if (row + count <= from || window.hides_all_from(row)) continue;
            alignas(64) float same[kTile];
            if (one[r / kRows] >= 0) {
              for (int64_t c = 0; c < kTile; c += kLanes) store(same + c, splat(bias_.far(h, one[r / kRows])));
              work_.bias = same;
            } else {
              work_.bias = nullptr;
              work_.time = bias_.time(h);
              work_.bucket = buckets.table() + r * kTile;
              for (int64_t i = 0; i < count; i++)
                work_.position[i] = bias_.position(h, row + i + window.missing(), from);
            }
            work_.limit = least(kTile, row + count - from);
            work_.first_limit = row + 1 - from;
            work_.first_seen = window.first_seen(row);
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
    const int64_t tiles = (call_.num_tokens + kTile - 1) / kTile;
    float *rows_of_bias = bias_.rest();  // [H, tiles * kTile]
    for (int64_t t = 0; t < tiles; t++) {
      const Window window(call_, t, call_.num_tokens);
      if (window.hides_all_from(call_.num_tokens)) continue;
      int32_t index[kTile];
      for (int64_t c = 0; c < kTile; c++) {
        const int64_t j = t * kTile + c;
        index[c] = j < call_.num_tokens ? time_bucket(difference(call_.query_time, call_.times[j])) : 0;
      }
      for (int64_t h = 0; h < call_.num_heads; h++) {
        const float *time = bias_.time(h),
                    *position = bias_.position(h, call_.num_tokens + window.missing(), t * kTile);
        for (int64_t c = 0; c < kTile; c++) rows_of_bias[(h * tiles + t) * kTile + c] = time[index[c]] + position[c];
      }
    }
    work_.more = 0;
    for (int64_t first = 0; first < call_.num_rows; first += kBlockRows) {
      const int64_t rows = begin(first, kBlockRows);
      each_tile([&](int64_t t, const T *k, const T *v) {
        const Window window(call_, t, call_.num_tokens);
        if (window.hides_all_from(call_.num_tokens)) return true;
        work_.limit = work_.first_limit = least(kTile, call_.num_tokens - t * kTile);
        work_.hidden = window.hidden(), work_.first_seen = window.first_seen(call_.num_tokens);
        for (int64_t h = 0; h < call_.num_heads; h++) {
          work_.bias = rows_of_bias + (h * tiles + t) * kTile;
          use_head(h, k, v);
          for (int64_t r = 0; r < rows; r += kRows) one_tile(h, r, least(kRows, rows - r));
        }
        return true;
      });
      see_themselves<Row>(call_, bias_, first, rows, dv_, sums_);
      finish<Row>(call_, first, rows, dv_, sums_);
    }
  }

 private:
  int64_t begin(int64_t first, int64_t limit) {  // starts a block of at most `limit` rows, and returns its rows
    const int64_t rows = least(least(kBlockRows, limit), call_.num_rows - first);
    queries<Row, A>(call_, first, rows, dq_, q_, scales_ + 2 * kTile);
    memset(sums_, 0, sizeof(float) * call_.num_heads * kBlockRows * dv_);
    return rows;
  }

  template <class F>
  void each_tile(F use) {
    int64_t t = 0;
    for (int64_t i = 0; i < call_.num_runs; i++)
      for (int64_t n = 0; n < call_.runs[i].num_tiles; n++, t++)
        if (t * kTile >= call_.num_tokens ||
            !use(t, (const T *)call_.runs[i].k + n * call_.num_heads * (dq_ + kScale) * kTile,
                 (const T *)call_.runs[i].v + n * call_.num_heads * (dv_ + kScale) * kTile))
          return;
  }

  void use_head(int64_t head, const T *k, const T *v) {
    k += head * (dq_ + kScale) * kTile;
    v += head * (dv_ + kScale) * kTile;
    next_k_ = k + (dq_ + kScale) * kTile;
    next_v_ = v + (dv_ + kScale) * kTile;
    if constexpr (kIsInt8) {
      widen_integers(k, wide_, dq_ * kTile);
      widen_integers(v, wide_ + dq_ * kTile, dv_ * kTile);
      convert((const bf16 *)(k + dq_ * kTile), scales_, kTile, 1.0f);
      convert((const bf16 *)(v + dv_ * kTile), scales_ + kTile, kTile, 1.0f);
      work_.k = wide_;
      work_.v = wide_ + dq_ * kTile;
      work_.k_scale = scales_;
      work_.v_scale = scales_ + kTile;
    } else if constexpr (kWidens) {
      widen_pairs(k, wide_, dq_ / 2, kTile);
      widen_pairs(v, wide_ + dq_ * kTile, kTile / 2, dv_);
      work_.k = wide_;
      work_.v = wide_ + dq_ * kTile;
    } else {
      work_.k = k;
      work_.v = v;
    }
  }

  static void widen_pairs(const bf16 *from, float *to, int64_t rows,
                          int64_t width) {  // [rows][width][2] -> [2 rows][width]
    for (int64_t r = 0; r < rows; r++, from += 2 * width, to += 2 * width)
      for (int64_t i = 0; i < width; i += kLanes) {
        const I32 pair = load((const int32_t *)from + i);
        store(to + i, (F32)(pair << 16));
        store(to + width + i, (F32)(pair & splat((int32_t)0xffff0000)));
      }
  }

  static void prefetch(const T *from, int64_t width, int64_t share) {  // one of kBlockRows / kRows shares
    const int64_t bytes = (width + kScale) * kTile * sizeof(T);
    for (int64_t at = share * 64; at < bytes; at += kBlockRows / kRows * 64)
      __builtin_prefetch((const void *)((uintptr_t)from + at));
  }

  void one_tile(int64_t head, int64_t row, int64_t rows) {
    work_.q = q_ + (head * kBlockRows + row) * dq_;
    work_.out = sums_ + (head * kBlockRows + row) * dv_;
    prefetch(next_k_, dq_, row / kRows);  // next in memory: the next head's part of the tile, or the next tile
    prefetch(next_v_, dv_, row / kRows);
    if constexpr (kIsInt8) {
      work_.q_scale = scales_ + 2 * kTile + head * kBlockRows + row;
      at_most<kRows>(rows, [&](auto r) { integer_tile<r.value>(work_); });
    } else {
      tile_of<M>(rows, work_);
    }
  }

  const Hstu &call_;
  int64_t dq_, dv_;
  float *sums_;
  A *q_;
  Used *wide_;     // keys, then values, of one tile of one head
  float *scales_;  // of int8: of its keys, its values, and the queries
  Bias bias_;
  Work<M> work_;
  const T *next_k_, *next_v_;
};

// Calls `use` with the arithmetic, a row element and a tile element of a call.
template <class F>
NPU_GR_INLINE void with_types(const Hstu &call, F use) {
  const bool narrow_rows = call.row_dtype == kBFloat16;
  if (call.tile_dtype == kInt8)
    return narrow_rows ? use(IntegerDot(), bf16(), int8_t()) : use(IntegerDot(), float(), int8_t());
  if (call.tile_dtype == kFloat32)
    return narrow_rows ? use(Float32(), bf16(), float()) : use(Float32(), float(), float());
  if (!narrow_rows) return use(Float32(), float(), bf16());
#if NPU_GR_BF16_DOT
  return use(Bfloat16Dot(), bf16(), bf16());
#else
  return use(Float32(), bf16(), bf16());
#endif
}

int64_t scratch_bytes(const Hstu *at, int64_t is_causal) {
  const Hstu &call = *at;
  const bool causal = is_causal;
  int64_t bytes = 0;
  with_types(call, [&](auto math, auto, auto) { bytes = scratch_of<decltype(math)>(call, causal); });
  return bytes;
}

void causal(const Hstu *at) {
  const Hstu &call = *at;
  with_types(call, [&](auto math, auto row, auto stored) {
    Attention<decltype(math), decltype(row), decltype(stored)>(call).causal();
  });
}

void targets(const Hstu *at) {
  const Hstu &call = *at;
  with_types(call, [&](auto math, auto row, auto stored) {
    Attention<decltype(math), decltype(row), decltype(stored)>(call).targets();
  });
}

}  // namespace hstu
}  // namespace

#endif
