// torch.ops.npu_gr.* on an NPU: checks, outputs, workspace, and the launches of op_host/run.h on the current stream.
//
// Schemas and fake kernels live in npu_gr/backend/npu/ops.py, which must be registered before this library is loaded.
// A launch is handed to torch_npu's command queue, so it keeps its place behind operators that were queued before it.
// Tensors are captured by the handler: their memory outlives the launch even where the caller lets go of them at once.
//
// NPU_GR_TRACE_LAUNCHES=1 in the environment: each launch names its kernel on stderr, waits, and says how it ended. A
// kernel that hangs is then the last one that was named.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>

#include "acl/acl_rt.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

#include "launches.h"  // aclrtlaunch_<kernel> of every kernel; see CMakeLists.txt
#include "platform.h"

namespace {
thread_local aclrtStream stream = nullptr;  // of the launch that this thread is in

template <typename Launch>
int traced(const char *kernel, uint32_t blocks, Launch launch) {
  static const bool is_on = std::getenv("NPU_GR_TRACE_LAUNCHES") != nullptr;
  if (!is_on) return launch();
  std::fprintf(stderr, "npu_gr: %s on %u cores\n", kernel, blocks);
  int status = launch();
  if (status == 0) status = aclrtSynchronizeStream(stream);
  std::fprintf(stderr, "npu_gr: %s ended with %d\n", kernel, status);
  return status;
}
}  // namespace
#define NPU_GR_LAUNCH(kernel, blocks, ...) \
  traced(#kernel, blocks, [&] { return int(aclrtlaunch_##kernel(blocks, stream, __VA_ARGS__)); })
#include "../op_host/run.h"

namespace {
using namespace npu_gr;
using at::Tensor;

constexpr int64_t kUint32End = int64_t(1) << 32;

Address address(const Tensor &tensor) {  // data_ptr(): a view may begin behind its storage
  return tensor.defined() ? static_cast<Address>(tensor.data_ptr()) : nullptr;
}
Address address(const c10::optional<Tensor> &tensor) { return tensor.has_value() ? address(*tensor) : nullptr; }

void check(const Tensor &tensor, const char *name, at::ScalarType dtype, at::IntArrayRef shape, const Tensor &like) {
  TORCH_CHECK(tensor.scalar_type() == dtype, name, ": must be ", dtype, ", is ", tensor.scalar_type());
  TORCH_CHECK(tensor.sizes() == shape, name, ": must be ", shape, ", is ", tensor.sizes());
  TORCH_CHECK(tensor.is_contiguous() && tensor.device() == like.device(), name, ": must be contiguous, on ",
              like.device());
}
Dtype float_dtype(const Tensor &logits, const char *op) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), op, ": logits must be a contiguous matrix");
  switch (logits.scalar_type()) {
    case at::kFloat: return Dtype::F32;
    case at::kHalf: return Dtype::F16;
    case at::kBFloat16: return Dtype::BF16;
    default: TORCH_CHECK(false, op, ": logits must be float32, float16 or bfloat16, is ", logits.scalar_type());
  }
}
uint32_t u32(int64_t value, const char *name) {
  TORCH_CHECK(value >= 0 && value < kUint32End, name, ": ", value, " does not fit 32 bits");
  return uint32_t(value);
}
template <typename Plan>
void check_plan(const Plan &plan) {
  TORCH_CHECK(plan.reason == nullptr, plan.reason, "; npu_gr's torch composition has no such limit");
}
Tensor ints(const Tensor &like, at::IntArrayRef shape) { return at::empty(shape, like.options().dtype(at::kInt)); }
Tensor floats(const Tensor &like, at::IntArrayRef shape) { return at::empty(shape, like.options().dtype(at::kFloat)); }
Tensor workspace(const Tensor &like, uint64_t bytes) {
  return at::empty({int64_t(bytes)}, like.options().dtype(at::kByte));
}

// Queues `work`, which returns the status of its launches; `kept` are the tensors that it touches.
template <typename Work>
void queue(const char *name, std::vector<Tensor> kept, Work work) {
  aclrtStream current = c10_npu::getCurrentNPUStream().stream(false);
  auto handler = [current, kept = std::move(kept), work]() -> int {
    stream = current;
    return work();
  };
  at_npu::native::OpCommand command;
  command.Name(name);
  command.SetCustomHandler(handler);
  command.Run();
}

