// LocalTensor and GlobalTensor: typed windows with bounds. A LocalTensor remembers its position, as the data movers
// reach VECIN and VECOUT only. GM may be larger than the machine's memory: what nothing touches need not be there.
// Sources: asc-devkit docs, 数据结构/LocalTensor, 数据结构/GlobalTensor, "DataCopyPad（GMToUB非对齐数据搬运）".
#pragma once
#include "core.h"
#include "types.h"

namespace AscendC {

inline int64_t GetBlockIdx() { return emulator::core.index; }
inline int64_t GetBlockNum() { return emulator::core.count; }

template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(T *at, uint32_t size, TPosition position) : at_(at), size_(size), position_(position) {}

  LocalTensor operator[](uint32_t offset) const {
    EMULATOR_CHECK(offset <= size_, "offset %u of a tensor of %u", offset, size_);
    return {at_ + offset, size_ - offset, position_};
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return {reinterpret_cast<U *>(at_), uint32_t(uint64_t(size_) * sizeof(T) / sizeof(U)), position_};
  }
  T GetValue(uint32_t i) const {
    access(i);
    emulator::core.read(emulator::S, at_ + i, sizeof(T));
    return at_[i];
  }
  void SetValue(uint32_t i, T value) const {
    access(i);
    emulator::core.write(emulator::S, at_ + i, sizeof(T));
    at_[i] = value;
  }
  uint32_t GetSize() const { return size_; }

  // ---- for the emulator only
  T *at() const { return at_; }
  TPosition position() const { return position_; }
  void need(const char *what, uint64_t count, uint32_t align = emulator::BLOCK) const {
    EMULATOR_CHECK(at_ != nullptr, "%s: no tensor", what);
    EMULATOR_CHECK(count <= size_, "%s: %llu elements of a tensor of %u", what, (emulator::ull)count, size_);
    auto offset = uint64_t(reinterpret_cast<uint8_t *>(at_) - emulator::core.base());
    EMULATOR_CHECK(offset % align == 0, "%s: UB address 0x%llx is not on a border of %u bytes", what,
                   (emulator::ull)offset, align);
  }

 private:
  T *at_ = nullptr;
  uint32_t size_ = 0;
  TPosition position_ = TPosition::VECCALC;

  void access(uint32_t i) const {
    EMULATOR_CHECK(i < size_, "element %u of a tensor of %u", i, size_);
    emulator::core.issue(emulator::S);
    ++emulator::core.counters[emulator::SCALAR_ACCESSES];
  }
};

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(__gm__ T *at, uint64_t size) { at_ = const_cast<T *>(at), size_ = size; }
  void SetGlobalBuffer(T *at, uint64_t size) = delete;  // an address without __gm__ is one of UB
  // The emulator takes offsets of 64 bits only: 32 hold the elements of no pool of KV, and wrap without a word.
  template <typename Offset>
  GlobalTensor operator[](Offset offset) const {
    static_assert(sizeof(Offset) == 8, "compute offsets of GM in 64 bits, from the first product on");
    EMULATOR_CHECK(offset <= size_, "GM offset %llu of %llu", (emulator::ull)offset, (emulator::ull)size_);
    GlobalTensor rest;
    rest.SetGlobalBuffer((__gm__ T *)at_ + offset, size_ - offset);
    return rest;
  }
  uint64_t GetSize() const { return size_; }
  T *at() const { return at_; }  // for the emulator only

 private:
  T *at_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace AscendC
