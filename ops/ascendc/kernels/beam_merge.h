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
  static constexpr uint32_t SLAB = 8;                // ranks, a data block
  static constexpr uint32_t LOT = 64;                // tokens fetched at a time
  static constexpr float LOWEST = -3.402823466e38f;  // of what may be chosen

 public:
  __aicore__ inline void Init(AscendC::TPipe *pipe, GM_ADDR prefix, GM_ADDR logp, GM_ADDR token, GM_ADDR score,
                              GM_ADDR parent, GM_ADDR chosen, const BeamMergeShape &shape) {
    pipe_ = pipe, s_ = shape, usable_ = Min(s_.ranks, s_.k);  // k of its own beam are before whatever lies deeper
    uint64_t cells = uint64_t(s_.requests) * s_.beams * s_.ranks, out = uint64_t(s_.requests) * s_.k;
    prefix_.SetGlobalBuffer((__gm__ float *)prefix, uint64_t(s_.requests) * s_.beams);
    logp_.SetGlobalBuffer((__gm__ float *)logp, cells), token_.SetGlobalBuffer((__gm__ int32_t *)token, cells);
    score_.SetGlobalBuffer((__gm__ float *)score, out), parent_.SetGlobalBuffer((__gm__ int32_t *)parent, out);
    chosen_.SetGlobalBuffer((__gm__ int32_t *)chosen, out);
    uint32_t padded = Up(s_.k, 32);
    best_.Init(pipe_, s_.tile, s_.k);
    pipe_->InitBuffer(xs_, 2, s_.tile * 4), pipe_->InitBuffer(prefixes_, 1, s_.beams * 4);
    pipe_->InitBuffer(wide_, s_.tile * 4), pipe_->InitBuffer(index_, s_.tile * 4),
        pipe_->InitBuffer(iota_, s_.tile * 4);
    pipe_->InitBuffer(outs_, 1, padded * 8), pipe_->InitBuffer(tokens_, 1, padded * 4);
    pipe_->InitBuffer(lots_, 2, LOT * 32), pipe_->InitBuffer(every_, LOT * 4);
    AscendC::CreateVecIndex(iota_.Get<int32_t>(), int32_t(0), s_.tile);
    VectorDone();
    AscendC::ShiftLeft(every_.Get<int32_t>(), iota_.Get<int32_t>(), int32_t(5), int32_t(LOT));  // 32 bytes each
  }
  __aicore__ inline void Process() {
    for (uint32_t request = AscendC::GetBlockIdx(); request < s_.requests; request += AscendC::GetBlockNum()) {
      auto prefix = prefixes_.AllocTensor<float>();
      CopyIn(prefix, prefix_[uint64_t(request) * s_.beams], s_.beams, 0.0f);
      prefixes_.EnQue(prefix);
      beam_ = prefixes_.DeQue<float>();
      best_.Reset();
      uint32_t depth = RankMajor(request);
      float worst = best_.Worst();
      best_.Reset();
      if (depth > 0) BeamMajor(request, depth, worst);
      Sync<AscendC::HardEvent::S_V>(*pipe_);
      prefixes_.FreeTensor(beam_);
      Emit(request);
    }
  }

 private:
  // Returns the number of ranks in which every candidate stands that is at least the k-th best.
  __aicore__ inline uint32_t RankMajor(uint32_t request) {
    uint32_t lot = s_.tile / SLAB;
    for (uint32_t rank = 0; rank < usable_; rank += SLAB) {
      bool any = false;
      for (uint32_t beam = 0; beam < s_.beams; beam += lot) {
        uint32_t beams = Min(lot, s_.beams - beam), count = beams * SLAB;
        auto x = Load(request, beam, beams, rank, Min(SLAB, usable_ - rank));
        AddPrefixes(x, beam, beams);
        // a mere count where nothing can be gained; what equals the worst decides nothing but the depth
        bool passed = best_.Offer(x, iota_.Get<int32_t>(), 0, count) > 0;
        float floor = best_.Worst() > LOWEST ? best_.Worst() : LOWEST;
        VectorDone();
        if (passed || best_.CountAtLeast(x, count, floor) > 0) any = true;
        xs_.FreeTensor(x);
      }
      if (!any) return rank;
    }
    return usable_;
  }
  __aicore__ inline void BeamMajor(uint32_t request, uint32_t depth, float worst) {
    uint32_t stride = Up(depth, SLAB), lot = s_.tile / stride;
    shift_ = 0;
    while ((1u << shift_) < stride) ++shift_;
    auto index = index_.Get<int32_t>();
    for (uint32_t i = 0; i < lot; ++i)  // beam << shift | rank
      AscendC::Adds(index[i * stride], iota_.Get<int32_t>(), int32_t(i << shift_), int32_t(stride));
    for (uint32_t beam = 0; beam < s_.beams; beam += lot) {
      uint32_t beams = Min(lot, s_.beams - beam), count = beams * stride;
      auto x = Load(request, beam, beams, 0, depth);
      for (uint32_t i = 0; i < beams; ++i)
        AscendC::Adds(x[i * stride], x[i * stride], beam_.GetValue(beam + i), int32_t(stride));
      VectorDone();
      // until k stand, what equals the k-th best may come in; after that it is too late
      bool full = !(best_.Worst() < worst);
      best_.Offer(x, index, int32_t(beam << shift_), count, worst, full ? AscendC::CMPMODE::GT : AscendC::CMPMODE::GE);
      xs_.FreeTensor(x);
    }
  }
  // [beams, ranks rounded up to 8]; -inf behind the last rank.
  __aicore__ inline Floats Load(uint32_t request, uint32_t beam, uint32_t beams, uint32_t rank, uint32_t ranks) {
    auto x = xs_.AllocTensor<float>();
    AscendC::DataCopyExtParams copy{uint16_t(beams), ranks * 4, (s_.ranks - ranks) * 4, 0, 0};
    AscendC::DataCopyPadExtParams<float> pad{true, 0, uint8_t(Up(ranks, SLAB) - ranks), NEG_INF};
    AscendC::DataCopyPad(x, logp_[(uint64_t(request) * s_.beams + beam) * s_.ranks + rank], copy, pad);
    xs_.EnQue(x);
    return xs_.DeQue<float>();
  }
  __aicore__ inline void AddPrefixes(const Floats &x, uint32_t beam, uint32_t beams) {
    auto wide = wide_.Get<float>();
    AscendC::Brcb(wide, beam_[beam], uint8_t((beams + 7) / 8), AscendC::BrcbRepeatParams{1, 8});
    VectorDone();
    AscendC::Add(x, x, wide, int32_t(beams * SLAB));
    VectorDone();
  }

  __aicore__ inline void Emit(uint32_t request) {
    using namespace AscendC;
    uint32_t padded = best_.PaddedK();
    int32_t count = int32_t(padded);
    auto score = outs_.AllocTensor<float>();
    auto parent = score[padded].ReinterpretCast<int32_t>();
    auto token = tokens_.AllocTensor<int32_t>();
    auto index = index_.Get<int32_t>(), none = wide_.Get<int32_t>();
    best_.Columns(score, index);
    VectorDone();
    ShiftRight(parent, index, int32_t(shift_), count);
    ShiftRight(none, index, int32_t(31), count);
    Sync<HardEvent::V_S>(*pipe_);
    Tokens(request, token, index);
    VectorDone();
    Or(token.ReinterpretCast<int16_t>(), token.ReinterpretCast<int16_t>(), none.ReinterpretCast<int16_t>(), count * 2);
    outs_.EnQue(score), tokens_.EnQue(token);
    score = outs_.DeQue<float>(), token = tokens_.DeQue<int32_t>();
    CopyOut(score_[uint64_t(request) * s_.k], score, s_.k);
    CopyOut(parent_[uint64_t(request) * s_.k], parent, s_.k);
    CopyOut(chosen_[uint64_t(request) * s_.k], token, s_.k);
    outs_.FreeTensor(score), tokens_.FreeTensor(token);
  }
  // Each token is four bytes somewhere in GM: one small movement each, a data block apart, then Gather closes the gaps.
  __aicore__ inline void Tokens(uint32_t request, const Ints &token, const Ints &index) {
    for (uint32_t at = 0; at < best_.PaddedK(); at += LOT) {
      uint32_t count = Min(LOT, best_.PaddedK() - at);
      auto lot = lots_.AllocTensor<int32_t>();
      for (uint32_t i = 0; i < count; ++i) {
        int32_t pair = index.GetValue(at + i);
        if (pair < 0) break;  // unfilled places are the last
        uint64_t beam = uint32_t(pair) >> shift_, rank = uint32_t(pair) & ((1u << shift_) - 1);
        CopyIn(lot[i * 8], token_[(uint64_t(request) * s_.beams + beam) * s_.ranks + rank], 1, int32_t(0));
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
