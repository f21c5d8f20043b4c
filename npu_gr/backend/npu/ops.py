"""The operators `torch.ops.npu_gr.*`: schemas, definitions in plain torch, shapes of fake tensors.

The definitions are registered as CompositeExplicitAutograd: they run on the CPU, and on an NPU
without a native library, and check a device's results. `load_library` adds the native operators
(ops/ascendc) for PrivateUse1.

    masked_topk(logits [R, N] f32|f16|bf16, mask_bits u8 [R, ceil(N / 8)], k, bias f32 [R]?)
        -> value f32 [R, k], index i32 [R, k]
    csr_gather_topk(logits [W, C] f32|f16|bf16, norm f32 [W]?, acc f32 [W], lo i32 [W],
                    degree i32 [W], code i32 [E], allowed bool [E]?, k)
        -> score f32 [k], parent i32 [k], edge i32 [k]
    beam_fork_(keys [L, M, S, ...], values likewise, parent i32 [W], num_slots)
    hstu_rows, hstu_scores, hstu_finish: `hstu_ops.py`

A rank request uses the three HSTU operators, a generate request `csr_gather_topk` and `beam_fork_`,
a match request `masked_topk`.

Selections are in descending order; ties go by index (masked_topk), or by beam, then edge
(csr_gather_topk). NaN and -inf are never selected; missing choices are -inf and -1. Mask bits:
lowest first, 1 = allowed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_gr.backend.npu import hstu_ops
from npu_gr.core.errors import ConfigError

NAMESPACE = "npu_gr"
SCHEMAS = (
    "masked_topk(Tensor logits, Tensor mask_bits, int k, Tensor? bias=None) -> (Tensor, Tensor)",
    "csr_gather_topk(Tensor logits, Tensor? norm, Tensor acc, Tensor lo, Tensor degree, Tensor "
    "code, Tensor? allowed, int k) -> (Tensor, Tensor, Tensor)",
    "beam_fork_(Tensor(a!) keys, Tensor(b!) values, Tensor parent, int num_slots) -> ()",
    *hstu_ops.SCHEMAS,
)
NEG_INF = float("-inf")


def names() -> list[str]:
    """Return the names of the operators."""
    return [schema.split("(")[0] for schema in SCHEMAS]


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of scores [R, N] and their columns.

    It sorts stably, because torch.topk does not define the order of ties.
    """
    scores = scores.masked_fill(scores.isnan(), NEG_INF)
    value, index = scores.sort(dim=1, descending=True, stable=True)
    missing = max(0, k - scores.shape[1])
    value = torch.nn.functional.pad(value[:, :k], (0, missing), value=NEG_INF)
    index = torch.nn.functional.pad(index[:, :k], (0, missing), value=-1)
    return value, index.masked_fill(value == NEG_INF, -1).to(torch.int32)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """Read table [R, N], int32, at index [R, k]; -1 stays -1."""
    empty = index < 0
    padded = torch.nn.functional.pad(table, (0, 1))  # so that a table without columns is readable
    return (
        padded.gather(1, index.long().masked_fill(empty, 0)).masked_fill(empty, -1).to(torch.int32)
    )


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask, bool [R, N], to bits uint8 [R, ceil(N / 8)], lowest first, padded with 0."""
    rows, columns = mask.shape
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -columns % 8)).view(
        rows, (columns + 7) // 8, 8
    )
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded << shifts).sum(2, dtype=torch.uint8)


def unpack_mask(bits: Tensor, columns: int) -> Tensor:
    """Undo `pack_mask`: bool [R, columns]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :columns].bool()


