// hstu_finish: what stands between a layer's attention and its output matrix, of each query.
//
// a = scale * attention in fp32 (a negative scale folds the sign of hstu_scores back); its norm over groups of numbers,
// y = (a - mean) / sqrt(var + eps) * weight + bias; out = u * y, rounded once. Joined: out [queries, 3, heads, v_dim] =
// u, a, u * y. Sums: 64 numbers as a binary tree of neighbours, the sums of 64 one by one; mean = sum * fl(1 / group).
#pragma once
#include "hstu_batch.h"

namespace npu_gr {

struct HstuFinishShape {
  uint32_t requests, queries, row_slots, heads, v_dim;
  uint32_t group, lot;         // numbers that one norm is over: v_dim, or heads * v_dim; queries of one step
  uint32_t joined;             // 1: out has u and a as well
  uint32_t scale, share, eps;  // the bits of floats; share = 1 / group
};

template <typename T>
class HstuFinish {
  using Raw = Moved<T>;
  using Tensor = AscendC::LocalTensor<Raw>;
  using Floats = AscendC::LocalTensor<float>;
  static constexpr bool kNarrow = sizeof(T) == 2;
  static constexpr uint8_t kBlock = 8;  // floats of a data block

 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR attention, GM_ADDR u, GM_ADDR norm, GM_ADDR meta,
                              GM_ADDR out, const HstuFinishShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    width_ = s_.heads * s_.v_dim;
    attention_.SetGlobalBuffer((__gm__ Raw *)attention, uint64_t(s_.requests) * s_.row_slots * width_);
    u_.SetGlobalBuffer((__gm__ Raw *)u, uint64_t(s_.queries) * width_);
    out_.SetGlobalBuffer((__gm__ Raw *)out, uint64_t(s_.queries) * width_ * (s_.joined ? 3 : 1));
    batch_.init(pipe, meta, s_.requests);
    AscendC::GlobalTensor<float> from;
    from.SetGlobalBuffer((__gm__ float *)norm, 2 * s_.group);
    uint32_t cells = s_.lot * width_, groups = round_up(s_.lot * width_ / s_.group, kBlock);
    pipe_->InitBuffer(norms_in_, 1, 2 * s_.group * 4);
    pipe_->InitBuffer(attention_in_, 2, cells * sizeof(T));
    pipe_->InitBuffer(u_in_, 2, cells * sizeof(T));
    pipe_->InitBuffer(outs_, 1, cells * sizeof(T) * (s_.joined ? 3 : 1));
    pipe_->InitBuffer(a_, cells * 4);
    pipe_->InitBuffer(work_, cells * 4);
    pipe_->InitBuffer(sums_, groups * 4);
    pipe_->InitBuffer(part_, groups * 4);
    pipe_->InitBuffer(spread_, groups * 32);
    norm_ = norms_in_.AllocTensor<float>();
    copy_in(norm_, from, 2 * s_.group, 0.0f);
    norms_in_.EnQue(norm_);
    norm_ = norms_in_.DeQue<float>();
  }
  __aicore__ inline void process() {
    uint32_t cores = AscendC::GetBlockNum(), done = 0;
    for (uint32_t request = 0; request < s_.requests; ++request) {
      HstuEntry e = batch_[request];
      uint32_t lots = (e.rows + s_.lot - 1) / s_.lot;
      for (uint32_t lot = (AscendC::GetBlockIdx() + cores - done % cores) % cores; lot < lots; lot += cores)
        run_lot(e, request, lot * s_.lot);
      done += lots;
    }
  }

