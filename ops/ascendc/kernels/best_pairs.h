// The best k (score, index) pairs of a stream of tiles, in a total order: score descending, then order of arrival.
//
// A tile is filtered against the worst pair that is kept; what is left is compacted, sorted in groups of 32, merged to
// one list and merged with the best so far. The filter is strict and the best so far stands first in the merge, so of
// equal scores the earlier stays. -inf and NaN never pass it. Unfilled places hold (-inf, -1).
#pragma once
#include "device.h"

namespace npu_gr {

class BestPairs {
 public:
  using Floats = AscendC::LocalTensor<float>;
  using Ints = AscendC::LocalTensor<int32_t>;

  // tile: a multiple of 256. Buffers: `best_pairs_bytes` of tiling.h. Before any other of the kernel: all of them are
  // multiples of 256 bytes, which is where Sort32 wants its result to begin.
  __aicore__ inline void init(AscendC::TPipe *pipe, uint32_t tile, uint32_t k) {
    pipe_ = pipe;
    k_ = k;
    padded_ = round_up(k, 32);
    pipe_->InitBuffer(bits_, round_up(tile / 8, 256));
    pipe_->InitBuffer(score_, tile * 4);
    pipe_->InitBuffer(index_, tile * 4);
    pipe_->InitBuffer(sorted_, tile * 8);
    pipe_->InitBuffer(merged_, tile * 8);
    pipe_->InitBuffer(first_, padded_ * 16);
    pipe_->InitBuffer(second_, padded_ * 16);
  }
  __aicore__ inline void reset() {
    best_ = first_.Get<float>();
    spare_ = second_.Get<float>();
    worst_ = kNegInf;
    uint64_t scores[2] = {0x5555555555555555ull, 0}, indices[2] = {0xAAAAAAAAAAAAAAAAull, 0};
    uint8_t repeats = uint8_t(padded_ / 32);
    vector_done();  // of a request before this one
    AscendC::Duplicate(best_, kNegInf, scores, repeats, 1, 8);
    vector_done();
    AscendC::Duplicate(best_.ReinterpretCast<int32_t>(), int32_t(-1), indices, repeats, 1, 8);
    vector_done();
  }
  // Score of the k-th pair; -inf while there are fewer.
  __aicore__ inline float worst() const { return worst_; }
  __aicore__ inline uint32_t padded_k() const { return padded_; }
  // The k best pairs, up to a multiple of 32, after a vector_done.
  __aicore__ inline Floats best() const { return best_; }

  // `count` scores `x` with indices `index` + base; x must be readable up to a multiple of 64. Returns how many passed.
  __aicore__ inline uint32_t offer(const Floats &x, const Ints &index, int32_t base, uint32_t count) {
    uint32_t kept = filter(x, count);
    if (kept == 0) return 0;
    uint64_t same = 0;
    auto score = score_.Get<float>();
    auto indices = index_.Get<int32_t>();
    AscendC::GatherMask(indices, index, bits(), true, count, one_repeat(), same);
    vector_done();
    AscendC::Adds(indices, indices, base, int32_t(kept));
    vector_done();
    uint32_t whole = round_up(kept, 32);
    if (kept != whole) clear_tail(score, kept, whole);
    auto pairs = sorted_.Get<float>();
    AscendC::Sort32(pairs, score, indices.ReinterpretCast<uint32_t>(), int32_t(whole / 32));
    vector_done();
    merge(merge_to_one(pairs, merged_.Get<float>(), whole), min_of(whole, padded_));
    return kept;
  }
  // A sorted list of `length` pairs, at most k rounded up to 32.
  __aicore__ inline void merge(const Floats &pairs, uint32_t length) {
    uint16_t lengths[4] = {uint16_t(padded_), uint16_t(length), 0, 0};
    AscendC::MrgSort(spare_, AscendC::MrgSortSrcList<float>(best_, pairs, pairs, pairs),
                     AscendC::MrgSort4Info(lengths, false, 3, 1));
    auto kept = spare_;
    spare_ = best_;
    best_ = kept;
    sync<AscendC::HardEvent::V_S>(*pipe_);
    worst_ = best_.GetValue(2 * (k_ - 1));
    sync<AscendC::HardEvent::S_V>(*pipe_);
  }
  // Splits the best pairs into their two columns, each as long as k rounded up to 32.
  __aicore__ inline void split_columns(const Floats &score, const Ints &index) {
    uint64_t kept = 0;
    AscendC::GatherMask(score, best_, uint8_t(1), true, padded_ * 2, one_repeat(), kept);
    AscendC::GatherMask(index, best_.ReinterpretCast<int32_t>(), uint8_t(2), true, padded_ * 2, one_repeat(), kept);
  }

