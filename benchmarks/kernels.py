"""`python -m benchmarks kernels`: this CPU's roofs, and native kernels against them and torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import kernels_device, kernels_hstu, kernels_pass, kernels_topk
from benchmarks.frame import SEED, Line, compared, only, option, timed_for
from benchmarks.roofs import measure
from npu_gr.backend.cpu.library import Native, NativeError, load
from npu_gr.backend.names import BackendName
from npu_gr.core.errors import ConfigError

PARTS = ("roofs", "topk", "hstu", "pass")
OPTIONS = (
    option("--isa", default="", help="Instruction set; by default the best of this CPU."),
    SEED,
    timed_for(2.0),
    only(PARTS),
    option(
        "--device",
        default="cpu",
        help="Backend; other than cpu: compare its ops with torch's on that device.",
    ),
)


def lines(
    isa: str, seed: int, seconds: float, parts: Sequence[str] = PARTS, device: BackendName = "cpu"
) -> Iterator[Line]:
    """Measure all parts.

    Args:
        isa: Instruction set; "" = the best of this CPU.
        seed: Random seed of the inputs.
        seconds: Approximate seconds of a case.
        parts: Subset of `PARTS`.
        device: Name of the backend.

    Raises:
        ConfigError: The kernels are not built or cannot run here.
    """
    if device != "cpu":
        yield from kernels_device.lines(device, seed, seconds)
        return
    try:
        native = load(isa)
    except NativeError as error:
        raise ConfigError(f"bench kernels: {error}") from error
    if "roofs" in parts:
        yield from _roofs(native)
    if "topk" in parts:
        yield from kernels_topk.lines(native, seed, max(1, round(5 * seconds)))
    if "hstu" in parts:
        yield from kernels_hstu.lines(isa, seed, seconds)
    if "pass" in parts:
        yield from kernels_pass.lines(isa, seed, seconds)


def _roofs(native: Native) -> Iterator[Line]:
    roofs = measure(native)
    found = [
        ("memory read", roofs.read_bytes_s, "GB/s"),
        ("fp32 multiply-add", roofs.f32_flops, "GFLOP/s"),
    ]
    if roofs.bf16_flops:
        found.append(("bf16 multiply-add", roofs.bf16_flops, "GFLOP/s"))
    for name, value, unit in found:
        case = f"roof: {name}, one core {native.isa}"
        yield compared("kernels", case, value / 1e9, unit, "itself", value / 1e9, 1.0)
