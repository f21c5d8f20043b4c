// The kernels for one instruction set: included by one isa_*.cpp each, after its target pragma and its macros.
//
// Everything below is in an unnamed namespace, so that no two instruction sets share an instantiation: a template that
// the linker took from the AVX-512 file would end the process on a smaller CPU.
#include "kernels.h"

#include "head.h"
#include "affine.h"
#include "beam.h"
#include "hstu.h"
#include "hstu_pass.h"
#include "pack_kv.h"
#include "probe.h"
#include "topk.h"
#include "vec.h"

#include "items.h"
#include "hstu_find.h"
#include "order.h"

extern const Kernels NPU_GR_TABLE;
const Kernels NPU_GR_TABLE = {
    .num_bytes = sizeof(Kernels),
    .abi = NPU_GR_ABI,
    .isa = NPU_GR_ISA,
    .vector_bytes = NPU_GR_VECTOR_BYTES,
    .has_bf16_dot = kHasBF16Dot,
    .probe_fma_f32 = probe_fma_f32,
    .probe_fma_bf16 = kHasBF16Dot ? probe_fma_bf16 : nullptr,
    .probe_read = probe_read,
    .probe_flops_f32 = kProbeFlops,
    .probe_flops_bf16 = kHasBF16Dot ? 2 * kProbeFlops : 0,
    .beam_topk_bytes = beam_topk_bytes,
    .gathered_head = gathered_head,
    .beam_topk = beam_topk,
    .beam_attention_bytes = beam::attention_bytes,
    .beam_attention = beam::attention,
    .hstu_scratch_bytes = hstu::scratch_bytes,
    .hstu_causal = hstu::causal,
    .hstu_targets = hstu::targets,
    .pack_kv = hstu::pack_kv,
    .affine_scratch_bytes = hstu::affine_scratch_bytes,
    .affine = hstu::affine,
    .hstu_pass_bytes = hstu::hstu_pass_bytes,
    .hstu_pass = hstu::hstu_pass,
    .hstu_find_bytes = hstu::hstu_find_bytes,
    .hstu_find = hstu::hstu_find,
    .best_items_bytes = items::best_items_bytes,
    .best_items = items::best_items,
    .item_products = items::item_products,
    .order_bytes = order::order_bytes,
    .blend_sums = order::blend_sums,
    .neighbour_sums = order::neighbour_sums,
};
