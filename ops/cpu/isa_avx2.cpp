#if defined(__x86_64__) && !defined(__clang__)  // clang knows no such pragma and would compile SSE2
#pragma GCC target("avx2,fma")
#define NPU_GR_TABLE npu_gr_table_avx2
#define NPU_GR_VECTOR_BYTES 32
#define NPU_GR_BF16_DOT 0
#define NPU_GR_ISA "avx2"
#include "table.h"
#endif
