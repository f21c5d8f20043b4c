#pragma once
#include <functional>
#include <string>

namespace at_npu {
namespace native {
// A launch that waits in the queue until somebody needs its result, as a consumer thread that is late would run it.
class OpCommand {
 public:
  OpCommand &Name(const std::string &name);
  OpCommand &SetCustomHandler(std::function<int()> handler);
  void Run();

 private:
  std::string name_;
  std::function<int()> handler_;
};
}  // namespace native
}  // namespace at_npu
