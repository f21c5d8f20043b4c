"""`python -m benchmarks kernels`: the roofs of this CPU, then each native kernel against them and against torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from benchmarks import kernels_hstu, kernels_pass, kernels_topk
from benchmarks.line import Line
from benchmarks.roofs import measure
from npu_gr.backend.cpu.library import Native, NativeError, load
from npu_gr.core.errors import ConfigError

Part = Literal["roofs", "topk", "hstu", "pass"]
PARTS: tuple[Part, ...] = ("roofs", "topk", "hstu", "pass")


def lines(isa: str, seed: int, budget_s: float, parts: tuple[Part, ...] = PARTS) -> Iterator[Line]:
    """Measure, a line a case.

    Args:
        isa: as in `library.load`.
        seed: of the random inputs.
        budget_s: seconds of a case, about.
        parts: which of `PARTS` run.

    Raises:
        ConfigError: the kernels are not built or cannot run here.
    """
    try:
        native = load(isa)
    except NativeError as error:
        raise ConfigError(f"bench kernels: {error}") from error
    if "roofs" in parts:
        yield from _roofs(native)
    if "topk" in parts:
        yield from kernels_topk.lines(native, seed, max(1, round(5 * budget_s)))
    if "hstu" in parts:
        yield from kernels_hstu.lines(isa, seed, budget_s)
    if "pass" in parts:
        yield from kernels_pass.lines(isa, seed, budget_s)


def _roofs(native: Native) -> Iterator[Line]:
    roofs = measure(native)
    found = [("memory read", roofs.read_bytes_s, "GB/s"), ("fp32 multiply-add", roofs.f32_flops, "GFLOP/s")]
    if roofs.bf16_flops:
        found.append(("bf16 multiply-add", roofs.bf16_flops, "GFLOP/s"))
    for name, value, unit in found:
        yield Line(
            bench="kernels",
            case=f"roof: {name}, one core {native.isa}",
            ours=value / 1e9,
            unit=unit,
            baseline="itself",
            baseline_value=value / 1e9,
            ratio=1.0,
            target=None,
            ok=None,
        )
