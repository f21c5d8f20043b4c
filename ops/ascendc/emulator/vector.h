// Vector instructions: the forms that take a count, and some that take a mask and repeats.
// Sources: asc-devkit docs, Memory矢量计算/{基础算术,逻辑计算,类型转换,数据填充,比较与选择,归约计算,离散与聚合}: the
// page of each name. Exp, Ln and Sqrt are libm's here: the hardware differs in the last bits. The order in which
// ReduceSum adds is not documented for dav-2201: do not test it bit for bit. That of WholeReduceSum is.
#pragma once
#include <cmath>
#include <limits>

#include "mask.h"
#include "pipe.h"

namespace AscendC {

namespace emulator {
template <typename T, typename... Options>
constexpr bool one_of = (std::is_same_v<T, Options> || ...);

// One vector instruction over `count` elements of `bytes` each, of its widest operand.
inline void issue_lanes(VectorKind kind, uint64_t count, uint64_t bytes) {
  core.issue(V);
  ++core.counters[VECTOR_INSTRUCTIONS];
  core.counters[VECTOR_REPEATS] += up(count * bytes, 256) / 256;
  ++core.counters[KINDS_BEGIN + 2 * kind];
  core.counters[KINDS_BEGIN + 2 * kind + 1] += count;
}
// The same of a form with a count, which sets the mask and puts the default back.
inline void vector_issue(VectorKind kind, uint64_t count, uint64_t bytes) {
  count_mask();
  issue_lanes(kind, count, bytes);
}
template <typename T>
void reads(const char *what, const LocalTensor<T> &tensor, uint64_t count, uint32_t align = BLOCK) {
  tensor.need(what, count, align);
  core.read(V, tensor.at(), count * sizeof(T));
}
template <typename T>
void writes(const char *what, const LocalTensor<T> &tensor, uint64_t count, uint32_t align = BLOCK) {
  tensor.need(what, count, align);
  core.write(V, tensor.at(), count * sizeof(T));
}
// Operands may be the same memory or apart, never overlap in part.
template <typename T, typename U>
void same_or_apart(const char *what, const LocalTensor<T> &to, const LocalTensor<U> &from, uint64_t count) {
  auto a = reinterpret_cast<const uint8_t *>(to.at()), b = reinterpret_cast<const uint8_t *>(from.at());
  bool apart = a + count * sizeof(T) <= b || b + count * sizeof(U) <= a;
  EMULATOR_CHECK(apart || (a == b && sizeof(T) == sizeof(U)), "%s: source and destination overlap in part", what);
}
template <typename T, typename F>
void unary(const char *what, const LocalTensor<T> &to, const LocalTensor<T> &from, uint64_t count, F function,
           VectorKind kind = WITH_SCALAR) {
  vector_issue(kind, count, sizeof(T));
  same_or_apart(what, to, from, count);
  reads(what, from, count);
  writes(what, to, count);
  T *y = to.at();
  const T *x = from.at();
  for (uint64_t i = 0; i < count; ++i) y[i] = function(x[i]);
}
template <typename T, typename F>
void binary(const char *what, const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b,
            uint64_t count, F function, VectorKind kind = WITH_TENSOR) {
  vector_issue(kind, count, sizeof(T));
  same_or_apart(what, to, a, count);
  same_or_apart(what, to, b, count);
  reads(what, a, count);
  reads(what, b, count);
  writes(what, to, count);
  T *z = to.at();
  const T *x = a.at(), *y = b.at();
  for (uint64_t i = 0; i < count; ++i) z[i] = function(x[i], y[i]);
}
// Integers wrap, as the hardware's do; C++ leaves that undefined for signed ones.
template <typename T, typename F>
T wrapping(T a, T b, F function) {
  if constexpr (std::is_same_v<T, int32_t>)
    return T(function(uint32_t(a), uint32_t(b)));
  else
    return T(function(a, b));
}
template <typename T>
constexpr bool arithmetic = one_of<T, half, float, int16_t, int32_t>;
}  // namespace emulator

template <typename T>
void Adds(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &scalar, const int32_t &count) {
  static_assert(emulator::arithmetic<T>);
  emulator::unary("Adds", to, from, count,
                  [&](T x) { return emulator::wrapping(x, scalar, [](auto a, auto b) { return a + b; }); });
}
template <typename T>
void Muls(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &scalar, const int32_t &count) {
  static_assert(emulator::arithmetic<T>);
  emulator::unary("Muls", to, from, count,
                  [&](T x) { return emulator::wrapping(x, scalar, [](auto a, auto b) { return a * b; }); });
}
template <typename T>
void Mins(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &scalar, const int32_t &count) {
  static_assert(emulator::arithmetic<T>);
  emulator::unary("Mins", to, from, count, [&](T x) { return std::min(x, scalar); });
}
template <typename T>
void Maxs(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &scalar, const int32_t &count) {
  static_assert(emulator::arithmetic<T>);
  emulator::unary("Maxs", to, from, count, [&](T x) { return std::max(x, scalar); });
}
template <typename T>
void Add(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, const int32_t &count) {
  static_assert(emulator::arithmetic<T>);
  emulator::binary("Add", to, a, b, count,
                   [](T x, T y) { return emulator::wrapping(x, y, [](auto p, auto q) { return p + q; }); });
}
template <typename T>
void Sub(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, const int32_t &count) {
  static_assert(emulator::arithmetic<T>);
  emulator::binary("Sub", to, a, b, count,
                   [](T x, T y) { return emulator::wrapping(x, y, [](auto p, auto q) { return p - q; }); });
}
template <typename T>
void Mul(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, const int32_t &count) {
  static_assert(emulator::one_of<T, float>);
  emulator::binary("Mul", to, a, b, count, [](T x, T y) { return x * y; });
}
template <typename T>
void Div(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, const int32_t &count) {
  static_assert(emulator::one_of<T, float>);
  emulator::binary(
      "Div", to, a, b, count, [](T x, T y) { return x / y; }, emulator::DIV);
}
template <typename T>
void Or(const LocalTensor<T> &to, const LocalTensor<T> &a, const LocalTensor<T> &b, const int32_t &count) {
  static_assert(emulator::one_of<T, int16_t, uint16_t>, "Or takes 16-bit integers");
  emulator::binary("Or", to, a, b, count, [](T x, T y) { return T(x | y); });
}
template <typename T>
void ShiftLeft(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &bits, const int32_t &count) {
  static_assert(emulator::one_of<T, int32_t, uint32_t>);
  EMULATOR_CHECK(bits >= 0 && bits <= T(32), "ShiftLeft: by %d bits", int(bits));
  emulator::unary("ShiftLeft", to, from, count, [&](T x) { return T(bits == 32 ? 0 : uint32_t(x) << bits); });
}
template <typename T>
void ShiftRight(const LocalTensor<T> &to, const LocalTensor<T> &from, const T &bits, const int32_t &count) {
  static_assert(emulator::one_of<T, int32_t, uint32_t>);
  EMULATOR_CHECK(bits >= 0 && bits < T(32), "ShiftRight: by %d bits", int(bits));
  emulator::unary("ShiftRight", to, from, count, [&](T x) { return T(x >> bits); });  // arithmetic for signed types
}
template <typename T>
void Exp(const LocalTensor<T> &to, const LocalTensor<T> &from, const int32_t &count) {
  static_assert(emulator::one_of<T, float>);
  emulator::unary(
      "Exp", to, from, count, [](T x) { return std::exp(x); }, emulator::EXP);
}
template <typename T>
void Sqrt(const LocalTensor<T> &to, const LocalTensor<T> &from, const int32_t &count) {
  static_assert(emulator::one_of<T, float>);
  emulator::unary(
      "Sqrt", to, from, count, [](T x) { return std::sqrt(x); }, emulator::EXP);
}
template <typename T>
void Ln(const LocalTensor<T> &to, const LocalTensor<T> &from, const int32_t &count) {
  static_assert(emulator::one_of<T, float>);
  emulator::unary(
      "Ln", to, from, count, [](T x) { return std::log(x); }, emulator::EXP);
}

template <typename T>
void Duplicate(const LocalTensor<T> &to, const T &value, const int32_t &count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  emulator::vector_issue(emulator::WITH_SCALAR, count, sizeof(T));
  emulator::writes("Duplicate", to, count);
  std::fill_n(to.at(), count, value);
}
// Bit i of a repeat's mask stands for its element i.
template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T> &to, const T &value, uint64_t mask[], const uint8_t repeats,
               const uint16_t block_stride, const uint8_t repeat_stride) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  constexpr uint32_t per_block = emulator::BLOCK / sizeof(T), per_repeat = 256 / sizeof(T);
  uint64_t lanes[2] = {mask[0], sizeof(T) == 2 ? mask[1] : 0};
  if (!isSetMask) std::copy_n(emulator::standing_mask("Duplicate"), 2, lanes);
  if (isSetMask) emulator::set_mask("Duplicate", lanes);
  emulator::issue_lanes(emulator::WITH_SCALAR, uint64_t(repeats) * per_repeat, sizeof(T));
  to.need("Duplicate", 0);
  for (uint32_t r = 0; r < repeats; ++r)
    for (uint32_t i = 0; i < per_repeat; ++i) {
      if (!(lanes[i / 64] >> (i % 64) & 1)) continue;
      uint32_t at = r * repeat_stride * per_block + i / per_block * block_stride * per_block + i % per_block;
      to.need("Duplicate", at + 1);
      emulator::core.write(emulator::V, to.at() + at, sizeof(T));
      to.at()[at] = value;
    }
}
template <typename T>
void CreateVecIndex(const LocalTensor<T> &to, const T &first, uint32_t count) {
  static_assert(emulator::one_of<T, int32_t, float>);
  emulator::vector_issue(emulator::WITH_SCALAR, count, sizeof(T));
  emulator::writes("CreateVecIndex", to, count);
  for (uint32_t i = 0; i < count; ++i) to.at()[i] = first + T(i);
}

