// Who waits for whom: queues, barriers, flags and their ids, the vector mask.
#pragma once
#include "bench.h"

namespace {

void queues() {
  rejected("would hang", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    q.AllocTensor<float>();
    q.AllocTensor<float>();
  });
  rejected("would hang", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    q.DeQue<float>();
  });
  rejected("not just allocated", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto t = q.AllocTensor<float>();
    q.EnQue(t);
    q.EnQue(t);
  });
  rejected("was not dequeued", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto t = q.AllocTensor<float>();
    q.FreeTensor(t);
  });
  rejected("not of this queue", [] {
    Bench b;
    In q, p;
    b.pipe.InitBuffer(q, 1, 32);
    b.pipe.InitBuffer(p, 1, 32);
    auto t = q.AllocTensor<float>();
    p.EnQue(t);
  });
  rejected("the queue is 1 deep", [] {
    Bench b;
    TQue<TPosition::VECIN, 1> q;
    b.pipe.InitBuffer(q, 2, 32);
    q.EnQue(q.AllocTensor<float>());
    q.EnQue(q.AllocTensor<float>());
  });
}

void order() {
  rejected("V reads what V wrote", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, 1.0f, 64);
    Adds(t, t, 1.0f, 64);
  });
  rejected("V overwrites what V may still read", [] {
    Bench b;
    auto t = b.holding(iota(64)), u = b.empty<float>(64);
    Adds(u, t, 1.0f, 64);
    Duplicate(t, 1.0f, 64);
  });
  clean("PipeBarrier orders one pipe", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, 1.0f, 64);
    PipeBarrier<PIPE_V>();
    Adds(t, t, 1.0f, 64);
    expect(t.at()[63] == 2, "Adds");
  });
  rejected("S reads what V wrote", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, 1.0f, 64);
    PipeBarrier<PIPE_V>();
    t.GetValue(0);
  });
  clean("a flag orders two pipes", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, 1.0f, 64);
    auto id = b.pipe.AllocEventID<HardEvent::V_S>();
    SetFlag<HardEvent::V_S>(id);
    WaitFlag<HardEvent::V_S>(id);
    b.pipe.ReleaseEventID<HardEvent::V_S>(id);
    expect(t.GetValue(0) == 1, "GetValue");
  });
  rejected("V overwrites what S may still read", [] {
    Bench b;
    auto t = b.holding(iota(64));
    t.GetValue(0);
    Duplicate(t, 1.0f, 64);
  });
  clean("PIPE_ALL orders everything", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, 1.0f, 64);
    PipeBarrier<PIPE_ALL>();
    t.GetValue(0);
    PipeBarrier<PIPE_ALL>();
    Duplicate(t, 2.0f, 64);
  });
  rejected("V reads what MTE2 wrote", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 256);
    auto f = iota(64);
    auto t = q.AllocTensor<float>();
    DataCopyPad(t, gm(f), {1, 256, 0, 0, 0}, DataCopyPadExtParams<float>{});
    Adds(t, t, 1.0f, 64);
  });
  rejected("MTE3 reads what V wrote", [] {
    Bench b;
    Out q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    auto t = q.AllocTensor<float>();
    Duplicate(t, 1.0f, 8);
    DataCopyPad(gm(f), t, {1, 32, 0, 0, 0});
  });
  rejected("MTE2 overwrites what MTE2 wrote", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    auto t = q.AllocTensor<float>();
    for (int i = 0; i < 2; ++i) DataCopyPad(t, gm(f), {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
}

void events() {
  rejected("would hang", [] { WaitFlag<HardEvent::V_S>(0); });
  rejected("is set already", [] {
    SetFlag<HardEvent::V_S>(0);
    SetFlag<HardEvent::V_S>(0);
  });
  rejected("event id 6", [] { SetFlag<HardEvent::V_S>(6); });
  rejected("ends with a flag set", [] { SetFlag<HardEvent::V_S>(0); });
  rejected("all 8 ids of V_S are in use", [] {
    TPipe pipe;
    for (int i = 0; i < 9; ++i) pipe.AllocEventID<HardEvent::V_S>();
  });
  clean("6 and 7 are given away by AllocEventID, and each HardEvent has ids of its own", [] {
    TPipe pipe;
    for (int i = 0; i < 8; ++i) {
      pipe.AllocEventID<HardEvent::V_S>();
      pipe.AllocEventID<HardEvent::S_V>();
    }
    SetFlag<HardEvent::V_S>(7);
    WaitFlag<HardEvent::V_S>(7);
    for (int8_t i = 0; i < 8; ++i) {
      pipe.ReleaseEventID<HardEvent::V_S>(i);
      pipe.ReleaseEventID<HardEvent::S_V>(i);
    }
  });
  rejected("event id that was not released", [] {
    TPipe pipe;
    pipe.AllocEventID<HardEvent::V_S>();
  });
  // every freed buffer of VECIN holds an id of V_MTE2
  auto cycle = [](auto &queue, auto &source) {
    auto t = queue.template AllocTensor<float>();
    DataCopyPad(t, gm(source), {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
    queue.EnQue(t);
    auto out = queue.template DeQue<float>();
    queue.FreeTensor(out);
  };
  // so many queues of two buffers, each used so often, then `last`
  auto turns = [cycle](int queues, int rounds, auto last) {
    return [=] {
      Bench b;
      std::vector<In> q(queues);
      auto source = iota(8);
      for (auto &queue : q) b.pipe.InitBuffer(queue, 2, 32);
      for (int round = 0; round < rounds; ++round)
        for (auto &queue : q) cycle(queue, source);
      last(b.pipe);
    };
  };
  auto nothing = [](TPipe &) {};
  clean("8 buffers of VECIN, in turns", turns(4, 3, nothing));
  rejected("FreeTensor: all 8 ids of V_MTE2", turns(5, 2, nothing));
  rejected("AllocEventID: all 8 ids of V_MTE2",
           turns(4, 2, [](TPipe &pipe) { pipe.AllocEventID<HardEvent::V_MTE2>(); }));
  rejected("V_MTE2 id 0 is set already", [&] {
    Bench b;
    In q;
    auto source = iota(8);
    b.pipe.InitBuffer(q, 1, 32);
    cycle(q, source);
    SetFlag<HardEvent::V_MTE2>(0);
  });
  rejected("not in use", [] {
    TPipe pipe;
    pipe.ReleaseEventID<HardEvent::V_S>(0);
  });
  // a queue is a flag each way: the third load must wait for the first use, which it does through FreeTensor
  clean("TQueBind orders MTE2 and MTE3", [] {
    Bench b;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> q;
    b.pipe.InitBuffer(q, 1, 32);
    auto from = iota(24), to = iota(24, 100);
    for (int i = 0; i < 3; ++i) {
      auto t = q.AllocTensor<float>();
      DataCopyPad(t, gm(from)[uint64_t(i) * 8], {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
      q.EnQue(t);
      t = q.DeQue<float>();
      DataCopyPad(gm(to)[uint64_t(i) * 8], t, {1, 32, 0, 0, 0});
      q.FreeTensor(t);
    }
    expect(to == from, "copied");
  });
}

void vector_mask() {
  uint64_t none[2] = {0, 0}, odd[2] = {0xAAAAAAAAAAAAAAAAull, 0};
  clean("a mask of one's own", [&] {
    Bench b;
    auto t = b.holding(iota(64));
    Duplicate(t, -1.0f, odd, 1, 1, 8);
    expect(t.at()[62] == 62.0f && t.at()[63] == -1.0f, "odd lanes");
  });
  clean("the standing mask", [&] {
    Bench b;
    auto t = b.holding(iota(64));
    SetVectorMask<float>(0, 1);
    Duplicate<float, false>(t, -1.0f, none, 1, 1, 8);
    ResetMask();
    expect(t.at()[0] == -1.0f && t.at()[1] == 1.0f, "lane 0");
  });
  clean("a call with a count leaves the default", [&] {
    Bench b;
    auto t = b.holding(iota(64));
    Adds(t, t, 0.0f, 8);
    PipeBarrier<PIPE_V>();
    Duplicate<float, false>(t, -1.0f, none, 1, 1, 8);
    expect(t.at()[63] == -1.0f, "all lanes");
  });
  rejected("reads the mask that GatherMask left behind", [&] {
    Bench b;
    auto t = b.holding(iota(64)), to = b.empty<float>(64);
    uint64_t kept = 0;
    GatherMask(to, t, uint8_t(1), true, 64, GatherMaskParams{1, 1, 8, 0}, kept);
    Duplicate<float, false>(t, -1.0f, none, 1, 1, 8);
  });
  rejected("reads the mask that Duplicate left behind", [&] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, -1.0f, odd, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    Duplicate<float, false>(t, -1.0f, none, 1, 1, 8);
  });
  rejected("SetMaskNorm is missing", [&] {
    Bench b;
    auto t = b.empty<float>(64);
    SetMaskCount();
    Duplicate(t, -1.0f, odd, 1, 1, 8);
  });
  rejected("the mode was not set before", [] { SetVectorMask<float, MaskMode::COUNTER>(0, 8); });
}

}  // namespace
