// The launch functions that CANN's build writes, one header a kernel.
#pragma once
#include "aclrtlaunch_beam_fork.h"
#include "aclrtlaunch_csr_merge.h"
#include "aclrtlaunch_csr_norm_bf16.h"
#include "aclrtlaunch_csr_norm_f16.h"
#include "aclrtlaunch_csr_norm_f32.h"
#include "aclrtlaunch_csr_select_bf16.h"
#include "aclrtlaunch_csr_select_f16.h"
#include "aclrtlaunch_csr_select_f32.h"
#include "aclrtlaunch_masked_topk_bf16.h"
#include "aclrtlaunch_masked_topk_f16.h"
#include "aclrtlaunch_masked_topk_f32.h"
#include "aclrtlaunch_merge_rows.h"
