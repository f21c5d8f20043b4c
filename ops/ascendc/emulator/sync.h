// Flags between pipes and barriers of one pipe.
// Sources: asc-devkit docs, "SetFlag-WaitFlag(ISASI)" (pairs, never set twice, ids 6 and 7 are the system's),
// "PipeBarrier(ISASI)" (never PIPE_S), AllocEventID, "TQue Buffer限制" in TQue简介 (8 ids a HardEvent on A2 and A3, of
// which queues take theirs too).
#pragma once
#include <utility>

#include "tensor.h"

namespace AscendC {
namespace emulator {
constexpr int kEventIds = 8;      // of each HardEvent
constexpr int kEventsByHand = 6;  // 0 to 5; all others come from AllocEventID

constexpr std::pair<Pipe, Pipe> ends(HardEvent event) {
  switch (event) {
    case HardEvent::MTE2_V: return {MTE2, V};
    case HardEvent::V_MTE2: return {V, MTE2};
    case HardEvent::V_MTE3: return {V, MTE3};
    case HardEvent::MTE3_V: return {MTE3, V};
    case HardEvent::MTE2_MTE3: return {MTE2, MTE3};
    case HardEvent::MTE3_MTE2: return {MTE3, MTE2};
    case HardEvent::S_V: return {S, V};
    case HardEvent::V_S: return {V, S};
    case HardEvent::S_MTE3: return {S, MTE3};
    case HardEvent::MTE3_S: return {MTE3, S};
    case HardEvent::S_MTE2: return {S, MTE2};
    case HardEvent::MTE2_S: return {MTE2, S};
  }
  return {S, S};
}
inline const char *name(HardEvent event) {
  static const char *names[] = {"MTE2_V", "V_MTE2", "V_MTE3", "MTE3_V", "MTE2_MTE3", "MTE3_MTE2",
                                "S_V",    "V_S",    "S_MTE3", "MTE3_S", "S_MTE2",    "MTE2_S"};
  return names[int(event)];
}

// The lowest id that is free, as AllocEventID takes it.
inline TEventID take_event(HardEvent event, const char *who) {
  for (int id = 0; id < kEventIds; ++id)
    if (core.event_ids.insert({int(event), id}).second) return TEventID(id);
  EMULATOR_CHECK(false, "%s: all %d ids of %s are in use: undefined on the NPU, most likely a hang", who, kEventIds,
                 name(event));
}
inline void give_event(HardEvent event, int id, const char *who) {
  EMULATOR_CHECK(core.event_ids.erase({int(event), id}), "%s: %s id %d is not in use", who, name(event), id);
}
inline void set_flag(HardEvent event, int id) {
  auto fresh = core.flags.insert({{int(event), id}, core.release(ends(event).first)});
  EMULATOR_CHECK(fresh.second, "SetFlag: %s id %d is set already: undefined on the NPU", name(event), id);
}
inline void wait_flag(HardEvent event, int id) {
  auto flag = core.flags.find({int(event), id});
  EMULATOR_CHECK(flag != core.flags.end(), "WaitFlag: %s id %d is not set: would hang on the NPU", name(event), id);
  core.acquire(ends(event).second, flag->second);
  core.flags.erase(flag);
}
}  // namespace emulator

template <HardEvent event>
inline void SetFlag(int32_t id) {
  bool is_ours = emulator::core.event_ids.count({int(event), id});
  EMULATOR_CHECK(is_ours || (id >= 0 && id < emulator::kEventsByHand), "SetFlag: event id %d; 0 to %d are free to use",
                 id, emulator::kEventsByHand - 1);
  emulator::set_flag(event, id);
}
template <HardEvent event>
inline void WaitFlag(int32_t id) {
  emulator::wait_flag(event, id);
}

template <pipe_t pipe>
inline void PipeBarrier() {
  static_assert(pipe != PIPE_S, "the hardware keeps the order of the scalar unit");
  if constexpr (pipe == PIPE_ALL)
    emulator::core.barrier_all();
  else
    emulator::core.barrier(pipe == PIPE_V ? emulator::V : pipe == PIPE_MTE2 ? emulator::MTE2 : emulator::MTE3);
}

}  // namespace AscendC
