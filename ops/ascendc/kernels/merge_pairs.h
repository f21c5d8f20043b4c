// merge_pairs: the second launch of an op that was split over cores. Lists of the parts, in the order of the parts, so
// equal scores keep their order; then the result in its columns.
//
// A launch of its own in place of a barrier of all cores: two streams that both wait for all cores can deadlock.
#pragma once
#include "best_pairs.h"

namespace npu_gr {

struct MergeShape {
  uint32_t rows, lists, k;  // lists of each row
};

// Merges the lists of one row after another.
class MergePairs {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR workspace, uint64_t num_lists, uint32_t k) {
    pipe_ = pipe;
    words_ = round_up(k, 32) * 2;
    pairs_.SetGlobalBuffer((__gm__ float *)workspace, num_lists * words_);
    best_.init(pipe_, 256, k);
    pipe_->InitBuffer(lists_, 2, words_ * 4);
  }
  __aicore__ inline BestPairs &merge(uint64_t first, uint32_t count) {
    best_.reset();
    load(first);
    for (uint32_t i = 0; i < count; ++i) {
      if (i + 1 < count) load(first + i + 1);
      auto list = lists_.DeQue<float>();
      best_.merge(list, words_ / 2);
      lists_.FreeTensor(list);
    }
    return best_;
  }

 private:
  __aicore__ inline void load(uint64_t list) {
    auto pairs = lists_.AllocTensor<float>();
    copy_in(pairs, pairs_[list * words_], words_, 0.0f);
    lists_.EnQue(pairs);
  }

  AscendC::TPipe *pipe_;
  uint32_t words_;
  BestPairs best_;
  AscendC::GlobalTensor<float> pairs_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> lists_;
};

// (value, index) columns, as masked_topk gives them.
class MergeRows {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR workspace, GM_ADDR value, GM_ADDR index,
                              const MergeShape &shape) {
    s_ = shape;
    value_.SetGlobalBuffer((__gm__ float *)value, uint64_t(s_.rows) * s_.k);
    index_.SetGlobalBuffer((__gm__ int32_t *)index, uint64_t(s_.rows) * s_.k);
    merge_.init(pipe, workspace, uint64_t(s_.rows) * s_.lists, s_.k);
    pipe->InitBuffer(outs_, 1, round_up(s_.k, 32) * 8);
  }
  __aicore__ inline void process() {
    for (uint32_t row = AscendC::GetBlockIdx(); row < s_.rows; row += AscendC::GetBlockNum()) {
      auto &best = merge_.merge(uint64_t(row) * s_.lists, s_.lists);
      auto out = outs_.AllocTensor<float>();
      auto index = out[best.padded_k()].ReinterpretCast<int32_t>();
      best.split_columns(out, index);
      outs_.EnQue(out);
      out = outs_.DeQue<float>();
      copy_out(value_[uint64_t(row) * s_.k], out, s_.k);
      copy_out(index_[uint64_t(row) * s_.k], index, s_.k);
      outs_.FreeTensor(out);
    }
  }

 private:
  MergeShape s_;
  MergePairs merge_;
  AscendC::GlobalTensor<float> value_;
  AscendC::GlobalTensor<int32_t> index_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
};

}  // namespace npu_gr
