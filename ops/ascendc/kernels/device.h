// The one place where a kernel meets the toolchain: CANN's header, or the CPU emulator's.
#pragma once
#ifndef NPU_GR_CANN
#error "define NPU_GR_CANN, 80500 for CANN 8.5.0: CMakeLists.txt does"
#endif
#ifdef ASCENDC_CPU_EMULATOR
#include "../emulator/ascendc_emulator.h"
#else
#include "kernel_operator.h"
#endif

namespace npu_gr {

constexpr float kNegInf = -__builtin_huge_valf();

__aicore__ inline uint32_t round_up(uint32_t value, uint32_t to) { return (value + to - 1) / to * to; }
__aicore__ inline uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

// One pipe waits for another, at once.
template <AscendC::HardEvent event>
__aicore__ inline void sync(AscendC::TPipe &pipe) {
  auto id = pipe.AllocEventID<event>();
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
  pipe.ReleaseEventID<event>(id);
}
// Bit i of `to` = element i of `from` against a number. The name of the call depends on the CANN that build.sh finds.
template <typename T>
__aicore__ inline void compare_with(const AscendC::LocalTensor<uint8_t> &to, const AscendC::LocalTensor<T> &from,
                                    T number, AscendC::CMPMODE mode, uint32_t count) {
#if NPU_GR_CANN >= 90000
  AscendC::Compares(to, from, number, mode, count);
#else
  AscendC::CompareScalar(to, from, number, mode, count);
#endif
}
__aicore__ inline void vector_done() { AscendC::PipeBarrier<PIPE_V>(); }

// `count` elements from GM, padded to a data block with `fill` where `count` does not fill one.
template <typename T>
__aicore__ inline void copy_in(const AscendC::LocalTensor<T> &to, const AscendC::GlobalTensor<T> &from, uint32_t count,
                               T fill) {
  constexpr uint32_t block = 32 / sizeof(T);
  AscendC::DataCopyExtParams copy{1, uint32_t(count * sizeof(T)), 0, 0, 0};
  AscendC::DataCopyPadExtParams<T> pad{true, 0, uint8_t(round_up(count, block) - count), fill};
  AscendC::DataCopyPad(to, from, copy, pad);
}
template <typename T>
__aicore__ inline void copy_out(const AscendC::GlobalTensor<T> &to, const AscendC::LocalTensor<T> &from,
                                uint32_t count) {
  AscendC::DataCopyPad(to, from, AscendC::DataCopyExtParams{1, uint32_t(count * sizeof(T)), 0, 0, 0});
}

}  // namespace npu_gr