struct BrcbRepeatParams {
  uint16_t dstBlkStride = 1, dstRepStride = 8;
};
// Each of 8 elements a repeat fills a data block.
template <typename T>
void Brcb(const LocalTensor<T> &to, const LocalTensor<T> &from, const uint8_t repeats, const BrcbRepeatParams &params) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  constexpr uint32_t per_block = emulator::BLOCK / sizeof(T);
  EMULATOR_CHECK(params.dstBlkStride == 1 && params.dstRepStride == 8,
                 "Brcb: the emulator knows contiguous results only");
  emulator::vector_issue(emulator::WITH_SCALAR, uint64_t(repeats) * 8 * per_block, sizeof(T));
  emulator::reads("Brcb src", from, uint64_t(repeats) * 8);
  emulator::writes("Brcb dst", to, uint64_t(repeats) * 8 * per_block);
  for (uint32_t i = 0; i < uint32_t(repeats) * 8; ++i) std::fill_n(to.at() + i * per_block, per_block, from.at()[i]);
}

namespace emulator {
template <typename T>
bool compare(T a, T b, CMPMODE mode) {
  switch (mode) {
    case CMPMODE::LT: return a < b;
    case CMPMODE::GT: return a > b;
    case CMPMODE::EQ: return a == b;
    case CMPMODE::LE: return a <= b;
    case CMPMODE::GE: return a >= b;
    case CMPMODE::NE: return a != b;
  }
  return false;
}
}  // namespace emulator

