// y = x W^T + b, with SiLU where asked: the microkernel of hstu_tile.h over weights packed as keys, 64 outputs a tile.
#ifndef NPU_GR_AFFINE_H
#define NPU_GR_AFFINE_H

#include "hstu_tile.h"

namespace {
namespace hstu {

// sums [R, kTile] = bias + x W^T in C vectors of columns
template <class M, int R, int C>
NPU_GR_APART void product(const typename M::A *x, int64_t width, const typename M::Tile *weight, const float *bias,
                          float *sums) {
  F32 sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = load(bias + c * kLanes);
  multiply<M, R, C>(sum, x, width, weight, kTile * M::kUnits, width / M::kUnits);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(sums + r * kTile + c * kLanes, sum[r][c]);
}

template <class M, class X, class Y>
class AffineBlocks {
  typedef typename M::A A;
  static constexpr int kBlock = 16 * kRows;  // rows of x that stay in L2 while the weights stream

 public:
  static int64_t scratch_bytes(const Affine &call) { return kBlock * padded(call.num_in, 2) * sizeof(A); }

  explicit AffineBlocks(const Affine &call) : call_(call), width_(padded(call.num_in, 2)), x_((A *)call.scratch) {}

  void run() {
    for (int64_t first = 0; first < call_.num_rows; first += kBlock) {
      const int64_t rows = least(kBlock, call_.num_rows - first);
      for (int64_t r = 0; r < rows; r++) {
        convert((const X *)call_.x + (first + r) * call_.x_stride, x_ + r * width_, call_.num_in, 1.0f);
        for (int64_t i = call_.num_in; i < width_; i++) x_[r * width_ + i] = 0;
      }
      for (int64_t out = 0; out < call_.num_out; out += kTile)
        for (int64_t r = 0; r < rows; r += kRows) tile(first + r, least(kRows, rows - r), x_ + r * width_, out);
    }
  }

 private:
  void tile(int64_t row, int64_t rows, const A *x, int64_t out) {
    const auto *weight = (const typename M::Tile *)call_.weight + out * width_;
    const int64_t here = least(kTile, call_.num_out - out);
    alignas(64) float sums[kRows][kTile];
    for (int64_t column = 0; column < here; column += kColumns * kLanes)
      at_most<kColumns>((here - column + kLanes - 1) / kLanes, [&](auto columns) {
        at_most<kRows>(rows, [&](auto count) {
          product<M, count.value, columns.value>(x, width_, weight + column * M::kUnits, call_.bias + out + column,
                                                 &sums[0][column]);
        });
      });
    for (int64_t r = 0; r < rows; r++) finish(sums[r], (Y *)call_.y + (row + r) * call_.num_out + out, here);
  }

  void finish(float *sums, Y *to, int64_t count) {
    if (call_.is_silu)
      for (int64_t at = 0; at < count; at += kLanes) store(sums + at, silu(load(sums + at), -1.44269504f));
    convert(sums, to, count, 1.0f);
  }

  const Affine &call_;
  int64_t width_;
  A *x_;
};

template <class F>
void with_affine(const Affine &call, F use) {
  const bool x16 = call.x_dtype == kBFloat16, y16 = call.y_dtype == kBFloat16;
#if NPU_GR_BF16_DOT
  if (call.tile_dtype == kBFloat16) {
    if (x16)
      return y16 ? use(AffineBlocks<Bfloat16Dot, bf16, bf16>(call)) : use(AffineBlocks<Bfloat16Dot, bf16, float>(call));
    return y16 ? use(AffineBlocks<Bfloat16Dot, float, bf16>(call)) : use(AffineBlocks<Bfloat16Dot, float, float>(call));
  }
#endif
  if (x16) return y16 ? use(AffineBlocks<Float32, bf16, bf16>(call)) : use(AffineBlocks<Float32, bf16, float>(call));
  return y16 ? use(AffineBlocks<Float32, float, bf16>(call)) : use(AffineBlocks<Float32, float, float>(call));
}

int64_t affine_scratch_bytes(const Affine *at) {
  int64_t bytes = 0;
  with_affine(*at, [&](auto blocks) { bytes = blocks.scratch_bytes(*at); });
  return bytes;
}

void affine(const Affine *at) {
  with_affine(*at, [](auto blocks) { blocks.run(); });
}

}  // namespace hstu
}  // namespace

#endif
