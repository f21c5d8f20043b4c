// The C ABI between the kernels and npu_gr/backend/native.py: one table of functions an instruction set.
//
// Plain pointers and sizes, no torch, no Python, no allocation, no threads, no exceptions. Every function may run on
// several threads at once; memory that it needs comes from the caller. Strides count elements, not bytes.
#ifndef NPU_GR_KERNELS_H
#define NPU_GR_KERNELS_H

#include <stdint.h>

#include "hstu_call.h"

#define NPU_GR_ABI 1  // raise it with every change of this table; native.py has the same number

extern "C" {

// What a buffer of floating-point numbers holds.
enum Element : int32_t { kFloat32 = 0, kBFloat16 = 1 };

struct Kernels {
  int64_t num_bytes;  // of this table; native.py compares it with its own
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

  // HSTU attention and its keys and values in tiles: hstu_call.h
  int64_t (*hstu_scratch_bytes)(const Hstu *, int64_t is_causal);
  void (*hstu_causal)(const Hstu *);
  void (*hstu_targets)(const Hstu *);
  void (*pack_kv)(const Pack *);
  int64_t (*affine_scratch_bytes)(const Affine *);
  void (*affine)(const Affine *);
};

// The table of an instruction set; "" = the best that this CPU has. Null: unknown, not compiled in, or the CPU lacks it.
__attribute__((visibility("default"))) const Kernels *npu_gr_kernels(const char *isa);
}

#endif
