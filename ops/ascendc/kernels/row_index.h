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

}  // namespace npu_gr
