// How each op is cut into tiles, buffers and cores. Pure C++: the host code, the CPU emulator and the tests share it.
//
// Sizes that the hardware sets: a list of MrgSort has at most 4095 pairs, Compares works on whole 256 bytes, and the
// buffers of one core must fit the Unified Buffer. A plan that does not exist comes with a reason in words; the caller
// then uses the torch composition.
#pragma once
#include <cstdint>

namespace npu_gr {

constexpr uint32_t kMaxK = 2048;          // pairs kept; two lists of them must fit next to a tile
constexpr uint32_t kMinTile = 256;        // elements; any less and Compares would see part of a repeat
constexpr uint32_t kMaxTile = 4096;       // a tile is sorted as one list in the end, of 4095 pairs at most in a merge
constexpr uint32_t kMaxRows = 2048;       // beams of one request
constexpr uint32_t kMaxPairs = 1u << 31;  // row and position share one 32-bit index, whose sign means "none"

constexpr uint64_t up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }
constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

// What a machine has; asked of the platform, never a constant.
struct Device {
  uint32_t cores;     // vector cores
  uint32_t ub_bytes;  // of one core, what Select keeps for itself taken off
};

enum class Dtype : uint32_t { F32, F16, BF16 };
constexpr uint32_t bytes_of(Dtype dtype) { return dtype == Dtype::F32 ? 4 : 2; }

// ---- the best k pairs of a stream of tiles: kernels/best_pairs.h
constexpr uint32_t padded_k(uint32_t k) { return uint32_t(up(k, 32)); }
constexpr uint64_t best_pairs_bytes(uint32_t tile, uint32_t k) {
  return up(tile / 8, 256)           // bits of the filter
         + 2 * 4ull * tile           // survivors: scores, indices
         + 2 * 8ull * tile           // their pairs, sorted in turns
         + 2 * 16ull * padded_k(k);  // best and spare, with room for a whole merge
}

struct Rejection {
  const char *reason = nullptr;  // nullptr: there is a plan
};

// The plan that there is not, and why.
template <typename Plan>
Plan rejected(Plan plan, const char *reason) {
  plan.reason = reason;
  return plan;
}

constexpr uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
constexpr uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Largest tile whose buffers fit, or 0. `bytes(tile)` of one core.
template <typename Bytes>
uint32_t largest_tile(uint32_t ub_bytes, uint32_t wanted, Bytes bytes) {
  uint32_t tile = kMaxTile / 2;  // 2048: 4096 gains little and leaves no room for k
  while (tile > kMinTile && tile / 2 >= wanted) tile /= 2;
  while (tile >= kMinTile && bytes(tile) > ub_bytes) tile /= 2;
  return tile < kMinTile ? 0 : tile;
}

// Cores that share one list: the time of a part falls with their number, that of the merge of their results grows.
inline uint32_t parts_for(uint64_t work_cycles, uint32_t k, uint32_t most) {
  uint64_t merge_cycles = 4ull * padded_k(k);  // two cycles a pair, its own and one that is there
  uint32_t parts = 1;
  while (parts < most && uint64_t(parts + 1) * parts * merge_cycles <= work_cycles) ++parts;
  return parts;
}

// ---- masked_topk
struct MaskedTopkPlan : Rejection {
  uint32_t tile = 0, splits = 1, part = 0;  // part: elements of a row that one core sees
  uint32_t blocks = 1, merge_blocks = 0;
  uint64_t workspace_bytes = 0;
};
constexpr uint64_t masked_topk_bytes(uint32_t tile, uint32_t k, Dtype dtype) {
  uint64_t inputs = 2 * (uint64_t(tile) * bytes_of(dtype) + up(tile / 8, 256));
  uint64_t wide = dtype == Dtype::F32 ? 0 : 4ull * tile;
  return inputs + wide + 4ull * tile + 32 + 8ull * padded_k(k) + best_pairs_bytes(tile, k);
}
constexpr uint64_t merge_bytes(uint32_t k, uint32_t rows) {  // lists in, pairs out, best and spare, table of rows
  return 2 * 8ull * padded_k(k) + 12ull * padded_k(k) + 2 * 4ull * padded_k(k) + up(4ull * rows, 32) +
         best_pairs_bytes(kMinTile, k);
}
// `tile` and `splits` other than 0 are the caller's choice: for tests and benches.
inline MaskedTopkPlan plan_masked_topk(uint32_t rows, uint32_t n, uint32_t k, Dtype dtype, Device device,
                                       uint32_t tile = 0, uint32_t splits = 0) {
  MaskedTopkPlan plan;
  if (k < 1 || k > kMaxK) return rejected(plan, "masked_topk: k must be 1 to 2048");
  if (n >= kMaxPairs) return rejected(plan, "masked_topk: rows of 2^31 elements or more");
  auto bytes = [&](uint32_t t) { return masked_topk_bytes(t, k, dtype); };
  plan.tile = tile ? tile : largest_tile(device.ub_bytes, larger(n, kMinTile), bytes);
  if (plan.tile == 0 || bytes(plan.tile) > device.ub_bytes)
    return rejected(plan, "masked_topk: no tile fits the buffer");
  if (merge_bytes(k, 0) > device.ub_bytes) return rejected(plan, "masked_topk: k lists do not fit the buffer");
  uint32_t tiles = larger(1, ceil_div(n, plan.tile));
  if (splits == 0) {
    uint64_t row_cycles = 700ull * tiles;  // a tile that the filter empties: bench emulator
    splits = rows >= device.cores ? 1 : parts_for(row_cycles, k, larger(1, device.cores / larger(1, rows)));
  }
  uint32_t tiles_a_part = ceil_div(tiles, smaller(splits, tiles));
  plan.part = tiles_a_part * plan.tile;
  plan.splits = ceil_div(tiles, tiles_a_part);
  plan.blocks = larger(1, smaller(rows * plan.splits, device.cores));
  if (plan.splits > 1) {
    plan.merge_blocks = larger(1, smaller(rows, device.cores));
    plan.workspace_bytes = 8ull * padded_k(k) * rows * plan.splits;
  }
  return plan;
}

