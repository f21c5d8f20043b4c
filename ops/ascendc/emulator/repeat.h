// Vector instructions in their form by repeats: where a row meets a matrix, or a number of each row its elements.
// Sources: asc-devkit docs, SIMD计算说明/高维切分, and the page of each name.
#pragma once
#include "vector.h"

namespace AscendC {

// The forms of two tensors by repeats: `mask` elements each; strides count data blocks of 32 bytes, 0 reads again.
struct BinaryRepeatParams {
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};
namespace emulator {
inline uint64_t lanes(uint64_t count) { return count < 64 ? (1ull << count) - 1 : ~0ull; }
template <typename T, typename F>
void repeated(const char *what, const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b,
              uint64_t mask, uint8_t repeats, const BinaryRepeatParams &by, F function, VectorKind kind = WITH_TENSOR) {
  constexpr uint32_t per_block = BLOCK / sizeof(T);
  EMULATOR_CHECK(mask > 0 && mask <= 256 / sizeof(T), "%s: a mask of %llu elements", what, (ull)mask);
  set_mask(what, {lanes(mask), 0});
  issue_lanes(kind, repeats * mask, sizeof(T));
  auto each = [&](const LocalTensor<T> &tensor, uint8_t blocks, uint8_t step, auto touch) {
    tensor.need(what, 0);
    for (uint32_t r = 0; r < repeats; ++r)
      for (uint32_t i = 0; i < mask; i += per_block) {
        uint32_t at = (r * step + i / per_block * blocks) * per_block;
        uint32_t count = uint32_t(std::min<uint64_t>(per_block, mask - i));
        tensor.need(what, at + count);
        touch(tensor.at() + at, count);
      }
  };
  std::vector<T> x, y;
  auto reading = [&](std::vector<T> &into) {
    return [&](const T *at, uint32_t count) {
      core.read(V, at, count * sizeof(T));
      into.insert(into.end(), at, at + count);
    };
  };
  each(a, by.src0BlkStride, by.src0RepStride, reading(x));
  each(b, by.src1BlkStride, by.src1RepStride, reading(y));
  size_t done = 0;
  each(to, by.dstBlkStride, by.dstRepStride, [&](T *at, uint32_t count) {
    core.write(V, at, count * sizeof(T));
    for (uint32_t i = 0; i < count; ++i, ++done) at[i] = function(x[done], y[done]);
  });
}
}  // namespace emulator
template <typename T>
void Add(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask,
         const uint8_t repeats, const BinaryRepeatParams &by) {
  static_assert(emulator::arithmetic<T>);
  emulator::repeated("Add", to, a, b, mask, repeats, by,
                     [](T x, T y) { return emulator::wrapping(x, y, [](auto p, auto q) { return p + q; }); });
}
template <typename T>
void Sub(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask,
         const uint8_t repeats, const BinaryRepeatParams &by) {
  static_assert(emulator::arithmetic<T>);
  emulator::repeated("Sub", to, a, b, mask, repeats, by,
                     [](T x, T y) { return emulator::wrapping(x, y, [](auto p, auto q) { return p - q; }); });
}
template <typename T>
void Mul(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask,
         const uint8_t repeats, const BinaryRepeatParams &by) {
  static_assert(emulator::one_of<T, float>);
  emulator::repeated("Mul", to, a, b, mask, repeats, by, [](T x, T y) { return x * y; });
}
template <typename T>
void Div(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask,
         const uint8_t repeats, const BinaryRepeatParams &by) {
  static_assert(emulator::one_of<T, float>);
  emulator::repeated(
      "Div", to, a, b, mask, repeats, by, [](T x, T y) { return x / y; }, emulator::DIV);
}

// A repeat takes the next 64 bits of the mask, whatever its elements' strides are; src1 of `by` is the scalar.
template <typename T, typename U>
void Select(const LocalTensor<T> &to, const LocalTensor<U> &bits, const LocalTensor<T> &from, T scalar, SELMODE mode,
            uint64_t mask, uint8_t repeats, const BinaryRepeatParams &by) {
  static_assert(emulator::one_of<T, float> && std::is_unsigned_v<U>);
  EMULATOR_CHECK(mode == SELMODE::VSEL_TENSOR_SCALAR_MODE, "Select: a scalar needs VSEL_TENSOR_SCALAR_MODE");
  EMULATOR_CHECK(mask == 64, "Select: the emulator knows whole repeats only");
  emulator::reads("Select mask", bits, uint64_t(repeats) * mask / (8 * sizeof(U)));
  auto first = reinterpret_cast<const uint8_t *>(bits.at());
  uint64_t i = 0;
  emulator::repeated(
      "Select", to, from, from, mask, repeats,
      {by.dstBlkStride, by.src0BlkStride, by.src0BlkStride, by.dstRepStride, by.src0RepStride, by.src0RepStride},
      [&](T x, T) {
        bool taken = first[i / 8] >> (i % 8) & 1;
        ++i;
        return taken ? x : scalar;
      },
      emulator::SELECT);
}

// The sum of each repeat's `mask` elements: neighbours first, then their sums, as a binary tree.
template <typename T>
void WholeReduceSum(const LocalTensor<T> &to, const LocalTensor<T> &from, const int32_t mask, const int32_t repeats,
                    const int32_t to_step, const int32_t block_stride, const int32_t repeat_stride) {
  static_assert(emulator::one_of<T, float>);
  constexpr int32_t per_block = emulator::BLOCK / sizeof(T), per_repeat = 256 / sizeof(T);
  EMULATOR_CHECK(mask > 0 && mask <= per_repeat && repeats <= 255, "WholeReduceSum: %d elements, %d repeats", mask,
                 repeats);
  EMULATOR_CHECK(block_stride == 1, "WholeReduceSum: the emulator knows contiguous repeats only");
  emulator::set_mask("WholeReduceSum", {emulator::lanes(uint64_t(mask)), 0});
  emulator::issue_lanes(emulator::WITH_TENSOR, uint64_t(repeats) * mask, sizeof(T));
  from.need("WholeReduceSum src", 0);
  to.need("WholeReduceSum dst", repeats ? (repeats - 1) * to_step + 1 : 0, sizeof(T));
  for (int32_t r = 0; r < repeats; ++r) {
    uint32_t at = uint32_t(r * repeat_stride * per_block);
    from.need("WholeReduceSum src", at + mask);
    emulator::core.read(emulator::V, from.at() + at, mask * sizeof(T));
    std::vector<T> part(per_repeat, T(0));
    std::copy_n(from.at() + at, mask, part.begin());
    for (size_t count = per_repeat / 2; count > 0; count /= 2)
      for (size_t i = 0; i < count; ++i) part[i] = part[2 * i] + part[2 * i + 1];
    emulator::core.write(emulator::V, to.at() + r * to_step, sizeof(T));
    to.at()[r * to_step] = part[0];
  }
}

}  // namespace AscendC
