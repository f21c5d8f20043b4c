// One test for each call that the twin models, from what its documentation page says; and one for each misuse it
// reports. A program: prints what failed, exit status 1 if anything did.
#define ASCENDC_CPU_TWIN 1
#define NPU_GR_CANN 90000  // with what is newer than the least
#include "ascendc_twin.h"

#include <atomic>

using namespace AscendC;

namespace {

int failures = 0, checks = 0;

void expect(bool ok, const char *what) {
  ++checks;
  if (!ok) std::printf("FAILED %s\n", what), ++failures;
}

// The complaint of a kernel on one core; empty if it has none.
template <typename Kernel>
std::string complaint(Kernel kernel, uint32_t cores = 1) {
  twin::Report report;
  try {
    twin::launch(cores, report, kernel);
  } catch (const twin::Error &error) {
    return error.what();
  }
  return "";
}
template <typename Kernel>
void clean(const char *what, Kernel kernel) {
  std::string found = complaint(kernel);
  expect(found.empty(), (std::string(what) + ": " + found).c_str());
}
template <typename Kernel>
void refused(const char *why, Kernel kernel, uint32_t cores = 1) {
  std::string found = complaint(kernel, cores);
  expect(found.find(why) != std::string::npos, (std::string("wants '") + why + "', gives '" + found + "'").c_str());
}

// Buffers of a small kernel: scratch tensors that hold known values, as a vector instruction would have left them.
struct Bench {
  TPipe pipe;
  template <typename T>
  LocalTensor<T> empty(uint32_t count) {
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, uint32_t(twin::up(count * sizeof(T), 256)));
    return buffer.Get<T>();
  }
  template <typename T>
  LocalTensor<T> holding(const std::vector<T> &values) {
    auto tensor = empty<T>(uint32_t(values.size()));
    std::copy(values.begin(), values.end(), tensor.at());
    return tensor;
  }
};
template <typename T>
bool holds(const LocalTensor<T> &tensor, const std::vector<T> &want) {
  return std::memcmp(tensor.at(), want.data(), want.size() * sizeof(T)) == 0;
}
template <typename T>
GlobalTensor<T> gm(std::vector<T> &values) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(values.data(), values.size());
  return tensor;
}
bool poison(const void *at, size_t bytes) {
  auto p = static_cast<const uint8_t *>(at);
  return std::all_of(p, p + bytes, [](uint8_t b) { return b == twin::kPoison; });
}
std::vector<float> iota(int count, float first = 0) {
  std::vector<float> values(count);
  for (int i = 0; i < count; ++i) values[i] = first + float(i);
  return values;
}
constexpr float INF = std::numeric_limits<float>::infinity();
using In = TQue<TPosition::VECIN, 2>;
using Out = TQue<TPosition::VECOUT, 2>;

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
  refused("UB overflow", [] {
    Bench b;
    b.empty<float>(twin::kUbBytes / 4 + 1);
  });
  refused("64 buffers at most", [] {
    Bench b;
    for (int i = 0; i < 65; ++i) b.empty<float>(8);
  });
  refused("element 64 of a tensor of 64", [] {
    Bench b;
    b.empty<float>(64).GetValue(64);
  });
  refused("offset 65 of a tensor of 64", [] {
    Bench b;
    b.empty<float>(64)[65];
  });
  refused("not on a border of 32 bytes", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Adds(t[1], t[1], 1.0f, 8);
  });
}

void queues() {
  refused("would hang", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    q.AllocTensor<float>();
    q.AllocTensor<float>();
  });
  refused("would hang", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    q.DeQue<float>();
  });
  refused("not just allocated", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto t = q.AllocTensor<float>();
    q.EnQue(t);
    q.EnQue(t);
  });
  refused("was not dequeued", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto t = q.AllocTensor<float>();
    q.FreeTensor(t);
  });
  refused("not of this queue", [] {
    Bench b;
    In q, p;
    b.pipe.InitBuffer(q, 1, 32);
    b.pipe.InitBuffer(p, 1, 32);
    auto t = q.AllocTensor<float>();
    p.EnQue(t);
  });
  refused("the queue is 1 deep", [] {
    Bench b;
    TQue<TPosition::VECIN, 1> q;
    b.pipe.InitBuffer(q, 2, 32);
    q.EnQue(q.AllocTensor<float>());
    q.EnQue(q.AllocTensor<float>());
  });
}