std::tuple<Tensor, Tensor> masked_topk(const Tensor &logits, const Tensor &mask, int64_t k,
                                       const c10::optional<Tensor> &bias) {
  Dtype dtype = float_dtype(logits, "masked_topk");
  int64_t rows = logits.size(0), n = logits.size(1);
  check(mask, "masked_topk: mask_bits", at::kByte, {rows, (n + 7) / 8}, logits);
  if (bias.has_value()) check(*bias, "masked_topk: bias", at::kFloat, {rows}, logits);
  auto plan = plan_masked_topk(u32(rows, "rows"), u32(n, "columns"), u32(k, "k"), dtype, device());
  check_plan(plan);
  Tensor value = floats(logits, {rows, k}), index = ints(logits, {rows, k}),
         work = workspace(logits, plan.workspace_bytes);
  MaskedTopkCall call{address(logits), address(mask), address(bias), address(value),        address(index),
                      uint32_t(rows),  uint32_t(n),   uint32_t(k),   uint32_t((n + 7) / 8), dtype};
  queue("npu_gr_masked_topk", {logits, mask, bias.value_or(Tensor()), value, index, work},
        [call, plan, space = address(work)] { return run(call, plan, space); });
  return {value, index};
}

std::tuple<Tensor, Tensor, Tensor> csr_gather_topk(const Tensor &logits, const c10::optional<Tensor> &norm,
                                                   const Tensor &acc, const Tensor &lo, const Tensor &degree,
                                                   const Tensor &code, const c10::optional<Tensor> &allowed,
                                                   int64_t k) {
  Dtype dtype = float_dtype(logits, "csr_gather_topk");
  int64_t rows = logits.size(0), codes = logits.size(1), edges = code.numel();
  if (norm.has_value()) check(*norm, "csr_gather_topk: norm", at::kFloat, {rows}, logits);
  check(acc, "csr_gather_topk: acc", at::kFloat, {rows}, logits);
  check(lo, "csr_gather_topk: lo", at::kInt, {rows}, logits);
  check(degree, "csr_gather_topk: degree", at::kInt, {rows}, logits);
  check(code, "csr_gather_topk: code", at::kInt, {edges}, logits);
  if (allowed.has_value()) check(*allowed, "csr_gather_topk: allowed", at::kBool, {edges}, logits);
  auto plan = plan_csr_gather_topk(u32(rows, "rows"), u32(codes, "codes"), u32(k, "k"), dtype, device());
  check_plan(plan);
  Tensor score = floats(logits, {k}), parent = ints(logits, {k}), edge = ints(logits, {k});
  Tensor used = norm.has_value() ? *norm : floats(logits, {rows}), work = workspace(logits, plan.workspace_bytes);
  CsrCall call{address(logits),     address(used),  address(acc),     address(lo),   address(degree), address(code),
               address(allowed),    address(score), address(parent),  address(edge), uint32_t(rows),  uint32_t(codes),
               u32(edges, "edges"), uint32_t(k),    norm.has_value(), dtype};
  queue("npu_gr_csr_gather_topk",
        {logits, used, acc, lo, degree, code, allowed.value_or(Tensor()), score, parent, edge, work},
        [call, plan, space = address(work)] { return run(call, plan, space); });
  return {score, parent, edge};
}

void beam_fork_(Tensor &keys, Tensor &values, const Tensor &parent, int64_t num_slots) {
  TORCH_CHECK(keys.dim() >= 3 && num_slots >= 0 && num_slots <= keys.size(2),
              "beam_fork_: keys must be [layers, beams, slots, ...]", " with at least num_slots = ", num_slots,
              " slots");
  check(keys, "beam_fork_: keys", keys.scalar_type(), keys.sizes(), keys);
  check(values, "beam_fork_: values", keys.scalar_type(), keys.sizes(), keys);
  check(parent, "beam_fork_: parent", at::kInt, {parent.numel()}, keys);
  int64_t slot_bytes = keys.element_size();
  for (int64_t i = 3; i < keys.dim(); ++i) slot_bytes *= keys.size(i);
  BeamForkCall call{address(keys),
                    address(values),
                    address(parent),
                    u32(keys.size(0), "layers"),
                    u32(keys.size(1), "beams"),
                    u32(parent.numel(), "parent"),
                    u32(keys.size(2) * slot_bytes, "bytes of a row"),
                    u32(num_slots * slot_bytes, "bytes in use")};
  auto plan = plan_beam_fork(call.layers, call.held, call.rows, call.used_bytes, device());
  check_plan(plan);
  queue("npu_gr_beam_fork_", {keys, values, parent}, [call, plan] { return run(call, plan); });
}
}  // namespace

TORCH_LIBRARY_IMPL(npu_gr, PrivateUse1, m) {
  m.impl("masked_topk", &masked_topk);
  m.impl("csr_gather_topk", &csr_gather_topk);
  m.impl("beam_fork_", &beam_fork_);
}
