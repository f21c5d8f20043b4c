// Cast: the conversions that the kernels use, with their roundings.
// Source: asc-devkit docs, 类型转换/Cast.
#pragma once
#include "vector.h"

namespace AscendC {

namespace emulator {
// The number of fewer bits that `mode` gives for x; half and float lists are in order of their bits.
template <typename To>
To narrowed(float x, RoundMode mode) {
  To to;
  uint16_t bits;
  if constexpr (std::is_same_v<To, half>) {
    to = half(x);
    std::memcpy(&bits, &to, 2);
    if (mode == RoundMode::CAST_TRUNC && std::abs(float(to)) > std::abs(x)) --bits;  // one step towards zero
  } else {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    bool rounds = mode == RoundMode::CAST_RINT && x == x;
    bits = uint16_t((rounds ? wide + 0x7FFF + (wide >> 16 & 1) : wide) >> 16);
    if (x != x) bits = uint16_t(bits | 0x40);
  }
  std::memcpy(&to, &bits, 2);
  return to;
}
template <typename To, typename From>
To converted(From x, RoundMode mode) {
  if constexpr (std::is_same_v<From, int32_t>) {
    float near = float(x);
    bool over = mode == RoundMode::CAST_FLOOR && double(near) > double(x);
    return over ? std::nextafter(near, -std::numeric_limits<float>::infinity()) : near;
  } else if constexpr (std::is_same_v<From, float>) {
    return narrowed<To>(x, mode);
  } else {
    return To(x);
  }
}
}  // namespace emulator
// To a wider type nothing is rounded; int32 to float and float to 16 bits say how.
template <typename To, typename From>
void Cast(const LocalTensor<To> &to, const LocalTensor<From> &from, const RoundMode &mode, const uint32_t count) {
  constexpr bool widens = (std::is_same_v<To, float> && emulator::one_of<From, half, bfloat16_t>) ||
                          (std::is_same_v<To, half> && std::is_same_v<From, uint8_t>);
  constexpr bool narrows = std::is_same_v<From, float> && emulator::one_of<To, half, bfloat16_t>;
  static_assert(widens || narrows || (std::is_same_v<To, float> && std::is_same_v<From, int32_t>));
  if constexpr (widens)
    EMULATOR_CHECK(mode == RoundMode::CAST_NONE, "Cast: nothing is rounded here");
  else
    EMULATOR_CHECK(mode == RoundMode::CAST_RINT || mode == (narrows ? RoundMode::CAST_TRUNC : RoundMode::CAST_FLOOR),
                   "Cast: the emulator does not know this rounding");
  emulator::vector_issue(narrows ? emulator::NARROW : emulator::WIDEN, count, std::max(sizeof(To), sizeof(From)));
  emulator::same_or_apart("Cast", to, from, count);
  emulator::reads("Cast src", from, count);
  emulator::writes("Cast dst", to, count);
  To *y = to.at();
  const From *x = from.at();
  for (uint32_t i = 0; i < count; ++i) y[i] = emulator::converted<To>(x[i], mode);
}

}  // namespace AscendC