// ---- csr_gather_topk
struct CsrPlan : Rejection {
  uint32_t tile = 0, groups = 1, pieces = 1;  // groups of rows, pieces of each row's children
  uint32_t shift = 0;                         // index of a pair = row << shift | child
  uint32_t blocks = 1, norm_blocks = 1;
  uint64_t workspace_bytes = 0;
};
constexpr uint64_t csr_row_bytes(uint32_t codes, uint32_t tile, Dtype dtype) {  // kernels/children.h
  uint64_t raw = up(uint64_t(codes) * bytes_of(dtype), 32);
  return raw * (dtype == Dtype::F32 ? 2 : 1) + (dtype == Dtype::F32 ? 0 : up(4ull * codes, 32)) + 2 * 4ull * tile +
         2ull * tile + 2ull * tile + up(tile / 8, 256);
}
constexpr uint64_t csr_select_bytes(uint32_t codes, uint32_t rows, uint32_t tile, uint32_t k, Dtype dtype) {
  return csr_row_bytes(codes, tile, dtype) + 3 * 4ull * tile + 4 * up(4ull * rows, 32) + 8ull * padded_k(k) +
         best_pairs_bytes(tile, k);
}
constexpr uint64_t csr_norm_bytes(uint32_t codes, uint32_t rows, uint32_t tile, Dtype dtype) {
  return csr_row_bytes(codes, tile, dtype) + 4ull * tile + 4096 + 4 * up(4ull * rows, 32) + 2 * up(4ull * rows, 32);
}
inline CsrPlan plan_csr_gather_topk(uint32_t rows, uint32_t codes, uint32_t k, Dtype dtype, Device device,
                                    uint32_t tile = 0, uint32_t groups = 0, uint32_t pieces = 0) {
  CsrPlan plan;
  if (k < 1 || k > kMaxK) return rejected(plan, "csr_gather_topk: k must be 1 to 2048");
  if (rows < 1 || rows > kMaxRows) return rejected(plan, "csr_gather_topk: 1 to 2048 rows");
  if (codes < 1) return rejected(plan, "csr_gather_topk: a codebook of no codes");
  while (codes > 1u << plan.shift) ++plan.shift;
  if (uint64_t(rows) << plan.shift > kMaxPairs) return rejected(plan, "csr_gather_topk: rows times codes over 2^31");
  plan.groups = groups ? smaller(groups, rows) : smaller(rows, parts_for(1000ull * rows, k, device.cores));
  uint64_t row_cycles = 1000 + codes;
  plan.pieces = pieces ? pieces : rows > 1 ? 1 : parts_for(row_cycles, k, device.cores);
  if (plan.pieces > 1) plan.groups = rows;  // else the second piece of a row would come behind the group's next row
  uint32_t held = ceil_div(rows, plan.groups);
  auto bytes = [&](uint32_t t) {
    uint64_t select = csr_select_bytes(codes, held, t, k, dtype), norm = csr_norm_bytes(codes, rows, t, dtype);
    return select > norm ? select : norm;
  };
  plan.tile = tile ? tile : largest_tile(device.ub_bytes, kMinTile * 8, bytes);
  if (plan.tile == 0 || bytes(plan.tile) > device.ub_bytes)
    return rejected(plan, "csr_gather_topk: a row of logits and k pairs do not fit the buffer");
  if (merge_bytes(k, rows) > device.ub_bytes) return rejected(plan, "csr_gather_topk: k lists do not fit the buffer");
  plan.blocks = smaller(plan.groups * plan.pieces, device.cores);
  plan.norm_blocks = smaller(rows, device.cores);
  plan.workspace_bytes = 8ull * padded_k(k) * plan.groups * plan.pieces;
  return plan;
}

// ---- beam_fork: bytes only
struct BeamForkPlan : Rejection {
  uint32_t chunk = 0;  // bytes of a row in one step
  uint32_t blocks = 1;
};
inline BeamForkPlan plan_beam_fork(uint32_t layers, uint32_t held_rows, uint32_t new_rows, uint32_t used_bytes,
                                   Device device, uint32_t chunk = 0) {
  BeamForkPlan plan;
  if (held_rows > kMaxRows || new_rows > held_rows)
    return rejected(plan, "beam_fork: at most 2048 beams, no more than the arena holds");
  uint64_t index = up(4ull * new_rows, 32);
  uint64_t room = (device.ub_bytes - index) / 2 / larger(1, held_rows) / 32 * 32;
  if (room < 32) return rejected(plan, "beam_fork: a column of the arena does not fit the buffer");
  uint32_t most = chunk ? uint32_t(up(chunk, 32)) : 4096;
  plan.chunk = smaller(smaller(most, uint32_t(room)), uint32_t(up(larger(1, used_bytes), 32)));
  uint64_t steps = 2ull * layers * ceil_div(used_bytes, plan.chunk);
  plan.blocks = steps < device.cores ? larger(1, uint32_t(steps)) : device.cores;
  return plan;
}

}  // namespace npu_gr
