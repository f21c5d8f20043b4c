// A 910B3, as far as our host code asks.
#pragma once
#include <cstdint>

namespace platform_ascendc {
enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM };

class PlatformAscendC {
 public:
  uint32_t GetCoreNumAiv() const { return 40; }
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
