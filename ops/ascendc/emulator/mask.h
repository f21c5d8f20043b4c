// The mask of the vector unit, which instructions share: a form with a count or a mask of its own sets it, one with
// isSetMask = false reads what stands there. GatherMask in counter mode leaves its count behind.
// Sources: asc-devkit docs, 掩码操作/{SetMaskCount,SetMaskNorm,SetVectorMask,ResetMask}: a mask that was set is to be
// reset; what the pages leave open (what stays behind GatherMask) is taken as unusable.
#pragma once
#include "core.h"

namespace AscendC {
enum class MaskMode : uint8_t { NORMAL, COUNTER };

inline void SetMaskCount() { emulator::core.mask.counts = true; }
inline void SetMaskNorm() { emulator::core.mask.counts = false; }
inline void ResetMask() {
  emulator::core.mask.bits[0] = emulator::core.mask.bits[1] = ~0ull;
  emulator::core.mask.left_by = nullptr;
}
template <typename T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(const uint64_t high, const uint64_t low) {
  EMULATOR_CHECK((mode == MaskMode::COUNTER) == emulator::core.mask.counts,
                 "SetVectorMask: the mode was not set before");
  emulator::core.mask.bits[0] = low;
  emulator::core.mask.bits[1] = high;
  emulator::core.mask.left_by = nullptr;
}

namespace emulator {
// The lanes of an instruction that takes a mask of its own.
inline void set_mask(const char *what, const uint64_t (&bits)[2]) {
  EMULATOR_CHECK(!core.mask.counts, "%s: the mask is in counter mode: SetMaskNorm is missing", what);
  core.mask = {false, {bits[0], bits[1]}, what};
}
// The lanes of an instruction that takes what stands there.
inline const uint64_t *standing_mask(const char *what) {
  EMULATOR_CHECK(!core.mask.counts, "%s: the mask is in counter mode: SetMaskNorm is missing", what);
  EMULATOR_CHECK(core.mask.left_by == nullptr, "%s reads the mask that %s left behind: SetVectorMask is missing", what,
                 core.mask.left_by);
  return core.mask.bits;
}
// A form with a count sets counter mode and count, and puts the default back.
inline void count_mask() { core.mask = VectorMask(); }
// GatherMask goes back to normal mode, and leaves its count where the lanes stand.
inline void leave_count(const char *what, uint64_t count) { core.mask = {false, {count, 0}, what}; }
}  // namespace emulator
}  // namespace AscendC
