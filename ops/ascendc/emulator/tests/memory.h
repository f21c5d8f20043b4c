// Buffers, global memory, and what moves between them.
#pragma once
#include "bench.h"

namespace {

void memory() {
  clean("UB is poisoned", [] {
    Bench b;
    expect(poison(b.empty<float>(64).at(), 256), "fresh UB holds nothing");
  });
  clean("a freed buffer is poisoned", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    std::vector<float> source = iota(8);
    auto t = q.AllocTensor<float>();
    DataCopyPad(t, gm(source), {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
    q.EnQue(t);
    t = q.DeQue<float>();
    expect(holds(t, source), "the queue hands the data over");
    q.FreeTensor(t);
    expect(poison(t.at(), 32), "FreeTensor gives the contents up");
  });
  clean("lengths are rounded up to 32 bytes", [] {
    Bench b;
    TBuf<TPosition::VECCALC> t;
    b.pipe.InitBuffer(t, 33);
    expect(t.Get<uint8_t>().GetSize() == 64, "InitBuffer");
  });
  rejected("UB overflow", [] {
    Bench b;
    b.empty<float>(emulator::kUbBytes / 4 + 1);
  });
  rejected("64 buffers at most", [] {
    Bench b;
    for (int i = 0; i < 65; ++i) b.empty<float>(8);
  });
  rejected("element 64 of a tensor of 64", [] {
    Bench b;
    b.empty<float>(64).GetValue(64);
  });
  rejected("offset 65 of a tensor of 64", [] {
    Bench b;
    b.empty<float>(64)[65];
  });
  rejected("not on a border of 32 bytes", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Adds(t[1], t[1], 1.0f, 8);
  });
}

void launches() {
  rejected("declared KERNEL_TYPE_MIX_AIC_1_2", [] { KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2); });
  clean("vector cores only", [] { KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY); });
  static std::atomic<uint64_t> ran, number;
  auto kernel = [] {
    ran += 1;
    number += GetBlockIdx();
  };
  ran = number = 0;
  complaint(kernel, 1024);
  expect(ran == 1024, "all cores run");
  ran = number = 0;
  complaint(kernel, 1u << 20);
  expect(ran == 4 && number == 0 + 1 + (1u << 20) * 2 - 3, "of very many cores the first two and the last two");
}

