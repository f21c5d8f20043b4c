// Sizes that the HSTU kernels, their plans and the host's tables share.
#pragma once
#include <cstdint>

namespace npu_gr {

constexpr uint32_t kRowBlock = 32;     // queries between two bounds of times; row slots are whole blocks
constexpr uint32_t kKeyBlock = 256;    // keys of a tile, and between two bounds; key slots are whole blocks
constexpr uint32_t kNearEnd = 288;     // repeats at each end of a table of positions; also the window of 32 queries
constexpr uint32_t kTimeBuckets = 64;  // of a table of times
constexpr uint32_t kEntryNumbers = 8;  // of a request in `meta`

}  // namespace npu_gr