// Bit i, lowest bit first, is the comparison of element i. CANN 9 gave the call its second name.
template <typename T, typename U>
void CompareScalar(const LocalTensor<U> &to, const LocalTensor<T> &from, const T scalar, CMPMODE mode, uint32_t count) {
  static_assert(std::is_same_v<U, uint8_t> && emulator::one_of<T, half, float>);
  EMULATOR_CHECK(count * sizeof(T) % 256 == 0, "Compares: %u elements are not whole repeats of 256 bytes", count);
  emulator::vector_issue(emulator::COMPARE, count, sizeof(T));
  emulator::reads("Compares src", from, count);
  emulator::writes("Compares dst", to, count / 8);
  for (uint32_t i = 0; i < count / 8; ++i) {
    uint8_t bits = 0;
    for (int j = 0; j < 8; ++j) bits |= uint8_t(emulator::compare(from.at()[i * 8 + j], scalar, mode)) << j;
    to.at()[i] = bits;
  }
}
#if NPU_GR_CANN >= 90000
template <typename T, typename U>
void Compares(const LocalTensor<U> &to, const LocalTensor<T> &from, const T scalar, CMPMODE mode, uint32_t count) {
  CompareScalar(to, from, scalar, mode, count);
}
#endif

// Where the bit is 1 the tensor, where it is 0 the scalar.
template <typename T, typename U>
void Select(const LocalTensor<T> &to, const LocalTensor<U> &mask, const LocalTensor<T> &from, T scalar, SELMODE mode,
            uint32_t count) {
  static_assert(emulator::one_of<T, half, float> && std::is_unsigned_v<U>);
  EMULATOR_CHECK(mode == SELMODE::VSEL_TENSOR_SCALAR_MODE, "Select: a scalar needs VSEL_TENSOR_SCALAR_MODE");
  emulator::vector_issue(emulator::SELECT, count, sizeof(T));
  emulator::same_or_apart("Select", to, from, count);
  emulator::reads("Select mask", mask, (count + 8 * sizeof(U) - 1) / (8 * sizeof(U)));
  emulator::reads("Select src", from, count);
  emulator::writes("Select dst", to, count);
  auto bits = reinterpret_cast<const uint8_t *>(mask.at());
  for (uint32_t i = 0; i < count; ++i) to.at()[i] = bits[i / 8] >> (i % 8) & 1 ? from.at()[i] : scalar;
}

