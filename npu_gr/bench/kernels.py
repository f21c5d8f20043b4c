"""`npu-gr bench kernels`: the roofs of this CPU, then each native kernel against them and against torch."""

from __future__ import annotations

from collections.abc import Iterator

from npu_gr.backend.native import NativeError, load
from npu_gr.bench import kernels_hstu, kernels_topk
from npu_gr.bench.line import Line
from npu_gr.bench.roofs import measure
from npu_gr.errors import ConfigError


def lines(
    isa: str, seed: int, repeats: int, seconds: float, catalogues: tuple[int, ...] = kernels_topk.CATALOGUES
) -> Iterator[Line]:
    """One line a case.

    Args:
        isa: as in `native.load`.
        seed: of the inputs.
        repeats: rounds of a case of the selection.
        seconds: time of a case of the ranker's kernels; 0 = none of them.
        catalogues: sizes that the selection is timed over.

    Raises:
        ConfigError: there are no kernels here.
    """
    try:
        native = load(isa)
    except NativeError as error:
        raise ConfigError(f"bench kernels: {error}") from error
    roofs = measure(native)
    yield _roof("memory read", roofs.read_bytes_s / 1e9, "GB/s", native.isa)
    yield _roof("fp32 multiply-add", roofs.f32_flops / 1e9, "GFLOP/s", native.isa)
    if roofs.bf16_flops:
        yield _roof("bf16 multiply-add", roofs.bf16_flops / 1e9, "GFLOP/s", native.isa)
    yield from kernels_topk.lines(native, seed, repeats, catalogues)
    if seconds:
        yield from kernels_hstu.lines(isa, seed, seconds)


def _roof(name: str, value: float, unit: str, isa: str) -> Line:
    return Line(
        bench="kernels",
        case=f"roof: {name}, one core {isa}",
        ours=value,
        unit=unit,
        baseline="itself",
        baseline_value=value,
        ratio=1.0,
        target=None,
        ok=None,
    )
