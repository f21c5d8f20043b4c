// libtorch_npu, as much of it as a backend needs: a device whose memory is this machine's, with its own allocator, a
// queue of launches that runs as late as it can, and torch's CPU fallback for every op that is not ours.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <deque>
#include <mutex>

#include "pretended.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace {
using at::Tensor;

// ---- the queue
struct Task {
  std::string name;
  std::function<int()> run;
  aclrtStream stream;
};
std::recursive_mutex lock;
std::deque<Task> tasks;
thread_local aclrtStream current = reinterpret_cast<aclrtStream>(1);  // stream 0; nullptr is none

void drain() {
  std::lock_guard<std::recursive_mutex> guard(lock);
  while (!tasks.empty()) {
    Task task = std::move(tasks.front());
    tasks.pop_front();
    pretended_expect(task.stream);
    int status = task.run();
    if (status != 0) {
      tasks.clear();
      TORCH_CHECK(false, task.name, ": error ", status, ": ", pretended_last_fault());
    }
  }
}

// ---- memory
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void *at = pretended_allocate(bytes);
    return {at, at, &pretended_free, c10::Device(c10::DeviceType::PrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pretended_free; }
  void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

size_t largest_pinned = 0;
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    largest_pinned = std::max(largest_pinned, bytes);
    void *at = std::malloc(bytes ? bytes : 1);
    return {at, at, &std::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Allocator *getPinnedMemoryAllocator() const override {
    static Pinned pinned;
    return &pinned;
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  c10::Device here() const { return {static_type, 0}; }
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, here()); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(here()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- ops that make tensors or look at them; all others fall back
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}
Tensor on_cpu(const Tensor &x) {  // the same memory
  if (x.is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}
Tensor copy_from(const Tensor &from, const Tensor &to, bool) {
  drain();
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
Tensor copy_from_and_resize(const Tensor &from, const Tensor &to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  drain();
  at::native::cpu_fallback(op, stack);
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

namespace c10_npu {
aclrtStream NPUStream::stream() const { return stream(true); }
aclrtStream NPUStream::stream(const bool empty_queue) const {
  if (empty_queue) drain();
  return stream_;
}
NPUStream getCurrentNPUStream() { return NPUStream(current); }
}  // namespace c10_npu

namespace at_npu {
namespace native {
OpCommand &OpCommand::Name(const std::string &name) {
  name_ = name;
  return *this;
}
OpCommand &OpCommand::SetCustomHandler(std::function<int()> handler) {
  handler_ = std::move(handler);
  return *this;
}
void OpCommand::Run() {
  std::lock_guard<std::recursive_mutex> guard(lock);
  tasks.push_back({name_, std::move(handler_), current});
}
}  // namespace native
}  // namespace at_npu

extern "C" {
void pretended_drain() { drain(); }
void pretended_set_stream(uint64_t index) { current = reinterpret_cast<aclrtStream>(index + 1); }
size_t pretended_largest_pinned() { return largest_pinned; }
void pretended_begin() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &memory);
}
}