struct GatherMaskParams {
  uint8_t src0BlockStride = 1;
  uint16_t repeatTimes = 1;
  uint16_t src0RepeatStride = 8;
  uint8_t src1RepeatStride = 0;
};
namespace emulator {
// Counter mode, one repeat: `count` elements. What follows the last kept element in its data block is undefined.
template <typename T, typename Keep, typename Reads>
void gather_mask(const LocalTensor<T> &to, const LocalTensor<T> &from, uint32_t count, const GatherMaskParams &params,
                 uint64_t &kept, Keep keep, Reads reads_pattern) {
  EMULATOR_CHECK(count > 0, "GatherMask: counter mode needs a count");
  EMULATOR_CHECK(params.repeatTimes == 1 && params.src0BlockStride == 1,
                 "GatherMask: the emulator knows one contiguous repeat");
  vector_issue(COMPACT, count, sizeof(T));
  reads("GatherMask src", from, count);
  reads_pattern();
  std::vector<T> out;
  for (uint32_t i = 0; i < count; ++i)
    if (keep(i)) out.push_back(from.at()[i]);
  kept = out.size();
  uint64_t whole = std::min<uint64_t>(up(kept * sizeof(T), BLOCK) / sizeof(T), to.GetSize());
  same_or_apart("GatherMask", to, from, count);
  writes("GatherMask dst", to, std::max(whole, kept));
  std::copy(out.begin(), out.end(), to.at());
  core.poison(reinterpret_cast<uint8_t *>(to.at() + kept), (whole - kept) * sizeof(T));
  leave_count("GatherMask", count);
}
}  // namespace emulator
template <typename T, typename U>
void GatherMask(const LocalTensor<T> &to, const LocalTensor<T> &from, const LocalTensor<U> &pattern, const bool counter,
                const uint32_t count, const GatherMaskParams &params, uint64_t &kept) {
  static_assert(sizeof(T) == sizeof(U) && std::is_unsigned_v<U>, "the pattern has the width of the elements");
  EMULATOR_CHECK(counter, "GatherMask: the emulator knows counter mode only");
  auto bits = reinterpret_cast<const uint8_t *>(pattern.at());
  emulator::gather_mask(
      to, from, count, params, kept, [&](uint32_t i) { return bits[i / 8] >> (i % 8) & 1; },
      [&] { emulator::reads("GatherMask pattern", pattern, (count + 8 * sizeof(U) - 1) / (8 * sizeof(U))); });
}
// 1 and 2: even and odd elements.
template <typename T>
void GatherMask(const LocalTensor<T> &to, const LocalTensor<T> &from, const uint8_t pattern, const bool counter,
                const uint32_t count, const GatherMaskParams &params, uint64_t &kept) {
  EMULATOR_CHECK(counter && (pattern == 1 || pattern == 2),
                 "GatherMask: the emulator knows patterns 1 and 2 in counter mode");
  emulator::gather_mask(
      to, from, count, params, kept, [&](uint32_t i) { return i % 2 == pattern - 1u; }, [] {});
}