def masked_topk(
    logits: Tensor, mask_bits: Tensor, k: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Select the k best allowed elements of each row.

    Args:
        logits: fp32, fp16 or bf16 [R, N].
        mask_bits: uint8 [R, ceil(N / 8)], lowest bit first, 1 = allowed.
        k: Number of choices per row.
        bias: fp32 [R], added to every score of a row; None = 0.

    Returns:
        Values fp32 [R, k] and indices int32 [R, k].
    """
    scores = logits.float().masked_fill(~unpack_mask(mask_bits, logits.shape[1]), NEG_INF)
    return _best(scores if bias is None else scores + bias[:, None], k)


def csr_gather_topk(
    logits: Tensor,
    norm: Tensor | None,
    acc: Tensor,
    lo: Tensor,
    degree: Tensor,
    code: Tensor,
    allowed: Tensor | None,
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `Backend.beam_topk` with int32 indices, always padded to k choices.

    Args:
        logits: fp32, fp16 or bf16 [W, C] of the level's codebook.
        norm: fp32 [W]; None = the log-sum-exp over each row's valid, allowed edges.
        acc: fp32 [W].
        lo, degree: int32 [W].
        code: int32 [E].
        allowed: bool [E]; None = every edge.
        k: Number of choices.

    Returns:
        Score fp32 [k], parent int32 [k], edge int32 [k].
    """
    row = torch.repeat_interleave(torch.arange(len(lo), device=lo.device), degree.long())
    first = torch.repeat_interleave(
        lo.long() - (degree.long().cumsum(0) - degree.long()), degree.long()
    )
    edge = first + torch.arange(len(row), device=lo.device)
    value = logits.float()[row, code[edge].long()]
    if allowed is not None:
        value = value.masked_fill(~allowed[edge].bool(), NEG_INF)
    if norm is None:
        norm = _valid_norm(value, row, len(lo))
    score = (value - norm[row]) + acc[row]
    out = (norm[row] > NEG_INF) & (acc[row] > NEG_INF) & (value > NEG_INF)
    best, at = _best(score.masked_fill(~out, NEG_INF)[None], k)
    return best[0], _pick(row[None], at)[0], _pick(edge[None], at)[0]


def _valid_norm(value: Tensor, row: Tensor, rows: int) -> Tensor:
    peak = value.new_full((rows,), NEG_INF).scatter_reduce_(0, row, value, "amax")
    shifted = (value - peak[row]).masked_fill(value == NEG_INF, NEG_INF)
    return peak + torch.zeros_like(peak).scatter_add_(0, row, shifted.exp()).log()


def beam_fork_(keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
    """Copy the first slots of row parent[i] to row i, in every layer; parents in any order."""
    for plane in (keys, values):
        plane[:, : len(parent), :num_slots] = plane[:, parent.long(), :num_slots]


def _fake_masked_topk(
    logits: Tensor, mask_bits: Tensor, k: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _fake_csr_gather_topk(
    logits: Tensor,
    norm: Tensor | None,
    acc: Tensor,
    lo: Tensor,
    degree: Tensor,
    code: Tensor,
    allowed: Tensor | None,
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    index = lo.new_empty((k,), dtype=torch.int32)
    return logits.new_empty((k,), dtype=torch.float32), index, torch.empty_like(index)


def _fake_beam_fork_(keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
    return None


def definition(name: str) -> Callable[..., Any]:
    """Return the plain torch definition of an operator."""
    found: Callable[..., Any] = globals().get(name) or getattr(hstu_ops, name)
    return found


@cache
def register() -> torch.library.Library:
    """Define the operators, once a process; they exist as long as the result."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema in SCHEMAS:
        name = library.define(schema)
        library.impl(name, definition(name), "CompositeExplicitAutograd")
        shapes = globals().get(f"_fake_{name}", hstu_ops.nothing)
        torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
    return library


def variant(soc: str) -> str:
    """Return the library's variant for a SoC, e.g. Ascend910B1 or Ascend910_9392.

    Raises:
        ConfigError: There are no native kernels for the SoC.
    """
    name = soc.lower()
    for prefix, known in (("ascend910b", "ascend910b"), ("ascend910_93", "ascend910_93")):
        if name.startswith(prefix):
            return known
    raise ConfigError(
        f"no native ops for {soc}: 910B and A3 (910_93) have them, others run the torch composition"
    )


LIBRARIES = Path(__file__).parent / "lib"  # output of build.sh


def library_path(soc: str, folder: Path | None = None) -> Path:
    """Return the path of the library of a SoC, in `folder` or in `LIBRARIES`."""
    return (folder or LIBRARIES) / f"libnpu_gr_ascend_{variant(soc)}.so"


def load_library(path: Path) -> None:
    """Load the native operators; they then run for all tensors of the device.

    Raises:
        ConfigError: The file is missing or does not load; nothing was registered.
    """
    if not path.is_file():
        raise ConfigError(f"no native ops at {path}: build them with ops/ascendc/build.sh")
    register()
    note = path.with_suffix(".json")
    try:
        built = json.loads(note.read_text())["torch"]
    except (OSError, ValueError, KeyError):
        built = None
    if built is not None and built.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ConfigError(
            f"{path} was built for torch {built}, this is {torch.__version__}: build it again"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ConfigError(f"{path} does not load: {error}") from error
