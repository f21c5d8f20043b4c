// The tiles of hstu_scores: queries by 256 keys of one head, history queries and candidates never in one tile.
//
// History tiles of one place follow each other head by head, so what depends on times and positions alone is made once
// for all heads. Candidates share time and position: their tiles of one head and key block follow each other row block
// by row block, and one row of bias serves them all. Cores take equal shares of what tiles weigh, which is about what
// they cost the vector unit; tiles that no query sees a key of cost a store, and are shared apart.
#pragma once
#include "hstu_batch.h"

namespace npu_gr {

struct HstuTile {
  uint32_t request, head, row, rows, key;
  uint32_t own;         // token of the first row; the others follow
  uint32_t limit;       // no position is behind it: the first candidate's token
  uint32_t candidates;  // 1: its queries are candidates

  __aicore__ inline uint32_t position(uint32_t i) const { return min_of(own + i, limit); }
  // Every query sees every key.
  __aicore__ inline bool is_full() const { return key + kKeyBlock <= position(0); }
  // Every key is at least `distance` before every query.
  __aicore__ inline bool is_far(uint32_t distance) const { return position(0) >= key + kKeyBlock - 1 + distance; }
  // Its rows from `first` on, `most` of them at most.
  __aicore__ inline HstuTile part(uint32_t first, uint32_t most) const {
    return {request, head, row + first, min_of(most, rows - first), key, own + first, limit, candidates};
  }
};

// Walks the tiles of a batch, those that some query sees a key of or the others, between two weights.
//
// They stand in lines: the far tiles of a block of history queries, its others, the tiles of a head and key block of
// candidates. In a line the seen ones follow each other, and weigh the same.
class HstuTiles {
 public:
  // distance: from here on a key is far; rows: queries of a tile. Where all are candidates a tile is kWide times as
  // many, for a long load is a faster one; history needs the memory.
  __aicore__ inline void init(const HstuBatch *batch, uint32_t requests, uint32_t heads, uint32_t key_slots,
                              uint32_t distance, uint32_t rows) {
    batch_ = batch;
    distance_ = distance;
    heads_ = heads;
    blocks_ = key_slots / kKeyBlock;
    requests_ = requests;
    history_rows_ = candidate_rows_ = rows;
    has_history_ = false;
    for (uint32_t request = 0; request < requests; ++request) {
      open(request);
      has_history_ = has_history_ || history_ > 0;
    }
    candidate_rows_ = has_history_ ? rows : kWide * rows;
    totals_[0] = totals_[1] = 0;
    for (uint32_t request = 0; request < requests; ++request) {
      open(request);
      for (uint32_t line = 0; line < row_lines_; ++line) add(of_history(line));
      for (uint32_t block = 0; block < blocks_; ++block) add(of_candidates(block));
    }
  }
  __aicore__ inline bool has_history() const { return has_history_; }
  __aicore__ inline uint32_t most_rows() const { return candidate_rows_; }
  // What the tiles weigh, the seen ones or the others.
  __aicore__ inline uint32_t total(bool seen) const { return totals_[seen]; }
  // The tiles to come are those that begin at a weight from `from` on, before `to`.
  __aicore__ inline void begin(bool seen, uint32_t from, uint32_t to) {
    seen_ = seen;
    before_ = 0;
    to_ = to;
    open(0);
    first_line();
    while (has_next() && before_ + number_ * weight_ < from) {
      uint32_t skipped = (from - before_ + weight_ - 1) / weight_;
      number_ = min_of(skipped, tiles_);
    }
  }
  __aicore__ inline bool has_next() {
    while (number_ >= tiles_ && request_ < requests_) {
      before_ += tiles_ * weight_;
      if (next_line()) continue;
      if (++request_ == requests_) return false;
      open(request_);
      first_line();
    }
    return request_ < requests_ && before_ + number_ * weight_ < to_;
  }
  // Only where `has_next` said so.
  __aicore__ inline HstuTile next() {
    uint32_t number = number_++;
    if (line_ < row_lines_) return tile(number % heads_, line_ / 2, span_.place(seen_, number / heads_), false);
    return tile(head_, span_.place(seen_, number), block_, true);
  }

 private:
  // Of the places in a line, from `from` to `to`, those from `begin` to `end` are seen, and weigh so much each.
  struct Span {
    uint32_t from, to, begin, end, weight;

