// What CANN's public headers declare of the Ascend C that our kernels use: the table of their signatures, by version.
//
// g++ parses the kernels against it, once for each supported CANN (tests/ops/test_api_versions.py). It has no
// bodies: what a call does is the emulator's. Facts from the public tags 8.5.0, 9.0.0, 9.1.0 and 9.2.0-beta.1 of
// asc-devkit, in our own words: types, order and defaults of arguments, and which version has what. Where a version
// only adds an overload that no kernel calls, it is left out.
//
// CANN has macros and attributes where other code has types and nothing, so this file has them too. An address in GM is
// a type of its own there. g++ knows no address spaces, and the one qualifier that it keeps apart is `volatile`.
#pragma once
#include <cstdint>
#include <type_traits>

#define __gm__ volatile
#define GM_ADDR __gm__ uint8_t *
#define __aicore__ __attribute__((unused))
#define __global__ __attribute__((used))
#define KERNEL_TASK_TYPE_DEFAULT(kind) static_assert(kind == KERNEL_TYPE_AIV_ONLY)

using half = _Float16;
struct bfloat16_t {
  uint16_t bits;
};

enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIV_1_0 };
typedef enum { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL } pipe_t;

namespace AscendC {
using TEventID = int8_t;
enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent : uint8_t {
  MTE2_V,
  V_MTE2,
  V_MTE3,
  MTE3_V,
  MTE2_MTE3,
  MTE3_MTE2,
  S_V,
  V_S,
  S_MTE3,
  MTE3_S,
  S_MTE2,
  MTE2_S
};
enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

__aicore__ int64_t GetBlockIdx();
__aicore__ int64_t GetBlockNum();

template <typename T>
class LocalTensor {
 public:
  __aicore__ T GetValue(const uint32_t) const;
  template <typename S>
  __aicore__ void SetValue(const uint32_t, const S) const;
  template <typename U>
  __aicore__ LocalTensor<U> ReinterpretCast() const;
  __aicore__ LocalTensor operator[](const uint32_t) const;
  __aicore__ uint32_t GetSize() const;
};
template <typename T>
class GlobalTensor {
 public:
  __aicore__ void SetGlobalBuffer(__gm__ T *, uint64_t);
  __aicore__ void SetGlobalBuffer(__gm__ T *);
  void SetGlobalBuffer(T *, uint64_t) = delete;  // there no address of another space converts
  void SetGlobalBuffer(T *) = delete;
  __aicore__ GlobalTensor operator[](const uint64_t) const;
  __aicore__ uint64_t GetSize() const;
};

template <TPosition source, TPosition target, int32_t depth, auto mask = 0>
class TQueBind {
 public:
  template <typename T>
  __aicore__ LocalTensor<T> AllocTensor();
  template <typename T>
  __aicore__ void FreeTensor(LocalTensor<T> &);  // no temporary
  template <typename T>
  __aicore__ bool EnQue(const LocalTensor<T> &);
  template <typename T>
  __aicore__ LocalTensor<T> DeQue();
};
template <TPosition position, int32_t depth, auto mask = 0>
class TQue : public TQueBind<position, position, depth, mask> {};
template <TPosition position>
class TBuf {
 public:
  template <typename T>
  __aicore__ LocalTensor<T> Get();  // not const
};
class TPipe {
 public:
  template <class T>
  __aicore__ bool InitBuffer(T &, uint8_t, uint32_t);
  template <TPosition position>
  __aicore__ bool InitBuffer(TBuf<position> &, uint32_t);
  template <HardEvent event>
  __aicore__ TEventID AllocEventID();
  template <HardEvent event>
  __aicore__ void ReleaseEventID(TEventID);
};

// ---- what calls take beside tensors: each has a constructor of all its arguments, so a braced list has all or none
struct DataCopyExtParams {
  __aicore__ DataCopyExtParams();
  __aicore__ DataCopyExtParams(const uint16_t, const uint32_t, const uint32_t, const uint32_t, const uint32_t);
};
template <typename T>
struct DataCopyPadExtParams {
  __aicore__ DataCopyPadExtParams();
  __aicore__ DataCopyPadExtParams(const bool, const uint8_t, const uint8_t, T);
};
struct BinaryRepeatParams {
  __aicore__ BinaryRepeatParams();
  __aicore__ BinaryRepeatParams(const uint8_t, const uint8_t, const uint8_t, const uint8_t, const uint8_t,
                                const uint8_t);
};
struct BrcbRepeatParams {
  __aicore__ BrcbRepeatParams();
  __aicore__ BrcbRepeatParams(const uint16_t, const uint16_t);
};
struct GatherMaskParams {
  __aicore__ GatherMaskParams();
  __aicore__ GatherMaskParams(const uint8_t, const uint16_t, const uint16_t, const uint8_t);
};
template <typename T>
struct MrgSortSrcList {
  __aicore__ MrgSortSrcList();
  __aicore__ MrgSortSrcList(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<T> &,
                            const LocalTensor<T> &);
};
struct MrgSort4Info {
  __aicore__ MrgSort4Info();
  __aicore__ MrgSort4Info(const uint16_t[4], const bool, const uint16_t, const uint16_t);
};

// ---- order
template <HardEvent event>
__aicore__ void SetFlag(int32_t);
template <HardEvent event>
__aicore__ void WaitFlag(int32_t);
template <pipe_t pipe>
__aicore__ void PipeBarrier();

// ---- movement
template <typename T>
__aicore__ void DataCopyPad(const LocalTensor<T> &, const GlobalTensor<T> &, const DataCopyExtParams &,
                            const DataCopyPadExtParams<T> &);
template <typename T>
__aicore__ void DataCopyPad(const GlobalTensor<T> &, const LocalTensor<T> &, const DataCopyExtParams &);
template <typename T>
__aicore__ void DataCopy(const LocalTensor<T> &, const LocalTensor<T> &, const uint32_t);
template <typename T>
__aicore__ void Gather(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<uint32_t> &, const uint32_t,
                       const uint32_t);
template <typename T, typename U>
__aicore__ void GatherMask(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<U> &, const bool,
                           const uint32_t, const GatherMaskParams &, uint64_t &);
template <typename T>
__aicore__ void GatherMask(const LocalTensor<T> &, const LocalTensor<T> &, const uint8_t, const bool, const uint32_t,
                           const GatherMaskParams &, uint64_t &);
template <typename T>
__aicore__ void Duplicate(const LocalTensor<T> &, const T &, const int32_t &);
template <typename T, bool isSetMask = true>
__aicore__ void Duplicate(const LocalTensor<T> &, const T &, uint64_t[], const uint8_t, const uint16_t, const uint8_t);
template <typename T>
__aicore__ void Brcb(const LocalTensor<T> &, const LocalTensor<T> &, const uint8_t, const BrcbRepeatParams &);
template <typename T>
__aicore__ void CreateVecIndex(LocalTensor<T>, const T &, uint32_t);

// ---- arithmetic, in the forms with a count and with a mask and repeats
#define UNARY(name)     \
  template <typename T> \
  __aicore__ void name(const LocalTensor<T> &, const LocalTensor<T> &, const int32_t &);
#define SCALAR(name)                           \
  template <typename T, bool isSetMask = true> \
  __aicore__ void name(const LocalTensor<T> &, const LocalTensor<T> &, const T &, const int32_t &);
#define BINARY(name)                                                                                             \
  template <typename T>                                                                                          \
  __aicore__ void name(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<T> &, const int32_t &); \
  template <typename T, bool isSetMask = true>                                                                   \
  __aicore__ void name(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<T> &, uint64_t,         \
                       const uint8_t, const BinaryRepeatParams &);
UNARY(Exp)
UNARY(Ln)
UNARY(Sqrt)
SCALAR(Adds)
SCALAR(Muls)
SCALAR(Maxs)
SCALAR(Mins)
SCALAR(ShiftLeft)
SCALAR(ShiftRight)
BINARY(Add)
BINARY(Sub)
BINARY(Mul)
BINARY(Div)
BINARY(Or)
template <typename T, typename U>
__aicore__ void Cast(const LocalTensor<T> &, const LocalTensor<U> &, const RoundMode &, const uint32_t);

// ---- choice
#if NPU_GR_CANN >= 90000
template <typename T, typename U>
__aicore__ void Compares(const LocalTensor<U> &, const LocalTensor<T> &, const T, CMPMODE, uint32_t);
#else
template <typename T, typename U>
__aicore__ void CompareScalar(const LocalTensor<U> &, const LocalTensor<T> &, const T, CMPMODE, uint32_t);
#endif  // 9 still has the old name, and no kernel needs it there
template <typename T, typename U>
__aicore__ void Select(const LocalTensor<T> &, const LocalTensor<U> &, const LocalTensor<T> &, T, SELMODE, uint32_t);
template <typename T, typename U, bool isSetMask = true>
__aicore__ void Select(const LocalTensor<T> &, const LocalTensor<U> &, const LocalTensor<T> &, T, SELMODE, uint64_t,
                       uint8_t, const BinaryRepeatParams &);
template <typename T, bool isSetMask = true>
__aicore__ void ReduceSum(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<T> &, const int32_t);
template <typename T>
__aicore__ void ReduceMax(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<T> &, const int32_t,
                          bool = false);
template <typename T, bool isSetMask = true>
__aicore__ void WholeReduceSum(const LocalTensor<T> &, const LocalTensor<T> &, const int32_t, const int32_t,
                               const int32_t, const int32_t, const int32_t);
template <typename T>
__aicore__ void Sort32(const LocalTensor<T> &, const LocalTensor<T> &, const LocalTensor<uint32_t> &, const int32_t);
template <typename T>
__aicore__ void MrgSort(const LocalTensor<T> &, const MrgSortSrcList<T> &, const MrgSort4Info &);

}  // namespace AscendC
