// What this machine has, asked of CANN once: vector cores and the Unified Buffer of one.
#pragma once
#include "../tiling.h"
#include "tiling/platform/platform_ascendc.h"

namespace npu_gr {

constexpr uint32_t kSelectBytes = 8 * 1024;  // of UB, which Select keeps for itself

inline Device device() {
  static const Device found = [] {
    auto *platform = platform_ascendc::PlatformAscendCManager::GetInstance();
    uint64_t ub = 0;
    platform->GetCoreMemSize(platform_ascendc::CoreMemType::UB, ub);
    return Device{platform->GetCoreNumAiv(), uint32_t(ub) - kSelectBytes};
  }();
  return found;
}

}  // namespace npu_gr
