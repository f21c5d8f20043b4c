// How the HSTU kernels are cut: see tiling.h, whose rules hold here.
#pragma once
#include "hstu_blocks.h"
#include "tiling.h"

namespace npu_gr {

constexpr uint32_t kHstuStageBytes = 32 * 1024;  // of a page in one step
constexpr uint32_t kHstuZeroBytes = 2 * 1024;
constexpr uint32_t kMaxRepeats = 255;  // of one instruction
constexpr uint32_t kMaxMoved = 4095;   // rows of one data movement

struct HstuSizes {
  uint32_t requests, row_slots, key_slots, heads, qk_dim, v_dim;
  Dtype dtype;
};
inline const char *hstu_rejection(const HstuSizes &s) {
  uint32_t block = 32 / bytes_of(s.dtype);
  if (s.requests < 1 || s.heads < 1) return "hstu: no requests, or no heads";
  if (s.qk_dim < 1 || s.v_dim < 1 || s.qk_dim % block || s.v_dim % block)
    return "hstu: a head's row is no whole number of 32 bytes";
  if (s.row_slots % kRowBlock || s.key_slots % kKeyBlock || s.key_slots < 1)
    return "hstu: row slots must be a multiple of 32, key slots of 256";
  if (s.key_slots >= 1u << 24) return "hstu: 2^24 keys or more";
  return nullptr;
}

// Rows of one step, at most 32, so that no core has one step more than another where all slots are in use.
constexpr uint32_t each_of(const HstuSizes &s, Device device) {
  uint32_t steps = ceil_div(s.requests * s.row_slots, 32 * device.cores);
  return larger(1, ceil_div(s.requests * s.row_slots, larger(1, steps) * device.cores));
}

struct HstuRowsPlan : Rejection {
  uint32_t piece = 0, lot = 0, zeros = 0;  // tokens of a page, new rows, tokens of zeros in one step
  uint32_t blocks = 1;
};
constexpr uint64_t hstu_rows_bytes(const HstuSizes &s, uint32_t page_ids, uint32_t piece, uint32_t lot,
                                   uint32_t zeros) {
  uint64_t widest = uint64_t(larger(s.qk_dim, s.v_dim)) * s.heads, size = bytes_of(s.dtype);
  uint64_t whole = 2ull * s.heads * (s.qk_dim + s.v_dim);
  return 4ull * kEntryNumbers * s.requests + up(4ull * page_ids, 32) + 2 * piece * widest * size +
         3 * lot * whole * size + 2 * 4 * lot * widest + zeros * (widest / s.heads) * size;
}
inline HstuRowsPlan plan_hstu_rows(const HstuSizes &s, uint32_t page_tokens, uint32_t page_ids, Device device,
                                   uint32_t piece = 0, uint32_t lot = 0) {
  HstuRowsPlan plan;
  if (const char *reason = hstu_rejection(s)) return rejected(plan, reason);
  if (page_tokens < 1 || page_tokens > kMaxMoved) return rejected(plan, "hstu_rows: 1 to 4095 tokens a page");
  uint32_t widest = larger(s.qk_dim, s.v_dim), row_bytes = widest * s.heads * bytes_of(s.dtype);
  plan.zeros = larger(1, kHstuZeroBytes / (widest * bytes_of(s.dtype)));
  plan.piece = smaller(page_tokens, piece ? piece : larger(1, kHstuStageBytes / row_bytes));
  plan.lot = lot ? lot : each_of(s, device);
  while (plan.lot > 1 && hstu_rows_bytes(s, page_ids, plan.piece, plan.lot, plan.zeros) > device.ub_bytes) --plan.lot;
  if (hstu_rows_bytes(s, page_ids, plan.piece, plan.lot, plan.zeros) > device.ub_bytes)
    return rejected(plan, "hstu_rows: a row and the page ids do not fit the buffer");
  plan.blocks = device.cores;  // how much there is to do, only the device knows
  return plan;
}

struct HstuScoresPlan : Rejection {
  uint32_t tile_rows = 0, blocks = 1;
};
constexpr uint64_t hstu_scores_bytes(const HstuSizes &s, uint32_t tile_rows) {
  uint64_t cells = uint64_t(tile_rows) * kKeyBlock, size = bytes_of(s.dtype);
  uint64_t bounds = 8ull * (s.row_slots / kRowBlock + s.key_slots / kKeyBlock) * s.requests;
  return 4ull * kEntryNumbers * s.requests + up(bounds, 32) + 1024 + 512ull * s.heads  // tables
         + larger(3 * size + 3 * 4, 5 * size + 2 * 4) * cells                          // in twice, out; x, e, times
         + 8 * cells / 8                                              // bits of borders and of what is seen
         + 2 * 1024 + 8 * kNearEnd * 4 + kRowBlock * 32 + 1024 + 256  // times, window, times again, rows
         + 1024 + 64;                                                 // columns, bits of the history
}
inline HstuScoresPlan plan_hstu_scores(const HstuSizes &s, Device device, uint32_t tile_rows = 0) {
  HstuScoresPlan plan;
  if (const char *reason = hstu_rejection(s)) return rejected(plan, reason);
  plan.tile_rows = tile_rows ? tile_rows : s.dtype == Dtype::F32 ? 16 : 32;
  while (plan.tile_rows > 8 && hstu_scores_bytes(s, plan.tile_rows) > device.ub_bytes) plan.tile_rows /= 2;
  if (plan.tile_rows > kRowBlock || hstu_scores_bytes(s, plan.tile_rows) > device.ub_bytes)
    return rejected(plan, "hstu_scores: tables, bounds and a tile do not fit the buffer");
  plan.blocks = device.cores;
  return plan;
}

struct HstuFinishPlan : Rejection {
  uint32_t lot = 0, blocks = 1;
};
constexpr uint64_t hstu_finish_bytes(const HstuSizes &s, uint32_t group, bool joined, uint32_t lot) {
  uint64_t cells = uint64_t(lot) * s.heads * s.v_dim, size = bytes_of(s.dtype), groups = up(cells / group, 8);
  return 4ull * kEntryNumbers * s.requests + up(8ull * group, 32) + (joined ? 7 : 5) * cells * size + 8 * cells +
         up(4 * groups, 32) * 2 + 32 * groups;
}
// group: numbers that one norm is over.
inline HstuFinishPlan plan_hstu_finish(const HstuSizes &s, uint32_t group, bool joined, Device device,
                                       uint32_t lot = 0) {
  HstuFinishPlan plan;
  if (const char *reason = hstu_rejection(s)) return rejected(plan, reason);
  if (group != s.v_dim && group != s.heads * s.v_dim)
    return rejected(plan, "hstu_finish: a norm is over a head, or over a row");
  if (group / 8 > kMaxRepeats) return rejected(plan, "hstu_finish: a norm over more than 2040 numbers");
  uint32_t of_row = s.heads * s.v_dim / group;
  plan.lot = smaller(lot ? lot : each_of(s, device), kMaxRepeats / of_row);
  while (plan.lot > 1 && hstu_finish_bytes(s, group, joined, plan.lot) > device.ub_bytes) --plan.lot;
  if (plan.lot < 1 || hstu_finish_bytes(s, group, joined, plan.lot) > device.ub_bytes)
    return rejected(plan, "hstu_finish: a row does not fit the buffer");
  plan.blocks = device.cores;
  return plan;
}

}  // namespace npu_gr
