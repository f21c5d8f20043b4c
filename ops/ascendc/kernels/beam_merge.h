// beam_merge: the k best of prefix[b] + logp[b, j] over a request's beams, of which each row of logp falls with j.
//
// Order: score descending, beam ascending, rank ascending. Two walks, both exact:
//   1. rank-major, 8 ranks of all beams at a time, for the k-th best score alone. As rows fall, the first 8 ranks in
//   which
//      no candidate reaches the k-th best end the walk: whatever lies deeper is worse (the early termination of xBeam,
//      arXiv:2512.11529).
//   2. beam-major over those ranks only, now with the threshold known, so that ties come out in the order above.
// A row must not rise and has its -inf and NaN at its end. Unfilled places are (-inf, -1, -1).
#pragma once
#include "best_pairs.h"

namespace npu_gr {

struct BeamMergeShape {
  uint32_t requests, beams, ranks, k, tile;
};

class BeamMerge {
  using Floats = AscendC::LocalTensor<float>;
  using Ints = AscendC::LocalTensor<int32_t>;
  static constexpr uint32_t kSlab = 8;                // ranks, a data block
  static constexpr uint32_t LOT = 64;                 // tokens fetched at a time
  static constexpr float kLowest = -3.402823466e38f;  // of what may be chosen

 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR prefix, GM_ADDR logp, GM_ADDR token, GM_ADDR score,
                              GM_ADDR parent, GM_ADDR chosen, const BeamMergeShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    usable_ = min_of(s_.ranks, s_.k);  // k of its own beam are before whatever lies deeper
    uint64_t cells = uint64_t(s_.requests) * s_.beams * s_.ranks, out = uint64_t(s_.requests) * s_.k;
    prefix_.SetGlobalBuffer((__gm__ float *)prefix, uint64_t(s_.requests) * s_.beams);
    logp_.SetGlobalBuffer((__gm__ float *)logp, cells);
    token_.SetGlobalBuffer((__gm__ int32_t *)token, cells);
    score_.SetGlobalBuffer((__gm__ float *)score, out);
    parent_.SetGlobalBuffer((__gm__ int32_t *)parent, out);
    chosen_.SetGlobalBuffer((__gm__ int32_t *)chosen, out);
    uint32_t padded = round_up(s_.k, 32);
    best_.init(pipe_, s_.tile, s_.k);
    pipe_->InitBuffer(xs_, 2, s_.tile * 4);
    pipe_->InitBuffer(prefixes_, 1, s_.beams * 4);
    pipe_->InitBuffer(wide_, s_.tile * 4);
    pipe_->InitBuffer(index_, s_.tile * 4);
    pipe_->InitBuffer(iota_, s_.tile * 4);
    pipe_->InitBuffer(outs_, 1, padded * 8);
    pipe_->InitBuffer(tokens_, 1, padded * 4);
    pipe_->InitBuffer(lots_, 2, LOT * 32);
    pipe_->InitBuffer(every_, LOT * 4);
    AscendC::CreateVecIndex(iota_.Get<int32_t>(), int32_t(0), s_.tile);
    vector_done();
    AscendC::ShiftLeft(every_.Get<int32_t>(), iota_.Get<int32_t>(), int32_t(5), int32_t(LOT));  // 32 bytes each
  }
  __aicore__ inline void process() {
    for (uint32_t request = AscendC::GetBlockIdx(); request < s_.requests; request += AscendC::GetBlockNum()) {
      auto prefix = prefixes_.AllocTensor<float>();
      copy_in(prefix, prefix_[uint64_t(request) * s_.beams], s_.beams, 0.0f);
      prefixes_.EnQue(prefix);
      beam_ = prefixes_.DeQue<float>();
      best_.reset();
      uint32_t depth = rank_major(request);
      float worst = best_.worst();
      best_.reset();
      if (depth > 0) beam_major(request, depth, worst);
      sync<AscendC::HardEvent::S_V>(*pipe_);
      prefixes_.FreeTensor(beam_);
      emit(request);
    }
  }

