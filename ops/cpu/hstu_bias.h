// HSTU's relative bias: a number for each distance in tokens plus one for each half octave of the time between them.
//
// It costs little because time buckets are monotone in the time difference: where the earliest and the latest
// difference of a tile fall into one bucket, and the diagonal is at least `position_buckets` away, the bias of the
// whole tile is one number a head. Elsewhere buckets are computed once and looked up by every head.
#ifndef NPU_GR_HSTU_BIAS_H
#define NPU_GR_HSTU_BIAS_H

#include "hstu_tile.h"

namespace {
namespace hstu {

constexpr int kBlockRows = 21 * kRows;  // query rows that share a pass over the keys: Q, O and a tile stay in L2
constexpr int kTimeBuckets = 64;

NPU_GR_INLINE int32_t time_bucket(int64_t delta) {  // half octaves; `time_bucket` of npu_gr/backend/base.py
  const int64_t limit = 2147483647;
  const float x = (float)((delta < 0 ? 0 : delta > limit ? limit : delta) + 1);
  int32_t bits;
  memcpy(&bits, &x, 4);
  return (bits >> 22) - (127 << 1);
}

NPU_GR_INLINE int64_t difference(int64_t a, int64_t b) {  // saturates
  int64_t d;
  return __builtin_sub_overflow(a, b, &d) ? (a < b ? INT64_MIN : INT64_MAX) : d;
}

NPU_GR_INLINE I32 look_up_index(I32 delta) {  // buckets of differences below 2 ** 31 - 1
  delta = delta > 0 ? delta : splat(0);
  return ((I32) __builtin_convertvector(delta + 1, F32) >> 22) - (127 << 1);
}

// What rows see of a tile, by positions. Rows and tiles stand on either side of the gap; no block of rows lies on both.
class Window {
 public:
  Window(const Hstu &call, int64_t tile, int64_t row)
      : recent_(call.recent),
        column_(tile * kTile),
        missing_(column_ < call.gap_at && row >= call.gap_at ? call.gap : 0),
        hidden_(recent_ ? most(0, call.first - column_ - (column_ < call.gap_at ? 0 : call.gap)) : kTile) {}

  int64_t missing() const { return missing_; }  // positions between the tile and the rows that are no tokens
  int64_t hidden() const { return least(hidden_, kTile); }
  int64_t first_seen(int64_t row) const { return recent_ ? row + missing_ - column_ - recent_ + 1 : 0; }
  bool hides_all_from(int64_t row) const { return !hidden_ && first_seen(row) >= kTile; }  // and from later rows

 private:
  int64_t recent_, column_, missing_, hidden_;
};

struct Span {  // earliest and latest
  int64_t first, last;
};

NPU_GR_INLINE Span span(const int64_t *times, int64_t n) {
  Span s = {times[0], times[0]};
  for (int64_t i = 1; i < n; i++) {
    s.first = times[i] < s.first ? times[i] : s.first;
    s.last = times[i] > s.last ? times[i] : s.last;
  }
  return s;
}

class Bias {  // tables divided by alpha, so that they can start the sums; position tables run towards the diagonal
 public:
  static int64_t floats(const Hstu &call, bool causal) {
    const int64_t tiles = (call.num_tokens + kTile - 1) / kTile;
    const int64_t tables = call.num_heads * (kTimeBuckets + position_length(call));
    return tables +
           (causal ? tiles * kTile + tiles * sizeof(Span) / 4 + kBlockRows * kTile : call.num_heads * tiles * kTile) +
           64;
  }

