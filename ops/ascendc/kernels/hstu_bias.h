// The relative bias of a tile: fl(time[bucket] + position[distance]) of each query and key, in fp32.
//
// bucket of f = float(d + 1), d = max(query time - key time, 0): twice its exponent, and one more in the upper half of
// its octave. Times are int32 relative to the request's first, and bounds of each block say on the scalar unit which
// buckets a tile can hold: one is a number, up to eight are compared with their borders and selected, more are gathered
// by the bits of f. All three give the same numbers. Where every key is far, `far` has time and position in one.
// near [heads, 8, width]: position by distance falling, its ends repeated 288 times, row s shifted by 7 - s, so that
// the window of any query begins on a data block of one of them. A window slides by one a query: up to eight queries in
// a row have theirs at the same place of rows that follow each other.
#pragma once
#include "hstu_tiles.h"

namespace npu_gr {

constexpr uint32_t kSelected = 8;       // buckets that are selected; of more, their bits are gathered
constexpr uint32_t kFloatBucket = 254;  // of 1.0f: the bits of a float, shifted by 22
constexpr uint32_t kTablesLead = 256;   // numbers before and behind the tables, which begin at kFloatBucket

struct HstuBiasShape {
  uint32_t requests, row_slots, key_slots, heads, positions, tile_rows;
};

// Bucket of n = d + 1 before it is rounded to a float; a float may be one bucket up.
__aicore__ inline uint32_t bucket_below(uint32_t n) {
  uint32_t octave = 0;
  for (uint32_t step = 16; step > 0; step /= 2)
    if (n >> octave >> step) octave += step;
  return 2 * octave + (octave > 0 ? n >> (octave - 1) & 1 : 0);
}

class HstuBias {
  using Floats = AscendC::LocalTensor<float>;
  using Ints = AscendC::LocalTensor<int32_t>;

 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR bounds, GM_ADDR row_times, GM_ADDR key_times,
                              GM_ADDR tables, GM_ADDR near, const HstuBiasShape &shape) {
    pipe_ = pipe;
    s_ = shape;
    width_ = s_.positions + 2 * kNearEnd;
    bounded_ = 2 * (s_.row_slots / kRowBlock + s_.key_slots / kKeyBlock);
    row_times_.SetGlobalBuffer((__gm__ int32_t *)row_times, uint64_t(s_.requests) * s_.row_slots);
    key_times_.SetGlobalBuffer((__gm__ int32_t *)key_times, uint64_t(s_.requests) * s_.key_slots);
    near_.SetGlobalBuffer((__gm__ float *)near, uint64_t(s_.heads) * 8 * width_);
    bounds_.init(pipe, bounds, s_.requests * bounded_);
    AscendC::GlobalTensor<float> from;
    uint32_t numbers = s_.heads * 2 * kTimeBuckets;
    from.SetGlobalBuffer((__gm__ float *)tables, numbers);
    pipe->InitBuffer(tables_in_, 1, (kTablesLead + numbers) * 4);
    tables_ = tables_in_.AllocTensor<float>();
    constexpr uint8_t left = kFloatBucket % 8, right = 8 - left;
    AscendC::DataCopyPad(tables_[kFloatBucket - left], from, AscendC::DataCopyExtParams{1, numbers * 4, 0, 0, 0},
                         AscendC::DataCopyPadExtParams<float>{true, left, right, 0.0f});
    tables_in_.EnQue(tables_);
    tables_ = tables_in_.DeQue<float>();
    sync<AscendC::HardEvent::MTE2_S>(*pipe);
    pipe->InitBuffer(times_in_, 2, kKeyBlock * 4);
    pipe->InitBuffer(near_in_, 1, 8 * kNearEnd * 4);
    pipe->InitBuffer(rows_, kRowBlock * 32);
    pipe->InitBuffer(masks_, (kSelected - 1) * s_.tile_rows * kKeyBlock / 8);
    pipe->InitBuffer(row_bias_, kKeyBlock * 4);
    pipe->InitBuffer(first_, 64 * 4);
    placed_.request = row_request_ = ~0u;
  }
  // Every query's distance to every key is at least that of the last position.
  __aicore__ inline bool is_far(const HstuTile &tile) const { return tile.is_far(s_.positions - 1); }
  // The buckets of a tile; where it has one and is far, its bias is `constant`.
  __aicore__ inline void look(const HstuTile &tile) {
    // a tile of history lies in one block; of candidates, whose time is one, the first block has it
    uint32_t of_request = tile.request * bounded_, row = of_request + tile.row / kRowBlock * 2,
             key = of_request + (s_.row_slots / kRowBlock + tile.key / kKeyBlock) * 2;
    int32_t least = bounds_[row] - bounds_[key + 1], most = bounds_[row + 1] - bounds_[key];
    uint32_t above = most > 0 ? uint32_t(most) + 1 : 1;
    lowest_ = bucket_below(least > 0 ? uint32_t(least) + 1 : 1);
    highest_ = bucket_below(above + (above >> 24));  // a float is at most half a unit in its last place above
  }
  __aicore__ inline bool is_constant(const HstuTile &tile) const { return lowest_ == highest_ && is_far(tile); }
  __aicore__ inline float constant(const HstuTile &tile) const { return number(tile.head, true, lowest_); }

