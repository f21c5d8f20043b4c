// What every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64.
#define NPU_GR_TABLE npu_gr_table_generic
#define NPU_GR_VECTOR_BYTES 16
#define NPU_GR_BF16_DOT 0
#if defined(__aarch64__)
#define NPU_GR_ISA "neon"
#else
#define NPU_GR_ISA "generic"
#endif
#include "table.h"
