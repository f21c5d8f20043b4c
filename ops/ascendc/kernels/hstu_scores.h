// hstu_scores: products of queries and keys become HSTU's weights, in place, in one launch.
//
// scores [requests, heads, row_slots, key_slots]; y = fl(alpha * score) + bias, score := y / (1 + exp(y)), each step
// fp32, the last rounded to the scores' type. With alpha and tables negated that is -SiLU of what they were, exactly:
// the sign is folded back behind the next product, and a vector instruction an element is saved. Keys that a query does
// not see, those behind the last one included, become +0. Rows without a query are not touched.
#pragma once
#include "hstu_bias.h"

namespace npu_gr {

struct HstuScoresShape {
  uint32_t requests, row_slots, key_slots, heads, positions, tile_rows;
  uint32_t alpha;  // the bits of a float
};

template <typename T>
class HstuScores {
  using Raw = Moved<T>;
  using Floats = AscendC::LocalTensor<float>;
  static constexpr bool kNarrow = sizeof(T) == 2;

 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR scores, GM_ADDR meta, GM_ADDR bounds, GM_ADDR row_times,
                              GM_ADDR key_times, GM_ADDR tables, GM_ADDR near, const HstuScoresShape &shape) {
    s_ = shape;
    uint32_t cells = s_.tile_rows * kKeyBlock;
    scores_.SetGlobalBuffer((__gm__ Raw *)scores, uint64_t(s_.requests) * s_.heads * s_.row_slots * s_.key_slots);
    batch_.init(pipe, meta, s_.requests);
    tiles_.init(&batch_, s_.requests, s_.heads, s_.key_slots, s_.tile_rows);
    bias_.init(pipe, bounds, row_times, key_times, tables, near,
               HstuBiasShape{s_.requests, s_.row_slots, s_.key_slots, s_.heads, s_.positions, s_.tile_rows});
    pipe->InitBuffer(ins_, 2, cells * sizeof(T));
    pipe->InitBuffer(outs_, 1, cells * sizeof(T));
    pipe->InitBuffer(x_, cells * 4);
    pipe->InitBuffer(e_, cells * 4);
    pipe->InitBuffer(columns_, kKeyBlock * 4);
    pipe->InitBuffer(seen_, cells / 8);
    pipe->InitBuffer(history_, kKeyBlock / 8);
    AscendC::CreateVecIndex(columns_.Get<float>(), 0.0f, kKeyBlock);
  }
  __aicore__ inline void process() {
    uint64_t total = tiles_.total(), cores = AscendC::GetBlockNum();
    uint32_t begin = uint32_t(total * AscendC::GetBlockIdx() / cores);
    uint32_t end = uint32_t(total * (AscendC::GetBlockIdx() + 1) / cores);
    if (begin == end) return;
    HstuTile next = tiles_[begin];
    load(next);
    for (uint32_t number = begin; number < end; ++number) {
      HstuTile tile = next;
      if (number + 1 < end) {
        next = tiles_[number + 1];
        load(next);  // moves while this one is worked on
      }
      run(tile);
    }
  }

