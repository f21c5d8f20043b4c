// Sorting of (score, index) pairs of 8 bytes: groups of 32, then merges of two to four sorted lists.
// Sources: asc-devkit docs, 排序组合（ISASI）/{Sort32,MrgSort}; that NaN comes first is what TopK's page says.
#pragma once
#include "pipe.h"

namespace AscendC {

namespace emulator {
struct Pair {
  float score;
  uint32_t index;
};
static_assert(sizeof(Pair) == 8);
inline bool before(const Pair &a, const Pair &b) {
  bool a_nan = a.score != a.score, b_nan = b.score != b.score;
  return a_nan || b_nan ? a_nan && !b_nan : a.score > b.score;
}
}  // namespace emulator

// Each 32 scores with their indices, sorted descending, equal scores in their order.
template <typename T>
void Sort32(const LocalTensor<T> &to, const LocalTensor<T> &score, const LocalTensor<uint32_t> &index,
            const int32_t repeats) {
  static_assert(std::is_same_v<T, float>);
  using namespace emulator;
  EMULATOR_CHECK(repeats >= 0 && repeats <= 255, "Sort32: %d repeats, 255 at most", repeats);
  uint32_t count = uint32_t(repeats) * 32;
  to.need("Sort32 dst", count * 2, 256), score.need("Sort32 score", count, 128), index.need("Sort32 index", count, 128);
  core.issue(V);
  ++core.counters[VECTOR_INSTRUCTIONS];
  core.counters[SORT32_GROUPS] += repeats;
  core.read(V, score.at(), count * 4), core.read(V, index.at(), count * 4), core.write(V, to.at(), count * 8);
  std::vector<Pair> pairs(count);
  for (uint32_t i = 0; i < count; ++i) pairs[i] = {score.at()[i], index.at()[i]};
  for (uint32_t i = 0; i < count; i += 32) std::stable_sort(pairs.begin() + i, pairs.begin() + i + 32, before);
  if (count) std::memcpy(to.at(), pairs.data(), count * sizeof(Pair));
}

struct MrgSort4Info {
  MrgSort4Info() = default;
  MrgSort4Info(const uint16_t lengths[4], bool suspend, uint16_t valid, uint16_t repeats)
      : ifExhaustedSuspension(suspend), validBit(valid), repeatTimes(uint8_t(repeats)) {
    std::copy(lengths, lengths + 4, elementLengths);
  }
  uint16_t elementLengths[4] = {0, 0, 0, 0};
  bool ifExhaustedSuspension = false;
  uint16_t validBit = 0;
  uint8_t repeatTimes = 1;
};
template <typename T>
struct MrgSortSrcList {
  MrgSortSrcList(const LocalTensor<T> &a, const LocalTensor<T> &b, const LocalTensor<T> &c, const LocalTensor<T> &d)
      : src1(a), src2(b), src3(c), src4(d) {}
  LocalTensor<T> src1, src2, src3, src4;
};

// One list out of two to four that are sorted; of equal scores the earlier list's come first.
template <typename T>
void MrgSort(const LocalTensor<T> &to, const MrgSortSrcList<T> &lists, const MrgSort4Info &info) {
  static_assert(std::is_same_v<T, float>);
  using namespace emulator;
  EMULATOR_CHECK(info.validBit == 3 || info.validBit == 7 || info.validBit == 15, "MrgSort: validBit %u",
                 info.validBit);
  EMULATOR_CHECK(!info.ifExhaustedSuspension, "MrgSort: the emulator knows complete merges only");
  int number = info.validBit == 3 ? 2 : info.validBit == 7 ? 3 : 4;
  const LocalTensor<T> *source[4] = {&lists.src1, &lists.src2, &lists.src3, &lists.src4};
  uint32_t sum = 0;
  for (int i = 0; i < number; ++i) {
    EMULATOR_CHECK(info.elementLengths[i] <= 4095, "MrgSort: a list of %u, 4095 at most", info.elementLengths[i]);
    sum += info.elementLengths[i];
  }
  if (info.repeatTimes > 1)
    for (int i = 1; i < 4; ++i)
      EMULATOR_CHECK(number == 4 && info.elementLengths[i] == info.elementLengths[0] &&
                         source[i]->at() == source[0]->at() + uint64_t(i) * info.elementLengths[0] * 2,
                     "MrgSort: repeats need four equal lists, one behind the other");
  uint64_t total = uint64_t(info.repeatTimes) * sum;
  to.need("MrgSort dst", total * 2, 32);
  core.issue(V);
  ++core.counters[VECTOR_INSTRUCTIONS];
  core.counters[MERGED_PAIRS] += total;
  auto begin = reinterpret_cast<const Pair *>(to.at()), end = begin + total;
  for (uint32_t r = 0; r < info.repeatTimes; ++r) {
    const Pair *head[4], *stop[4];
    for (int i = 0; i < number; ++i) {
      source[i]->need("MrgSort src", (uint64_t(r) * sum + info.elementLengths[i]) * 2, 8);
      head[i] = reinterpret_cast<const Pair *>(source[i]->at()) + uint64_t(r) * sum;
      stop[i] = head[i] + info.elementLengths[i];
      EMULATOR_CHECK(stop[i] <= begin || head[i] >= end, "MrgSort: source and destination overlap");
      core.read(V, head[i], info.elementLengths[i] * sizeof(Pair));
    }
    Pair *out = reinterpret_cast<Pair *>(to.at()) + uint64_t(r) * sum;
    core.write(V, out, sum * sizeof(Pair));
    for (uint32_t n = 0; n < sum; ++n) {
      int best = -1;
      for (int i = 0; i < number; ++i)
        if (head[i] < stop[i] && (best < 0 || before(*head[i], *head[best]))) best = i;
      out[n] = *head[best]++;
    }
  }
}

}  // namespace AscendC
