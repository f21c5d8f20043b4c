"""Typical programming mistakes in kernels, tiling and host code, planted one at a time.

A fault replaces a text of a file by another text. A build contains all faults; ON is true for the
one that is switched on. `mutate.py` builds and runs the faults of the kernels,
tests/ops/test_pretended.py those of the host code. `equivalent` says why a fault has no effect that
a test could detect; it is empty for all others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """A mistake, and the ops of which a test case must detect it."""

    name: str
    file: str
    old: str
    new: str
    ops: tuple[str, ...]
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


TOPK = ("masked_topk",)
CSR = ("csr_gather_topk",)
FORK = ("beam_fork",)

KERNEL_FAULTS = (
    Fault(
        "no barrier before Sort32",
        "kernels/best_pairs.h",
        "    vector_done();\n    uint32_t whole",
        "    if (!ON) vector_done();\n    uint32_t whole",
        TOPK,
    ),
    Fault(
        "the pad of a load is an element short",
        "kernels/device.h",
        "uint8_t(round_up(count, block) - count)",
        "uint8_t(round_up(count, block) - count - (ON && round_up(count, block) > count))",
        (*TOPK, *CSR),
        "nothing reads what lies behind count",
    ),
    Fault(
        "Sort32's result off its border of 256 bytes",
        "kernels/best_pairs.h",
        "auto pairs = sorted_.Get<float>();",
        "auto pairs = sorted_.Get<float>()[ON ? 8 : 0];",
        TOPK,
    ),
    Fault(
        "the scalar unit reads before a load is done",
        "kernels/children.h",
        "    sync<AscendC::HardEvent::MTE2_S>(*pipe_);",
        "    if (!ON) sync<AscendC::HardEvent::MTE2_S>(*pipe_);",
        CSR,
    ),
    Fault(
        "the plan forgets 16 bytes a pair",
        "tiling.h",
        "return masked_topk_bytes(t, k, dtype);",
        "return masked_topk_bytes(t, k, dtype) - (ON ? 16ull * padded_k(k) : 0);",
        TOPK,
    ),
    Fault(
        "two cores store the same list",
        "kernels/csr_gather_topk.h",
        "store(group * s_.pieces + piece);",
        "store(ON ? 0 : group * s_.pieces + piece);",
        CSR,
    ),
    Fault(
        "more buffers of VECIN than there are events",
        "kernels/children.h",
        "pipe_->InitBuffer(rows_, kNarrow ? 1 : 2,",
        "pipe_->InitBuffer(rows_, ON ? 4 : kNarrow ? 1 : 2,",
        CSR,
    ),
    Fault(
        "an offset of GM in 32 bits, to be read",
        "kernels/masked_topk.h",
        "logits_[uint64_t(row) * s_.n + at]",
        "logits_[ON ? uint64_t(row * s_.n + at) : uint64_t(row) * s_.n + at]",
        TOPK,
    ),
    Fault(
        "an offset of GM in 32 bits, to be written",
        "kernels/beam_fork.h",
        "uint64_t top = layer * s_.held * s_.row_bytes + column;",
        "uint64_t top = ON ? uint32_t(layer) * s_.held * s_.row_bytes + column\n"
        "                      : layer * s_.held * s_.row_bytes + column;",
        FORK,
    ),
    Fault(
        "k values are stored as whole blocks",
        "kernels/masked_topk.h",
        "copy_out(value_[uint64_t(row) * s_.k], out, s_.k);",
        "copy_out(value_[uint64_t(row) * s_.k], out, ON ? round_up(s_.k, 8) : s_.k);",
        TOPK,
    ),
    Fault(
        "what GatherMask leaves behind its last element stays",
        "kernels/best_pairs.h",
        "if (kept != whole) clear_tail",
        "if (!ON && kept != whole) clear_tail",
        TOPK,
    ),
    Fault(
        "the best pairs of the row before stay",
        "kernels/masked_topk.h",
        "    best_.reset();\n    if (begin",
        "    if (!ON || row == 0) best_.reset();\n    if (begin",
        TOPK,
    ),
    Fault(
        "the result is computed after EnQue",
        "kernels/masked_topk.h",
        "    best_.split_columns(out, index);\n    outs_.EnQue(out);",
        "    if (!ON) best_.split_columns(out, index);\n    outs_.EnQue(out);\n"
        "    if (ON) best_.split_columns(out, index);",
        TOPK,
    ),
    Fault(
        "the mask's buffer is not rounded up",
        "kernels/masked_topk.h",
        "pipe_->InitBuffer(masks_, 2, round_up(s_.tile / 8, 256));",
        "pipe_->InitBuffer(masks_, 2, ON ? s_.tile / 8 : round_up(s_.tile / 8, 256));",
        TOPK,
        "a tile's bits fit, and the plan has room to spare",
    ),
    Fault(
        "tiles twice as large",
        "tiling.h",
        "uint32_t tile = kMaxTile / 2;",
        "uint32_t tile = ON ? kMaxTile : kMaxTile / 2;",
        (*TOPK, *CSR),
        "lists of a tile of 4096 are 2048 pairs or less in every merge but the last",
    ),
    Fault(
        "no barrier behind CreateVecIndex",
        "kernels/csr_gather_topk.h",
        "      AscendC::Adds(index_.Get<int32_t>()[filled_],",
        "      if (ON) AscendC::CreateVecIndex(iota_.Get<int32_t>(), int32_t(0), s_.tile);\n"
        "      AscendC::Adds(index_.Get<int32_t>()[filled_],",
        CSR,
    ),
    Fault(
        "two arguments of a kernel swapped",
        "kernels/entries.h",
        "op.init(&pipe, logits, norm, acc, lo, degree, code,",
        "op.init(&pipe, logits, norm, acc, ON ? degree : lo, ON ? lo : degree, code,",
        CSR,
    ),
    Fault(
        "kernels of a kind that has cube cores",
        "kernels/entries.h",
        "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY)",
        "KERNEL_TASK_TYPE_DEFAULT(ON ? KERNEL_TYPE_MIX_AIC_1_2 : KERNEL_TYPE_AIV_ONLY)",
        (*TOPK, *CSR, *FORK),
    ),
    Fault(
        "a core more than there is work",
        "op_host/run.h",
        "NPU_GR_LAUNCH_OF(c.dtype, csr_select, plan.blocks,",
        "NPU_GR_LAUNCH_OF(c.dtype, csr_select, plan.blocks + ON,",
        CSR,
        "it finds nothing to do; no kernel waits for another core",
    ),
    Fault(
        "the ragged last part of a split row is dropped",
        "tiling.h",
        "plan.splits = ceil_div(tiles, tiles_a_part);",
        "plan.splits = ON ? tiles / tiles_a_part : ceil_div(tiles, tiles_a_part);",
        TOPK,
    ),
    Fault(
        "a part ends a tile early",
        "kernels/masked_topk.h",
        "s_.n : begin + s_.part;",
        "s_.n : begin + s_.part - (ON ? s_.tile : 0);",
        TOPK,
    ),
    Fault(
        "the lists of a row's parts are those of the row before",
        "kernels/masked_topk.h",
        "store_pairs(row * s_.splits + part);",
        "store_pairs((ON && row ? row - 1 : row) * s_.splits + part);",
        TOPK,
    ),
    Fault(
        "the workspace has room for one row",
        "tiling.h",
        "plan.workspace_bytes = 8ull * padded_k(k) * rows * plan.splits;",
        "plan.workspace_bytes = 8ull * padded_k(k) * (ON ? 1 : rows) * plan.splits;",
        TOPK,
    ),
    Fault(
        "the shift is a bit short",
        "tiling.h",
        "while (codes > 1u << plan.shift) ++plan.shift;",
        "while (codes > (ON ? 2u : 1u) << plan.shift) ++plan.shift;",
        CSR,
    ),
    Fault(
        "a child that is not allowed counts in the norm",
        "kernels/children.h",
        "if (s_.has_allowed) forbid(x, edge, count);",
        "if (s_.has_allowed && !(ON && !s_.has_norm)) forbid(x, edge, count);",
        CSR,
    ),
    Fault(
        "a beam that stays in its place is moved over",
        "kernels/beam_fork.h",
        "last_ = parent + 1 > last_ ? parent + 1 : last_;",
        "last_ = parent + !ON > last_ ? parent + !ON : last_;",
        FORK,
    ),
)

# Faults of the code between torch and the launches. npu_gr/backend/npu/check.py defines the ops.
HOST_FAULTS = (
    Fault(
        "lo and degree swapped",
        "torch/binding.cpp",
        "address(lo),   address(degree),",
        "address(ON ? degree : lo),   address(ON ? lo : degree),",
        CSR,
    ),
    Fault(
        "the workspace is not kept until the launch",
        "torch/binding.cpp",
        "allowed.value_or(Tensor()), score, parent, edge, work},",
        "allowed.value_or(Tensor()), score, parent, edge, ON ? Tensor() : work},",
        CSR,
    ),
    Fault(
        "any strides are taken",
        "torch/binding.cpp",
        "TORCH_CHECK(tensor.is_contiguous() &&",
        "TORCH_CHECK((ON || tensor.is_contiguous()) &&",
        FORK,
    ),
    Fault(
        "the 8 KB of Select are planned with",
        "torch/platform.h",
        "uint32_t(ub) - kSelectBytes",
        "uint32_t(ub) - (ON ? 0 : kSelectBytes)",
        CSR,
    ),
    Fault(
        "float16 is taken for bfloat16",
        "torch/binding.cpp",
        "case at::kHalf: return Dtype::F16;",
        "case at::kHalf: return ON ? Dtype::BF16 : Dtype::F16;",
        TOPK,
    ),
    Fault(
        "a row of the mask is a byte short",
        "torch/binding.cpp",
        "uint32_t((n + 7) / 8), dtype};",
        "uint32_t((n + (ON ? 0 : 7)) / 8), dtype};",
        TOPK,
    ),
    Fault(
        "the norm's share is of a number more",
        "torch/binding.cpp",
        "float_bits(1.0 / double(group)),",
        "float_bits(1.0 / double(group + ON)),",
        ("hstu_finish",),
    ),
    Fault(
        "the window of positions is one longer",
        "torch/binding.cpp",
        'u32(near.size(2) - 2 * kNearEnd, "positions"),',
        'u32(near.size(2) - 2 * kNearEnd + ON, "positions"),',
        ("hstu_scores",),
    ),
    Fault(
        "the values of a search are as wide as its logits",
        "torch/binding.cpp",
        "Tensor value = floats(logits, {rows, k}), index",
        "Tensor value = ON ? at::empty({rows, k}, logits.options()) : floats(logits, {rows, k}), "
        "index",
        TOPK,
    ),
    Fault(
        "alpha is not passed on",
        "torch/binding.cpp",
        "float_bits(alpha)};",
        "float_bits(ON ? 1.0 : alpha)};",
        ("hstu_scores",),
    ),
    Fault(
        "SiLU of all parts is forgotten",
        "torch/binding.cpp",
        "silu_all,\n",
        "silu_all && !ON,\n",
        ("hstu_rows",),
    ),
    Fault(
        "the first stream for ever",
        "torch/binding.cpp",
        "    stream = current;",
        "    static aclrtStream first = current;\n    stream = ON ? first : current;",
        CSR,
    ),
    Fault(
        "the workspace of a search is not kept until the launch",
        "torch/binding.cpp",
        "bias.value_or(Tensor()), value, index, work},",
        "bias.value_or(Tensor()), value, index, ON ? Tensor() : work},",
        TOPK,
    ),
    Fault(
        "the status of an operator's launches is dropped",
        "torch/binding.cpp",
        "    return work();",
        "    int status = work();\n    return ON ? 0 : status;",
        (*TOPK, *CSR, *FORK),
    ),
    Fault(
        "the merge of a search hides that the search failed",
        "op_host/run.h",
        "if (status != 0 || plan.splits == 1) return status;",
        "if ((status != 0 && !ON) || plan.splits == 1) return status;",
        TOPK,
    ),
    Fault(
        "a choice hides that its norm failed",
        "op_host/run.h",
        "    if (status != 0) return status;\n",
        "    if (status != 0 && !ON) return status;\n",
        CSR,
    ),
    Fault(
        "a merge hides that the choice failed",
        "op_host/run.h",
        "  if (status != 0) return status;\n  return NPU_GR_LAUNCH(csr_merge,",
        "  if (status != 0 && !ON) return status;\n  return NPU_GR_LAUNCH(csr_merge,",
        CSR,
    ),
    Fault(
        "the size of a workspace has 32 bits",
        "torch/binding.cpp",
        "at::empty({int64_t(bytes)},",
        "at::empty({ON ? int64_t(uint32_t(bytes)) : int64_t(bytes)},",
        TOPK,
    ),
)


def plant(faults: tuple[Fault, ...], tree: Path) -> None:
    """Write all faults into a copy of the sources; ON(n) switches the n-th.

    Raises:
        ValueError: a file does not contain the text of its fault.
    """
    for number, fault in enumerate(faults):
        path = tree / fault.file
        text = path.read_text()
        if fault.old not in text:
            raise ValueError(f"{fault.name}: {fault.file} has no {fault.old!r}")
        path.write_text(text.replace(fault.old, re.sub(r"\bON\b", f"ON({number})", fault.new)))
