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
#include <cstring>

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

// Queues the launch that one HSTU operator is; `call` and `plan` are copied into the handler.
template <typename Call, typename Plan>
void queue_hstu(const char *name, std::vector<Tensor> kept, const Call &call, const Plan &plan) {
  check_plan(plan);
  queue(name, std::move(kept), [call, plan] { return run(call, plan); });
}
HstuSizes hstu_sizes(const Tensor &rows, int64_t key_slots, int64_t v_dim, const char *op) {
  TORCH_CHECK(rows.dim() == 4 && rows.is_contiguous(), op, ": must be contiguous, [requests, heads, rows, width]");
  return {u32(rows.size(0), "requests"),
          u32(rows.size(2), "rows"),
          u32(key_slots, "keys"),
          u32(rows.size(1), "heads"),
          u32(rows.size(3), "width"),
          u32(v_dim, "width"),
          float_dtype(rows.view({-1, rows.size(3)}), op)};
}
uint32_t float_bits(double value) {
  float narrow = float(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  return bits;
}

void hstu_rows(const Tensor &mixed, const Tensor &meta, const Tensor &page_ids, Tensor &k_plane, Tensor &v_plane,
               Tensor &q, Tensor &k, Tensor &v, Tensor &u, double q_scale, bool silu_all) {
  TORCH_CHECK(k.dim() == 4 && v.dim() == 4 && k_plane.dim() == 4, "hstu_rows: k, v and planes have four dimensions");
  HstuSizes s = hstu_sizes(q, k.size(2), v.size(3), "hstu_rows: q");
  auto dtype = q.scalar_type();
  int64_t requests = q.size(0), heads = q.size(1), qk = q.size(3), uv = v.size(3), keys = k.size(2);
  int64_t rows = mixed.size(0), queries = u.size(0), pages = k_plane.size(0), tokens = k_plane.size(1);
  check(mixed, "hstu_rows: mixed", dtype, {rows, 2 * heads * (qk + uv)}, q);
  check(meta, "hstu_rows: meta", at::kInt, {requests, kEntryNumbers}, q);
  check(page_ids, "hstu_rows: page_ids", at::kInt, {page_ids.numel()}, q);
  check(k_plane, "hstu_rows: k_plane", dtype, {pages, tokens, heads, qk}, q);
  check(v_plane, "hstu_rows: v_plane", dtype, {pages, tokens, heads, uv}, q);
  check(k, "hstu_rows: k", dtype, {requests, heads, keys, qk}, q);
  check(v, "hstu_rows: v", dtype, {requests, heads, keys, uv}, q);
  check(u, "hstu_rows: u", dtype, {queries, heads * uv}, q);
  HstuRowsCall call{address(mixed),
                    address(meta),
                    address(page_ids),
                    address(k_plane),
                    address(v_plane),
                    address(q),
                    address(k),
                    address(v),
                    address(u),
                    s,
                    u32(rows, "rows"),
                    u32(queries, "queries"),
                    u32(tokens, "tokens of a page"),
                    u32(pages, "pages"),
                    u32(page_ids.numel(), "page_ids"),
                    silu_all,
                    float_bits(q_scale)};
  queue_hstu("npu_gr_hstu_rows", {mixed, meta, page_ids, k_plane, v_plane, q, k, v, u}, call,
             plan_hstu_rows(s, call.page_tokens, call.num_page_ids, device()));
}

void hstu_scores(Tensor &scores, const Tensor &meta, const Tensor &bounds, const Tensor &row_times,
                 const Tensor &key_times, const Tensor &tables, const Tensor &near, double alpha) {
  TORCH_CHECK(scores.dim() == 4 && near.dim() == 3 && near.size(2) > 2 * kNearEnd,
              "hstu_scores: scores must be [requests, heads, rows, keys], near [heads, 8, positions + ", 2 * kNearEnd,
              "]");
  int64_t block = 32 / int64_t(scores.element_size());  // the widths of heads do not matter here
  HstuSizes s = hstu_sizes(scores, scores.size(3), block, "hstu_scores: scores");
  s.qk_dim = uint32_t(block);
  int64_t requests = scores.size(0), heads = scores.size(1), rows = scores.size(2), keys = scores.size(3);
  check(meta, "hstu_scores: meta", at::kInt, {requests, kEntryNumbers}, scores);
  check(bounds, "hstu_scores: bounds", at::kInt, {requests, rows / kRowBlock + keys / kKeyBlock, 2}, scores);
  check(row_times, "hstu_scores: row_times", at::kInt, {requests, rows}, scores);
  check(key_times, "hstu_scores: key_times", at::kInt, {requests, keys}, scores);
  check(tables, "hstu_scores: tables", at::kFloat, {heads, 2, kTimeBuckets}, scores);
  check(near, "hstu_scores: near", at::kFloat, {heads, 8, near.size(2)}, scores);
  HstuScoresCall call{address(scores),
                      address(meta),
                      address(bounds),
                      address(row_times),
                      address(key_times),
                      address(tables),
                      address(near),
                      s,
                      u32(near.size(2) - 2 * kNearEnd, "positions"),
                      float_bits(alpha)};
  queue_hstu("npu_gr_hstu_scores", {scores, meta, bounds, row_times, key_times, tables, near}, call,
             plan_hstu_scores(s, device()));
}

void hstu_finish(const Tensor &attention, const Tensor &u, const Tensor &norm, const Tensor &meta, Tensor &out,
                 double scale, double eps) {
  TORCH_CHECK(attention.dim() == 4 && norm.dim() == 2 && out.dim() == 3 && (out.size(1) == 1 || out.size(1) == 3),
              "hstu_finish: attention must be [requests, heads, rows, width], out [queries, 1 or 3, heads * width]");
  HstuSizes s = hstu_sizes(attention, kKeyBlock, attention.size(3), "hstu_finish: attention");
  int64_t queries = u.size(0), width = attention.size(1) * attention.size(3), group = norm.size(1);
  auto dtype = attention.scalar_type();
  check(u, "hstu_finish: u", dtype, {queries, width}, attention);
  check(norm, "hstu_finish: norm", at::kFloat, {2, group}, attention);
  check(meta, "hstu_finish: meta", at::kInt, {attention.size(0), kEntryNumbers}, attention);
  check(out, "hstu_finish: out", dtype, {queries, out.size(1), width}, attention);
  uint32_t joined = out.size(1) == 3;
  HstuFinishCall call{address(attention),
                      address(u),
                      address(norm),
                      address(meta),
                      address(out),
                      s,
                      u32(queries, "queries"),
                      u32(group, "numbers of a norm"),
                      joined,
                      float_bits(scale),
                      float_bits(1.0 / double(group)),
                      float_bits(eps)};
  queue_hstu("npu_gr_hstu_finish", {attention, u, norm, meta, out}, call,
             plan_hstu_finish(s, call.group, joined != 0, device()));
}
}  // namespace

TORCH_LIBRARY_IMPL(npu_gr, PrivateUse1, m) {
  m.impl("masked_topk", &masked_topk);
  m.impl("csr_gather_topk", &csr_gather_topk);
  m.impl("beam_fork_", &beam_fork_);
  m.impl("hstu_rows", &hstu_rows);
  m.impl("hstu_scores", &hstu_scores);
  m.impl("hstu_finish", &hstu_finish);
}
