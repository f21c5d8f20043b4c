// beam_fork: rows of bytes take their parents' place, whatever they hold. GM to UB to GM, no vector work.
//
// It changes the unshared KV in place. A core takes a column of one layer's plane, all rows of it, into UB and
// only then writes: no row is overwritten before it is read, whatever the parents' order, and columns have nothing to
// do with each other, so all layers and both planes are one launch without a barrier of cores.
#pragma once
#include "row_index.h"

namespace npu_gr {

struct BeamForkShape {
  uint32_t layers, held, rows;     // planes [layers, held, row_bytes]; the first `rows` rows get a parent
  uint32_t row_bytes, used_bytes;  // of a row; of its slots that are in use, which stand first
  uint32_t chunk;
};

// plane[l, i, : used] = plane[l, parent[i], : used] of the old plane; a parent outside 0 .. held - 1 moves nothing.
class BeamFork {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR keys, GM_ADDR values, GM_ADDR parent,
                              const BeamForkShape &shape) {
    s_ = shape;
    uint64_t bytes = uint64_t(s_.layers) * s_.held * s_.row_bytes;
    plane_[0].SetGlobalBuffer((__gm__ uint8_t *)keys, bytes);
    plane_[1].SetGlobalBuffer((__gm__ uint8_t *)values, bytes);
    parent_.init(pipe, parent, s_.rows);
    pipe->InitBuffer(stage_, 2, s_.held * s_.chunk);
  }
  __aicore__ inline void process() {
    first_ = s_.held;
    last_ = 0;  // parents of rows that move
    for (uint32_t i = 0; i < s_.rows; ++i)
      if (moves(i)) {
        uint32_t parent = uint32_t(parent_[i]);
        first_ = min_of(first_, parent);
        last_ = parent + 1 > last_ ? parent + 1 : last_;
      }
    if (first_ >= last_) return;
    uint32_t chunks = (s_.used_bytes + s_.chunk - 1) / s_.chunk;
    for (uint32_t step = AscendC::GetBlockIdx(); step < 2 * s_.layers * chunks; step += AscendC::GetBlockNum())
      move_column(plane_[step % 2], step / 2 / chunks, step / 2 % chunks * s_.chunk);
  }

 private:
  __aicore__ inline bool moves(uint32_t i) const {
    int32_t parent = parent_[i];
    return parent >= 0 && uint32_t(parent) < s_.held && uint32_t(parent) != i;
  }
  __aicore__ inline void move_column(const AscendC::GlobalTensor<uint8_t> &plane, uint64_t layer, uint32_t column) {
    uint32_t bytes = min_of(s_.chunk, s_.used_bytes - column), pitch = round_up(bytes, 32);
    uint64_t top = layer * s_.held * s_.row_bytes + column;
    auto stage = stage_.AllocTensor<uint8_t>();
    AscendC::DataCopyExtParams all{uint16_t(last_ - first_), bytes, s_.row_bytes - bytes, 0, 0};
    AscendC::DataCopyPadExtParams<uint8_t> pad{true, 0, uint8_t(pitch - bytes), 0};
    AscendC::DataCopyPad(stage, plane[top + uint64_t(first_) * s_.row_bytes], all, pad);
    stage_.EnQue(stage);
    stage = stage_.DeQue<uint8_t>();
    for (uint32_t i = 0; i < s_.rows; ++i)
      if (moves(i))
        copy_out(plane[top + uint64_t(i) * s_.row_bytes], stage[(uint32_t(parent_[i]) - first_) * pitch], bytes);
    stage_.FreeTensor(stage);
  }

  BeamForkShape s_;
  uint32_t first_, last_;
  RowIndex parent_;
  AscendC::GlobalTensor<uint8_t> plane_[2];
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> stage_;
};

}  // namespace npu_gr
