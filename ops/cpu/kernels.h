// The C ABI between the kernels and npu_gr/backend/cpu/library.py: one table of functions an instruction set.
//
// Plain pointers and sizes, no torch, no Python, no allocation, no threads, no exceptions. Every function may run on
// several threads at once; memory that it needs comes from the caller. Strides count elements, not bytes.
#ifndef NPU_GR_KERNELS_H
#define NPU_GR_KERNELS_H

#include <stdint.h>

#include "hstu_call.h"
#include "hstu_find_call.h"
#include "hstu_pass_call.h"
#include "items_call.h"
#include "order_call.h"

#define NPU_GR_ABI 13  // raise it with every change of this table; `library.py` has the same number

extern "C" {

// What a buffer of floating-point numbers holds.
enum Element : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };  // kInt8: of tiles of keys and values alone

// The best continuations of a request's beams; see Backend.beam_topk for what it means.
struct TopkJob {
  const void *logits;  // [num_rows, num_columns] of `element`; not read with `value_start`
  int64_t element;
  int64_t row_stride;
  int64_t num_rows;
  int64_t num_columns;
  int64_t first_column;        // of code 0
  int64_t num_codes;           // first_column + num_codes <= num_columns
  int64_t over_valid;          // 1: normalised over the row's valid edges; 0: over all its columns
  float scale;                 // of every logit: 1 / temperature
  float *values;               // scaled logits of the valid edges alone, row after row; overwritten
  const int64_t *value_start;  // [num_rows] where each row's values begin; null: read `logits`
  const float *acc;            // [num_rows]
  const int64_t *lo;           // [num_rows] first edge; codes of a row's edges ascend
  const int64_t *degree;       // [num_rows] edges
  const int32_t *code;         // [edges]
  const uint8_t *allowed;      // [edges], null = all
  int64_t width;
  void *workspace;  // beam_topk_bytes of it, aligned to 64
  float *norm;      // [num_rows] out, may be null: log-sum-exp of the rows that were visited
  float *score;     // [width] out
  int64_t *parent;  // [width] out
  int64_t *edge;    // [width] out
};

// Logits hidden @ weight.T at the valid edges of each row alone.
struct HeadJob {
  const void *hidden;  // [num_rows, dim] of `element`
  const void *weight;  // [codes, dim] of `element`
  int64_t element;
  int64_t hidden_stride;
  int64_t weight_stride;
  int64_t num_rows;
  int64_t dim;
  float scale;                 // of every logit
  const int64_t *lo;           // [num_rows] first edge
  const int64_t *degree;       // [num_rows] edges
  const int32_t *code;         // [edges]
  const int64_t *value_start;  // [num_rows] where each row's values begin
  float *values;               // out: [sum of degree]
};

// Softmax attention of beams; see Backend.beam_attention. All tensors are of `element`, and contiguous.
struct BeamJob {
  const void *q;  // [num_rows, num_heads, head_dim]
  int64_t element;
  int64_t num_rows;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;
  int64_t num_slabs;  // of the prefix, in token order
  const void *const *slab_keys;
  const void *const *slab_values;  // each [tokens, num_kv_heads, head_dim]
  const int64_t *slab_tokens;
  int64_t num_slots;     // of each beam's own tokens that are valid
  const void *own_keys;  // [holders, slots, num_kv_heads, head_dim]
  const void *own_values;
  int64_t own_row_stride;
  const int64_t *ancestry;  // [num_slots, num_rows] holder of each slot; null: the row itself
  int64_t ancestry_stride;
  void *out;        // as q
  void *workspace;  // beam_attention_bytes of it, aligned to 64
};

struct Kernels {
  int64_t num_bytes;  // of this table; `library.py` compares it with its own
  int64_t abi;
  const char *isa;       // generic | neon | avx2 | avx512 | avx512_bf16
  int64_t vector_bytes;  // of one register
  int64_t has_bf16_dot;  // 1: products of bf16 pairs in hardware

  // Probes: the roofs that kernels are measured against.
  float (*probe_fma_f32)(int64_t repeats);   // returns its sum; flops = repeats * probe_flops_f32
  float (*probe_fma_bf16)(int64_t repeats);  // the same on bf16 pairs; null where the CPU has no such product
  float (*probe_read)(const float *data, int64_t count);  // reads everything once
  int64_t probe_flops_f32;
  int64_t probe_flops_bf16;

  int64_t (*beam_topk_bytes)(int64_t num_rows, int64_t num_columns, int64_t width);  // of workspace
  void (*gathered_head)(const HeadJob *job);
  int64_t (*beam_topk)(const TopkJob *job);             // how many were selected; -1: a logit is not a number
  int64_t (*beam_attention_bytes)(const BeamJob *job);  // of workspace
  void (*beam_attention)(const BeamJob *job);

  // HSTU attention and its keys and values in tiles: hstu_call.h
  int64_t (*hstu_scratch_bytes)(const Hstu *, int64_t is_causal);
  void (*hstu_causal)(const Hstu *);
  void (*hstu_targets)(const Hstu *);
  void (*pack_kv)(const Pack *);
  int64_t (*affine_scratch_bytes)(const Affine *);
  void (*affine)(const Affine *);
  int64_t (*hstu_pass_bytes)(const HstuPass *);  // of scratch, or a PassError
  void (*hstu_pass)(const HstuPass *);
  int64_t (*hstu_find_bytes)(const HstuFind *);  // of next.scratch, or an error
  int64_t (*hstu_find)(const HstuFind *);        // 0, or an error

  int64_t (*best_items_bytes)(const ItemsJob *job);  // of workspace
  void (*best_items)(const ItemsJob *job);
  int64_t (*item_products)(const ProductsJob *job);  // 0; -1: a row is none of the items'

  int64_t (*order_bytes)(const OrderJob *job);  // of workspace
  void (*blend_sums)(const OrderJob *job);
  void (*neighbour_sums)(const OrderJob *job, double *sums);  // of the liked events alone: [1 + I], first of padding
};

// The table of an instruction set; "" = the best that this CPU has. Null: unknown, not compiled in, or the CPU lacks
// it.
__attribute__((visibility("default"))) const Kernels *npu_gr_kernels(const char *isa);
}

#endif