// to[i] = from[(base + offset[i]) bytes]
template <typename T>
void Gather(const LocalTensor<T> &to, const LocalTensor<T> &from, const LocalTensor<uint32_t> &offset,
            const uint32_t base, const uint32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  emulator::vector_issue(emulator::GATHER, count, sizeof(T));
  emulator::core.counters[emulator::GATHERED] += count;
  emulator::reads("Gather offset", offset, count);
  from.need("Gather src", 0);
  emulator::writes("Gather dst", to, count);
  EMULATOR_CHECK(static_cast<void *>(to.at()) != static_cast<void *>(from.at()),
                 "Gather: source and destination are the same");
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t byte = uint64_t(base) + offset.at()[i];
    EMULATOR_CHECK(byte % sizeof(T) == 0, "Gather: offset %llu is not on an element", (emulator::ull)byte);
    EMULATOR_CHECK(byte / sizeof(T) < from.GetSize(), "Gather: offset %llu is behind the tensor", (emulator::ull)byte);
    emulator::core.read(emulator::V, from.at() + byte / sizeof(T), sizeof(T));
    to.at()[i] = from.at()[byte / sizeof(T)];
  }
}

namespace emulator {
// One instruction a level of 64 partial results; `scratch` elements of the work buffer are used.
inline void reduce_issue(uint64_t count) {
  for (; count > 1; count = (count + 63) / 64) vector_issue(WITH_TENSOR, count, 4);
}
}  // namespace emulator
template <typename T>
void ReduceMax(const LocalTensor<T> &to, const LocalTensor<T> &from, const LocalTensor<T> &work, const int32_t count) {
  static_assert(emulator::one_of<T, float>);
  if (count == 0) return;
  emulator::core.issue(emulator::V);
  emulator::reduce_issue(count);
  emulator::reads("ReduceMax src", from, count);
  emulator::writes("ReduceMax work", work, emulator::up((count + 63) / 64 * 2, 8));
  emulator::writes("ReduceMax dst", to, 1);
  T best = *std::max_element(from.at(), from.at() + count);
  emulator::core.poison(reinterpret_cast<uint8_t *>(work.at()), emulator::up((count + 63) / 64 * 2, 8) * sizeof(T));
  to.at()[0] = best;
}
template <typename T>
void ReduceSum(const LocalTensor<T> &to, const LocalTensor<T> &from, const LocalTensor<T> &work, const int32_t count) {
  static_assert(emulator::one_of<T, float>);
  if (count == 0) return;
  emulator::core.issue(emulator::V);
  emulator::reduce_issue(count);
  emulator::reads("ReduceSum src", from, count);
  emulator::writes("ReduceSum work", work, emulator::up((count + 63) / 64, 8));
  emulator::writes("ReduceSum dst", to, 1);
  std::vector<T> part(from.at(), from.at() + count);
  while (part.size() > 1) {  // pairwise, as a tree
    size_t half_size = (part.size() + 1) / 2;
    for (size_t i = 0; i + half_size < part.size(); ++i) part[i] += part[i + half_size];
    part.resize(half_size);
  }
  emulator::core.poison(reinterpret_cast<uint8_t *>(work.at()), emulator::up((count + 63) / 64, 8) * sizeof(T));
  to.at()[0] = part[0];
}

}  // namespace AscendC
