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
    pipe_ = pipe;
    s_ = shape;
    uint32_t cells = s_.tile_rows * kKeyBlock;
    scores_.SetGlobalBuffer((__gm__ Raw *)scores, uint64_t(s_.requests) * s_.heads * s_.row_slots * s_.key_slots);
    batch_.init(pipe, meta, s_.requests);
    tiles_.init(&batch_, s_.requests, s_.heads, s_.key_slots, s_.positions - 1, s_.tile_rows);
    bias_.init(pipe, bounds, row_times, key_times, tables, near,
               HstuBiasShape{s_.requests, s_.row_slots, s_.key_slots, s_.heads, s_.positions, s_.tile_rows});
    pipe->InitBuffer(ins_, 2, tiles_.most_rows() * kKeyBlock * sizeof(T));
    pipe->InitBuffer(outs_, 1, cells * sizeof(T));
    pipe->InitBuffer(x_, cells * 4);
    pipe->InitBuffer(e_, cells * 4);
    if (tiles_.has_history()) pipe->InitBuffer(times_, cells * 4);
    pipe->InitBuffer(columns_, kKeyBlock * 4);
    pipe->InitBuffer(seen_, cells / 8);
    pipe->InitBuffer(history_, kKeyBlock / 8);
    pipe->InitBuffer(zeros_, 32);
    AscendC::Duplicate(zeros_.Get<int32_t>(), int32_t(0), 8);
    AscendC::CreateVecIndex(columns_.Get<float>(), 0.0f, kKeyBlock);
  }
  __aicore__ inline void process() {
    weigh_seen();
    clear_unseen();
  }

 private:
  // Whether this core has a share of the tiles that are seen, or of the others; opens it.
  __aicore__ inline bool has_share(bool seen) {
    uint64_t total = tiles_.total(seen), core = AscendC::GetBlockIdx(), cores = AscendC::GetBlockNum();
    tiles_.begin(seen, uint32_t(total * core / cores), uint32_t(total * (core + 1) / cores));
    return tiles_.has_next();
  }
  __aicore__ inline void weigh_seen() {
    if (!has_share(true)) return;
    HstuTile next = tiles_.next();
    load(next);
    for (bool goes_on = true; goes_on;) {
      HstuTile tile = next;
      goes_on = tiles_.has_next();
      if (goes_on) {
        next = tiles_.next();
        load(next);  // moves while this one is worked on
      }
      auto in = ins_.template DeQue<Raw>();
      for (uint32_t first = 0; first < tile.rows; first += s_.tile_rows)
        weigh(tile.part(first, s_.tile_rows), in[first * kKeyBlock]);
      ins_.FreeTensor(in);
    }
  }
  __aicore__ inline void clear_unseen() {
    if (!has_share(false)) return;
    auto zeros = outs_.template AllocTensor<Raw>();
    AscendC::Duplicate(zeros, Raw(0), int32_t(s_.tile_rows * kKeyBlock));
    outs_.EnQue(zeros);
    zeros = outs_.template DeQue<Raw>();
    while (tiles_.has_next()) {
      HstuTile tile = tiles_.next();
      for (uint32_t first = 0; first < tile.rows; first += s_.tile_rows) store(tile.part(first, s_.tile_rows), zeros);
    }
    outs_.FreeTensor(zeros);
  }
  __aicore__ inline uint64_t at(const HstuTile &tile) const {
    uint64_t row = (uint64_t(tile.request) * s_.heads + tile.head) * s_.row_slots + tile.row;
    return row * s_.key_slots + tile.key;
  }
  __aicore__ inline void load(const HstuTile &tile) {
    auto in = ins_.template AllocTensor<Raw>();
    gather_rows(in, scores_[at(tile)], tile.rows, kKeyBlock, s_.key_slots);
    ins_.EnQue(in);
  }
  __aicore__ inline void store(const HstuTile &tile, const AscendC::LocalTensor<Raw> &out) {
    scatter_rows(scores_[at(tile)], out, tile.rows, kKeyBlock, s_.key_slots);
  }
  __aicore__ inline void weigh(const HstuTile &tile, const AscendC::LocalTensor<Raw> &in) {
    using namespace AscendC;
    int32_t count = int32_t(tile.rows * kKeyBlock);
    auto x = x_.Get<float>(), e = e_.Get<float>();
    vector_done();  // of the tile before
    bias_.look(tile);
    bool is_constant = bias_.is_constant(tile);
    auto bias = is_constant ? e : bias_.make(tile, e, tiles_.has_history() ? times_.Get<float>() : x);
    vector_done();
    auto scores = widened(in, x, uint32_t(count));
    if (s_.alpha != kOne) {
      Muls(x, scores, float_of(s_.alpha), count);
      vector_done();
      scores = x;
    }
    if (is_constant)
      Adds(x, scores, bias_.constant(tile), count);
    else
      add(x, scores, bias, tile);
    vector_done();
    Exp(e, x, count);
    vector_done();
    Adds(e, e, 1.0f, count);
    vector_done();
    auto out = outs_.template AllocTensor<Raw>();  // here, to overlap with the store of the last tile
    auto weights = kNarrow ? x : out.template ReinterpretCast<float>();
    Div(weights, x, e, count);
    vector_done();
    if (!tile.is_full()) {
      see(tile);
      Select(weights, seen_.Get<uint8_t>(), weights, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(count));
      vector_done();
    }
    if constexpr (kNarrow) Cast(out.template ReinterpretCast<T>(), weights, RoundMode::CAST_RINT, uint32_t(count));
    outs_.EnQue(out);
    out = outs_.template DeQue<Raw>();
    store(tile, out);
    outs_.FreeTensor(out);
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
  __aicore__ inline void add(const Floats &x, const Floats &scores, const Floats &bias, const HstuTile &tile) {
    if (!tile.candidates) {
      AscendC::Add(x, scores, bias, int32_t(tile.rows * kKeyBlock));
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
    auto seen = seen_.Get<uint8_t>();
    int32_t before = int32_t(tile.limit) - int32_t(tile.key), own = int32_t(tile.own) - int32_t(tile.key);
    if (tile.candidates) {
      see_history(before, tile.rows);
      sync<HardEvent::V_S>(*pipe_);
      auto words = seen.template ReinterpretCast<uint32_t>();
      for (int32_t i = 0; i < int32_t(tile.rows); ++i) {
        int32_t column = own + i, word = column / 32 * 32;
        if (column < 0 || column >= int32_t(kKeyBlock)) continue;
        int32_t held = before - word;  // keys of the history in this word, which the own key is behind
        uint32_t bits = held > 0 ? (1u << held) - 1 : 0;
        words.SetValue((uint32_t(i) * kKeyBlock + uint32_t(word)) / 32, bits | 1u << (column - word));
      }
      sync<HardEvent::S_V>(*pipe_);
    } else if (tile.request != seen_request_ || tile.row != seen_row_ || tile.key != seen_key_) {
      for (uint32_t i = 0; i < tile.rows; ++i)
        compare_with(seen[i * kKeyBlock / 8], columns, float(own + int32_t(i)), CMPMODE::LE, kKeyBlock);
    }
    vector_done();
    seen_request_ = tile.candidates ? ~0u : tile.request;
    seen_row_ = tile.row;
    seen_key_ = tile.key;
  }

  // The first `before` keys, in every row.
  __aicore__ inline void see_history(int32_t before, uint32_t rows) {
    using namespace AscendC;
    auto history = history_.Get<uint8_t>();
    compare_with(history, columns_.Get<float>(), float(before), CMPMODE::LT, kKeyBlock);
    vector_done();
    Add(seen_.Get<int32_t>(), history.template ReinterpretCast<int32_t>(), zeros_.Get<int32_t>(), 64,
        uint8_t(round_up(rows, 8) / 8), BinaryRepeatParams{1, 0, 0, 8, 0, 0});
  }

  static constexpr uint32_t kOne = 0x3F800000;  // 1.0f
  AscendC::TPipe *pipe_;
  HstuScoresShape s_;
  HstuBatch batch_;
  HstuTiles tiles_;
  HstuBias bias_;
  uint32_t seen_request_ = ~0u, seen_row_ = 0, seen_key_ = 0;  // of the history tile that `seen_` holds
  AscendC::GlobalTensor<Raw> scores_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> ins_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outs_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> x_, e_, times_, columns_, seen_, history_, zeros_;
};

}  // namespace npu_gr
