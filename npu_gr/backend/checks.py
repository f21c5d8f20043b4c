"""Checks of the machine for each backend, step by step, with a remedy for each missing part.

The checks change nothing and need no running service. A part that the machine lacks (an NPU on a
CPU machine) is `missing`; a part that does not work is `broken`, and so is a missing part of the
backend that is required.

`compare` compares every op of a backend with its slow definition, on a few hundred rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Hidden
from npu_gr.backend.calls import BeamCall, BiasTables, Continuations, HstuCall, TopkCall
from npu_gr.backend.cpu.library import NativeError, load
from npu_gr.backend.names import BackendName
from npu_gr.backend.npu import device as npu_device
from npu_gr.backend.npu import hstu_triton, versions
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.check import disagreements
from npu_gr.backend.npu.hstu_paged import PagedHstu
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.core.errors import ConfigError

DRIVER = Path("/usr/local/Ascend/driver/version.info")
DEVICES = Path("/dev")


class FindingState(StrEnum):
    """The state of a part of the machine, as the report prints it."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


class Finding(NamedTuple):
    """The result of one check, and a remedy if it failed."""

    name: str
    state: FindingState
    found: str
    remedy: str = ""
    section: str = ""  # section of the report


def device_findings(
    needed: BackendName | None, hstu_library: Path | None = None
) -> dict[BackendName, list[Finding]]:
    """Check the CPU kernels, the GPU and the NPU, the latter two up to the first failing step.

    Args:
        needed: The backend that must work; None = any.
        hstu_library: Value of the setting `hstu_library`; None = not set.
    """
    return {
        "cpu": [_native()],
        "cuda": list(_cuda(is_needed=needed == "cuda")),
        "npu": list(_ascend(needed == "npu", hstu_library)),
    }


def usable_backends(
    found: Mapping[BackendName, list[Finding]], needed: BackendName | None
) -> list[BackendName]:
    """Name the backends whose ops can run here; `found` is the result of `device_findings`."""
    names: list[BackendName] = ["cpu"]
    if torch.cuda.is_available() or needed == "cuda":
        names.append("cuda")
    if not any(
        each.name.startswith("NPU") and each.state is not FindingState.OK for each in found["npu"]
    ):
        names.append("npu")
    return names


def _cuda(is_needed: bool) -> Iterator[Finding]:
    """Check each part that a GPU needs, up to the first that fails."""
    missing = FindingState.BROKEN if is_needed else FindingState.MISSING
    if torch.version.cuda is None:
        remedy = (
            "pip install torch from the index for your driver: "
            "https://pytorch.org/get-started/locally"
        )
        yield Finding(
            "CUDA: torch", missing, f"torch {torch.__version__} is built without CUDA", remedy
        )
        return
    yield Finding(
        "CUDA: torch", FindingState.OK, f"torch {torch.__version__}, for CUDA {torch.version.cuda}"
    )
    if not torch.cuda.is_available():
        remedy = "nvidia-smi must show a GPU whose driver is new enough; in a container: --gpus all"
        yield Finding("CUDA: device", missing, "torch finds none", remedy)
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        words = f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} GiB"
        yield Finding(f"CUDA: device {number}", FindingState.OK, words)
    try:
        yield Finding("CUDA: Triton", FindingState.OK, version("triton"))
    except PackageNotFoundError:
        words = "torch ops run in the place of our kernels"
        yield Finding("CUDA: Triton", FindingState.MISSING, words, "pip install 'npu_gr[triton]'")


def _native() -> Finding:
    try:
        found = load()
    except NativeError as error:
        remedy = (
            "pip install builds them where a C++ compiler is: apt-get install g++, then "
            "install again"
        )
        return Finding(
            "CPU kernels",
            FindingState.MISSING,
            f"torch ops run instead, several times slower: {error}",
            remedy,
        )
    return Finding("CPU kernels", FindingState.OK, found.isa)