  Bias(const Hstu &call, float *scratch) : call_(call), length_(position_length(call)) {
    const float unit = (float)(1.0 / call.alpha);
    const int64_t buckets = call.position_buckets;
    time_ = scratch;
    position_ = time_ + call.num_heads * kTimeBuckets;
    rest_ = position_ + call.num_heads * length_;
    for (int64_t i = 0; i < call.num_heads * kTimeBuckets; i++) time_[i] = call.time_bias[i] * unit;
    for (int64_t h = 0; h < call.num_heads; h++)
      for (int64_t x = 0; x < length_; x++) {  // distance of entry x: diagonal() - x
        const int64_t distance = diagonal() - x;
        const float *table = call.position_bias + h * buckets;
        position_[h * length_ + x] = unit * (distance < 0 ? 0 : table[distance < buckets ? distance : buckets - 1]);
      }
  }

  const float *time(int64_t head) const { return time_ + head * kTimeBuckets; }
  float *rest() const { return rest_; }

  // kTile entries for a row and the columns from first_column on
  const float *position(int64_t head, int64_t row, int64_t first_column) const {
    const int64_t x = diagonal() - (row - first_column);
    // before x = 0 every distance is beyond the last bucket; a row before the tile sees none of it
    return position_ + head * length_ + least(most(0, x), diagonal() + 1);
  }
  bool is_far(int64_t row, int64_t first_column) const {
    return row - (first_column + kTile - 1) >= call_.position_buckets - 1;
  }
  float far(int64_t head, int32_t bucket) const { return time(head)[bucket] + position_[head * length_]; }

 private:
  static int64_t position_length(const Hstu &call) { return 2 * kTile + call.position_buckets; }
  int64_t diagonal() const { return kTile + call_.position_buckets - 1; }

  const Hstu &call_;
  int64_t length_;
  float *time_, *position_, *rest_;
};

// Which bucket each row of a block sees in each column of a tile.
class Buckets {
 public:
  Buckets(const Hstu &call, float *scratch) : call_(call) {
    tiles_ = (call.num_tokens + kTile - 1) / kTile;
    spans_ = (Span *)(((uintptr_t)scratch + 7) & ~(uintptr_t)7);
    offsets_ = (int32_t *)(spans_ + tiles_);
    table_ = offsets_ + tiles_ * kTile;
    for (int64_t t = 0; t < tiles_; t++) {
      const int64_t left = call.num_tokens - t * kTile;
      spans_[t] = span(call.times + t * kTile, left < kTile ? left : kTile);
    }
    Span all = spans_[0];
    for (int64_t t = 1; t < tiles_; t++) {
      all.first = spans_[t].first < all.first ? spans_[t].first : all.first;
      all.last = spans_[t].last > all.last ? spans_[t].last : all.last;
    }
    is_short_ = (uint64_t)all.last - (uint64_t)all.first < 2147483647u;
    if (is_short_)
      for (int64_t i = 0; i < tiles_ * kTile; i++)
        offsets_[i] = i < call.num_tokens ? (int32_t)(call.times[i] - all.first) : 0;
  }

  // The one bucket of all of `rows` in a tile, or -1.
  int32_t one(Span rows, int64_t t) const {
    const int32_t least = time_bucket(difference(rows.first, spans_[t].last));
    return least == time_bucket(difference(rows.last, spans_[t].first)) ? least : -1;
  }

  void fill(int64_t row, int64_t count, int64_t t, int32_t *to) const {  // [count, kTile]
    for (int64_t r = row; r < row + count; r++, to += kTile) {
      const int32_t same = one(Span{call_.times[r], call_.times[r]}, t);
      for (int64_t c = 0; c < kTile; c += kLanes)
        if (same >= 0)
          store(to + c, splat(same));
        else if (is_short_)
          store(to + c, look_up_index(splat(offsets_[r]) - load(offsets_ + t * kTile + c)));
        else
          for (int64_t i = c; i < c + kLanes; i++)
            to[i] = t * kTile + i < call_.num_tokens
                        ? time_bucket(difference(call_.times[r], call_.times[t * kTile + i]))
                        : 0;
    }
  }
  int32_t *table() const { return table_; }

 private:
  const Hstu &call_;
  int64_t tiles_;
  Span *spans_;
  int32_t *offsets_, *table_;
  bool is_short_;
};

}  // namespace hstu
}  // namespace

#endif
