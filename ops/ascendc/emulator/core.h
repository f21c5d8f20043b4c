// One AI vector core as the emulator sees it: its Unified Buffer, the order of its pipes, its counters.
//
// Order is kept as vector clocks: a pipe knows of another pipe's instructions only through a flag, a queue or
// PIPE_ALL. Each 32 bytes of UB remember who wrote and read them last, each range of GM likewise, so an access that
// nothing orders is an error even where the emulator, which runs in program order, would give the right value.
// Sources: asc-devkit docs, "SetFlag-WaitFlag(ISASI)", "PipeBarrier(ISASI)", "通用说明和约束", "NPU架构版本2201".
#pragma once
#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "types.h"

namespace AscendC {
namespace emulator {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A function, not text of the macro: hundreds of checks compile in less time.
[[noreturn, gnu::noinline, gnu::format(printf, 1, 2)]] inline void fail(const char *format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Error(std::string(text));
}
#define EMULATOR_CHECK(condition, ...)                        \
  do {                                                        \
    if (!(condition)) ::AscendC::emulator::fail(__VA_ARGS__); \
  } while (0)

using ull = unsigned long long;

enum Pipe { S, V, MTE2, MTE3, PIPES };
inline const char *name(int pipe) {
  static const char *names[] = {"S", "V", "MTE2", "MTE3"};
  return names[pipe];
}

// What a cost model needs; see tests/ops/ascend_emulator.py for the same list.
enum Counter {
  VECTOR_INSTRUCTIONS,
  VECTOR_REPEATS,  // of 256 bytes
  GATHERED,        // elements of Gather
  SORT32_GROUPS,
  MERGED_PAIRS,
  BARRIERS,  // of one pipe
  FLAGS,     // SetFlag, and what queues do in its place
  MTE2_INSTRUCTIONS,
  MTE2_BLOCKS,
  MTE2_BYTES,
  MTE2_LONG_BYTES,  // those of instructions that move kLongLoadBytes or more
  MTE3_INSTRUCTIONS,
  MTE3_BLOCKS,
  MTE3_BYTES,
  SCALAR_ACCESSES,
  // of each kind of vector instruction, in the order of `VectorKind`: how many, then their elements
  KINDS_BEGIN,
  COUNTERS = KINDS_BEGIN + 2 * 10
};
constexpr uint64_t kLongLoadBytes = 25000;  // from here on a load is faster: benchmarks/hstu_model.py has the source
// What a cost model tells apart; whatever sorts has counters of its own.
enum VectorKind { WITH_SCALAR, WITH_TENSOR, EXP, DIV, COMPARE, SELECT, WIDEN, NARROW, GATHER, COMPACT };
using Counters = std::array<uint64_t, COUNTERS>;

constexpr uint32_t BLOCK = 32;                              // bytes of a data block
constexpr uint32_t kUbBytes = 192 * 1024 - 256 - 8 * 1024;  // dav-2201; 8 KB are kept free for Select
inline uint32_t ub_limit = kUbBytes;                        // of the machine that is imitated
constexpr uint8_t kPoison = 0x7F;  // 3.4e38 as a float, which wins every selection; a NaN would be dropped unseen

inline uint64_t up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

using Clock = std::array<uint64_t, PIPES>;
using EventId = std::pair<int, int>;  // HardEvent, id

// What the special registers of the vector unit hold between instructions: mask.h.
struct VectorMask {
  bool counts = false;                // counter mode
  uint64_t bits[2] = {~0ull, ~0ull};  // one a lane; in counter mode bits[0] elements
  const char *left_by = nullptr;      // the instruction whose value this is; nullptr = set on purpose, or the default
};

// Whether a range of GM is allocated: a simulated device knows what was freed. nullptr = all of it is.
inline bool (*gm_is_live)(const void *at, uint64_t bytes) = nullptr;

struct GmAccess {
  uintptr_t begin, end;
  bool write;
  uint64_t clock;
  int pipe;
};

class Core {
 public:
  uint32_t index = 0, count = 1;
  Counters counters{};
  std::vector<GmAccess> gm;  // every access of this launch, for the check between cores

  void start(uint32_t index_, uint32_t count_) {
    *this = Core();
    index = index_;
    count = count_;
    arena_.assign(kUbBytes + BLOCK * 8, kPoison);
    blocks_.assign(kUbBytes / BLOCK, Block());
  }

  // ---- memory
  uint8_t *base() {  // 256-byte aligned, as the hardware's buffer starts at 0
    auto at = reinterpret_cast<uintptr_t>(arena_.data());
    return reinterpret_cast<uint8_t *>(up(at, 256));
  }
  uint8_t *take(uint64_t bytes) {
    EMULATOR_CHECK(top_ + bytes <= ub_limit, "UB overflow: %u bytes in use, %llu more, %u there are", top_, (ull)bytes,
                   ub_limit);
    uint8_t *at = base() + top_;
    top_ += uint32_t(bytes);
    return at;
  }
  uint32_t used() const { return top_; }
  void poison(uint8_t *at, uint64_t bytes) { std::memset(at, kPoison, bytes); }

