// The launch functions that CANN's build writes, one header a kernel. For the type check without CANN they are declared
// here, with the arguments of kernels/entries.h.
#pragma once
#ifndef NPU_GR_TYPE_CHECK
#include "aclrtlaunch_beam_fork.h"
#include "aclrtlaunch_csr_merge.h"
#include "aclrtlaunch_csr_norm_bf16.h"
#include "aclrtlaunch_csr_norm_f16.h"
#include "aclrtlaunch_csr_norm_f32.h"
#include "aclrtlaunch_csr_select_bf16.h"
#include "aclrtlaunch_csr_select_f16.h"
#include "aclrtlaunch_csr_select_f32.h"
#include "aclrtlaunch_hstu_finish_bf16.h"
#include "aclrtlaunch_hstu_finish_f16.h"
#include "aclrtlaunch_hstu_finish_f32.h"
#include "aclrtlaunch_hstu_rows_bf16.h"
#include "aclrtlaunch_hstu_rows_f16.h"
#include "aclrtlaunch_hstu_rows_f32.h"
#include "aclrtlaunch_hstu_scores_bf16.h"
#include "aclrtlaunch_hstu_scores_f16.h"
#include "aclrtlaunch_hstu_scores_f32.h"
#include "aclrtlaunch_masked_topk_bf16.h"
#include "aclrtlaunch_masked_topk_f16.h"
#include "aclrtlaunch_masked_topk_f32.h"
#include "aclrtlaunch_merge_rows.h"
#else
#include <acl/acl_base.h>

#include <cstdint>

#define NPU_GR_DECLARE(kernel, ...) \
  extern "C" uint32_t aclrtlaunch_##kernel(uint32_t blocks, aclrtStream stream, __VA_ARGS__)
#define NPU_GR_P void *
#define NPU_GR_U uint32_t
#define NPU_GR_CSR NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U
#define NPU_GR_DECLARE_OF(dtype)                                                                                      \
  NPU_GR_DECLARE(masked_topk_##dtype, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_U, NPU_GR_U, \
                 NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U);                                         \
  NPU_GR_DECLARE(csr_norm_##dtype, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_CSR);           \
  NPU_GR_DECLARE(csr_select_##dtype, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P,  \
                 NPU_GR_CSR);                                                                                         \
  NPU_GR_DECLARE(hstu_rows_##dtype, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P,   \
                 NPU_GR_P, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U,  \
                 NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U);                               \
  NPU_GR_DECLARE(hstu_scores_##dtype, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_U, \
                 NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U);                                         \
  NPU_GR_DECLARE(hstu_finish_##dtype, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_U, NPU_GR_U, NPU_GR_U, \
                 NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U)
NPU_GR_DECLARE_OF(f32);
NPU_GR_DECLARE_OF(f16);
NPU_GR_DECLARE_OF(bf16);
NPU_GR_DECLARE(merge_rows, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_U, NPU_GR_U, NPU_GR_U);
NPU_GR_DECLARE(csr_merge, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_CSR);
NPU_GR_DECLARE(beam_fork, NPU_GR_P, NPU_GR_P, NPU_GR_P, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U, NPU_GR_U);
#endif
