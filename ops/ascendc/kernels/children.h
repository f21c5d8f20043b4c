// The logits of a beam's children: a row of logits comes to UB, its children's codes, and Gather picks.
//
// A row whose accumulated score or norm is -inf, or that has no children, is out and moves nothing.
#pragma once
#include "masked_topk.h"

namespace npu_gr {

struct CsrShape {
  uint32_t rows, codes, edges, k, tile;
  uint32_t groups, pieces, shift;  // index of a pair = row << shift | child
  uint32_t has_norm, has_allowed;
};

// Columns of 4-byte numbers, one number a row, of which some rows are in UB: read by the scalar unit. All columns are
// one buffer of one queue, because each buffer that is free holds one of the 8 hardware events of VECIN.
template <uint32_t kColumns>
class RowColumns {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR const (&columns)[kColumns], uint32_t rows, uint32_t held) {
    pipe_ = pipe;
    pitch_ = round_up(held, 8);
    for (uint32_t i = 0; i < kColumns; ++i) gm_[i].SetGlobalBuffer((__gm__ int32_t *)columns[i], rows);
    pipe_->InitBuffer(queue_, 1, kColumns * pitch_ * 4);
  }
  __aicore__ inline void load(uint32_t first, uint32_t count) {
    table_ = queue_.template AllocTensor<int32_t>();
    for (uint32_t i = 0; i < kColumns; ++i) copy_in(table_[i * pitch_], gm_[i][uint64_t(first)], count, int32_t(0));
    queue_.EnQue(table_);
    table_ = queue_.template DeQue<int32_t>();
    sync<AscendC::HardEvent::MTE2_S>(*pipe_);
  }
  __aicore__ inline AscendC::LocalTensor<int32_t> column(uint32_t i) const { return table_[i * pitch_]; }
  __aicore__ inline int32_t integer(uint32_t i, uint32_t row) const { return column(i).GetValue(row); }
  __aicore__ inline float number(uint32_t i, uint32_t row) const {
    return column(i).template ReinterpretCast<float>().GetValue(row);
  }
  // To be called after the scalar unit's last read.
  __aicore__ inline void free() {
    sync<AscendC::HardEvent::S_V>(*pipe_);
    queue_.FreeTensor(table_);
  }

 private:
  AscendC::TPipe *pipe_;
  uint32_t pitch_;  // numbers of one column in UB
  AscendC::GlobalTensor<int32_t> gm_[kColumns];
  AscendC::LocalTensor<int32_t> table_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> queue_;
};

template <typename T>
class Children {
  using Raw = typename Stored<T>::Raw;
  static constexpr bool kNarrow = sizeof(T) == 2;

 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR logits, GM_ADDR code, GM_ADDR allowed,
                              const CsrShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    logits_.SetGlobalBuffer((__gm__ Raw *)logits, uint64_t(s_.rows) * s_.codes);
    code_.SetGlobalBuffer((__gm__ int32_t *)code, s_.edges);
    allowed_.SetGlobalBuffer((__gm__ uint8_t *)allowed, s_.has_allowed ? s_.edges : 0);
    pipe_->InitBuffer(rows_, kNarrow ? 1 : 2, s_.codes * sizeof(T));
    if constexpr (kNarrow) pipe_->InitBuffer(wide_, s_.codes * 4);
    pipe_->InitBuffer(codes_, 2, s_.tile * 4);
    pipe_->InitBuffer(flags_, 2, s_.tile);
    pipe_->InitBuffer(halves_, s_.tile * 2);
    pipe_->InitBuffer(bits_, s_.tile / 8);
  }
  __aicore__ inline void open(uint32_t row) {
    auto raw = rows_.template AllocTensor<Raw>();
    copy_in(raw, logits_[uint64_t(row) * s_.codes], s_.codes, Raw(0));
    rows_.EnQue(raw);
    raw_ = rows_.template DeQue<Raw>();
    if constexpr (kNarrow) {
      row_ = wide_.Get<float>();
      AscendC::Cast(row_, raw_.template ReinterpretCast<T>(), AscendC::RoundMode::CAST_NONE,
                    s_.codes);  // pick has the barrier
    } else {
      row_ = raw_;
    }
  }
  __aicore__ inline void close() { rows_.FreeTensor(raw_); }

  // x[0 .. count) = logits of the open row's children behind `edges`; -inf where the child is not allowed.
  __aicore__ inline void pick(const AscendC::LocalTensor<float> &x, uint64_t edge, uint32_t count) {
    auto code = codes_.AllocTensor<int32_t>();
    copy_in(code, code_[edge], count, int32_t(0));
    codes_.EnQue(code);
    code = codes_.DeQue<int32_t>();
    AscendC::ShiftLeft(code, code, int32_t(2), int32_t(count));  // bytes
    vector_done();
    AscendC::Gather(x, row_, code.ReinterpretCast<uint32_t>(), 0, count);
    vector_done();
    codes_.FreeTensor(code);
    if (s_.has_allowed) forbid(x, edge, count);
  }

 private:
  __aicore__ inline void forbid(const AscendC::LocalTensor<float> &x, uint64_t edge, uint32_t count) {
    auto flag = flags_.AllocTensor<uint8_t>();
    copy_in(flag, allowed_[edge], count, uint8_t(0));
    flags_.EnQue(flag);
    flag = flags_.DeQue<uint8_t>();
    auto wide = halves_.Get<half>();
    auto bits = bits_.Get<uint8_t>();
    AscendC::Cast(wide, flag, AscendC::RoundMode::CAST_NONE, count);
    vector_done();
    compare_with(bits, wide, half(0), AscendC::CMPMODE::NE, round_up(count, 128));
    vector_done();
    AscendC::Select(x, bits, x, kNegInf, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    vector_done();
    flags_.FreeTensor(flag);
  }

  AscendC::TPipe *pipe_;
  CsrShape s_;
  AscendC::LocalTensor<Raw> raw_;
  AscendC::LocalTensor<float> row_;
  AscendC::GlobalTensor<Raw> logits_;
  AscendC::GlobalTensor<int32_t> code_;
  AscendC::GlobalTensor<uint8_t> allowed_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> rows_, codes_, flags_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> wide_, halves_, bits_;
};

}  // namespace npu_gr