def _ascend(is_needed: bool, hstu_library: Path | None = None) -> Iterator[Finding]:
    """Check each part that an NPU needs, up to the first that fails."""
    missing = FindingState.BROKEN if is_needed else FindingState.MISSING
    yield _autoload()
    yield _driver()
    try:
        npu = npu_device.find()
    except npu_device.NpuNotFound as error:
        # an installed torch_npu without a driver does not fail the check of a CPU machine
        yield Finding(f"NPU: {error.step}", missing, error.why, error.remedy)
        return
    yield Finding("NPU: torch_npu", FindingState.OK, npu.version)
    yield Finding("NPU: CANN", FindingState.OK, _cann())
    yield Finding("NPU: device", FindingState.OK, f"{npu.soc}, {npu.device}")
    yield _versions(npu.version)
    if hstu_library is not None:
        yield _paged(npu, hstu_library)
    yield _triton(npu)
    try:
        path = ascend_ops.library_path(npu.soc)
        ascend_ops.load_library(path)
    except ConfigError as error:
        yield Finding(
            "Ascend C operators",
            FindingState.MISSING,
            str(error),
            "SOC_VERSION=... ops/ascendc/build.sh",
        )
    else:
        yield Finding("Ascend C operators", FindingState.OK, str(path))
        for op, wrong in disagreements(npu.device):
            state, remedy = (
                (FindingState.BROKEN, "set `native: off`, and report this line")
                if wrong
                else (FindingState.OK, "")
            )
            yield Finding(f"Ascend C {op}", state, wrong or "as defined", remedy)


def _paged(npu: npu_device.Npu, library: Path) -> Finding:
    """Load Huawei's paged attention and compare it with its definition."""
    name = "mxrec::hstu_paged"
    try:
        PagedHstu.load(library, npu.device, lambda array: torch.from_numpy(array).to(npu.device))
    except ConfigError as error:
        return Finding(
            name,
            FindingState.BROKEN,
            str(error),
            "leave hstu_library out: our own attention runs instead",
        )
    return Finding(
        name, FindingState.OK, f"{library}: the newest schema, as defined in fp32 and bf16"
    )


def _triton(npu: npu_device.Npu) -> Finding:
    """Load the Triton kernel for NPUs and compare it with its definition."""
    name = "triton-ascend"
    try:
        found = version(name)
    except PackageNotFoundError:
        words = "not installed: `attention: triton` cannot be set, and nothing else needs it"
        return Finding(name, FindingState.OK, words)
    try:
        hstu_triton.load(npu.device)
    except ConfigError as error:
        return Finding(
            name, FindingState.BROKEN, f"{found}: {error}", "leave `attention: triton` out"
        )
    return Finding(
        name, FindingState.OK, f"{found}: the kernel computes as defined in fp32 and bf16"
    )


def _driver() -> Finding:
    """Check the driver in the operating system's kernel, which CANN needs."""
    name = "Ascend driver"
    nodes = sorted(DEVICES.glob("davinci[0-9]*"))
    if not DRIVER.is_file():
        remedy = (
            f"install driver and firmware; in a container mount {DRIVER.parent} and /dev/davinci*"
        )
        return Finding(name, FindingState.MISSING, f"no {DRIVER}", remedy)
    lines = [
        line.strip()
        for line in DRIVER.read_text().splitlines()
        if line.lower().startswith("version")
    ]
    found = f"{lines[0] if lines else DRIVER}, {len(nodes)} devices"
    if not nodes:
        return Finding(
            name,
            FindingState.MISSING,
            found,
            "no /dev/davinci0: in a container pass the device nodes in",
        )
    return Finding(name, FindingState.OK, found)


