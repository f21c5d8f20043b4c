// Vector instructions that compare, select, gather and sort.
#pragma once
#include "bench.h"

namespace {

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
  rejected("whole repeats of 256 bytes", [] {
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
  clean("Select by repeats", [] {  // the same 64 numbers twice, the bits go on
    Bench b;
    auto x = b.holding(iota(64)), out = b.empty<float>(128);
    std::vector<uint8_t> bits(32, 0);
    bits[0] = 0x04, bits[15] = 0x80;
    Select(out, b.holding(bits), x, -1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64, 2, {1, 1, 1, 8, 0, 8});
    expect(out.at()[2] == 2 && out.at()[127] == 63 && out.at()[66] == -1 && out.at()[63] == -1, "bits and numbers");
  });
  rejected("whole repeats only", [] {
    Bench b;
    auto bits = b.holding(std::vector<uint8_t>(32, 0));
    Select(b.empty<float>(64), bits, b.holding(iota(64)), 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 40, 1,
           {1, 1, 1, 8, 8, 8});
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
  rejected("not on an element", [] {
    Bench b;
    Gather(b.empty<float>(8), b.holding(iota(8)), b.holding(std::vector<uint32_t>{2}), 0, 1);
  });
  rejected("behind the tensor", [] {
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
    expect(emulator::core.counters[emulator::VECTOR_INSTRUCTIONS] == 4, "a level of 64 each");
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
    auto pairs = reinterpret_cast<const emulator::Pair *>(to.at());
    expect(pairs[0].score == 2 && pairs[0].index == 105, "descending");
    expect(pairs[1].index == 100 && pairs[31].index == 131, "stable");
    expect(pairs[32].index == 163, "NaN first");
    expect(pairs[63].index == 140, "-inf last");
  });
  rejected("border of 256 bytes", [] {
    Bench b;
    auto t = b.empty<float>(192);
    Sort32(t[32], b.holding(iota(32)), b.empty<uint32_t>(32), 1);
  });
  rejected("border of 128 bytes", [] {
    Bench b;
    auto t = b.empty<float>(128);
    Sort32(t, b.holding(iota(64))[8], b.empty<uint32_t>(32), 1);
  });
  rejected("255 at most", [] {
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
    auto p = reinterpret_cast<const emulator::Pair *>(to.at());
    expect(p[0].index == 0 && p[1].index == 10 && p[2].index == 1 && p[3].index == 11 && p[4].index == 2,
           "the earlier list wins ties");
    expect(emulator::core.counters[emulator::MERGED_PAIRS] == 5, "pairs are counted");
    auto r = b.holding(list({{4, 0}, {3, 1}, {2, 2}, {1, 3}, {8, 4}, {7, 5}, {6, 6}, {5, 7}})).ReinterpretCast<float>();
    uint16_t one[4] = {1, 1, 1, 1};
    auto out = b.empty<float>(16);
    MrgSort(out, MrgSortSrcList<float>(r, r[2], r[4], r[6]), MrgSort4Info(one, false, 15, 2));
    p = reinterpret_cast<const emulator::Pair *>(out.at());
    expect(p[0].score == 4 && p[3].score == 1 && p[4].score == 8 && p[7].score == 5,
           "repeats stand one behind the other");
  });
  rejected("source and destination overlap", [] {
    Bench b;
    auto t = b.empty<float>(64);
    uint16_t l[4] = {4, 4, 0, 0};
    MrgSort(t, MrgSortSrcList<float>(t, t[16], t, t), MrgSort4Info(l, false, 3, 1));
  });
  rejected("4095 at most", [] {
    Bench b;
    auto t = b.empty<float>(64);
    uint16_t l[4] = {4096, 4, 0, 0};
    MrgSort(t, MrgSortSrcList<float>(t, t, t, t), MrgSort4Info(l, false, 3, 1));
  });
  rejected("validBit", [] {
    Bench b;
    auto t = b.empty<float>(64);
    uint16_t l[4] = {4, 4, 0, 0};
    MrgSort(t, MrgSortSrcList<float>(t, t, t, t), MrgSort4Info(l, false, 5, 1));
  });
  rejected("four equal lists", [] {
    Bench b;
    auto t = b.empty<float>(64), u = b.empty<float>(64);
    uint16_t l[4] = {4, 4, 4, 3};
    MrgSort(u, MrgSortSrcList<float>(t, t[8], t[16], t[24]), MrgSort4Info(l, false, 15, 2));
  });
}

}  // namespace