    __aicore__ inline uint32_t count(bool seen) const { return seen ? end - begin : to - from - (end - begin); }
    __aicore__ inline uint32_t place(bool seen, uint32_t number) const {
      if (seen) return begin + number;
      return from + number + (from + number < begin ? 0 : end - begin);
    }
  };
  // Of a tile, in some 400 cycles of the vector unit: benchmarks/hstu_model.py counts them.
  static constexpr uint32_t kFarWeight = 6, kNearWeight = 11, kFullWeight = 10, kPartWeight = 12;
  static constexpr uint32_t kWide = 2;

  const HstuBatch *batch_;
  HstuEntry entry_;
  uint32_t requests_, heads_, blocks_, distance_, history_rows_, candidate_rows_, totals_[2];
  // of the open request: queries of history, candidates that are queries and the first one's token, lines of history
  uint32_t request_, history_, asking_, own_, row_lines_, candidate_tiles_;
  bool seen_, has_history_;
  uint32_t to_, before_, number_;  // weight of the lines before this one; of the next tile in its line
  uint32_t line_, head_, block_;   // the line: of history, or of candidates
  uint32_t tiles_, weight_;        // of the line
  Span span_;

  __aicore__ inline void open(uint32_t request) {
    request_ = request;
    entry_ = (*batch_)[request];
    history_ = entry_.rows > entry_.targets ? entry_.rows - entry_.targets : 0;
    asking_ = entry_.rows - history_;
    own_ = entry_.keys - asking_;
    row_lines_ = 2 * blocks_of(history_, history_rows_);
    candidate_tiles_ = blocks_of(asking_, candidate_rows_);
  }
  __aicore__ inline void add(const Span &span) {
    totals_[0] += span.count(false) * heads_;
    totals_[1] += span.count(true) * heads_ * span.weight;
  }
  // Every core passes all lines before its own, on its scalar unit: neither divides.
  __aicore__ inline void first_line() {
    line_ = head_ = block_ = 0;
    look();
  }
  __aicore__ inline bool next_line() {
    if (line_ < row_lines_) {
      ++line_;
    } else if (++block_ == blocks_) {
      block_ = 0;
      ++head_;
    }
    if (head_ == heads_) return false;
    look();
    return true;
  }
  __aicore__ inline void look() {
    bool history = line_ < row_lines_;
    span_ = history ? of_history(line_) : of_candidates(block_);
    tiles_ = span_.count(seen_) * (history ? heads_ : 1);
    weight_ = seen_ ? span_.weight : 1;
    number_ = 0;
  }
  __aicore__ inline static uint32_t blocks_of(uint32_t count, uint32_t block) { return (count + block - 1) / block; }
  // Of a block of history queries: its far key blocks, or its others.
  __aicore__ inline Span of_history(uint32_t line) const {
    uint32_t row = line / 2 * history_rows_, first = own_ - history_ + row;  // token of its first query
    uint32_t seen = blocks_of(first + min_of(history_rows_, history_ - row), kKeyBlock), far = 0;
    if (first >= distance_ + kKeyBlock - 1) far = (first - distance_ - (kKeyBlock - 1)) / kKeyBlock + 1;
    if (line % 2 == 0) return {0, far, 0, far, kFarWeight};
    return {far, blocks_, far, seen, kNearWeight};
  }
  // Of a key block: its blocks of candidates. Behind the history each candidate sees its own key alone.
  __aicore__ inline Span of_candidates(uint32_t block) const {
    uint32_t all = candidate_tiles_, key = block * kKeyBlock, behind = key + kKeyBlock;
    uint32_t limit = entry_.keys - entry_.targets;
    if (key < limit) return {0, all, 0, all, behind <= limit ? kFullWeight : kPartWeight};
    if (behind <= own_ || key >= entry_.keys) return {0, all, 0, 0, kPartWeight};
    uint32_t first = key > own_ ? key - own_ : 0;
    return {0, all, first / candidate_rows_, blocks_of(min_of(asking_, behind - own_), candidate_rows_), kPartWeight};
  }
  __aicore__ inline HstuTile tile(uint32_t head, uint32_t place, uint32_t block, bool candidates) const {
    uint32_t rows = candidates ? candidate_rows_ : history_rows_;
    uint32_t row = place * rows + (candidates ? history_ : 0), end = candidates ? entry_.rows : history_;
    return {request_,
            head,
            row,
            min_of(rows, end - row),
            block * kKeyBlock,
            entry_.keys - entry_.rows + row,
            entry_.keys - entry_.targets,
            candidates};
  }
};

}  // namespace npu_gr
