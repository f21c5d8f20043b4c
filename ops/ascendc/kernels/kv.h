// kv_gather and beam_fork: rows of bytes move, whatever they hold. GM to UB to GM, no vector work.
//
// beam_fork changes the unshared KV in place. A core takes a column of one layer's plane, all rows of it, into UB and
// only then writes: no row is overwritten before it is read, whatever the parents' order, and columns have nothing to
// do with each other, so all layers and both planes are one launch without a barrier of cores.
#pragma once
#include "device.h"

namespace npu_gr {

// Row numbers, in UB for the scalar unit.
class RowIndex {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR gm, uint32_t count) {
    AscendC::GlobalTensor<int32_t> from;
    from.SetGlobalBuffer((__gm__ int32_t *)gm, count);
    pipe->InitBuffer(queue_, 1, count * 4);
    table_ = queue_.AllocTensor<int32_t>();
    copy_in(table_, from, count, int32_t(0));
    queue_.EnQue(table_);
    table_ = queue_.DeQue<int32_t>();
    sync<AscendC::HardEvent::MTE2_S>(*pipe);
  }
  __aicore__ inline int32_t operator[](uint32_t i) const { return table_.GetValue(i); }

 private:
  AscendC::LocalTensor<int32_t> table_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> queue_;
};

struct KvGatherShape {
  uint32_t groups, held, out, row_bytes;  // src [groups, held, row_bytes] -> dst [groups, out, row_bytes]
  uint32_t chunk, rows;                   // bytes of a row and rows of one step; one row where it has several chunks
};

// dst[g, i] = src[g, index[i]]; a row whose index is outside 0 .. held - 1 is left as it is.
class KvGather {
 public:
  __aicore__ inline void init(AscendC::TPipe *pipe, GM_ADDR src, GM_ADDR index, GM_ADDR dst,
                              const KvGatherShape &shape) {
    s_ = shape;
    src_.SetGlobalBuffer((__gm__ uint8_t *)src, uint64_t(s_.groups) * s_.held * s_.row_bytes);
    dst_.SetGlobalBuffer((__gm__ uint8_t *)dst, uint64_t(s_.groups) * s_.out * s_.row_bytes);
    index_.init(pipe, index, s_.out);
    pipe->InitBuffer(stage_, 2, s_.chunk * s_.rows);
  }
  __aicore__ inline void process() {
    uint32_t lots = (s_.out + s_.rows - 1) / s_.rows, chunks = (s_.row_bytes + s_.chunk - 1) / s_.chunk;
    uint64_t steps = uint64_t(s_.groups) * lots * chunks;
    for (uint64_t step = AscendC::GetBlockIdx(); step < steps; step += AscendC::GetBlockNum()) {
      uint32_t chunk = uint32_t(step % chunks), lot = uint32_t(step / chunks % lots);
      run_step(step / chunks / lots, lot * s_.rows, chunk * s_.chunk);
    }
  }

 private:
  __aicore__ inline void run_step(uint64_t group, uint32_t first, uint32_t column) {
    uint32_t bytes = min_of(s_.chunk, s_.row_bytes - column), rows = min_of(s_.rows, s_.out - first),
             pitch = round_up(bytes, 32);
    auto stage = stage_.AllocTensor<uint8_t>();
    for (uint32_t i = 0; i < rows; ++i) {
      int32_t row = index_[first + i];
      if (row < 0 || uint32_t(row) >= s_.held) continue;
      copy_in(stage[i * pitch], src_[(group * s_.held + uint32_t(row)) * s_.row_bytes + column], bytes, uint8_t(0));
    }
    stage_.EnQue(stage);
    stage = stage_.DeQue<uint8_t>();
    for (uint32_t i = 0; i < rows;) {  // neighbours go out together
      uint32_t run = 0;
      while (i + run < rows && index_[first + i + run] >= 0 && uint32_t(index_[first + i + run]) < s_.held) ++run;
      if (run) store_rows(stage[i * pitch], (group * s_.out + first + i) * s_.row_bytes + column, run, bytes);
      i += run + 1;
    }
    stage_.FreeTensor(stage);
  }
  __aicore__ inline void store_rows(const AscendC::LocalTensor<uint8_t> &from, uint64_t to, uint32_t rows,
                                    uint32_t bytes) {
    AscendC::DataCopyPad(dst_[to], from, AscendC::DataCopyExtParams{uint16_t(rows), bytes, 0, s_.row_bytes - bytes, 0});
  }

  KvGatherShape s_;
  RowIndex index_;
  AscendC::GlobalTensor<uint8_t> src_, dst_;
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> stage_;
};

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
