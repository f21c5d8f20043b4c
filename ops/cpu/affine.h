// y = x W^T + b, with SiLU where asked: the microkernel of hstu_tile.h over weights packed as keys, 64 outputs a tile.
#ifndef NPU_GR_AFFINE_H
#define NPU_GR_AFFINE_H

#include "hstu_tile.h"

namespace {
namespace hstu {

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
        for (int64_t r = 0; r < rows; r += kRows)
          at_most<kRows>(rows - r, [&](auto count) { tile<count.value>(first, r, out); });
    }
  }

 private:
  template <int R>
  NPU_GR_APART void tile(int64_t first, int64_t row, int64_t out) {
    const auto *weight = (const typename M::Tile *)call_.weight + out * width_;
    for (int64_t column = 0; column < least(kTile, call_.num_out - out); column += kColumns * kLanes) {
      F32 sum[R][kColumns];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; c++) sum[r][c] = load(call_.bias + out + column + c * kLanes);
      multiply<M, R, kColumns>(sum, x_ + row * width_, width_, weight + column * M::kUnits, kTile * M::kUnits,
                               width_ / M::kUnits);
      finish<R>(sum, first + row, out + column);
    }
  }

  template <int R>
  NPU_GR_APART void finish(F32 (&sum)[R][kColumns], int64_t row, int64_t out) {
    for (int r = 0; r < R; r++)
      for (int c = 0; c < kColumns; c++) {
        const F32 y = call_.is_silu ? silu(sum[r][c], -1.44269504f) : sum[r][c];
        const int64_t at = out + c * kLanes;
        Y *to = (Y *)call_.y + (row + r) * call_.num_out + at;
        if (at + kLanes <= call_.num_out) {
          store(to, y);
        } else {
          for (int i = 0; at + i < call_.num_out; i++) put(to + i, y[i]);
        }
      }
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
