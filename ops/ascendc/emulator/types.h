// The names that a kernel writes: address spaces, pipes, events, positions, 16-bit floats.
#pragma once
#include <cstdint>
#include <cstring>

// Macros where CANN has macros. `volatile` stands for the address space of GM, which is part of a type there.
#define __aicore__ __attribute__((unused))
#define __global__ __attribute__((used))
#define __gm__ volatile
#define GM_ADDR __gm__ uint8_t *

using half = _Float16;

// bfloat16 as storage only: Cast is the one thing that reads its value.
struct bfloat16_t {
  uint16_t bits;
  explicit operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

// What a kernel says it is. As vector cores are all that the emulator has, its launch rejects the others: core.h.
enum KernelType {
  KERNEL_TYPE_AIV_ONLY,
  KERNEL_TYPE_AIC_ONLY,
  KERNEL_TYPE_MIX_AIV_1_0,
  KERNEL_TYPE_MIX_AIC_1_0,
  KERNEL_TYPE_MIX_AIC_1_1,
  KERNEL_TYPE_MIX_AIC_1_2
};
#define KERNEL_TASK_TYPE_DEFAULT(kind) ::AscendC::emulator::core.set_type(kind, #kind)

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

namespace AscendC {
using TEventID = int8_t;
enum class TPosition { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent { MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_MTE3, MTE3_MTE2, S_V, V_S, S_MTE3, MTE3_S, S_MTE2, MTE2_S };
enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };
}  // namespace AscendC