void global_memory() {
  static std::vector<float> shared;
  shared = iota(64);
  auto write = [](uint32_t at, uint32_t count) {
    Bench b;
    Out q;
    b.pipe.InitBuffer(q, 1, 256);
    auto t = q.AllocTensor<float>();
    Duplicate(t, 1.0f, 64);
    q.EnQue(t);
    t = q.DeQue<float>();
    DataCopyPad(gm(shared)[uint64_t(at)], t, {1, count * 4, 0, 0, 0});
  };
  auto read = [](uint32_t at, uint32_t count) {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 256);
    auto t = q.AllocTensor<float>();
    DataCopyPad(t, gm(shared)[uint64_t(at)], {1, count * 4, 0, 0, 0}, DataCopyPadExtParams<float>{});
  };
  rejected(
      "another core", [&] { write(GetBlockIdx() * 8, 9); }, 3);
  rejected(
      "another core", [&] { GetBlockIdx() == 1 ? write(10, 4) : read(0, 12); }, 2);
  expect(complaint([&] { write(GetBlockIdx() * 8, 8); }, 8).empty(), "cores side by side");
  expect(complaint([&] { read(0, 64); }, 8).empty(), "all cores may read");
  emulator::gm_is_live = [](const void *at, uint64_t) { return at != shared.data(); };
  rejected("MTE2 reads GM that is no longer allocated", [&] { read(0, 8); });
  clean("what is allocated", [&] { read(8, 8); });
  emulator::gm_is_live = nullptr;
  rejected("GM is read behind its end", [&] { read(60, 5); });
  rejected("GM is written behind its end", [&] { write(60, 5); });
  rejected("without sync", [] {
    Bench b;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> q;
    b.pipe.InitBuffer(q, 2, 32);
    auto v = iota(16);
    auto t = q.AllocTensor<float>();
    DataCopyPad(t, gm(v), {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
    q.EnQue(t);
    t = q.DeQue<float>();
    DataCopyPad(gm(v)[uint64_t(8)], t, {1, 32, 0, 0, 0});
    auto u = q.AllocTensor<float>();
    DataCopyPad(u, gm(v)[uint64_t(8)], {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
}

void movement() {
  clean("DataCopyPad into UB", [] {  // the page's examples: blocks of 47 and 48 bytes, a gap, padding
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 512);
    std::vector<uint8_t> from(200);
    for (int i = 0; i < 200; ++i) from[i] = uint8_t(i);
    auto t = q.AllocTensor<uint8_t>();
    DataCopyPad(t, gm(from), {2, 47, 1, 1, 0}, DataCopyPadExtParams<uint8_t>{false, 0, 0, 0});
    expect(t.at()[0] == 0 && t.at()[46] == 46 && t.at()[47] == 0 && t.at()[63] == 0,
           "the dummy is the block's first element");
    expect(t.at()[96] == 48 && t.at()[142] == 94 && t.at()[143] == 48,
           "source gap in bytes, destination gap in blocks of 32");
    expect(poison(t.at() + 64, 32), "the gap is left alone");
    q.EnQue(t);
    t = q.DeQue<uint8_t>();
    q.FreeTensor(t);
    t = q.AllocTensor<uint8_t>();
    DataCopyPad(t, gm(from), {1, 47, 0, 0, 0}, DataCopyPadExtParams<uint8_t>{true, 2, 3, 9});
    expect(t.at()[0] == 9 && t.at()[1] == 9 && t.at()[2] == 0 && t.at()[48] == 46 && t.at()[49] == 9 && t.at()[63] == 9,
           "padding and dummy are the value");
    q.EnQue(t);
    t = q.DeQue<uint8_t>();
    q.FreeTensor(t);
    t = q.AllocTensor<uint8_t>();
    DataCopyPad(t, gm(from), {1, 47, 0, 0, 0}, DataCopyPadExtParams<uint8_t>{false, 0, 3, 9});
    expect(poison(t.at() + 47, 17), "padding without a value is undefined");
    expect(emulator::core.counters[emulator::MTE2_BYTES] == 47 * 4 &&
               emulator::core.counters[emulator::MTE2_BLOCKS] == 4 &&
               emulator::core.counters[emulator::MTE2_INSTRUCTIONS] == 3,
           "MTE2 is counted");
  });
  clean("DataCopyPad out of UB", [] {
    Bench b;
    Out q;
    b.pipe.InitBuffer(q, 1, 256);
    std::vector<float> to(12, 9);
    auto t = q.AllocTensor<float>();
    CreateVecIndex(t, 0.0f, 48);
    q.EnQue(t);
    t = q.DeQue<float>();
    DataCopyPad(gm(to), t, {3, 12, 1, 4, 0});  // UB: 12 bytes padded to 32, then a gap of 32; GM: a gap of 4 bytes
    expect(to == std::vector<float>({0, 1, 2, 9, 16, 17, 18, 9, 32, 33, 34, 9}),
           "blocks land apart, gaps in GM are left alone");
  });
  rejected("4095 at most", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {4096, 4, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  rejected("2097151 at most", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {1, 2097152, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  rejected("not whole elements", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {1, 6, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  rejected("padding over 32 bytes", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 96);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {1, 4, 0, 0, 0}, DataCopyPadExtParams<float>{true, 0, 9, 0});
  });
  rejected("only VECIN and VECOUT", [] {
    Bench b;
    auto f = iota(8);
    DataCopyPad(b.empty<float>(8), gm(f), {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  clean("DataCopy in UB", [] {
    Bench b;
    auto from = b.holding(iota(16)), to = b.empty<float>(16);
    DataCopy(to, from, 16);
    expect(holds(to, iota(16)), "DataCopy");
  });
  rejected("whole blocks of 32", [] {
    Bench b;
    auto t = b.empty<float>(64);
    DataCopy(t[32], t, 9);
  });
}

}  // namespace