 private:
  AscendC::TPipe *pipe_;
  uint32_t k_, padded_;
  float worst_;
  Floats best_, spare_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> bits_, score_, index_, sorted_, merged_, first_, second_;

  __aicore__ inline AscendC::GatherMaskParams one_repeat() const { return AscendC::GatherMaskParams{1, 1, 8, 0}; }
  __aicore__ inline AscendC::LocalTensor<uint32_t> bits() { return bits_.Get<uint32_t>(); }

  __aicore__ inline uint32_t filter(const Floats &x, uint32_t count) {
    uint64_t kept = 0;
    compare_with(bits_.Get<uint8_t>(), x, worst_, AscendC::CMPMODE::GT, round_up(count, 64));
    vector_done();
    AscendC::GatherMask(score_.Get<float>(), x, bits(), true, count, one_repeat(), kept);
    return uint32_t(kept);
  }
  // What GatherMask leaves behind its last element is undefined. It becomes -inf, and is never taken: there are
  // always enough pairs of -inf before it.
  __aicore__ inline void clear_tail(const Floats &score, uint32_t kept, uint32_t whole) {
    uint32_t from = kept / 8 * 8;
    uint64_t lanes = (1ull << (whole - from)) - 1, mask[2] = {lanes >> (kept - from) << (kept - from), 0};
    AscendC::Duplicate(score[from], kNegInf, mask, 1, 1, 8);
    vector_done();
  }
  // Lists of 32 become one: four at a time, the two buffers in turns. Returns where it stands.
  __aicore__ inline Floats merge_to_one(Floats from, Floats to, uint32_t count) {
    for (uint32_t run = 32; run < count; run *= 4) {
      uint32_t groups = count / (run * 4), done = groups * run * 4;
      if (groups) {
        uint16_t lengths[4] = {uint16_t(run), uint16_t(run), uint16_t(run), uint16_t(run)};
        AscendC::MrgSort(to, AscendC::MrgSortSrcList<float>(from, from[run * 2], from[run * 4], from[run * 6]),
                         AscendC::MrgSort4Info(lengths, false, 15, uint16_t(groups)));
      }
      if (done < count) merge_rest(to[done * 2], from[done * 2], run, count - done);
      vector_done();
      auto merged = to;
      to = from;
      from = merged;
    }
    return from;
  }
  // One to three whole runs and part of one.
  __aicore__ inline void merge_rest(const Floats &to, const Floats &from, uint32_t run, uint32_t count) {
    uint32_t lists = (count + run - 1) / run;
    if (lists == 1) {
      AscendC::DataCopy(to, from, count * 2);
      return;
    }
    uint16_t lengths[4] = {0, 0, 0, 0};
    for (uint32_t i = 0; i * run < count; ++i) lengths[i] = uint16_t(min_of(run, count - i * run));
    AscendC::MrgSort(to,
                     AscendC::MrgSortSrcList<float>(from, from[run * 2], lists > 2 ? from[run * 4] : from,
                                                    lists > 3 ? from[run * 6] : from),
                     AscendC::MrgSort4Info(lengths, false, uint16_t((1u << lists) - 1), 1));
  }
};

}  // namespace npu_gr
