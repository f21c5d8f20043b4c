// Which table a CPU gets. The only exported symbol of the library is here.
#include "kernels.h"

#include <string.h>

extern const Kernels npu_gr_table_generic;
#if defined(__x86_64__) && !defined(__clang__)
extern const Kernels npu_gr_table_avx2, npu_gr_table_avx512, npu_gr_table_avx512_bf16;

static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif

static bool has_all() { return true; }

struct Candidate {
  const Kernels *table;
  bool (*is_supported)();
};

static const Candidate kBestFirst[] = {
#if defined(__x86_64__) && !defined(__clang__)
    {&npu_gr_table_avx512_bf16, has_avx512_bf16},
    {&npu_gr_table_avx512, has_avx512},
    {&npu_gr_table_avx2, has_avx2},
#endif
    {&npu_gr_table_generic, has_all},
};

const Kernels *npu_gr_kernels(const char *isa) {
  for (const Candidate &candidate : kBestFirst)
    if ((!*isa || !strcmp(isa, candidate.table->isa)) && candidate.is_supported()) return candidate.table;
  return nullptr;
}
