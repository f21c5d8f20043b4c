// The tiles of hstu_scores: queries by 256 keys of one head, history queries and candidates never in one tile.
//
// History tiles of one place follow each other head by head, so what depends on times and positions alone is made once
// for all heads. Candidates share time and position: their tiles of one head and key block follow each other row block
// by row block, and one row of bias serves them all.
#pragma once
#include "hstu_batch.h"

namespace npu_gr {

struct HstuTile {
  uint32_t request, head, row, rows, key;
  uint32_t own;         // token of the first row; the others follow
  uint32_t limit;       // no position is behind it: the first candidate's token
  uint32_t candidates;  // 1: its queries are candidates

  __aicore__ inline uint32_t position(uint32_t i) const { return min_of(own + i, limit); }
  __aicore__ inline uint32_t last_own() const { return own + rows - 1; }
  // Some query sees some key.
  __aicore__ inline bool is_seen() const {
    return key < position(rows - 1) || (key <= last_own() && key + kKeyBlock > own);
  }
  // Every query sees every key.
  __aicore__ inline bool is_full() const { return key + kKeyBlock <= position(0); }
  // Every key is at least `distance` before every query.
  __aicore__ inline bool is_far(uint32_t distance) const { return position(0) >= key + kKeyBlock - 1 + distance; }
};

// Walks the tiles of a batch from a first number on.
class HstuTiles {
 public:
  // rows: queries of a tile.
  __aicore__ inline void init(const HstuBatch *batch, uint32_t requests, uint32_t heads, uint32_t key_slots,
                              uint32_t rows) {
    batch_ = batch;
    requests_ = requests;
    heads_ = heads;
    blocks_ = key_slots / kKeyBlock;
    rows_ = rows;
    total_ = 0;
    for (uint32_t request = 0; request < requests; ++request) {
      open(request);
      total_ += tiles();
    }
    open(0);
  }
  __aicore__ inline uint32_t total() const { return total_; }
  // Numbers must not fall.
  __aicore__ inline HstuTile operator[](uint32_t number) {
    while (number - before_ >= tiles()) {
      uint32_t passed = before_ + tiles();
      open(request_ + 1);
      before_ = passed;
    }
    uint32_t i = number - before_, in_history = blocks_of(history_) * blocks_ * heads_;
    if (i < in_history) return tile(i % heads_, i / heads_ / blocks_, i / heads_ % blocks_, false);
    i -= in_history;
    uint32_t row_blocks = blocks_of(entry_.rows - history_);
    return tile(i / row_blocks / blocks_, i % row_blocks, i / row_blocks % blocks_, true);
  }

 private:
  const HstuBatch *batch_;
  HstuEntry entry_;
  uint32_t requests_, heads_, blocks_, rows_, total_, request_, before_, history_;

  __aicore__ inline void open(uint32_t request) {
    request_ = request;
    before_ = 0;
    entry_ = (*batch_)[request];
    history_ = entry_.rows > entry_.targets ? entry_.rows - entry_.targets : 0;
  }
  __aicore__ inline uint32_t blocks_of(uint32_t rows) const { return (rows + rows_ - 1) / rows_; }
  __aicore__ inline uint32_t tiles() const {
    return (blocks_of(history_) + blocks_of(entry_.rows - history_)) * blocks_ * heads_;
  }
  __aicore__ inline HstuTile tile(uint32_t head, uint32_t row_block, uint32_t block, bool candidates) const {
    uint32_t row = row_block * rows_ + (candidates ? history_ : 0), end = candidates ? entry_.rows : history_;
    return {request_,
            head,
            row,
            min_of(rows_, end - row),
            block * kKeyBlock,
            entry_.keys - entry_.rows + row,
            entry_.keys - entry_.targets,
            candidates};
  }
};

}  // namespace npu_gr
