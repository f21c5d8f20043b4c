// masked_topk: the k best allowed elements of each row; equal scores in the order of their index.
//
// logits [rows, n], mask bits [rows, mask_stride bytes] (bit 1 = allowed, lowest bit first), bias [rows] or none.
// Values fp32 [rows, k] and indices int32 [rows, k]; (-inf, -1) where nothing is left. NaN and -inf are never chosen.
// A row may be split over cores: each then leaves its best pairs, in the order of the parts, for merge_pairs.
#pragma once
#include "best_pairs.h"

namespace npu_gr {

struct MaskedTopkShape {
  uint32_t rows, n, k, tile, mask_stride;
  uint32_t splits, part;  // parts of a row, elements of one: a multiple of the tile
  uint32_t has_bias;
};

// T: float, half or bfloat16_t. Raw: what moves through the queues, and its -inf.
template <typename T>
struct Stored {
  using Raw = uint16_t;
  static constexpr Raw kMinusInf = std::is_same<T, half>::value ? 0xFC00 : 0xFF80;
};
template <>
struct Stored<float> {
  using Raw = float;
  static constexpr Raw kMinusInf = kNegInf;
};

template <typename T>
class MaskedTopk {
  using Raw = typename Stored<T>::Raw;
  static constexpr bool kNarrow = sizeof(T) == 2;

 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR logits, GM_ADDR mask, GM_ADDR bias, GM_ADDR value,
                              GM_ADDR index, GM_ADDR workspace, const MaskedTopkShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    uint64_t out = uint64_t(s_.rows) * s_.k, padded = round_up(s_.k, 32);
    logits_.SetGlobalBuffer((__gm__ Raw *)logits, uint64_t(s_.rows) * s_.n);
    mask_.SetGlobalBuffer((__gm__ uint8_t *)mask, uint64_t(s_.rows) * s_.mask_stride);
    bias_.SetGlobalBuffer((__gm__ float *)bias, s_.has_bias ? s_.rows : 0);
    value_.SetGlobalBuffer((__gm__ float *)value, out);
    index_.SetGlobalBuffer((__gm__ int32_t *)index, out);
    pairs_.SetGlobalBuffer((__gm__ float *)workspace, s_.splits > 1 ? padded * 2 * s_.splits * s_.rows : 0);
    best_.init(pipe_, s_.tile, s_.k);
    pipe_->InitBuffer(raws_, 2, s_.tile * sizeof(T));
    pipe_->InitBuffer(masks_, 2, round_up(s_.tile / 8, 256));
    pipe_->InitBuffer(iota_, s_.tile * 4);
    pipe_->InitBuffer(scalar_, 1, 32);
    if constexpr (kNarrow) pipe_->InitBuffer(wide_, s_.tile * 4);
    pipe_->InitBuffer(outs_, 1, uint32_t(padded) * 8);
    AscendC::CreateVecIndex(iota_.Get<int32_t>(), int32_t(0), s_.tile);  // once: slow on the hardware
  }
  __aicore__ inline void process() {
    for (uint32_t item = AscendC::GetBlockIdx(); item < s_.rows * s_.splits; item += AscendC::GetBlockNum())
      run_part(item / s_.splits, item % s_.splits);
  }

 private:
  __aicore__ inline void run_part(uint32_t row, uint32_t part) {
    uint32_t begin = part * s_.part, end = s_.n - begin < s_.part ? s_.n : begin + s_.part;
    float bias = s_.has_bias ? add_bias(row) : 0.0f;
    best_.reset();
    if (begin < end) load(row, begin, end);
    for (uint32_t at = begin; at < end; at += s_.tile) {
      if (end - at > s_.tile) load(row, at + s_.tile, end);  // the next tile moves while this one is worked on
      run_tile(at, min_of(s_.tile, end - at), bias);
    }
    if (s_.splits > 1)
      store_pairs(row * s_.splits + part);
    else
      store_columns(row);
  }
  __aicore__ inline float add_bias(uint32_t row) {
    auto cell = scalar_.template AllocTensor<float>();
    copy_in(cell, bias_[uint64_t(row)], 1, 0.0f);
    scalar_.EnQue(cell);
    cell = scalar_.template DeQue<float>();
    sync<AscendC::HardEvent::MTE2_S>(*pipe_);
    float bias = cell.GetValue(0);
    sync<AscendC::HardEvent::S_V>(*pipe_);
    scalar_.FreeTensor(cell);
    return bias;
  }
  __aicore__ inline void load(uint32_t row, uint32_t at, uint32_t end) {
    uint32_t count = min_of(s_.tile, end - at);
    auto raw = raws_.template AllocTensor<Raw>();
    copy_in(raw, logits_[uint64_t(row) * s_.n + at], count, Stored<T>::kMinusInf);
    raws_.EnQue(raw);
    auto mask = masks_.template AllocTensor<uint8_t>();
    copy_in(mask, mask_[uint64_t(row) * s_.mask_stride + at / 8], (count + 7) / 8, uint8_t(0));
    masks_.EnQue(mask);
  }
  __aicore__ inline void run_tile(uint32_t at, uint32_t count, float bias) {
    auto raw = raws_.template DeQue<Raw>();
    auto mask = masks_.template DeQue<uint8_t>();
    AscendC::LocalTensor<float> x;
    if constexpr (kNarrow) {
      x = wide_.Get<float>();
      vector_done();  // the filter of the tile before may still read it
      AscendC::Cast(x, raw.template ReinterpretCast<T>(), AscendC::RoundMode::CAST_NONE, count);
      vector_done();
    } else {
      x = raw;
    }
    AscendC::Select(x, mask, x, kNegInf, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    vector_done();
    if (s_.has_bias) {
      AscendC::Adds(x, x, bias, int32_t(count));
      vector_done();
    }
    best_.offer(x, iota_.Get<int32_t>(), int32_t(at), count);
    raws_.FreeTensor(raw);
    masks_.FreeTensor(mask);
  }
  __aicore__ inline void store_columns(uint32_t row) {
    auto out = outs_.template AllocTensor<float>();
    auto index = out[best_.padded_k()].template ReinterpretCast<int32_t>();
    best_.split_columns(out, index);
    outs_.EnQue(out);
    out = outs_.template DeQue<float>();
    copy_out(value_[uint64_t(row) * s_.k], out, s_.k);
    copy_out(index_[uint64_t(row) * s_.k], index, s_.k);
    outs_.FreeTensor(out);
  }
  __aicore__ inline void store_pairs(uint32_t list) {
    uint32_t words = best_.padded_k() * 2;
    auto out = outs_.template AllocTensor<float>();
    AscendC::DataCopy(out, best_.best(), words);
    outs_.EnQue(out);
    out = outs_.template DeQue<float>();
    copy_out(pairs_[uint64_t(list) * words], out, words);
    outs_.FreeTensor(out);
  }

  AscendC::TPipe *pipe_;
  MaskedTopkShape s_;
  BestPairs best_;
  AscendC::GlobalTensor<Raw> logits_;
  AscendC::GlobalTensor<uint8_t> mask_;
  AscendC::GlobalTensor<float> bias_, value_, pairs_;
  AscendC::GlobalTensor<int32_t> index_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> raws_, masks_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> scalar_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> iota_, wide_;
};

}  // namespace npu_gr
