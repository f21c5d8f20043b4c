#pragma once
#include "acl/acl_base.h"

namespace c10_npu {
class NPUStream {
 public:
  explicit NPUStream(aclrtStream stream) : stream_(stream) {}
  // The handle; with `empty_queue` after all that is queued has been launched.
  aclrtStream stream(bool empty_queue = true) const;

 private:
  aclrtStream stream_;
};
NPUStream getCurrentNPUStream();
}  // namespace c10_npu
