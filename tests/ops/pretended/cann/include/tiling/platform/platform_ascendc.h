// A 910B3, as far as our host code asks; PRETENDED_CORES gives it another number of cores.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace platform_ascendc {
enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM };

class PlatformAscendC {
 public:
  uint32_t GetCoreNumAiv() const {
    const char *cores = std::getenv("PRETENDED_CORES");
    return cores == nullptr ? 40 : uint32_t(std::atoi(cores));
  }
  void GetCoreMemSize(const CoreMemType &kind, uint64_t &bytes) const {
    bytes = kind == CoreMemType::UB ? 192 * 1024 - 256 : 0;
  }
};
class PlatformAscendCManager {
 public:
  static PlatformAscendC *GetInstance() {
    static PlatformAscendC platform;
    return &platform;
  }
};
}  // namespace platform_ascendc
