// Vector instructions that compute number by number.
#pragma once
#include "bench.h"

namespace {

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
  rejected("overlap in part", [] {
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
  rejected("a mask of 65 elements", [] {
    Bench b;
    auto x = b.holding(iota(128));
    Add(b.empty<float>(128), x, x, 65, 1, BinaryRepeatParams{});
  });
  rejected("elements of a tensor of 64", [] {
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
  rejected("does not know this rounding", [] {
    Bench b;
    Cast(b.empty<half>(8), b.holding(iota(8)), RoundMode::CAST_CEIL, 8);
  });
}

}  // namespace
