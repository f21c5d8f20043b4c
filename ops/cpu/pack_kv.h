// Natural rows of keys and values into tiles, at any token: npu_gr/backend/tiles.py is the definition.
#ifndef NPU_GR_PACK_KV_H
#define NPU_GR_PACK_KV_H

#include "hstu_tile.h"

namespace {
namespace hstu {

typedef int32_t I4 __attribute__((vector_size(16)));
typedef I4 UnalignedI4 __attribute__((aligned(2), may_alias));

// [4 tokens][n units of 32 bits] -> [n][kTile], 4 x 4 at a time; n a multiple of 4
NPU_GR_INLINE void turn(const void *const from[4], int32_t *to, int64_t n) {
  for (int64_t d = 0; d < n; d += 4) {
    I4 row[4];
    for (int i = 0; i < 4; i++) row[i] = ((const UnalignedI4 *)from[i])[d / 4];
    const I4 low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
    const I4 a = __builtin_shuffle(row[0], row[1], low), b = __builtin_shuffle(row[2], row[3], low);
    const I4 c = __builtin_shuffle(row[0], row[1], high), e = __builtin_shuffle(row[2], row[3], high);
    *(UnalignedI4 *)(to + d * kTile) = __builtin_shuffle(a, b, left);
    *(UnalignedI4 *)(to + (d + 1) * kTile) = __builtin_shuffle(a, b, right);
    *(UnalignedI4 *)(to + (d + 2) * kTile) = __builtin_shuffle(c, e, left);
    *(UnalignedI4 *)(to + (d + 3) * kTile) = __builtin_shuffle(c, e, right);
  }
}

template <class T>
NPU_GR_INLINE T &key_at(T *head, int64_t d, int64_t token) {
  return sizeof(T) == 4 ? head[d * kTile + token] : head[(d / 2 * kTile + token) * 2 + d % 2];
}
template <class T>
NPU_GR_INLINE T &value_at(T *head, int64_t dv, int64_t token, int64_t d) {
  return sizeof(T) == 4 ? head[token * dv + d] : head[(token / 2 * dv + d) * 2 + token % 2];
}

template <class Row, class T>
void pack_keys(const Pack &call, int64_t row, int64_t count, int64_t token, T *tile) {
  const int64_t dq = padded(call.qk_dim, 2), step = call.k.row_stride, units = call.qk_dim / (4 / sizeof(T)) / 4 * 4;
  const Row *from = (const Row *)call.k.data + row * step;
  for (int64_t i = 0; i < count;) {
    const bool is_four = sizeof(Row) == sizeof(T) && i + 4 <= count;
    ahead(from + i * step, step, is_four ? 4 : 1, call.num_heads * call.qk_dim);
    for (int64_t h = 0; h < call.num_heads; h++) {
      const Row *rows[4];
      for (int j = 0; j < 4; j++) rows[j] = from + (i + (is_four ? j : 0)) * step + h * call.k.head_stride;
      T *to = tile + h * dq * kTile;
      if (is_four) turn((const void *const *)rows, (int32_t *)to + token + i, units);
      for (int j = 0; j < (is_four ? 4 : 1); j++) {
        for (int64_t d = is_four ? units * (4 / sizeof(T)) : 0; d < call.qk_dim; d++)
          put(&key_at(to, d, token + i + j), widen(rows[j][d]));
        for (int64_t d = call.qk_dim; d < dq; d++) key_at(to, d, token + i + j) = 0;
      }
    }
    i += is_four ? 4 : 1;
  }
}

template <class Row, class T>
void pack_values(const Pack &call, int64_t row, int64_t count, int64_t token, T *tile) {
  const int64_t dv = padded(call.v_dim, 16), step = call.v.row_stride;
  for (int64_t i = 0; i < count;) {
    const bool is_pair = sizeof(T) == 2 && sizeof(Row) == 2 && (token + i) % 2 == 0 && i + 1 < count;
    ahead((const Row *)call.v.data + (row + i) * step, step, is_pair ? 2 : 1, call.num_heads * call.v_dim);
    for (int64_t h = 0; h < call.num_heads; h++) {
      const Row *from = (const Row *)call.v.data + (row + i) * step + h * call.v.head_stride;
      T *to = &value_at(tile + h * dv * kTile, dv, token + i, 0);
      if (is_pair) {
        for (int64_t d = 0; d < call.v_dim; d++) {
          const uint32_t pair = (uint32_t)(uint16_t)from[d] | (uint32_t)(uint16_t)from[step + d] << 16;
          memcpy(to + 2 * d, &pair, 4);
        }
        for (int64_t d = 2 * call.v_dim; d < 2 * dv; d++) to[d] = 0;
      } else if (sizeof(T) == 4) {
        convert(from, to, call.v_dim, 1.0f);
        for (int64_t d = call.v_dim; d < dv; d++) to[d] = 0;
      } else {
        for (int64_t d = 0; d < call.v_dim; d++) put(to + 2 * d, widen(from[d]));
        for (int64_t d = call.v_dim; d < dv; d++) to[2 * d] = 0;
      }
    }
    i += is_pair ? 2 : 1;
  }
  for (int64_t h = 0; h < call.num_heads; h++)  // a weight of zero must not meet a NaN
    for (int64_t t = token + count; t < kTile; t++)
      for (int64_t d = 0; d < dv; d++) value_at(tile + h * dv * kTile, dv, t, d) = 0;
}

template <class Row, class T>
void pack(const Pack &call) {
  const int64_t dq = padded(call.qk_dim, 2), dv = padded(call.v_dim, 16);
  for (int64_t row = 0; row < call.num_rows;) {
    const int64_t at = call.first_token + row, token = at % kTile;
    const int64_t count = least(kTile - token, call.num_rows - row), tile = at / kTile * call.num_heads * kTile;
    pack_keys<Row, T>(call, row, count, token, (T *)call.into.k + tile * dq);
    pack_values<Row, T>(call, row, count, token, (T *)call.into.v + tile * dv);
    row += count;
  }
}

// Passes the numbers of a row of one head in int8 to `put`, and returns their scale: `quantise` of tiles.py.
template <class Row, class F>
NPU_GR_INLINE bf16 quantise(const Row *from, int64_t n, F put) {
  float top = 0, faults = 0;
  for (int64_t i = 0; i < n; i++) {
    const float x = widen(from[i]);
    top = fabsf(x) > top ? fabsf(x) : top;
    faults += x * 0.0f;
  }
  const bf16 scale = faults == 0 ? narrow(top < 0x1p-100f ? 0.0f : top / 127.0f) : 0x7fc0;  // or NaN
  const float step = widen(scale);
  for (int64_t i = 0; i < n; i++) {
    const float x = step > 0 ? widen(from[i]) / step + 12582912.0f - 12582912.0f : 0;  // to the nearest, ties to even
    put(i, (int8_t)(int32_t)(x > 127 ? 127.0f : x < -127 ? -127.0f : x));
  }
  return scale;
}

template <class Row>
void pack_int8(const Pack &call) {
  const int64_t dq = padded(call.qk_dim, 2), dv = padded(call.v_dim, 16), heads = call.num_heads;
  for (int64_t row = 0; row < call.num_rows; row++) {
    const int64_t token = (call.first_token + row) % kTile, tile = (call.first_token + row) / kTile;
    for (int64_t h = 0; h < heads; h++) {
      int8_t *k = (int8_t *)call.into.k + (tile * heads + h) * (dq + 2) * kTile;
      int8_t *v = (int8_t *)call.into.v + (tile * heads + h) * (dv + 2) * kTile;
      const Row *from_k = (const Row *)call.k.data + row * call.k.row_stride + h * call.k.head_stride;
      const Row *from_v = (const Row *)call.v.data + row * call.v.row_stride + h * call.v.head_stride;
      const auto put_k = [&](int64_t d, int8_t x) { k[(d / 2 * kTile + token) * 2 + d % 2] = x; };
      const auto put_v = [&](int64_t d, int8_t x) { v[(token / 2 * dv + d) * 2 + token % 2] = x; };
      ((bf16 *)(k + dq * kTile))[token] = quantise(from_k, call.qk_dim, put_k);
      ((bf16 *)(v + dv * kTile))[token] = quantise(from_v, call.v_dim, put_v);
      for (int64_t d = call.qk_dim; d < dq; d++) put_k(d, 0);
      for (int64_t d = call.v_dim; d < dv; d++) put_v(d, 0);
      if (row + 1 < call.num_rows) continue;
      for (int64_t t = token + 1; t < kTile; t++) {  // a weight of zero must not meet a NaN
        ((bf16 *)(v + dv * kTile))[t] = 0;
        for (int64_t d = 0; d < dv; d++) v[(t / 2 * dv + d) * 2 + t % 2] = 0;
      }
    }
  }
}

void pack_kv(const Pack *at) {
  const Pack &call = *at;
  const bool narrow_rows = call.row_dtype == kBFloat16;
  if (call.tile_dtype == kInt8) return narrow_rows ? pack_int8<bf16>(call) : pack_int8<float>(call);
  if (call.tile_dtype == kFloat32) return narrow_rows ? pack<bf16, float>(call) : pack<float, float>(call);
  return narrow_rows ? pack<bf16, bf16>(call) : pack<float, bf16>(call);
}
}  // namespace hstu
}  // namespace

#endif
