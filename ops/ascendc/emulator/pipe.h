// TPipe, TBuf, TQue and TQueBind: who owns which part of UB, and the flags that queues set in the kernel's place.
//
// A queue's flags take ids of the pool that AllocEventID serves: one from EnQue to DeQue, one from FreeTensor to the
// next AllocTensor of that buffer. So each freed buffer of a position holds an id of the same HardEvent, and there
// are 8. Sources: asc-devkit docs, 资源管理/TPipe/{InitBuffer,AllocEventID}, 资源管理/TQue, 资源管理/TQueBind.
#pragma once
#include <deque>

#include "sync.h"

namespace AscendC {

template <TPosition position>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() {
    return {reinterpret_cast<T *>(at_), bytes_ / uint32_t(sizeof(T)), position};
  }

 private:
  friend class TPipe;
  uint8_t *at_ = nullptr;
  uint32_t bytes_ = 0;
};

// Buffers that one pipe fills and another empties.
template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
  static constexpr TPosition home = source == TPosition::GM ? target : source;
  static constexpr bool is_in = target == TPosition::VECIN,
                        is_out = source == TPosition::VECOUT;  // else both: TQueBind
  static constexpr HardEvent filled = is_in ? HardEvent::MTE2_V : is_out ? HardEvent::V_MTE3 : HardEvent::MTE2_MTE3;
  static constexpr HardEvent emptied = is_in ? HardEvent::V_MTE2 : is_out ? HardEvent::MTE3_V : HardEvent::MTE3_MTE2;

 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    for (size_t tried = 0; tried < buffers_.size(); ++tried) {
      Buffer &buffer = buffers_[next_++ % buffers_.size()];  // in turns, so that all of them come into use
      if (buffer.state != Buffer::FREE) continue;
      buffer.state = Buffer::FILLING;
      if (buffer.event >= 0) {
        emulator::core.of_free.erase({int(emptied), buffer.event});
        wait(emptied, buffer, "AllocTensor");
      }
      return tensor<T>(buffer);
    }
    EMULATOR_CHECK(false, "AllocTensor: all %zu buffers are in use: would hang on the NPU", buffers_.size());
  }
  template <typename T>
  bool EnQue(const LocalTensor<T> &tensor) {
    Buffer &buffer = find(tensor);
    EMULATOR_CHECK(buffer.state == Buffer::FILLING, "EnQue: the tensor was not just allocated");
    EMULATOR_CHECK(order_.size() < size_t(depth), "EnQue: the queue is %d deep", depth);
    buffer.state = Buffer::QUEUED;
    set(filled, buffer, "EnQue");
    order_.push_back(&buffer);
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    EMULATOR_CHECK(!order_.empty(), "DeQue: nothing is queued: would hang on the NPU");
    Buffer &buffer = *order_.front();
    order_.pop_front();
    buffer.state = Buffer::EMPTYING;
    wait(filled, buffer, "DeQue");
    return tensor<T>(buffer);
  }
  // What is freed may be overwritten at any time: its contents are gone.
  template <typename T>
  void FreeTensor(LocalTensor<T> &tensor) {
    Buffer &buffer = find(tensor);
    EMULATOR_CHECK(buffer.state == Buffer::EMPTYING, "FreeTensor: the tensor was not dequeued");
    buffer.state = Buffer::FREE;
    set(emptied, buffer, "FreeTensor");
    emulator::core.of_free.insert({int(emptied), buffer.event});
    emulator::core.poison(buffer.at, bytes_);
  }

 private:
  friend class TPipe;
  struct Buffer {
    enum State { FREE, FILLING, QUEUED, EMPTYING };
    uint8_t *at;
    State state;
    int event = -1;  // the id of the flag that it waits for
  };
  std::vector<Buffer> buffers_;
  size_t next_ = 0;
  std::deque<Buffer *> order_;
  uint32_t bytes_ = 0;

  void set(HardEvent event, Buffer &buffer, const char *who) {
    buffer.event = emulator::take_event(event, who);
    emulator::set_flag(event, buffer.event);
  }
  void wait(HardEvent event, Buffer &buffer, const char *who) {
    emulator::wait_flag(event, buffer.event);
    emulator::give_event(event, buffer.event, who);
    buffer.event = -1;
  }
  template <typename T>
  LocalTensor<T> tensor(const Buffer &buffer) const {
    return {reinterpret_cast<T *>(buffer.at), bytes_ / uint32_t(sizeof(T)), home};
  }
  template <typename T>
  Buffer &find(const LocalTensor<T> &tensor) {
    for (auto &buffer : buffers_)
      if (buffer.at == reinterpret_cast<uint8_t *>(tensor.at())) return buffer;
    EMULATOR_CHECK(false, "the tensor is not of this queue");
  }
};

template <TPosition position, int32_t depth>
using TQue = std::conditional_t<position == TPosition::VECIN, TQueBind<TPosition::GM, TPosition::VECIN, depth>,
                                TQueBind<TPosition::VECOUT, TPosition::GM, depth>>;

class TPipe {
 public:
  template <TPosition position>
  bool InitBuffer(TBuf<position> &buffer, uint32_t bytes) {
    buffer.bytes_ = uint32_t(emulator::up(bytes, emulator::BLOCK));
    buffer.at_ = take(buffer.bytes_);
    return true;
  }
  template <TPosition source, TPosition target, int32_t depth>
  bool InitBuffer(TQueBind<source, target, depth> &queue, uint8_t number, uint32_t bytes) {
    queue.bytes_ = uint32_t(emulator::up(bytes, emulator::BLOCK));
    for (int i = 0; i < number; ++i) queue.buffers_.push_back({take(queue.bytes_), {}, -1});
    return true;
  }
  // Waits for the buffers that are free, as the hardware's does.
  ~TPipe() {
    for (const auto &event : emulator::core.of_free) {
      emulator::core.flags.erase(event);
      emulator::core.event_ids.erase(event);
    }
    emulator::core.of_free.clear();
  }
  template <HardEvent event>
  TEventID AllocEventID() {
    return emulator::take_event(event, "AllocEventID");
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    emulator::give_event(event, id, "ReleaseEventID");
  }

 private:
  static constexpr int kMaxBuffers = 64;
  int buffers_ = 0;

  uint8_t *take(uint32_t bytes) {
    EMULATOR_CHECK(++buffers_ <= kMaxBuffers, "InitBuffer: a kernel has %d buffers at most", kMaxBuffers);
    return emulator::core.take(bytes);
  }
};

}  // namespace AscendC
