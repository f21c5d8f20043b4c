#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,prefer-vector-width=512")
#define NPU_GR_TABLE npu_gr_table_avx512_bf16
#define NPU_GR_VECTOR_BYTES 64
#define NPU_GR_BF16_DOT 1
#define NPU_GR_ISA "avx512_bf16"
#include "table.h"
#endif
