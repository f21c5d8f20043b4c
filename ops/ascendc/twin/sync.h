// Flags between pipes and barriers of one pipe.
// Sources: asc-devkit docs, "SetFlag-WaitFlag(ISASI)" (pairs, never set twice, ids 6 and 7 are the system's),
// "PipeBarrier(ISASI)" (never PIPE_S).
#pragma once
#include <utility>

#include "tensor.h"

namespace AscendC {
namespace twin {
constexpr int kEventIds = 6;

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
}  // namespace twin

template <HardEvent event>
inline void SetFlag(int32_t id) {
  TWIN_CHECK(id >= 0 && id < twin::kEventIds, "SetFlag: event id %d; 0 to 5 are free to use", id);
  auto fresh = twin::core.flags.insert({{int(event), id}, twin::core.release(twin::ends(event).first)});
  TWIN_CHECK(fresh.second, "SetFlag: event %d id %d is set already: undefined on the NPU", int(event), id);
}

template <HardEvent event>
inline void WaitFlag(int32_t id) {
  auto flag = twin::core.flags.find({int(event), id});
  TWIN_CHECK(flag != twin::core.flags.end(), "WaitFlag: event %d id %d is not set: would hang on the NPU", int(event),
             id);
  twin::core.acquire(twin::ends(event).second, flag->second);
  twin::core.flags.erase(flag);
}

template <pipe_t pipe>
inline void PipeBarrier() {
  static_assert(pipe != PIPE_S, "the hardware keeps the order of the scalar unit");
  if constexpr (pipe == PIPE_ALL)
    twin::core.barrier_all();
  else
    twin::core.barrier(pipe == PIPE_V ? twin::V : pipe == PIPE_MTE2 ? twin::MTE2 : twin::MTE3);
}

}  // namespace AscendC