def _cann() -> str:
    """Read the CANN version from the toolkit's files; its environment must have been sourced."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if not home:
        return "found, ASCEND_HOME_PATH is not set"
    return f"{versions.cann_at(Path(home)) or 'a version that no file names'}, at {home}"


def _versions(torch_npu: str) -> Finding:
    """Check whether the native operators support this CANN and this torch_npu."""
    name = "Ascend C versions"
    cann = versions.cann_at(Path(os.environ.get("ASCEND_HOME_PATH", "/nowhere")))
    known = (
        f"CANN {versions.LEAST_CANN} to {versions.NEWEST_CANN}, each with its torch_npu: "
        "docs/ascend.md"
    )
    if cann is None:
        return Finding(
            name,
            FindingState.MISSING,
            "no file names the version of CANN",
            f"source set_env.sh; {known}",
        )
    try:
        warning = versions.check(cann, torch_npu)
    except versions.VersionError as error:
        return Finding(name, FindingState.MISSING, str(error), f"{known}; torch ops run meanwhile")
    return Finding(name, FindingState.OK, warning or f"CANN {cann} with torch_npu {torch_npu}")


def _autoload() -> Finding:
    """Check that torch does not import torch_npu by itself, which fails where CANN is absent."""
    name = "torch autoload"
    try:
        installed = version("torch-npu")
    except PackageNotFoundError:
        return Finding(
            name,
            FindingState.OK,
            "torch-npu is not installed: torch loads no device's package by itself",
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return Finding(
            name, FindingState.OK, f"torch-npu {installed} waits until backend npu asks for it"
        )
    remedy = (
        "start by the command npu-gr, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before python "
        "imports torch"
    )
    return Finding(
        name, FindingState.BROKEN, f"torch imports torch-npu {installed} by itself", remedy
    )


TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}  # relative to the largest result


def compare(backend: Backend) -> list[Finding]:
    """Compare every op of a backend with the reference in fp32 and bf16; one finding an op."""
    findings = []
    for name, run in OPS.items():
        impl = backend.ops.get(name, "torch")
        worst = max(_difference(run, backend, dtype) / TOLERANCE[dtype] for dtype in TOLERANCE)
        state = FindingState.OK if worst <= 1.0 else FindingState.BROKEN
        remedy = (
            ""
            if state is FindingState.OK
            else "do not serve with it: report this line, and set `native: off` meanwhile"
        )
        findings.append(
            Finding(
                f"{backend.name}: {name}", state, f"{impl}; {worst:.1%} of the tolerance", remedy
            )
        )
    return findings


Op = Callable[[Backend, torch.dtype], Tensor]


def _difference(run: Op, backend: Backend, dtype: torch.dtype) -> float:
    got = run(backend, dtype).to("cpu", torch.float64)
    want = run(ReferenceBackend(), dtype).to(torch.float64)
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


def _made(backend: Backend, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(dtype).to(backend.device) for shape in shapes
    ]


def _times(backend: Backend, num: int) -> Tensor:
    return (torch.arange(num) * 3600).to(backend.device)


def _hstu(backend: Backend, dtype: torch.dtype) -> Tensor:
    q, k, past_k = _made(backend, dtype, (40, 2, 16), (40, 2, 16), (170, 2, 16))
    bias = BiasTables(*_made(backend, dtype, (2, 64), (2, 64)))
    past = [(past_k, past_k.flip(0))]
    times = _times(backend, 210)
    causal = backend.hstu_causal(HstuCall(q, k, q.flip(0), past, times, bias, 0.25))
    targets = backend.hstu_targets(
        HstuCall(q, k, q.flip(0), past, times[:170], bias, 0.25, query_time=10**6)
    )
    return torch.cat([causal, targets])


def _attention(backend: Backend, dtype: torch.dtype) -> Tensor:
    q, k, past, own = _made(backend, dtype, (40, 4, 16), (40, 2, 16), (170, 2, 16), (40, 3, 2, 16))
    causal = backend.causal_attention(q, k, k.flip(0), [(past, past)], 0.25)
    call = BeamCall(q, [(past, past)], (own, own), 2, None, 0.25)
    beams = backend.beam_attention(call)
    plain = backend.beam_attention(call._replace(is_split=False))
    return torch.cat([causal, beams, plain])


def _topk(backend: Backend, dtype: torch.dtype) -> Tensor:
    (logits,) = _made(backend, dtype, (16, 64))
    lo = torch.arange(16).to(backend.device) * 8
    code = torch.arange(128, dtype=torch.int32).to(backend.device) % 64
    follow = Continuations(lo, torch.full_like(lo, 8), code)
    chosen = backend.beam_topk(TopkCall(logits, torch.zeros(16, device=backend.device), follow, 32))
    return torch.stack([chosen.score, chosen.parent, chosen.edge])


def _fork(backend: Backend, dtype: torch.dtype) -> Tensor:
    keys, values = _made(backend, dtype, (2, 16, 3, 2, 8), (2, 16, 3, 2, 8))
    parent = (torch.arange(16) // 3).to(backend.device)
    backend.beam_fork_(keys, values, parent, 2)
    return torch.stack([keys, values])


def _items(backend: Backend, dtype: torch.dtype) -> Tensor:
    queries, items = (x.float() for x in _made(backend, dtype, (3, 16), (500, 16)))
    pairs = Hidden(torch.arange(40) % 3, torch.arange(40) * 7)  # on the host
    found = backend.best_items(queries, items, 20, pairs)
    return torch.stack([found.scores, found.items])


OPS: dict[str, Op] = {
    "hstu_attention": _hstu,
    "softmax_attention": _attention,
    "beam_topk": _topk,
    "beam_fork": _fork,
    "best_items": _items,
}