  // The bias of a tile's rows, [rows, 256], in `bias`; of candidates, [256], the same tensor for all of them. `look`
  // comes first, and a vector_done behind. Wants `bias` free of readers. `times`, as large, is the next call's for
  // tiles of history; of candidates it is free behind this one.
  __aicore__ inline Floats make(const HstuTile &tile, const Floats &bias, const Floats &times) {
    if (tile.candidates && tile.request == row_request_ && tile.key == row_key_ && tile.head == row_head_)
      return row_bias_.Get<float>();
    if (lowest_ < highest_ && !is_placed(tile)) place(tile, times);
    if (tile.candidates) {
      row_request_ = tile.request;
      row_key_ = tile.key;
      row_head_ = tile.head;
    }
    auto to = tile.candidates ? row_bias_.Get<float>() : bias;
    uint32_t rows = tile.candidates ? 1 : tile.rows;
    bool far = is_far(tile);
    add_times(to, times, tile.head, far, rows * kKeyBlock);
    if (!far) tile.candidates ? add_position(to, tile) : add_positions(to, tile);
    return to;
  }

 private:
  __aicore__ inline uint32_t buckets() const { return highest_ - lowest_ + 1; }
  __aicore__ inline float number(uint32_t head, bool far, uint32_t bucket) const {
    return tables_.GetValue(kFloatBucket + (head * 2 + far) * kTimeBuckets + bucket);
  }
  // Candidates share their time: what was made for some of them serves all, but for what is gathered by.
  __aicore__ inline bool is_placed(const HstuTile &tile) const {
    return !(tile.candidates && buckets() > kSelected) && tile.request == placed_.request && tile.key == placed_.key &&
           tile.candidates == placed_.candidates && (tile.candidates || tile.row == placed_.row) &&
           lowest_ == placed_lowest_ && highest_ == placed_highest_;
  }
  // What a tile's times give to all heads: the borders that f reaches; or in `f` where its bucket stands in a table.
  __aicore__ inline void place(const HstuTile &tile, const Floats &f) {
    using namespace AscendC;
    placed_ = tile;
    placed_lowest_ = lowest_;
    placed_highest_ = highest_;
    uint32_t rows = tile.candidates ? 1 : tile.rows;
    int32_t count = int32_t(rows * kKeyBlock);
    auto row_times = rows_.Get<int32_t>(), d = f.ReinterpretCast<int32_t>();
    auto in = load(row_times_[uint64_t(tile.request) * s_.row_slots + tile.row], rows);
    Brcb(row_times, in, uint8_t(round_up(rows, 8) / 8), BrcbRepeatParams{1, 8});
    times_in_.FreeTensor(in);
    vector_done();
    Adds(row_times, row_times, int32_t(1), int32_t(rows * 8));
    in = load(key_times_[uint64_t(tile.request) * s_.key_slots + tile.key], kKeyBlock);
    vector_done();
    for (uint32_t at = 0; at < kKeyBlock; at += 64)
      Sub(d[at], row_times, in[at], 64, uint8_t(rows), BinaryRepeatParams{1, 0, 1, kKeyBlock / 8, 1, 0});
    times_in_.FreeTensor(in);
    vector_done();
    Maxs(d, d, int32_t(1), count);  // d + 1
    vector_done();
    Cast(f, d, RoundMode::CAST_RINT, uint32_t(count));
    vector_done();
    if (buckets() <= kSelected) {
      for (uint32_t i = 1; i < buckets(); ++i)
        compare_with(mask(i), f, float_of((lowest_ + i + kFloatBucket) << 22), CMPMODE::LT, uint32_t(count));
    } else {
      ShiftRight(d, d, int32_t(22), count);
      vector_done();
      ShiftLeft(d, d, int32_t(2), count);  // bytes; `tables_` begins at bucket 0 of a float
    }
  }
  __aicore__ inline AscendC::LocalTensor<uint8_t> mask(uint32_t border) {
    return masks_.Get<uint8_t>()[(border - 1) * s_.tile_rows * kKeyBlock / 8];
  }
  __aicore__ inline Ints load(const AscendC::GlobalTensor<int32_t> &from, uint32_t count) {
    auto in = times_in_.AllocTensor<int32_t>();
    copy_in(in, from, count, int32_t(0));
    times_in_.EnQue(in);
    return times_in_.DeQue<int32_t>();
  }
  __aicore__ inline void add_times(const Floats &to, const Floats &f, uint32_t head, bool far, uint32_t count) {
    using namespace AscendC;
    if (buckets() > kSelected) {
      vector_done();  // of `place`
      Gather(to, tables_[(head * 2 + far) * kTimeBuckets], f.ReinterpretCast<uint32_t>(), 0, count);
      return;
    }
    if (buckets() == 1) {
      Duplicate(to, number(head, far, lowest_), int32_t(count));
      return;
    }
    auto first = first_.Get<float>();  // 64 numbers that are read again and again
    Duplicate(first, number(head, far, lowest_), 64);
    vector_done();  // of `place` too
    Select(to, mask(1), first, number(head, far, lowest_ + 1), SELMODE::VSEL_TENSOR_SCALAR_MODE, 64,
           uint8_t(count / 64), BinaryRepeatParams{1, 1, 1, 8, 0, 8});
    for (uint32_t i = 2; i < buckets(); ++i) {
      vector_done();
      Select(to, mask(i), to, number(head, far, lowest_ + i), SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    }
  }
  // Where in a row of `near` the window of a query begins.
  __aicore__ inline uint32_t window(uint32_t position, uint32_t key) const {
    return min_of(kNearEnd - 1 + s_.positions + key - position, width_ - kKeyBlock);
  }
  __aicore__ inline void add_positions(const Floats &to, const HstuTile &tile) {
    uint32_t first = window(tile.position(tile.rows - 1), tile.key) / 8 * 8;
    auto in = near_in_.AllocTensor<float>();
    gather_rows(in, near_[uint64_t(tile.head) * 8 * width_ + first], 8, kNearEnd, width_);
    near_in_.EnQue(in);
    in = near_in_.DeQue<float>();
    vector_done();
    constexpr uint8_t row = kKeyBlock / 8, pitch = kNearEnd / 8;
    for (uint32_t i = 0; i < tile.rows;) {
      uint32_t from = window(tile.position(i), tile.key), shift = from % 8;
      uint32_t together = min_of(shift + 1, tile.rows - i);  // queries whose windows begin at one place of the next row
      for (uint32_t column = 0; column < kKeyBlock; column += 64)
        AscendC::Add(to[i * kKeyBlock + column], to[i * kKeyBlock + column],
                     in[(7 - shift) * kNearEnd + (from - shift - first) + column], 64, uint8_t(together),
                     AscendC::BinaryRepeatParams{1, 1, 1, row, row, pitch});
      i += together;
    }
    near_in_.FreeTensor(in);
  }
  __aicore__ inline void add_position(const Floats &to, const HstuTile &tile) {
    auto in = near_in_.AllocTensor<float>();
    copy_in(in, near_[(uint64_t(tile.head) * 8 + 7) * width_ + window(tile.position(0), tile.key)], kKeyBlock, 0.0f);
    near_in_.EnQue(in);
    in = near_in_.DeQue<float>();
    vector_done();
    AscendC::Add(to, to, in, int32_t(kKeyBlock));
    near_in_.FreeTensor(in);
  }

  AscendC::TPipe *pipe_;
  HstuBiasShape s_;
  uint32_t width_, bounded_, lowest_ = 0, highest_ = 0;
  HstuTile placed_;  // what `masks_` hold, for the buckets placed_lowest_ .. placed_highest_
  uint32_t placed_lowest_ = 0, placed_highest_ = 0;
  uint32_t row_request_, row_key_ = 0, row_head_ = 0;  // of the candidates whose bias `row_bias_` holds
  RowIndex bounds_;
  Floats tables_;
  AscendC::GlobalTensor<int32_t> row_times_, key_times_;
  AscendC::GlobalTensor<float> near_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> tables_in_, near_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> times_in_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> rows_, masks_, row_bias_, first_;
};

}  // namespace npu_gr
