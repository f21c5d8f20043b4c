// Data movement: GM <-> UB by MTE2 and MTE3 at any byte address and length, UB -> UB by the vector unit.
// Sources: asc-devkit docs, "DataCopyPad（GMToUB非对齐数据搬运）", "DataCopyPad（UBToGM非对齐数据搬运）",
// "DataCopy（UBToUB连续数据搬运）".
#pragma once
#include "pipe.h"

namespace AscendC {

struct DataCopyExtParams {
  uint16_t blockCount = 1;
  uint32_t blockLen = 0;   // bytes
  uint32_t srcStride = 0;  // gap between blocks: bytes in GM, data blocks of 32 bytes in UB
  uint32_t dstStride = 0;
  uint32_t rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;  // elements
  T paddingValue = T();
};

namespace emulator {
template <typename T>
void check_blocks(const LocalTensor<T> &local, const DataCopyExtParams &copy) {
  EMULATOR_CHECK(local.position() == TPosition::VECIN || local.position() == TPosition::VECOUT,
                 "DataCopyPad: only VECIN and VECOUT can be reached from GM");
  EMULATOR_CHECK(copy.blockCount <= 4095, "DataCopyPad: %u blocks, 4095 at most", copy.blockCount);
  EMULATOR_CHECK(copy.blockLen <= 2097151, "DataCopyPad: blocks of %u bytes, 2097151 at most", copy.blockLen);
  EMULATOR_CHECK(copy.blockLen % sizeof(T) == 0, "DataCopyPad: blocks of %u bytes are not whole elements",
                 copy.blockLen);
}
}  // namespace emulator

template <typename T>
void DataCopyPad(const LocalTensor<T> &to, const GlobalTensor<T> &from, const DataCopyExtParams &copy,
                 const DataCopyPadExtParams<T> &pad) {
  using namespace emulator;
  check_blocks(to, copy);
  EMULATOR_CHECK(pad.leftPadding * sizeof(T) <= 32 && pad.rightPadding * sizeof(T) <= 32,
                 "DataCopyPad: padding over 32 bytes");
  uint32_t count = uint32_t(copy.blockLen / sizeof(T)), used = pad.leftPadding + count + pad.rightPadding;
  uint32_t whole = uint32_t(up(used * sizeof(T), BLOCK) / sizeof(T));
  uint64_t step = whole + copy.dstStride * uint64_t(BLOCK) / sizeof(T);
  to.need("DataCopyPad dst", copy.blockCount ? (copy.blockCount - 1) * step + whole : 0);
  core.issue(MTE2);
  ++core.counters[MTE2_INSTRUCTIONS];
  core.counters[MTE2_BLOCKS] += copy.blockCount;
  uint64_t moved = uint64_t(copy.blockCount) * copy.blockLen;
  core.counters[MTE2_BYTES] += moved;
  if (moved >= kLongLoadBytes) core.counters[MTE2_LONG_BYTES] += moved;
  for (uint32_t b = 0; b < copy.blockCount; ++b) {
    uint64_t skipped = uint64_t(b) * (copy.blockLen + uint64_t(copy.srcStride));
    EMULATOR_CHECK(skipped + copy.blockLen <= from.GetSize() * sizeof(T), "DataCopyPad: GM is read behind its end");
    const uint8_t *source = reinterpret_cast<const uint8_t *>(from.at()) + skipped;
    core.read_gm(MTE2, source, copy.blockLen);
    T *target = to.at() + b * step;
    core.write(MTE2, target, uint64_t(whole) * sizeof(T));
    core.poison(reinterpret_cast<uint8_t *>(target), uint64_t(whole) * sizeof(T));  // padding of undefined contents
    std::memcpy(target + pad.leftPadding, source, copy.blockLen);
    bool none = pad.leftPadding + pad.rightPadding == 0;
    if (!none && !pad.isPad) continue;
    for (uint32_t i = 0; i < whole; ++i)
      if (i < pad.leftPadding || i >= pad.leftPadding + count) {
        if (pad.isPad && !none)
          target[i] = pad.paddingValue;
        else if (count)
          target[i] = target[0];  // the dummy of an unpadded block is its first element
      }
  }
}

template <typename T>
void DataCopyPad(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyExtParams &copy) {
  using namespace emulator;
  check_blocks(from, copy);
  uint64_t step = up(copy.blockLen, BLOCK) + copy.srcStride * uint64_t(BLOCK);
  from.need("DataCopyPad src",
            copy.blockCount ? ((copy.blockCount - 1) * step + copy.blockLen + sizeof(T) - 1) / sizeof(T) : 0);
  core.issue(MTE3);
  ++core.counters[MTE3_INSTRUCTIONS];
  core.counters[MTE3_BLOCKS] += copy.blockCount;
  core.counters[MTE3_BYTES] += uint64_t(copy.blockCount) * copy.blockLen;
  for (uint32_t b = 0; b < copy.blockCount; ++b) {
    uint64_t skipped = uint64_t(b) * (copy.blockLen + uint64_t(copy.dstStride));
    EMULATOR_CHECK(skipped + copy.blockLen <= to.GetSize() * sizeof(T), "DataCopyPad: GM is written behind its end");
    auto source = reinterpret_cast<const uint8_t *>(from.at()) + b * step;
    uint8_t *target = reinterpret_cast<uint8_t *>(to.at()) + skipped;
    core.read(MTE3, source, copy.blockLen);
    core.write_gm(MTE3, target, copy.blockLen);
    std::memcpy(target, source, copy.blockLen);
  }
}

template <typename T>
void DataCopy(const LocalTensor<T> &to, const LocalTensor<T> &from, uint32_t count) {
  using namespace emulator;
  uint64_t bytes = uint64_t(count) * sizeof(T);
  EMULATOR_CHECK(bytes % BLOCK == 0, "DataCopy: %llu bytes are not whole blocks of 32", (ull)bytes);
  to.need("DataCopy dst", count);
  from.need("DataCopy src", count);
  core.issue(V);
  ++core.counters[VECTOR_INSTRUCTIONS];
  core.counters[VECTOR_REPEATS] += up(bytes, 256) / 256;
  core.read(V, from.at(), bytes);
  core.write(V, to.at(), bytes);
  std::memmove(to.at(), from.at(), bytes);
}

}  // namespace AscendC
