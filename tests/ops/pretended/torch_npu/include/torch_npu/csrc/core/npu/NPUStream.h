#pragma once
#include "acl/acl_base.h"

namespace c10_npu {
class NPUStream {
 public:
  explicit NPUStream(aclrtStream stream) : stream_(stream) {}
  // The handle, after all that is queued has been launched, unless `empty_queue` is false.
  aclrtStream stream() const;
  aclrtStream stream(const bool empty_queue) const;

 private:
  aclrtStream stream_;
};
NPUStream getCurrentNPUStream();
}  // namespace c10_npu