 private:
  // `outs_` has one buffer: the lot before has been stored, so nothing of it is still at work.
  __aicore__ inline void run_lot(const HstuEntry &e, uint32_t request, uint32_t first) {
    uint32_t rows = min_of(s_.lot, e.rows - first), count = rows * width_;
    uint64_t query = uint64_t(e.first_query) + first;
    auto in = attention_in_.template AllocTensor<Raw>();
    for (uint32_t head = 0; head < s_.heads; ++head) {
      uint64_t from = ((uint64_t(request) * s_.heads + head) * s_.row_slots + first) * s_.v_dim;
      gather_rows(in[head * s_.v_dim], attention_[from], rows, s_.v_dim, s_.v_dim, width_ - s_.v_dim);
    }
    attention_in_.EnQue(in);
    auto u = u_in_.template AllocTensor<Raw>();
    gather_rows(u, u_[query * width_], 1, count, count);
    u_in_.EnQue(u);
    in = attention_in_.template DeQue<Raw>();
    u = u_in_.template DeQue<Raw>();
    auto out = outs_.template AllocTensor<Raw>();
    auto gated = s_.joined ? out[2 * s_.lot * width_] : out;
    auto a = a_.Get<float>();
    scale(a, in, count);
    attention_in_.FreeTensor(in);
    if (s_.joined) {
      AscendC::DataCopy(out, u, count);
      narrow(out[s_.lot * width_], a, count);
    }
    normalise(a, rows * width_ / s_.group, count);
    gate(gated, a, u, count);
    u_in_.FreeTensor(u);
    outs_.EnQue(out);
    out = outs_.template DeQue<Raw>();
    if (s_.joined) {
      for (uint32_t part = 0; part < 3; ++part)
        scatter_rows(out_[(query * 3 + part) * width_], out[part * s_.lot * width_], rows, width_, 3 * width_);
    } else {
      copy_out(out_[query * width_], out, count);
    }
    outs_.FreeTensor(out);
  }
  __aicore__ inline void scale(const Floats &a, const Tensor &in, uint32_t count) {
    if constexpr (kNarrow) {
      AscendC::Cast(a, in.template ReinterpretCast<T>(), AscendC::RoundMode::CAST_NONE, count);
      vector_done();
      AscendC::Muls(a, a, float_of(s_.scale), int32_t(count));
    } else {
      AscendC::Muls(a, in, float_of(s_.scale), int32_t(count));
    }
    vector_done();
  }
  __aicore__ inline void narrow(const Tensor &to, const Floats &from, uint32_t count) {
    if constexpr (kNarrow)
      AscendC::Cast(to.template ReinterpretCast<T>(), from, AscendC::RoundMode::CAST_RINT, count);
    else
      AscendC::DataCopy(to, from, count);
  }
  // a becomes its norm.
  __aicore__ inline void normalise(const Floats &a, uint32_t groups, uint32_t count) {
    using namespace AscendC;
    auto squares = work_.Get<float>(), sums = sums_.Get<float>();
    add_up(a, groups);
    Muls(sums, sums, float_of(s_.share), int32_t(groups));
    vector_done();
    spread(groups);
    by_group(a, groups, true, [&](auto to, auto x, uint64_t mask, const BinaryRepeatParams &by) {
      Sub(to, to, x, mask, uint8_t(groups), by);
    });
    Mul(squares, a, a, int32_t(count));
    vector_done();
    add_up(squares, groups);
    Muls(sums, sums, float_of(s_.share), int32_t(groups));
    vector_done();
    Adds(sums, sums, float_of(s_.eps), int32_t(groups));
    vector_done();
    Sqrt(sums, sums, int32_t(groups));
    vector_done();
    spread(groups);
    by_group(a, groups, true, [&](auto to, auto x, uint64_t mask, const BinaryRepeatParams &by) {
      Div(to, to, x, mask, uint8_t(groups), by);
    });
    by_group(a, groups, false, [&](auto to, auto x, uint64_t mask, const BinaryRepeatParams &by) {
      Mul(to, to, x, mask, uint8_t(groups), by);
    });
    by_group(a, groups, false, [&](auto to, auto x, uint64_t mask, const BinaryRepeatParams &by) {
      Add(to, to, x[s_.group], mask, uint8_t(groups), by);
    });
  }
  // sums = the sum of each group of x.
  __aicore__ inline void add_up(const Floats &x, uint32_t groups) {
    auto sums = sums_.Get<float>(), part = part_.Get<float>();
    for (uint32_t at = 0; at < s_.group; at += 64) {
      AscendC::WholeReduceSum(at == 0 ? sums : part, x[at], int32_t(min_of(64, s_.group - at)), int32_t(groups), 1, 1,
                              int32_t(s_.group / kBlock));
      vector_done();
      if (at == 0) continue;
      AscendC::Add(sums, sums, part, int32_t(groups));
      vector_done();
    }
  }
  // Each sum fills a data block.
  __aicore__ inline void spread(uint32_t groups) {
    AscendC::Brcb(spread_.Get<float>(), sums_.Get<float>(), uint8_t(round_up(groups, kBlock) / kBlock),
                  AscendC::BrcbRepeatParams{1, 8});
    vector_done();
  }
  // 64 numbers of every group at a time: with the group's own number, or with those of `norm_`.
  template <typename Step>
  __aicore__ inline void by_group(const Floats &a, uint32_t groups, bool own, Step step) {
    uint8_t pitch = uint8_t(s_.group / kBlock);
    auto numbers = spread_.Get<float>();
    for (uint32_t at = 0; at < s_.group; at += 64) {
      uint64_t mask = min_of(64, s_.group - at);
      if (own)
        step(a[at], numbers, mask, AscendC::BinaryRepeatParams{1, 1, 0, pitch, pitch, 1});
      else
        step(a[at], norm_[at], mask, AscendC::BinaryRepeatParams{1, 1, 1, pitch, pitch, 0});
    }
    vector_done();
  }
  __aicore__ inline void gate(const Tensor &to, const Floats &y, const Tensor &u, uint32_t count) {
    if constexpr (kNarrow) {
      auto wide = work_.Get<float>();
      AscendC::Cast(wide, u.template ReinterpretCast<T>(), AscendC::RoundMode::CAST_NONE, count);
      vector_done();
      AscendC::Mul(y, y, wide, int32_t(count));
      vector_done();
      narrow(to, y, count);
    } else {
      AscendC::Mul(to, y, u, int32_t(count));
    }
  }

  AscendC::TPipe *pipe_;
  HstuFinishShape s_;
  uint32_t width_;
  HstuBatch batch_;
  Floats norm_;
  AscendC::GlobalTensor<Raw> attention_, u_, out_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> norms_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> attention_in_, u_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> a_, work_, sums_, part_, spread_;
};

}  // namespace npu_gr
