// The launches of each op, in order. The torch binding and the CPU emulator both include it, so the sequence that the
// tests run is the one that the NPU gets. The includer defines
//   NPU_GR_LAUNCH(kernel, blocks, arguments...)  an int, 0 = launched
// All pointers are device memory. `workspace` has plan.workspace_bytes. Returns the first status that is not 0.
#pragma once
#include "../hstu_tiling.h"
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

struct HstuRowsCall {
  Address mixed, meta, page_ids, k_plane, v_plane, q, k, v, u;
  HstuSizes sizes;
  uint32_t mixed_rows, queries, page_tokens, pages, num_page_ids;
  uint32_t silu_all, q_scale;  // q_scale: the bits of a float
};
inline int run(const HstuRowsCall &c, const HstuRowsPlan &plan) {
  const HstuSizes &s = c.sizes;
  return NPU_GR_LAUNCH_OF(s.dtype, hstu_rows, plan.blocks, c.mixed, c.meta, c.page_ids, c.k_plane, c.v_plane, c.q, c.k,
                          c.v, c.u, s.requests, c.mixed_rows, c.queries, s.row_slots, s.key_slots, s.heads, s.qk_dim,
                          s.v_dim, c.page_tokens, c.pages, c.num_page_ids, plan.piece, plan.lot, plan.zeros, c.silu_all,
                          c.q_scale);
}

struct HstuScoresCall {
  Address scores, meta, bounds, row_times, key_times, tables, near;
  HstuSizes sizes;
  uint32_t positions, alpha;  // alpha: the bits of a float
};
inline int run(const HstuScoresCall &c, const HstuScoresPlan &plan) {
  const HstuSizes &s = c.sizes;
  return NPU_GR_LAUNCH_OF(s.dtype, hstu_scores, plan.blocks, c.scores, c.meta, c.bounds, c.row_times, c.key_times,
                          c.tables, c.near, s.requests, s.row_slots, s.key_slots, s.heads, c.positions, plan.tile_rows,
                          c.alpha);
}

struct HstuFinishCall {
  Address attention, u, norm, meta, out;
  HstuSizes sizes;
  uint32_t queries, group, joined;
  uint32_t scale, share, eps;  // the bits of floats
};
inline int run(const HstuFinishCall &c, const HstuFinishPlan &plan) {
  const HstuSizes &s = c.sizes;
  return NPU_GR_LAUNCH_OF(s.dtype, hstu_finish, plan.blocks, c.attention, c.u, c.norm, c.meta, c.out, s.requests,
                          c.queries, s.row_slots, s.heads, s.v_dim, c.group, plan.lot, c.joined, c.scale, c.share,
                          c.eps);
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
