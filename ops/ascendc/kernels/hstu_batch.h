// What the HSTU kernels know of a batch: eight numbers a request, written by the host.
//
// A request's tokens are 0 .. keys - 1: `cached` ones, then its new rows, history first and `targets` candidates last.
// Its queries are the last `rows` of the new rows. Query i stands at token keys - rows + i and sees the tokens before
// its position, min(keys - rows + i, keys - targets), and itself: history is causal, candidates do not see each other.
#pragma once
#include "../hstu_blocks.h"
#include "row_index.h"

namespace npu_gr {

struct HstuEntry {
  uint32_t rows, keys, cached, targets;
  uint32_t first_page;   // in the list of page ids
  uint32_t first_row;    // of its new rows among all new rows
  uint32_t first_query;  // of its queries among all queries
  uint32_t keeps;        // its new history rows go to its pages

  __aicore__ inline uint32_t new_rows() const { return keys - cached; }
  __aicore__ inline uint32_t silent_rows() const { return new_rows() - rows; }  // new rows that are no query
};

class HstuBatch {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR meta, uint32_t requests) {
    numbers_.init(pipe, meta, requests * kEntryNumbers);
  }
  __aicore__ inline HstuEntry operator[](uint32_t request) const {
    uint32_t at = request * kEntryNumbers;
    return {number(at),     number(at + 1), number(at + 2), number(at + 3),
            number(at + 4), number(at + 5), number(at + 6), number(at + 7)};
  }

 private:
  RowIndex numbers_;
  __aicore__ inline uint32_t number(uint32_t at) const { return uint32_t(numbers_[at]); }
};

// What moves: 16-bit numbers whatever they mean, or floats.
template <typename T>
using Moved = std::conditional_t<sizeof(T) == 2, uint16_t, float>;

__aicore__ inline float float_of(uint32_t bits) {
  union {
    uint32_t bits;
    float number;
  } both{bits};
  return both.number;
}

// Rows of `width` numbers, `pitch` numbers apart in GM, side by side in UB; and back. Widths are whole data blocks.
template <typename T>
__aicore__ inline void gather_rows(const AscendC::LocalTensor<T> &to, const AscendC::GlobalTensor<T> &from,
                                   uint32_t rows, uint32_t width, uint32_t pitch, uint32_t gap_in_ub = 0) {
  AscendC::DataCopyExtParams copy{uint16_t(rows), uint32_t(width * sizeof(T)), uint32_t((pitch - width) * sizeof(T)),
                                  uint32_t(gap_in_ub * sizeof(T) / 32), 0};
  AscendC::DataCopyPad(to, from, copy, AscendC::DataCopyPadExtParams<T>{false, 0, 0, 0});
}
template <typename T>
__aicore__ inline void scatter_rows(const AscendC::GlobalTensor<T> &to, const AscendC::LocalTensor<T> &from,
                                    uint32_t rows, uint32_t width, uint32_t pitch, uint32_t gap_in_ub = 0) {
  AscendC::DataCopyExtParams copy{uint16_t(rows), uint32_t(width * sizeof(T)), uint32_t(gap_in_ub * sizeof(T) / 32),
                                  uint32_t((pitch - width) * sizeof(T)), 0};
  AscendC::DataCopyPad(to, from, copy);
}

}  // namespace npu_gr
