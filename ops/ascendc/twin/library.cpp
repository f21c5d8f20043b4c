// The twin as a shared library with a C interface: one function an op, on host memory. See npu_gr/bench/ascend_twin.py.
//
// A function returns 0; 1 with a reason in words where there is no plan; 2 with the twin's complaint. Caller's sizes
// are trusted. `knobs` = cores, UB bytes (0: of dav-2201), then what the plan's optional arguments are (0: the plan's
// choice).
#define ASCENDC_CPU_TWIN 1
#include "../kernels/entries.h"

namespace {
thread_local AscendC::twin::Report *report;
}

#define NPU_GR_LAUNCH(kernel, blocks, ...) (AscendC::twin::launch(blocks, *report, [&] { kernel(__VA_ARGS__); }), 0)
#include "../op_host/run.h"

namespace {
using namespace npu_gr;
using AscendC::twin::Report;

struct Out {
  char error[512];
  uint64_t total[AscendC::twin::COUNTERS], critical[AscendC::twin::COUNTERS];
  uint32_t launches, ub_bytes, blocks, tile, parts, reserved;
};

Device device(const uint32_t *knobs) {
  AscendC::twin::ub_limit = knobs[1] ? knobs[1] : AscendC::twin::kUbBytes;
  return {knobs[0], AscendC::twin::ub_limit};
}

int refuse(Out *out, const char *reason) {
  std::snprintf(out->error, sizeof out->error, "%s", reason);
  return 1;
}
template <typename Run>
int guarded(Out *out, Run work) {
  Report here;
  report = &here;
  int status = 0;
  try {
    status = work();
  } catch (const std::exception &error) {
    std::snprintf(out->error, sizeof out->error, "%s", error.what());
    status = 2;
  }
  report = nullptr;
  std::copy(here.total.begin(), here.total.end(), out->total);
  std::copy(here.critical.begin(), here.critical.end(), out->critical);
  out->launches = here.launches;
  out->ub_bytes = here.ub_bytes;
  return status;
}
std::vector<uint8_t> poisoned(uint64_t bytes) { return std::vector<uint8_t>(bytes, AscendC::twin::kPoison); }
}  // namespace

extern "C" {

int twin_counters() { return AscendC::twin::COUNTERS; }

// knobs: cores, ub, tile, splits
int twin_masked_topk(const uint32_t *knobs, uint32_t dtype, Address logits, Address mask, Address bias, Address value,
                     Address index, uint32_t rows, uint32_t n, uint32_t k, uint32_t mask_stride, Out *out) {
  auto plan = plan_masked_topk(rows, n, k, Dtype(dtype), device(knobs), knobs[2], knobs[3]);
  if (plan.reason) return refuse(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.tile;
  out->parts = plan.splits;
  MaskedTopkCall call{logits, mask, bias, value, index, rows, n, k, mask_stride, Dtype(dtype)};
  auto workspace = poisoned(plan.workspace_bytes);
  return guarded(out, [&] { return run(call, plan, workspace.data()); });
}

// knobs: cores, ub, tile, groups, pieces
int twin_csr_gather_topk(const uint32_t *knobs, uint32_t dtype, Address logits, Address norm, Address acc, Address lo,
                         Address degree, Address code, Address allowed, Address score, Address parent, Address edge,
                         uint32_t rows, uint32_t codes, uint32_t edges, uint32_t k, uint32_t has_norm, Out *out) {
  auto plan = plan_csr_gather_topk(rows, codes, k, Dtype(dtype), device(knobs), knobs[2], knobs[3], knobs[4]);
  if (plan.reason) return refuse(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.tile;
  out->parts = plan.groups * plan.pieces;
  CsrCall call{logits, norm, acc,  lo,    degree, code, allowed,       score,
               parent, edge, rows, codes, edges,  k,    has_norm != 0, Dtype(dtype)};
  auto workspace = poisoned(plan.workspace_bytes);
  return guarded(out, [&] { return run(call, plan, workspace.data()); });
}

// knobs: cores, ub, chunk
int twin_beam_fork(const uint32_t *knobs, Address keys, Address values, Address parent, uint32_t layers, uint32_t held,
                   uint32_t rows, uint32_t row_bytes, uint32_t used_bytes, Out *out) {
  auto plan = plan_beam_fork(layers, held, rows, used_bytes, device(knobs), knobs[2]);
  if (plan.reason) return refuse(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.chunk;
  out->parts = held;
  BeamForkCall call{keys, values, parent, layers, held, rows, row_bytes, used_bytes};
  return guarded(out, [&] { return run(call, plan); });
}

}  // extern "C"
