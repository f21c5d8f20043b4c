// The emulator as a shared library with a C interface: one function an op, on host memory. See
// tests/ops/ascend_emulator.py.
//
// A function returns 0; 1 with a reason in words where there is no plan; 2 with the emulator's complaint. Caller's
// sizes are trusted. `knobs` = cores, UB bytes (0: of dav-2201), then what the plan's optional arguments are (0: the
// plan's choice).
#define ASCENDC_CPU_EMULATOR 1
#include "../kernels/entries.h"

namespace {
thread_local AscendC::emulator::Report *report;
thread_local std::vector<AscendC::emulator::Counters> cores;  // of this thread's last launch
}  // namespace

#define NPU_GR_LAUNCH(kernel, blocks, ...) (AscendC::emulator::launch(blocks, *report, [&] { kernel(__VA_ARGS__); }), 0)
#include "../op_host/run.h"

namespace {
using namespace npu_gr;
using AscendC::emulator::Report;

struct Out {
  char error[512];
  uint64_t total[AscendC::emulator::COUNTERS], critical[AscendC::emulator::COUNTERS];
  uint32_t launches, ub_bytes, blocks, tile, parts, reserved;
};

Device device(const uint32_t *knobs) {
  AscendC::emulator::ub_limit = knobs[1] ? knobs[1] : AscendC::emulator::kUbBytes;
  return {knobs[0], AscendC::emulator::ub_limit};
}

int reject(Out *out, const char *reason) {
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
  cores = here.cores;
  out->launches = here.launches;
  out->ub_bytes = here.ub_bytes;
  return status;
}
HstuSizes hstu_sizes(const uint32_t *s) { return {s[0], s[1], s[2], s[3], s[4], s[5], Dtype(s[6])}; }
std::vector<uint8_t> poisoned(uint64_t bytes) { return std::vector<uint8_t>(bytes, AscendC::emulator::kPoison); }
}  // namespace

extern "C" {

int emulator_counters() { return AscendC::emulator::COUNTERS; }

// The counters of each core in this thread's last launch; returns how many cores it had, of which `room` are written.
uint32_t emulator_cores(uint64_t *counters, uint32_t room) {
  for (uint32_t core = 0; core < room && core < cores.size(); ++core)
    std::copy(cores[core].begin(), cores[core].end(), counters + core * AscendC::emulator::COUNTERS);
  return uint32_t(cores.size());
}

// knobs: cores, ub, tile, splits
int emulator_masked_topk(const uint32_t *knobs, uint32_t dtype, Address logits, Address mask, Address bias,
                         Address value, Address index, uint32_t rows, uint32_t n, uint32_t k, uint32_t mask_stride,
                         Out *out) {
  auto plan = plan_masked_topk(rows, n, k, Dtype(dtype), device(knobs), knobs[2], knobs[3]);
  if (plan.reason) return reject(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.tile;
  out->parts = plan.splits;
  MaskedTopkCall call{logits, mask, bias, value, index, rows, n, k, mask_stride, Dtype(dtype)};
  auto workspace = poisoned(plan.workspace_bytes);
  return guarded(out, [&] { return run(call, plan, workspace.data()); });
}

// knobs: cores, ub, tile, groups, pieces
int emulator_csr_gather_topk(const uint32_t *knobs, uint32_t dtype, Address logits, Address norm, Address acc,
                             Address lo, Address degree, Address code, Address allowed, Address score, Address parent,
                             Address edge, uint32_t rows, uint32_t codes, uint32_t edges, uint32_t k, uint32_t has_norm,
                             Out *out) {
  auto plan = plan_csr_gather_topk(rows, codes, k, Dtype(dtype), device(knobs), knobs[2], knobs[3], knobs[4]);
  if (plan.reason) return reject(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.tile;
  out->parts = plan.groups * plan.pieces;
  CsrCall call{logits, norm, acc,  lo,    degree, code, allowed,       score,
               parent, edge, rows, codes, edges,  k,    has_norm != 0, Dtype(dtype)};
  auto workspace = poisoned(plan.workspace_bytes);
  return guarded(out, [&] { return run(call, plan, workspace.data()); });
}

// knobs: cores, ub, chunk
int emulator_beam_fork(const uint32_t *knobs, Address keys, Address values, Address parent, uint32_t layers,
                       uint32_t held, uint32_t rows, uint32_t row_bytes, uint32_t used_bytes, Out *out) {
  auto plan = plan_beam_fork(layers, held, rows, used_bytes, device(knobs), knobs[2]);
  if (plan.reason) return reject(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.chunk;
  out->parts = held;
  BeamForkCall call{keys, values, parent, layers, held, rows, row_bytes, used_bytes};
  return guarded(out, [&] { return run(call, plan); });
}

// knobs: cores, ub, piece, lot. sizes: those of HstuSizes in their order, the dtype last.
int emulator_hstu_rows(const uint32_t *knobs, const uint32_t *sizes, Address mixed, Address meta, Address page_ids,
                       Address k_plane, Address v_plane, Address q, Address k, Address v, Address u,
                       uint32_t mixed_rows, uint32_t queries, uint32_t page_tokens, uint32_t pages,
                       uint32_t num_page_ids, uint32_t silu_all, uint32_t q_scale, Out *out) {
  HstuSizes s = hstu_sizes(sizes);
  auto plan = plan_hstu_rows(s, page_tokens, num_page_ids, device(knobs), knobs[2], knobs[3]);
  if (plan.reason) return reject(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.piece;
  out->parts = plan.lot;
  HstuRowsCall call{mixed,      meta,    page_ids,    k_plane, v_plane,      q,        k,      v, u, s,
                    mixed_rows, queries, page_tokens, pages,   num_page_ids, silu_all, q_scale};
  return guarded(out, [&] { return run(call, plan); });
}

// knobs: cores, ub, tile
int emulator_hstu_scores(const uint32_t *knobs, const uint32_t *sizes, Address scores, Address meta, Address bounds,
                         Address row_times, Address key_times, Address tables, Address near, uint32_t positions,
                         uint32_t alpha, Out *out) {
  HstuSizes s = hstu_sizes(sizes);
  auto plan = plan_hstu_scores(s, device(knobs), knobs[2]);
  if (plan.reason) return reject(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.tile_rows;
  out->parts = 1;
  HstuScoresCall call{scores, meta, bounds, row_times, key_times, tables, near, s, positions, alpha};
  return guarded(out, [&] { return run(call, plan); });
}

// knobs: cores, ub, lot
int emulator_hstu_finish(const uint32_t *knobs, const uint32_t *sizes, Address attention, Address u, Address norm,
                         Address meta, Address result, uint32_t queries, uint32_t group, uint32_t joined,
                         uint32_t scale, uint32_t share, uint32_t eps, Out *out) {
  HstuSizes s = hstu_sizes(sizes);
  auto plan = plan_hstu_finish(s, group, joined != 0, device(knobs), knobs[2]);
  if (plan.reason) return reject(out, plan.reason);
  out->blocks = plan.blocks;
  out->tile = plan.lot;
  out->parts = 1;
  HstuFinishCall call{attention, u, norm, meta, result, s, queries, group, joined, scale, share, eps};
  return guarded(out, [&] { return run(call, plan); });
}

// Exp as the emulator computes it, for definitions that must give the same bits.
void emulator_exp(const float *from, float *to, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) to[i] = std::exp(from[i]);
}

}  // extern "C"
