// TPipe, TBuf, TQue and TQueBind: who owns which part of UB, and the flags that queues set in the kernel's place.
// Sources: asc-devkit docs, 资源管理/TPipe/{InitBuffer,AllocEventID}, 资源管理/TQue, 资源管理/TQueBind.
#pragma once
#include <deque>
#include <set>

#include "sync.h"

namespace AscendC {

template <TPosition position>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() const {
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
  static constexpr twin::Pipe filler = home == TPosition::VECIN ? twin::MTE2 : twin::V;
  static constexpr twin::Pipe emptier = target == TPosition::VECIN ? twin::V : twin::MTE3;

 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    for (auto &buffer : buffers_) {
      if (buffer.state != Buffer::FREE) continue;
      buffer.state = Buffer::FILLING;
      twin::core.acquire(filler, buffer.clock);
      return tensor<T>(buffer);
    }
    TWIN_CHECK(false, "AllocTensor: all %zu buffers are in use: would hang on the NPU", buffers_.size());
  }
  template <typename T>
  bool EnQue(const LocalTensor<T> &filled) {
    Buffer &buffer = find(filled);
    TWIN_CHECK(buffer.state == Buffer::FILLING, "EnQue: the tensor was not just allocated");
    TWIN_CHECK(order_.size() < size_t(depth), "EnQue: the queue is %d deep", depth);
    buffer.state = Buffer::QUEUED;
    buffer.clock = twin::core.release(filler);
    order_.push_back(&buffer);
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    TWIN_CHECK(!order_.empty(), "DeQue: nothing is queued: would hang on the NPU");
    Buffer &buffer = *order_.front();
    order_.pop_front();
    buffer.state = Buffer::EMPTYING;
    twin::core.acquire(emptier, buffer.clock);
    return tensor<T>(buffer);
  }
  // What is freed may be overwritten at any time: its contents are gone.
  template <typename T>
  void FreeTensor(const LocalTensor<T> &emptied) {
    Buffer &buffer = find(emptied);
    TWIN_CHECK(buffer.state == Buffer::EMPTYING, "FreeTensor: the tensor was not dequeued");
    buffer.state = Buffer::FREE;
    buffer.clock = twin::core.release(emptier);
    twin::core.poison(buffer.at, bytes_);
  }

 private:
  friend class TPipe;
  struct Buffer {
    enum State { FREE, FILLING, QUEUED, EMPTYING };
    uint8_t *at;
    State state;
    twin::Clock clock;
  };
  std::vector<Buffer> buffers_;
  std::deque<Buffer *> order_;
  uint32_t bytes_ = 0;

  template <typename T>
  LocalTensor<T> tensor(const Buffer &buffer) const {
    return {reinterpret_cast<T *>(buffer.at), bytes_ / uint32_t(sizeof(T)), home};
  }
  template <typename T>
  Buffer &find(const LocalTensor<T> &tensor) {
    for (auto &buffer : buffers_)
      if (buffer.at == reinterpret_cast<uint8_t *>(tensor.at())) return buffer;
    TWIN_CHECK(false, "the tensor is not of this queue");
  }
};

template <TPosition position, int32_t depth>
using TQue = std::conditional_t<position == TPosition::VECIN, TQueBind<TPosition::GM, TPosition::VECIN, depth>,
                                TQueBind<TPosition::VECOUT, TPosition::GM, depth>>;

class TPipe {
 public:
  template <TPosition position>
  bool InitBuffer(TBuf<position> &buffer, uint32_t bytes) {
    buffer.bytes_ = uint32_t(twin::up(bytes, twin::BLOCK));
    buffer.at_ = take(buffer.bytes_);
    return true;
  }
  template <TPosition source, TPosition target, int32_t depth>
  bool InitBuffer(TQueBind<source, target, depth> &queue, uint8_t number, uint32_t bytes) {
    queue.bytes_ = uint32_t(twin::up(bytes, twin::BLOCK));
    for (int i = 0; i < number; ++i) queue.buffers_.push_back({take(queue.bytes_), {}, {}});
    return true;
  }
  template <HardEvent event>
  TEventID AllocEventID() {
    for (int id = 0; id < twin::kEventIds; ++id)
      if (events_.insert({int(event), id}).second) return TEventID(id);
    TWIN_CHECK(false, "AllocEventID: all %d ids of event %d are in use", twin::kEventIds, int(event));
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    TWIN_CHECK(events_.erase({int(event), id}), "ReleaseEventID: event %d id %d is not in use", int(event), id);
  }

 private:
  static constexpr int kMaxBuffers = 64;
  std::set<std::pair<int, int>> events_;
  int buffers_ = 0;

  uint8_t *take(uint32_t bytes) {
    TWIN_CHECK(++buffers_ <= kMaxBuffers, "InitBuffer: a kernel has %d buffers at most", kMaxBuffers);
    return twin::core.take(bytes);
  }
};

}  // namespace AscendC
