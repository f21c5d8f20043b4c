// The entry points that the host launches, one a kernel and dtype. Shapes arrive as scalars: uint32, and nothing else.
#pragma once
#include "beam_fork.h"
#include "csr_gather_topk.h"
#include "hstu_finish.h"
#include "hstu_rows.h"
#include "hstu_scores.h"
#include "masked_topk.h"
#include "merge_pairs.h"

#define NPU_GR_KERNEL extern "C" __global__ __aicore__ void

#define NPU_GR_CSR_SHAPE_ARGS                                                                                 \
  uint32_t rows, uint32_t codes, uint32_t edges, uint32_t k, uint32_t tile, uint32_t groups, uint32_t pieces, \
      uint32_t shift, uint32_t has_norm, uint32_t has_allowed
#define NPU_GR_CSR_SHAPE \
  npu_gr::CsrShape { rows, codes, edges, k, tile, groups, pieces, shift, has_norm, has_allowed }

#define NPU_GR_KERNELS_OF(dtype, T)                                                                                  \
  NPU_GR_KERNEL masked_topk_##dtype(GM_ADDR logits, GM_ADDR mask, GM_ADDR bias, GM_ADDR value, GM_ADDR index,        \
                                    GM_ADDR pairs, uint32_t rows, uint32_t n, uint32_t k, uint32_t tile,             \
                                    uint32_t mask_stride, uint32_t splits, uint32_t part, uint32_t has_bias) {       \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                  \
    AscendC::TPipe pipe;                                                                                             \
    npu_gr::MaskedTopk<T> op;                                                                                        \
    op.init(&pipe, logits, mask, bias, value, index, pairs,                                                          \
            npu_gr::MaskedTopkShape{rows, n, k, tile, mask_stride, splits, part, has_bias});                         \
    op.process();                                                                                                    \
  }                                                                                                                  \
  NPU_GR_KERNEL csr_norm_##dtype(GM_ADDR logits, GM_ADDR lo, GM_ADDR degree, GM_ADDR code, GM_ADDR allowed,          \
                                 GM_ADDR norm, NPU_GR_CSR_SHAPE_ARGS) {                                              \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                  \
    AscendC::TPipe pipe;                                                                                             \
    npu_gr::CsrNorm<T> op;                                                                                           \
    op.init(&pipe, logits, lo, degree, code, allowed, norm, NPU_GR_CSR_SHAPE);                                       \
    op.process();                                                                                                    \
  }                                                                                                                  \
  NPU_GR_KERNEL csr_select_##dtype(GM_ADDR logits, GM_ADDR norm, GM_ADDR acc, GM_ADDR lo, GM_ADDR degree,            \
                                   GM_ADDR code, GM_ADDR allowed, GM_ADDR pairs, NPU_GR_CSR_SHAPE_ARGS) {            \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                  \
    AscendC::TPipe pipe;                                                                                             \
    npu_gr::CsrSelect<T> op;                                                                                         \
    op.init(&pipe, logits, norm, acc, lo, degree, code, allowed, pairs, NPU_GR_CSR_SHAPE);                           \
    op.process();                                                                                                    \
  }                                                                                                                  \
  NPU_GR_KERNEL hstu_rows_##dtype(                                                                                   \
      GM_ADDR mixed, GM_ADDR meta, GM_ADDR page_ids, GM_ADDR k_plane, GM_ADDR v_plane, GM_ADDR q, GM_ADDR k,         \
      GM_ADDR v, GM_ADDR u, uint32_t requests, uint32_t mixed_rows, uint32_t queries, uint32_t row_slots,            \
      uint32_t key_slots, uint32_t heads, uint32_t qk_dim, uint32_t v_dim, uint32_t page_tokens, uint32_t pages,     \
      uint32_t num_page_ids, uint32_t piece, uint32_t lot, uint32_t zeros, uint32_t silu_all, uint32_t q_scale) {    \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                  \
    AscendC::TPipe pipe;                                                                                             \
    npu_gr::HstuRows<T> op;                                                                                          \
    op.init(&pipe, mixed, meta, page_ids, k_plane, v_plane, q, k, v, u,                                              \
            npu_gr::HstuRowsShape{requests, mixed_rows, queries, row_slots, key_slots, heads, qk_dim, v_dim,         \
                                  page_tokens, pages, num_page_ids, piece, lot, zeros, silu_all, q_scale});          \
    op.process();                                                                                                    \
  }                                                                                                                  \
  NPU_GR_KERNEL hstu_scores_##dtype(GM_ADDR scores, GM_ADDR meta, GM_ADDR bounds, GM_ADDR row_times,                 \
                                    GM_ADDR key_times, GM_ADDR tables, GM_ADDR near, uint32_t requests,              \
                                    uint32_t row_slots, uint32_t key_slots, uint32_t heads, uint32_t positions,      \
                                    uint32_t tile_rows, uint32_t alpha) {                                            \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                  \
    AscendC::TPipe pipe;                                                                                             \
    npu_gr::HstuScores<T> op;                                                                                        \
    op.init(&pipe, scores, meta, bounds, row_times, key_times, tables, near,                                         \
            npu_gr::HstuScoresShape{requests, row_slots, key_slots, heads, positions, tile_rows, alpha});            \
    op.process();                                                                                                    \
  }                                                                                                                  \
  NPU_GR_KERNEL hstu_finish_##dtype(GM_ADDR attention, GM_ADDR u, GM_ADDR norm, GM_ADDR meta, GM_ADDR out,           \
                                    uint32_t requests, uint32_t queries, uint32_t row_slots, uint32_t heads,         \
                                    uint32_t v_dim, uint32_t group, uint32_t lot, uint32_t joined, uint32_t scale,   \
                                    uint32_t share, uint32_t eps) {                                                  \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                                  \
    AscendC::TPipe pipe;                                                                                             \
    npu_gr::HstuFinish<T> op;                                                                                        \
    op.init(                                                                                                         \
        &pipe, attention, u, norm, meta, out,                                                                        \
        npu_gr::HstuFinishShape{requests, queries, row_slots, heads, v_dim, group, lot, joined, scale, share, eps}); \
    op.process();                                                                                                    \
  }

NPU_GR_KERNELS_OF(f32, float)
NPU_GR_KERNELS_OF(f16, half)
NPU_GR_KERNELS_OF(bf16, bfloat16_t)

NPU_GR_KERNEL merge_rows(GM_ADDR pairs, GM_ADDR value, GM_ADDR index, uint32_t rows, uint32_t lists, uint32_t k) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  npu_gr::MergeRows op;
  op.init(&pipe, pairs, value, index, npu_gr::MergeShape{rows, lists, k});
  op.process();
}

NPU_GR_KERNEL csr_merge(GM_ADDR pairs, GM_ADDR lo, GM_ADDR score, GM_ADDR parent, GM_ADDR edge, NPU_GR_CSR_SHAPE_ARGS) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  npu_gr::CsrMerge op;
  op.init(&pipe, pairs, lo, score, parent, edge, NPU_GR_CSR_SHAPE);
  op.process();
}

NPU_GR_KERNEL beam_fork(GM_ADDR keys, GM_ADDR values, GM_ADDR parent, uint32_t layers, uint32_t held, uint32_t rows,
                        uint32_t row_bytes, uint32_t used_bytes, uint32_t chunk) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  npu_gr::BeamFork op;
  op.init(&pipe, keys, values, parent, npu_gr::BeamForkShape{layers, held, rows, row_bytes, used_bytes, chunk});
  op.process();
}