  // ---- order
  void issue(Pipe pipe) {
    ++now_[pipe];
    known_[pipe][pipe] = now_[pipe];
  }
  Clock release(Pipe pipe) {
    ++counters[FLAGS];
    return known_[pipe];
  }
  void acquire(Pipe pipe, const Clock &from) {
    done_[pipe] = std::max(done_[pipe], from[pipe]);
    for (int other = 0; other < PIPES; ++other)
      if (other != pipe) known_[pipe][other] = std::max(known_[pipe][other], from[other]);
  }
  void barrier(Pipe pipe) {
    ++counters[BARRIERS];
    done_[pipe] = now_[pipe];
  }
  void barrier_all() {
    ++counters[BARRIERS];
    done_ = now_;
    for (auto &known : known_) known = now_;
  }
  void read(Pipe pipe, const void *at, uint64_t bytes) { touch(pipe, at, bytes, false); }
  void write(Pipe pipe, const void *at, uint64_t bytes) { touch(pipe, at, bytes, true); }

  void read_gm(Pipe pipe, const void *at, uint64_t bytes) { touch_gm(pipe, at, bytes, false); }
  void write_gm(Pipe pipe, const void *at, uint64_t bytes) { touch_gm(pipe, at, bytes, true); }

  std::map<EventId, Clock> flags;  // that are set
  std::set<EventId> event_ids;     // in use, by queues and by the kernel itself: one pool a HardEvent
  std::set<EventId> of_free;       // of those the ones of freed buffers, which TPipe waits for at the end
  VectorMask mask;

  void set_type(KernelType type, const char *name) const {
    EMULATOR_CHECK(type == KERNEL_TYPE_AIV_ONLY,
                   "the kernel is declared %s: it would run on other cores, or more of them", name);
  }

 private:
  struct Block {
    int8_t writer = -1;
    uint64_t written = 0, reads[PIPES] = {};
  };
  std::vector<uint8_t> arena_;
  std::vector<Block> blocks_;
  uint32_t top_ = 0;
  Clock now_{}, done_{};              // done_[p]: p's own instructions that are complete before its next one
  std::array<Clock, PIPES> known_{};  // known_[p][q]: q's instructions that are complete before p's next one
  std::multimap<uintptr_t, GmAccess> recent_;
  uint64_t longest_ = 0;

  bool ordered(int pipe, int earlier, uint64_t clock) const {
    if (clock == 0) return true;
    if (pipe != earlier) return known_[pipe][earlier] >= clock;
    return pipe == S || done_[pipe] >= clock || clock == now_[pipe];  // the scalar unit keeps its own order
  }
  void touch(Pipe pipe, const void *pointer, uint64_t bytes, bool writes) {
    if (bytes == 0) return;
    auto at = static_cast<const uint8_t *>(pointer);
    EMULATOR_CHECK(at >= base() && at + bytes <= base() + kUbBytes, "access outside UB");
    uint64_t first = uint64_t(at - base()) / BLOCK, last = (uint64_t(at - base()) + bytes - 1) / BLOCK;
    uint64_t before[PIPES], now = now_[pipe];  // of each pipe the last instruction that is complete, as `ordered` says
    for (int other = 0; other < PIPES; ++other)
      before[other] = other != pipe ? known_[pipe][other] : pipe == S ? now : done_[pipe];
    for (Block *block = &blocks_[first], *end = &blocks_[last] + 1; block != end; ++block) {
      int writer = block->writer;
      if (writer >= 0)
        EMULATOR_CHECK(block->written <= before[writer] || (writer == pipe && block->written == now),
                       "core %u, UB 0x%llx: %s %s what %s wrote without sync", index,
                       (ull)((block - &blocks_[0]) * BLOCK), name(pipe), writes ? "overwrites" : "reads", name(writer));
      if (!writes) {
        block->reads[pipe] = now;
        continue;
      }
      for (int other = 0; other < PIPES; ++other) {
        uint64_t clock = block->reads[other];
        EMULATOR_CHECK(clock <= before[other] || (other == pipe && clock == now),
                       "core %u, UB 0x%llx: %s overwrites what %s may still read", index,
                       (ull)((block - &blocks_[0]) * BLOCK), name(pipe), name(other));
        block->reads[other] = 0;
      }
      block->writer = int8_t(pipe);
      block->written = now;
    }
  }
  void touch_gm(Pipe pipe, const void *pointer, uint64_t bytes, bool writes) {
    if (bytes == 0) return;
    auto begin = reinterpret_cast<uintptr_t>(pointer), end = begin + bytes;
    EMULATOR_CHECK(gm_is_live == nullptr || gm_is_live(pointer, bytes),
                   "core %u: %s %s GM that is no longer allocated, or never was", index, name(pipe),
                   writes ? "writes" : "reads");
    for (auto it = recent_.lower_bound(begin < longest_ ? 0 : begin - longest_); it != recent_.end() && it->first < end;
         ++it) {
      const GmAccess &earlier = it->second;
      if (earlier.end <= begin || (!writes && !earlier.write)) continue;
      EMULATOR_CHECK(ordered(pipe, earlier.pipe, earlier.clock), "core %u: %s %s GM that %s %s without sync", index,
                     name(pipe), writes ? "writes" : "reads", name(earlier.pipe), earlier.write ? "wrote" : "reads");
    }
    GmAccess access{begin, end, writes, now_[pipe], pipe};
    recent_.insert({begin, access});
    longest_ = std::max<uint64_t>(longest_, bytes);
    gm.push_back(access);
  }
};

inline thread_local Core core;

}  // namespace emulator
}  // namespace AscendC