 private:
  __aicore__ inline uint64_t at(const HstuTile &tile) const {
    uint64_t row = (uint64_t(tile.request) * s_.heads + tile.head) * s_.row_slots + tile.row;
    return row * s_.key_slots + tile.key;
  }
  __aicore__ inline void load(const HstuTile &tile) {
    if (!tile.is_seen()) return;
    auto in = ins_.template AllocTensor<Raw>();
    gather_rows(in, scores_[at(tile)], tile.rows, kKeyBlock, s_.key_slots);
    ins_.EnQue(in);
  }
  // `outs_` has one buffer: the tile before has been stored, so nothing of it is still at work.
  __aicore__ inline void run(const HstuTile &tile) {
    auto out = outs_.template AllocTensor<Raw>();
    if (tile.is_seen())
      weigh(tile, out);
    else
      AscendC::Duplicate(out, Raw(0), int32_t(tile.rows * kKeyBlock));
    outs_.EnQue(out);
    out = outs_.template DeQue<Raw>();
    scatter_rows(scores_[at(tile)], out, tile.rows, kKeyBlock, s_.key_slots);
    outs_.FreeTensor(out);
  }
  __aicore__ inline void weigh(const HstuTile &tile, const AscendC::LocalTensor<Raw> &out) {
    using namespace AscendC;
    int32_t count = int32_t(tile.rows * kKeyBlock);
    auto in = ins_.template DeQue<Raw>();
    auto x = x_.Get<float>(), e = e_.Get<float>();
    auto scores = widened(in, x, uint32_t(count));
    if (s_.alpha != kOne) {
      Muls(x, scores, float_of(s_.alpha), count);
      vector_done();
      scores = x;
    }
    add_bias(tile, x, scores, e, count);
    ins_.FreeTensor(in);
    vector_done();
    Exp(e, x, count);
    vector_done();
    Adds(e, e, 1.0f, count);
    vector_done();
    auto weights = kNarrow ? x : out.template ReinterpretCast<float>();
    Div(weights, x, e, count);
    vector_done();
    if (!tile.is_full()) {
      see(tile);
      Select(weights, seen_.Get<uint8_t>(), weights, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(count));
      vector_done();
    }
    if constexpr (kNarrow) Cast(out.template ReinterpretCast<T>(), weights, RoundMode::CAST_RINT, uint32_t(count));
  }
  // The scores in fp32: themselves, or in x.
  __aicore__ inline Floats widened(const AscendC::LocalTensor<Raw> &in, const Floats &x, uint32_t count) {
    if constexpr (kNarrow) {
      AscendC::Cast(x, in.template ReinterpretCast<T>(), AscendC::RoundMode::CAST_NONE, count);
      vector_done();
      return x;
    } else {
      return in;
    }
  }
  __aicore__ inline void add_bias(const HstuTile &tile, const Floats &x, const Floats &scores, const Floats &e,
                                  int32_t count) {
    bias_.look(tile);
    if (bias_.is_constant(tile)) {
      AscendC::Adds(x, scores, bias_.constant(tile), count);
      return;
    }
    auto bias = bias_.make(tile, e);
    vector_done();
    if (!tile.candidates) {
      AscendC::Add(x, scores, bias, count);
      return;
    }
    constexpr uint8_t row = kKeyBlock / 8;
    for (uint32_t column = 0; column < kKeyBlock; column += 64)
      AscendC::Add(x[column], scores[column], bias[column], 64, uint8_t(tile.rows),
                   AscendC::BinaryRepeatParams{1, 1, 1, row, row, 0});
  }
  // Bits of the keys that each query sees. Where they are made for one head, they are made for all.
  __aicore__ inline void see(const HstuTile &tile) {
    using namespace AscendC;
    auto columns = columns_.Get<float>();
    auto seen = seen_.Get<uint8_t>(), history = history_.Get<uint8_t>();
    int32_t before = int32_t(tile.limit) - int32_t(tile.key), own = int32_t(tile.own) - int32_t(tile.key);
    if (tile.candidates) {
      compare_with(history, columns, float(before), CMPMODE::LT, kKeyBlock);
      for (uint32_t i = 0; i < tile.rows; ++i)
        compare_with(seen[i * kKeyBlock / 8], columns, float(own + int32_t(i)), CMPMODE::EQ, kKeyBlock);
      vector_done();
      auto bits = seen.template ReinterpretCast<uint16_t>();
      for (uint32_t i = 0; i < tile.rows; ++i)
        Or(bits[i * kKeyBlock / 16], bits[i * kKeyBlock / 16], history.template ReinterpretCast<uint16_t>(),
           int32_t(kKeyBlock / 16));
    } else if (tile.request != seen_request_ || tile.row != seen_row_ || tile.key != seen_key_) {
      for (uint32_t i = 0; i < tile.rows; ++i)
        compare_with(seen[i * kKeyBlock / 8], columns, float(own + int32_t(i)), CMPMODE::LE, kKeyBlock);
    }
    vector_done();
    seen_request_ = tile.candidates ? ~0u : tile.request;
    seen_row_ = tile.row;
    seen_key_ = tile.key;
  }

  static constexpr uint32_t kOne = 0x3F800000;  // 1.0f
  HstuScoresShape s_;
  HstuBatch batch_;
  HstuTiles tiles_;
  HstuBias bias_;
  uint32_t seen_request_ = ~0u, seen_row_ = 0, seen_key_ = 0;  // of the history tile that `seen_` holds
  AscendC::GlobalTensor<Raw> scores_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> ins_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x_, e_, columns_, seen_, history_;
};

}  // namespace npu_gr