void order() {
  refused("V reads what V wrote", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, 1.0f, 64);
    Adds(t, t, 1.0f, 64);
  });
  refused("V overwrites what V may still read", [] {
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
  refused("S reads what V wrote", [] {
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
  refused("V overwrites what S may still read", [] {
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
  refused("V reads what MTE2 wrote", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 256);
    auto f = iota(64);
    auto t = q.AllocTensor<float>();
    DataCopyPad(t, gm(f), {1, 256, 0, 0, 0}, DataCopyPadExtParams<float>{});
    Adds(t, t, 1.0f, 64);
  });
  refused("MTE3 reads what V wrote", [] {
    Bench b;
    Out q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    auto t = q.AllocTensor<float>();
    Duplicate(t, 1.0f, 8);
    DataCopyPad(gm(f), t, {1, 32, 0, 0, 0});
  });
  refused("MTE2 overwrites what MTE2 wrote", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    auto t = q.AllocTensor<float>();
    for (int i = 0; i < 2; ++i) DataCopyPad(t, gm(f), {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  refused("would hang", [] { WaitFlag<HardEvent::V_S>(0); });
  refused("is set already", [] {
    SetFlag<HardEvent::V_S>(0);
    SetFlag<HardEvent::V_S>(0);
  });
  refused("event id 6", [] { SetFlag<HardEvent::V_S>(6); });
  refused("ends with a flag set", [] { SetFlag<HardEvent::V_S>(0); });
  refused("all 8 ids of V_S are in use", [] {
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
  refused("event id that was not released", [] {
    TPipe pipe;
    pipe.AllocEventID<HardEvent::V_S>();
  });
  // every freed buffer of VECIN holds an id of V_MTE2
  auto cycle = [](auto &queue, auto &source) {
    auto t = queue.template AllocTensor<float>();
    DataCopyPad(t, gm(source), {1, 32, 0, 0, 0}, DataCopyPadExtParams<float>{});
    queue.EnQue(t);
    queue.FreeTensor(queue.template DeQue<float>());
  };
  clean("8 buffers of VECIN, in turns", [&] {
    Bench b;
    In q[4];
    auto source = iota(8);
    for (auto &queue : q) b.pipe.InitBuffer(queue, 2, 32);
    for (int round = 0; round < 3; ++round)
      for (auto &queue : q) cycle(queue, source);
  });
  refused("FreeTensor: all 8 ids of V_MTE2", [&] {
    Bench b;
    In q[5];
    auto source = iota(8);
    for (auto &queue : q) b.pipe.InitBuffer(queue, 2, 32);
    for (int round = 0; round < 2; ++round)
      for (auto &queue : q) cycle(queue, source);
  });
  refused("AllocEventID: all 8 ids of V_MTE2", [&] {
    Bench b;
    In q[4];
    auto source = iota(8);
    for (auto &queue : q) {
      b.pipe.InitBuffer(queue, 2, 32);
      cycle(queue, source), cycle(queue, source);
    }
    b.pipe.AllocEventID<HardEvent::V_MTE2>();
  });
  refused("V_MTE2 id 0 is set already", [&] {
    Bench b;
    In q;
    auto source = iota(8);
    b.pipe.InitBuffer(q, 1, 32);
    cycle(q, source);
    SetFlag<HardEvent::V_MTE2>(0);
  });
  refused("not in use", [] {
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
  refused("reads the mask that GatherMask left behind", [&] {
    Bench b;
    auto t = b.holding(iota(64)), to = b.empty<float>(64);
    uint64_t kept = 0;
    GatherMask(to, t, uint8_t(1), true, 64, GatherMaskParams{1, 1, 8, 0}, kept);
    Duplicate<float, false>(t, -1.0f, none, 1, 1, 8);
  });
  refused("reads the mask that Duplicate left behind", [&] {
    Bench b;
    auto t = b.empty<float>(64);
    Duplicate(t, -1.0f, odd, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    Duplicate<float, false>(t, -1.0f, none, 1, 1, 8);
  });
  refused("SetMaskNorm is missing", [&] {
    Bench b;
    auto t = b.empty<float>(64);
    SetMaskCount();
    Duplicate(t, -1.0f, odd, 1, 1, 8);
  });
  refused("the mode was not set before", [] { SetVectorMask<float, MaskMode::COUNTER>(0, 8); });
}

void launches() {
  refused("declared KERNEL_TYPE_MIX_AIC_1_2", [] { KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2); });
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
  refused(
      "another core", [&] { write(GetBlockIdx() * 8, 9); }, 3);
  refused(
      "another core", [&] { GetBlockIdx() == 1 ? write(10, 4) : read(0, 12); }, 2);
  expect(complaint([&] { write(GetBlockIdx() * 8, 8); }, 8).empty(), "cores side by side");
  expect(complaint([&] { read(0, 64); }, 8).empty(), "all cores may read");
  twin::gm_is_live = [](const void *at, uint64_t) { return at != shared.data(); };
  refused("MTE2 reads GM that is no longer allocated", [&] { read(0, 8); });
  clean("what is allocated", [&] { read(8, 8); });
  twin::gm_is_live = nullptr;
  refused("GM is read behind its end", [&] { read(60, 5); });
  refused("GM is written behind its end", [&] { write(60, 5); });
  refused("without sync", [] {
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
    expect(twin::core.counters[twin::MTE2_BYTES] == 47 * 4 && twin::core.counters[twin::MTE2_BLOCKS] == 4 &&
               twin::core.counters[twin::MTE2_INSTRUCTIONS] == 3,
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
  refused("4095 at most", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {4096, 4, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  refused("2097151 at most", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {1, 2097152, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  refused("not whole elements", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 32);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {1, 6, 0, 0, 0}, DataCopyPadExtParams<float>{});
  });
  refused("padding over 32 bytes", [] {
    Bench b;
    In q;
    b.pipe.InitBuffer(q, 1, 96);
    auto f = iota(8);
    DataCopyPad(q.AllocTensor<float>(), gm(f), {1, 4, 0, 0, 0}, DataCopyPadExtParams<float>{true, 0, 9, 0});
  });
  refused("only VECIN and VECOUT", [] {
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
  refused("whole blocks of 32", [] {
    Bench b;
    auto t = b.empty<float>(64);
    DataCopy(t[32], t, 9);
  });
}

void arithmetic() {
  clean("count forms", [] {
    Bench b;
    auto a = b.holding(iota(10)), c = b.holding(iota(10, 5)), to = b.empty<float>(16);
    Add(to, a, c, 10);
    expect(to.at()[9] == 23 && poison(&to.at()[10], 24), "Add, and nothing behind the count");
    PipeBarrier<PIPE_V>();
    Sub(to, c, a, 10);
    expect(to.at()[9] == 5, "Sub");
    PipeBarrier<PIPE_V>();
    Adds(to, a, -2.5f, 10);
    expect(to.at()[9] == 6.5f, "Adds");
    auto i = b.holding(std::vector<int32_t>{-1, -8, 7, 1 << 30}), k = b.empty<int32_t>(8);
    ShiftRight(k, i, 1, 4);
    expect(holds(k, std::vector<int32_t>{-1, -4, 3, 1 << 29}), "ShiftRight of signed is arithmetic");
    PipeBarrier<PIPE_V>();
    ShiftLeft(k, i, 2, 4);
    expect(holds(k, std::vector<int32_t>{-4, -32, 28, 0}), "ShiftLeft drops the high bits");
    PipeBarrier<PIPE_V>();
    Maxs(k, i, 0, 4);
    expect(holds(k, std::vector<int32_t>{0, 0, 7, 1 << 30}), "Maxs");
    PipeBarrier<PIPE_V>();
    Adds(k, b.holding(std::vector<int32_t>{INT32_MAX}), 1, 1);
    expect(k.at()[0] == INT32_MIN, "integers wrap");
    auto x = b.holding(std::vector<int16_t>{0x0F, -1}), y = b.holding(std::vector<int16_t>{0x70, 0}),
         z = b.empty<int16_t>(2);
    Or(z, x, y, 2);
    expect(holds(z, std::vector<int16_t>{0x7F, -1}), "Or");
    PipeBarrier<PIPE_V>();
    Exp(to, b.holding(std::vector<float>{0, -INF, 1}), 3);
    expect(to.at()[0] == 1 && to.at()[1] == 0 && std::abs(to.at()[2] - 2.7182817f) < 1e-6f, "Exp");
    PipeBarrier<PIPE_V>();
    Ln(to, b.holding(std::vector<float>{1, 0}), 2);
    expect(to.at()[0] == 0 && to.at()[1] == -INF, "Ln");
  });
  refused("overlap in part", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Adds(t[8], t, 1.0f, 16);
  });
  clean("Cast", [] {
    Bench b;
    auto to = b.empty<float>(8);
    auto h = b.holding(std::vector<half>{half(1.5f), half(-65504)});
    Cast(to, h, RoundMode::CAST_NONE, 2);
    expect(holds(to, std::vector<float>{1.5f, -65504}), "half to float");
    auto bf = b.holding(std::vector<bfloat16_t>{{0x3FC0}, {0xFF80}});
    PipeBarrier<PIPE_V>();
    Cast(to, bf, RoundMode::CAST_NONE, 2);
    expect(holds(to, std::vector<float>{1.5f, -INF}), "bfloat16 to float");
    auto u = b.holding(std::vector<uint8_t>{0, 1, 255});
    auto wide = b.empty<half>(4);
    Cast(wide, u, RoundMode::CAST_NONE, 3);
    expect(wide.at()[0] == half(0) && wide.at()[1] == half(1) && wide.at()[2] == half(255), "uint8 to half");
  });
  clean("filling", [] {
    Bench b;
    auto t = b.empty<float>(64);
    uint64_t mask[2] = {0x8000000000000005ull, 0};
    Duplicate(t, 3.0f, mask, 1, 1, 8);
    expect(t.at()[0] == 3 && t.at()[2] == 3 && t.at()[63] == 3 && poison(&t.at()[1], 4) && poison(&t.at()[62], 4),
           "Duplicate: bit i is element i");
    auto u = b.empty<float>(128);
    uint64_t all[2] = {~0ull, 0};
    Duplicate(u, 1.0f, all, 2, 1, 8);
    expect(u.at()[127] == 1, "Duplicate: repeats of 256 bytes");
    auto i = b.empty<int32_t>(100);
    CreateVecIndex(i, int32_t(7), 100);
    expect(i.at()[0] == 7 && i.at()[99] == 106, "CreateVecIndex");
    auto f = b.holding(iota(8)), w = b.empty<float>(64);
    Brcb(w, f, 1, {1, 8});
    expect(w.at()[0] == 0 && w.at()[8] == 1 && w.at()[15] == 1 && w.at()[63] == 7, "Brcb: one element, one block");
  });
}

void by_repeats() {
  clean("arithmetic of one tensor", [] {
    Bench b;
    auto x = b.holding(iota(8, -3)), y = b.empty<float>(8);
    Muls(y, x, -2.0f, 8);
    expect(y.at()[0] == 6 && y.at()[7] == -8, "Muls");
    PipeBarrier<PIPE_V>();
    Mins(y, x, 0.0f, 8);
    expect(y.at()[0] == -3 && y.at()[7] == 0, "Mins");
    PipeBarrier<PIPE_V>();
    Mul(y, x, x, 8);
    expect(y.at()[0] == 9 && y.at()[7] == 16, "Mul");
    PipeBarrier<PIPE_V>();
    Sqrt(y, y, 8);
    expect(y.at()[0] == 3 && y.at()[7] == 4, "Sqrt");
    PipeBarrier<PIPE_V>();
    Div(y, x, y, 8);
    expect(y.at()[0] == -1 && y.at()[7] == 1, "Div");
  });
  clean("a row meets a matrix", [] {
    Bench b;
    auto x = b.holding(iota(128)), row = b.holding(iota(64, 100)), y = b.empty<float>(128);
    Add(y, x, row, 64, 2, BinaryRepeatParams{1, 1, 1, 8, 8, 0});
    expect(y.at()[0] == 100 && y.at()[63] == 226 && y.at()[64] == 164 && y.at()[127] == 290, "repeat stride 0");
    auto each = b.holding(std::vector<float>(16, 1.0f));
    std::fill_n(each.at() + 8, 8, 5.0f);
    PipeBarrier<PIPE_V>();
    Sub(y, x, each, 64, 2, BinaryRepeatParams{1, 1, 0, 8, 8, 1});
    expect(y.at()[63] == 62 && y.at()[64] == 59, "block stride 0: a number of each repeat");
    PipeBarrier<PIPE_V>();
    Mul(y, x, each, 8, 2, BinaryRepeatParams{1, 1, 1, 8, 8, 1});
    expect(y.at()[7] == 7 && y.at()[8] == 7 && y.at()[64] == 320, "a mask leaves the rest of a repeat alone");
    PipeBarrier<PIPE_V>();
    Div(y, x, each, 64, 2, BinaryRepeatParams{1, 1, 0, 8, 8, 1});
    expect(y.at()[63] == 63 && y.at()[65] == 13, "Div");
  });
  refused("a mask of 65 elements", [] {
    Bench b;
    auto x = b.holding(iota(128));
    Add(b.empty<float>(128), x, x, 65, 1, BinaryRepeatParams{});
  });
  refused("elements of a tensor of 64", [] {
    Bench b;
    auto x = b.holding(iota(64));
    Add(b.empty<float>(128), x, x, 64, 2, BinaryRepeatParams{});
  });
  clean("WholeReduceSum", [] {
    Bench b;
    std::vector<float> v(128, 0.0f);
    v[0] = 1e8f, v[1] = 3, v[2] = -1e8f, v[3] = 3;  // neighbours first: the threes are lost
    v[64] = 1e8f, v[65] = -1e8f, v[66] = 3, v[67] = 3;
    auto to = b.empty<float>(8);
    WholeReduceSum(to, b.holding(v), 64, 2, 1, 1, 8);
    expect(to.at()[0] == 0 && to.at()[1] == 6, "a tree of neighbours");
    PipeBarrier<PIPE_V>();
    WholeReduceSum(to[1], b.holding(iota(64)), 3, 2, 1, 1, 1);
    expect(to.at()[1] == 3 && to.at()[2] == 27, "a mask, and repeats a data block apart");
  });
  clean("Cast rounds", [] {
    Bench b;
    auto i = b.holding(std::vector<int32_t>{16777217, -5, 2147483647});
    auto f = b.empty<float>(8);
    Cast(f, i, RoundMode::CAST_RINT, 3);
    expect(f.at()[0] == 16777216.0f && f.at()[1] == -5 && f.at()[2] == 2147483648.0f, "int32 to float, to even");
    PipeBarrier<PIPE_V>();
    Cast(f, i, RoundMode::CAST_FLOOR, 3);
    expect(f.at()[0] == 16777216.0f && f.at()[2] == 2147483520.0f, "int32 to float, down");
    auto x = b.holding(std::vector<float>{1.00390625f, 1.01171875f, -1.006f, NAN});
    auto bf = b.empty<bfloat16_t>(8);
    Cast(bf, x, RoundMode::CAST_RINT, 4);
    expect(bf.at()[0].bits == 0x3F80 && bf.at()[1].bits == 0x3F82 && bf.at()[2].bits == 0xBF81, "to bfloat16, to even");
    expect(float(bf.at()[3]) != float(bf.at()[3]), "NaN stays");
    PipeBarrier<PIPE_V>();
    Cast(bf, x, RoundMode::CAST_TRUNC, 4);
    expect(bf.at()[1].bits == 0x3F81 && bf.at()[2].bits == 0xBF80, "to bfloat16, to zero");
    auto y = b.holding(std::vector<float>{1.00048828125f, 1.0009f, 1e6f});
    auto h = b.empty<half>(8);
    Cast(h, y, RoundMode::CAST_RINT, 3);
    expect(h.at()[0] == half(1) && h.at()[1] == half(1.0009765625f) && float(h.at()[2]) == INF, "to half, to even");
    PipeBarrier<PIPE_V>();
    Cast(h, y, RoundMode::CAST_TRUNC, 3);
    expect(h.at()[1] == half(1), "to half, to zero");
  });
  refused("does not know this rounding", [] {
    Bench b;
    Cast(b.empty<half>(8), b.holding(iota(8)), RoundMode::CAST_CEIL, 8);
  });
}

void choosing() {
  clean("the call's name before CANN 9", [] {
    Bench b;
    auto bits = b.empty<uint8_t>(32);
    CompareScalar(bits, b.holding(iota(64)), 62.0f, CMPMODE::GT, 64);
    expect(bits.at()[7] == 0x80 && bits.at()[6] == 0, "CompareScalar");
  });
  clean("Compares", [] {
    Bench b;
    auto v = iota(64);
    v[3] = NAN;
    auto x = b.holding(v);
    auto bits = b.empty<uint8_t>(8);
    Compares(bits, x, 2.0f, CMPMODE::GT, 64);
    expect(bits.at()[0] == 0xF0 && bits.at()[7] == 0xFF, "lowest bit first, NaN compares false");
    PipeBarrier<PIPE_V>();
    Compares(bits, x, 2.0f, CMPMODE::GE, 64);
    expect(bits.at()[0] == 0xF4, "GE");
  });
  refused("whole repeats of 256 bytes", [] {
    Bench b;
    Compares(b.empty<uint8_t>(32), b.holding(iota(64)), 0.0f, CMPMODE::GT, 63);
  });
  clean("Select", [] {
    Bench b;
    auto x = b.holding(iota(10));
    auto m = b.holding(std::vector<uint8_t>{0x05, 0x02});
    auto out = b.empty<float>(16);
    Select(out, m, x, -1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 10);
    expect(holds(out, std::vector<float>{0, -1, 2, -1, -1, -1, -1, -1, -1, 9}), "1 takes the tensor");
  });
  clean("GatherMask", [] {  // figure 1 of the page: pattern 2 takes the odd elements
    Bench b;
    auto x = b.holding(iota(64)), to = b.empty<float>(64);
    uint64_t n = 0;
    GatherMask(to, x, uint8_t(2), true, 64, {1, 1, 8, 0}, n);
    expect(n == 32 && to.at()[0] == 1 && to.at()[31] == 63, "pattern 2");
    PipeBarrier<PIPE_V>();
    GatherMask(to, x, uint8_t(1), true, 10, {1, 1, 8, 0}, n);
    expect(n == 5 && to.at()[4] == 8 && poison(&to.at()[5], 12), "pattern 1; the rest of the block is undefined");
    auto p = b.holding(std::vector<uint32_t>{0x99999999u, 0x99999999u});
    PipeBarrier<PIPE_V>();
    GatherMask(to, x, p, true, 64, {1, 1, 8, 0}, n);
    expect(n == 32 && to.at()[0] == 0 && to.at()[1] == 3 && to.at()[2] == 4 && to.at()[31] == 63, "figure 3: 1001");
  });
  clean("Gather", [] {
    Bench b;
    auto x = b.holding(iota(16)), to = b.empty<float>(8);
    Gather(to, x, b.holding(std::vector<uint32_t>{60, 0, 4}), 0, 3);
    expect(holds(to, std::vector<float>{15, 0, 1}), "offsets in bytes");
    PipeBarrier<PIPE_V>();
    Gather(to, x, b.holding(std::vector<uint32_t>{0, 4}), 8, 2);
    expect(to.at()[1] == 3, "from a base");
  });
  refused("not on an element", [] {
    Bench b;
    Gather(b.empty<float>(8), b.holding(iota(8)), b.holding(std::vector<uint32_t>{2}), 0, 1);
  });
  refused("behind the tensor", [] {
    Bench b;
    Gather(b.empty<float>(8), b.holding(iota(64)), b.holding(std::vector<uint32_t>{256}), 0, 1);
  });
  clean("reductions", [] {
    Bench b;
    auto v = iota(200);
    v[150] = 1000;
    auto x = b.holding(v), to = b.empty<float>(8), work = b.empty<float>(64);
    ReduceMax(to, x, work, 200);
    expect(to.at()[0] == 1000, "ReduceMax");
    PipeBarrier<PIPE_V>();
    ReduceSum(to, x, work, 100);
    expect(to.at()[0] == 4950, "ReduceSum");
    expect(twin::core.counters[twin::VECTOR_INSTRUCTIONS] == 4, "a level of 64 each");
  });
}

void sorting() {
  clean("Sort32", [] {
    Bench b;
    std::vector<float> v(64, 1.0f);
    v[5] = 2;
    v[40] = -INF;
    v[63] = NAN;
    std::vector<uint32_t> i(64);
    for (int k = 0; k < 64; ++k) i[k] = 100 + k;
    auto to = b.empty<float>(128);
    Sort32(to, b.holding(v), b.holding(i), 2);
    auto pairs = reinterpret_cast<const twin::Pair *>(to.at());
    expect(pairs[0].score == 2 && pairs[0].index == 105, "descending");
    expect(pairs[1].index == 100 && pairs[31].index == 131, "stable");
    expect(pairs[32].index == 163, "NaN first");
    expect(pairs[63].index == 140, "-inf last");
  });
  refused("border of 256 bytes", [] {
    Bench b;
    auto t = b.empty<float>(192);
    Sort32(t[32], b.holding(iota(32)), b.empty<uint32_t>(32), 1);
  });
  refused("border of 128 bytes", [] {
    Bench b;
    auto t = b.empty<float>(128);
    Sort32(t, b.holding(iota(64))[8], b.empty<uint32_t>(32), 1);
  });
  refused("255 at most", [] {
    Bench b;
    auto t = b.empty<float>(64);
    Sort32(t, t, t.ReinterpretCast<uint32_t>(), 256);
  });
  using Pairs = std::vector<uint64_t>;
  static auto list = [](std::initializer_list<std::pair<float, uint32_t>> pairs) {
    Pairs out;
    for (auto [s, i] : pairs) {
      uint32_t bits;
      std::memcpy(&bits, &s, 4);
      out.push_back(uint64_t(i) << 32 | bits);
    }
    return out;
  };
  clean("MrgSort", [] {
    Bench b;
    auto x = b.holding(list({{9, 0}, {5, 1}, {1, 2}})).ReinterpretCast<float>(),
         y = b.holding(list({{7, 10}, {5, 11}})).ReinterpretCast<float>();
    auto to = b.empty<float>(16);
    uint16_t l[4] = {3, 2, 0, 0};
    MrgSort(to, MrgSortSrcList<float>(x, y, x, x), MrgSort4Info(l, false, 3, 1));
    auto p = reinterpret_cast<const twin::Pair *>(to.at());
    expect(p[0].index == 0 && p[1].index == 10 && p[2].index == 1 && p[3].index == 11 && p[4].index == 2,
           "the earlier list wins ties");
    expect(twin::core.counters[twin::MERGED_PAIRS] == 5, "pairs are counted");
    auto r = b.holding(list({{4, 0}, {3, 1}, {2, 2}, {1, 3}, {8, 4}, {7, 5}, {6, 6}, {5, 7}})).ReinterpretCast<float>();
    uint16_t one[4] = {1, 1, 1, 1};
    auto out = b.empty<float>(16);
    MrgSort(out, MrgSortSrcList<float>(r, r[2], r[4], r[6]), MrgSort4Info(one, false, 15, 2));
    p = reinterpret_cast<const twin::Pair *>(out.at());
    expect(p[0].score == 4 && p[3].score == 1 && p[4].score == 8 && p[7].score == 5,
           "repeats stand one behind the other");
  });
  refused("source and destination overlap", [] {
    Bench b;
    auto t = b.empty<float>(64);
    uint16_t l[4] = {4, 4, 0, 0};
    MrgSort(t, MrgSortSrcList<float>(t, t[16], t, t), MrgSort4Info(l, false, 3, 1));
  });
  refused("4095 at most", [] {
    Bench b;
    auto t = b.empty<float>(64);
    uint16_t l[4] = {4096, 4, 0, 0};
    MrgSort(t, MrgSortSrcList<float>(t, t, t, t), MrgSort4Info(l, false, 3, 1));
  });
  refused("validBit", [] {
    Bench b;
    auto t = b.empty<float>(64);
    uint16_t l[4] = {4, 4, 0, 0};
    MrgSort(t, MrgSortSrcList<float>(t, t, t, t), MrgSort4Info(l, false, 5, 1));
  });
  refused("four equal lists", [] {
    Bench b;
    auto t = b.empty<float>(64), u = b.empty<float>(64);
    uint16_t l[4] = {4, 4, 4, 3};
    MrgSort(u, MrgSortSrcList<float>(t, t[8], t[16], t[24]), MrgSort4Info(l, false, 15, 2));
  });
}

}  // namespace

int main() {
  memory();
  queues();
  order();
  vector_mask();
  launches();
  global_memory();
  movement();
  arithmetic();
  by_repeats();
  choosing();
  sorting();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures != 0;
}