 private:
  // Returns the number of ranks in which every candidate stands that is at least the k-th best.
  __aicore__ inline uint32_t rank_major(uint32_t request) {
    uint32_t lot = s_.tile / kSlab;
    for (uint32_t rank = 0; rank < usable_; rank += kSlab) {
      bool any = false;
      for (uint32_t beam = 0; beam < s_.beams; beam += lot) {
        uint32_t beams = min_of(lot, s_.beams - beam), count = beams * kSlab;
        auto x = load(request, beam, beams, rank, min_of(kSlab, usable_ - rank));
        add_prefixes(x, beam, beams);
        // a mere count where nothing can be gained; what equals the worst decides nothing but the depth
        bool passed = best_.offer(x, iota_.Get<int32_t>(), 0, count) > 0;
        float floor = best_.worst() > kLowest ? best_.worst() : kLowest;
        vector_done();
        if (passed || best_.count_at_least(x, count, floor) > 0) any = true;
        xs_.FreeTensor(x);
      }
      if (!any) return rank;
    }
    return usable_;
  }
  __aicore__ inline void beam_major(uint32_t request, uint32_t depth, float worst) {
    uint32_t stride = round_up(depth, kSlab), lot = s_.tile / stride;
    shift_ = 0;
    while ((1u << shift_) < stride) ++shift_;
    auto index = index_.Get<int32_t>();
    for (uint32_t i = 0; i < lot; ++i)  // beam << shift | rank
      AscendC::Adds(index[i * stride], iota_.Get<int32_t>(), int32_t(i << shift_), int32_t(stride));
    for (uint32_t beam = 0; beam < s_.beams; beam += lot) {
      uint32_t beams = min_of(lot, s_.beams - beam), count = beams * stride;
      auto x = load(request, beam, beams, 0, depth);
      for (uint32_t i = 0; i < beams; ++i)
        AscendC::Adds(x[i * stride], x[i * stride], beam_.GetValue(beam + i), int32_t(stride));
      vector_done();
      // until k stand, what equals the k-th best may come in; after that it is too late
      bool full = !(best_.worst() < worst);
      best_.offer(x, index, int32_t(beam << shift_), count, worst, full ? AscendC::CMPMODE::GT : AscendC::CMPMODE::GE);
      xs_.FreeTensor(x);
    }
  }
  // [beams, ranks rounded up to 8]; -inf behind the last rank.
  __aicore__ inline Floats load(uint32_t request, uint32_t beam, uint32_t beams, uint32_t rank, uint32_t ranks) {
    auto x = xs_.AllocTensor<float>();
    AscendC::DataCopyExtParams copy{uint16_t(beams), ranks * 4, (s_.ranks - ranks) * 4, 0, 0};
    AscendC::DataCopyPadExtParams<float> pad{true, 0, uint8_t(round_up(ranks, kSlab) - ranks), kNegInf};
    AscendC::DataCopyPad(x, logp_[(uint64_t(request) * s_.beams + beam) * s_.ranks + rank], copy, pad);
    xs_.EnQue(x);
    return xs_.DeQue<float>();
  }
  __aicore__ inline void add_prefixes(const Floats &x, uint32_t beam, uint32_t beams) {
    auto wide = wide_.Get<float>();
    AscendC::Brcb(wide, beam_[beam], uint8_t((beams + 7) / 8), AscendC::BrcbRepeatParams{1, 8});
    vector_done();
    AscendC::Add(x, x, wide, int32_t(beams * kSlab));
    vector_done();
  }

  __aicore__ inline void emit(uint32_t request) {
    using namespace AscendC;
    uint32_t padded = best_.padded_k();
    int32_t count = int32_t(padded);
    auto score = outs_.AllocTensor<float>();
    auto parent = score[padded].ReinterpretCast<int32_t>();
    auto token = tokens_.AllocTensor<int32_t>();
    auto index = index_.Get<int32_t>(), none = wide_.Get<int32_t>();
    best_.split_columns(score, index);
    vector_done();
    ShiftRight(parent, index, int32_t(shift_), count);
    ShiftRight(none, index, int32_t(31), count);
    sync<HardEvent::V_S>(*pipe_);
    pick_tokens(request, token, index);
    vector_done();
    Or(token.ReinterpretCast<int16_t>(), token.ReinterpretCast<int16_t>(), none.ReinterpretCast<int16_t>(), count * 2);
    outs_.EnQue(score);
    tokens_.EnQue(token);
    score = outs_.DeQue<float>();
    token = tokens_.DeQue<int32_t>();
    copy_out(score_[uint64_t(request) * s_.k], score, s_.k);
    copy_out(parent_[uint64_t(request) * s_.k], parent, s_.k);
    copy_out(chosen_[uint64_t(request) * s_.k], token, s_.k);
    outs_.FreeTensor(score);
    tokens_.FreeTensor(token);
  }
  // Each token is four bytes somewhere in GM: one small movement each, a data block apart, then Gather closes the gaps.
  __aicore__ inline void pick_tokens(uint32_t request, const Ints &token, const Ints &index) {
    for (uint32_t at = 0; at < best_.padded_k(); at += LOT) {
      uint32_t count = min_of(LOT, best_.padded_k() - at);
      auto lot = lots_.AllocTensor<int32_t>();
      for (uint32_t i = 0; i < count; ++i) {
        int32_t pair = index.GetValue(at + i);
        if (pair < 0) break;  // unfilled places are the last
        uint64_t beam = uint32_t(pair) >> shift_, rank = uint32_t(pair) & ((1u << shift_) - 1);
        copy_in(lot[i * 8], token_[(uint64_t(request) * s_.beams + beam) * s_.ranks + rank], 1, int32_t(0));
      }
      lots_.EnQue(lot);
      lot = lots_.DeQue<int32_t>();
      AscendC::Gather(token[at], lot, every_.Get<uint32_t>(), 0, count);
      lots_.FreeTensor(lot);
    }
  }

  AscendC::TPipe *pipe_;
  BeamMergeShape s_;
  uint32_t usable_, shift_ = 0;
  BestPairs best_;
  Floats beam_;
  AscendC::GlobalTensor<float> prefix_, logp_, score_;
  AscendC::GlobalTensor<int32_t> token_, parent_, chosen_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> xs_, lots_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> prefixes_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_, tokens_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> wide_, index_, iota_, every_;
};

}  // namespace npu_gr
