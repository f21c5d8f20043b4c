// The launches of each op, in order. The torch binding and the CPU twin both include it, so the sequence that the tests
// run is the one that the NPU gets. The includer defines
//   NPU_GR_LAUNCH(kernel, blocks, arguments...)  an int, 0 = launched
// All pointers are device memory. `workspace` has plan.workspace_bytes. Returns the first status that is not 0.
#pragma once
#include "../tiling.h"

#ifndef NPU_GR_LAUNCH
#error "define NPU_GR_LAUNCH before including run.h"
#endif

// One kernel a dtype: `name`_f32, `name`_f16, `name`_bf16.
#define NPU_GR_LAUNCH_OF(dtype, name, ...)                                    \
  ((dtype) == ::npu_gr::Dtype::F32   ? NPU_GR_LAUNCH(name##_f32, __VA_ARGS__) \
   : (dtype) == ::npu_gr::Dtype::F16 ? NPU_GR_LAUNCH(name##_f16, __VA_ARGS__) \
                                     : NPU_GR_LAUNCH(name##_bf16, __VA_ARGS__))

namespace npu_gr {

using Address = uint8_t *;

struct MaskedTopkCall {
  Address logits, mask, bias, value, index;  // bias: nullptr = none
  uint32_t rows, n, k, mask_stride;          // mask_stride: bytes of a row of the mask
  Dtype dtype;
};
inline int run(const MaskedTopkCall &c, const MaskedTopkPlan &plan, Address workspace) {
  if (c.rows == 0) return 0;
  int status =
      NPU_GR_LAUNCH_OF(c.dtype, masked_topk, plan.blocks, c.logits, c.mask, c.bias, c.value, c.index, workspace, c.rows,
                       c.n, c.k, plan.tile, c.mask_stride, plan.splits, plan.part, uint32_t(c.bias != nullptr));
  if (status != 0 || plan.splits == 1) return status;
  return NPU_GR_LAUNCH(merge_rows, plan.merge_blocks, workspace, c.value, c.index, c.rows, plan.splits, c.k);
}

struct CsrCall {
  Address logits, norm, acc, lo, degree, code,
      allowed;  // allowed: nullptr = all. norm: written where has_norm is false
  Address score, parent, edge;
  uint32_t rows, codes, edges, k;
  bool has_norm;
  Dtype dtype;
};
inline int run(const CsrCall &c, const CsrPlan &plan, Address workspace) {
  uint32_t allowed = c.allowed != nullptr;
  if (!c.has_norm) {
    int status =
        NPU_GR_LAUNCH_OF(c.dtype, csr_norm, plan.norm_blocks, c.logits, c.lo, c.degree, c.code, c.allowed, c.norm,
                         c.rows, c.codes, c.edges, c.k, plan.tile, plan.groups, plan.pieces, plan.shift, 0u, allowed);
    if (status != 0) return status;
  }
  int status = NPU_GR_LAUNCH_OF(c.dtype, csr_select, plan.blocks, c.logits, c.norm, c.acc, c.lo, c.degree, c.code,
                                c.allowed, workspace, c.rows, c.codes, c.edges, c.k, plan.tile, plan.groups,
                                plan.pieces, plan.shift, 1u, allowed);
  if (status != 0) return status;
  return NPU_GR_LAUNCH(csr_merge, 1u, workspace, c.lo, c.score, c.parent, c.edge, c.rows, c.codes, c.edges, c.k,
                       plan.tile, plan.groups, plan.pieces, plan.shift, 1u, allowed);
}

struct BeamForkCall {
  Address keys, values, parent;
  uint32_t layers, held, rows, row_bytes, used_bytes;
};
inline int run(const BeamForkCall &c, const BeamForkPlan &plan) {
  if (c.layers == 0 || c.rows == 0 || c.used_bytes == 0) return 0;
  return NPU_GR_LAUNCH(beam_fork, plan.blocks, c.keys, c.values, c.parent, c.layers, c.held, c.rows, c.row_bytes,
                       c.used_bytes, plan.chunk);
}

}  // namespace npu_gr
