"""What this machine has for our ops, whether they compute what they should, and what to do about what is missing.

Nothing is changed and no service is needed. A piece that the machine simply lacks (no NPU on a CPU machine) is
`missing`; one that is there and does not work is `broken`, and so is all that a named backend needs and lacks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from npu_gr.backend.base import Backend, BiasTables, Continuations
from npu_gr.backend.choose import BackendName, choose
from npu_gr.backend.cpu.library import NativeError, load
from npu_gr.backend.npu import device as npu_device
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.check import disagreements
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.core.errors import ConfigError

DRIVER, DEVICES = Path("/usr/local/Ascend/driver/version.info"), Path("/dev")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}  # of the result's largest number


class State(StrEnum):
    """Of one piece."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


class Check(NamedTuple):
    """What was found of one piece."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine(backend: BackendName | None = None) -> list[Check]:
    """Every check, in the order in which a start needs them.

    Args:
        backend: that must work; None = whatever is there.
    """
    checks = [Check("python", State.OK, f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs")]
    checks += [Check("torch", State.OK, torch.__version__), _native()]
    checks += _ascend(is_needed=backend == "npu")
    names: list[BackendName] = ["cpu"]
    if torch.cuda.is_available() or backend == "cuda":
        names.append("cuda")
    if not any(c.name.startswith("NPU") and c.state is not State.OK for c in checks):
        names.append("npu")
    for name in names:
        try:
            made = choose(name)
        except ConfigError as error:
            checks.append(Check(f"ops {name}", State.BROKEN, str(error)))
            continue
        checks += compare(made)
    return checks


def is_well(checks: list[Check]) -> bool:
    """Nothing that is there, or needed, is broken."""
    return all(check.state is not State.BROKEN for check in checks)


def _native() -> Check:
    try:
        found = load()
    except NativeError as error:
        remedy = "pip install builds them where a C++ compiler is: apt-get install g++, then install again"
        return Check("CPU kernels", State.MISSING, f"torch ops run instead, several times slower: {error}", remedy)
    return Check("CPU kernels", State.OK, found.isa)


def _ascend(is_needed: bool) -> Iterator[Check]:
    """The way to an NPU, up to the step that fails."""
    missing = State.BROKEN if is_needed else State.MISSING
    yield _autoload()
    yield _driver()
    try:
        npu = npu_device.find()
    except npu_device.NotFound as error:
        # a package without its driver is a machine where somebody wanted an NPU: still no reason to fail a CPU's check
        yield Check(f"NPU: {error.step}", missing, error.why, error.remedy)
        return
    yield Check("NPU: torch_npu", State.OK, npu.version)
    yield Check("NPU: CANN", State.OK, cann_version())
    yield Check("NPU: device", State.OK, f"{npu.soc}, {npu.device}")
    try:
        path = ascend_ops.library_path(npu.soc)
        ascend_ops.load_library(path)
    except ConfigError as error:
        yield Check("Ascend C operators", State.MISSING, str(error), "SOC_VERSION=... ops/ascendc/build.sh")
    else:
        yield Check("Ascend C operators", State.OK, str(path))
        for op, wrong in disagreements(npu.device):
            state, remedy = (State.BROKEN, "set `native: off`, and report this line") if wrong else (State.OK, "")
            yield Check(f"Ascend C {op}", state, wrong or "as defined", remedy)


def _driver() -> Check:
    """The kernel's side; what CANN cannot be without."""
    name, nodes = "Ascend driver", sorted(DEVICES.glob("davinci[0-9]*"))
    if not DRIVER.is_file():
        remedy = f"install driver and firmware; in a container mount {DRIVER.parent} and /dev/davinci*"
        return Check(name, State.MISSING, f"no {DRIVER}", remedy)
    lines = [line.strip() for line in DRIVER.read_text().splitlines() if line.lower().startswith("version")]
    found = f"{lines[0] if lines else DRIVER}, {len(nodes)} devices"
    if not nodes:
        return Check(name, State.MISSING, found, "no /dev/davinci0: in a container pass the device nodes in")
    return Check(name, State.OK, found)


def cann_version() -> str:
    """As the toolkit's own file says, where its environment was sourced."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    for name in ("version.cfg", "compiler/version.info", "version.info"):
        path = Path(home, name)
        if home and path.is_file():
            lines = [line.strip() for line in path.read_text().splitlines() if "ersion" in line]
            if lines:
                return f"{home}: {lines[0]}"
    return home or "found, ASCEND_HOME_PATH is not set"


def _autoload() -> Check:
    """The trap: torch imports torch_npu by itself, and dies of it where CANN is absent."""
    name = "torch autoload"
    try:
        installed = version("torch-npu")
    except PackageNotFoundError:
        return Check(name, State.OK, "torch-npu is not installed: torch loads no device's package by itself")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return Check(name, State.OK, f"torch-npu {installed} waits until backend npu asks for it")
    remedy = "start by the command npu-gr, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before python imports torch"
    return Check(name, State.BROKEN, f"torch imports torch-npu {installed} by itself", remedy)


# ---- do the ops compute what they should


def compare(backend: Backend) -> list[Check]:
    """Every op of a backend against its slow definition, in fp32 and bf16, on a few hundred rows."""
    checks = []
    for name, run in OPS.items():
        impl = backend.ops.get(name, "torch")
        worst = max(_difference(run, backend, dtype) / TOLERANCE[dtype] for dtype in TOLERANCE)
        state = State.OK if worst <= 1.0 else State.BROKEN
        remedy = "" if state is State.OK else "do not serve with it: report this line, and set `native: off` meanwhile"
        checks.append(Check(f"{backend.name}: {name}", state, f"{impl}; {worst:.1%} of the tolerance", remedy))
    return checks


Op = Callable[[Backend, torch.dtype], Tensor]


def _difference(run: Op, backend: Backend, dtype: torch.dtype) -> float:
    got = run(backend, dtype).to("cpu", torch.float64)
    want = run(ReferenceBackend(), dtype).to(torch.float64)
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


def _made(backend: Backend, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).to(backend.device) for shape in shapes]


def _times(backend: Backend, num: int) -> Tensor:
    return (torch.arange(num) * 3600).to(backend.device)


def _hstu(backend: Backend, dtype: torch.dtype) -> Tensor:
    q, k, past_k = _made(backend, dtype, (40, 2, 16), (40, 2, 16), (170, 2, 16))
    bias = BiasTables(*_made(backend, dtype, (2, 64), (2, 64)))
    past, times = [(past_k, past_k.flip(0))], _times(backend, 210)
    causal = backend.hstu_causal(q, k, q.flip(0), past, times, bias, 0.25)
    targets = backend.hstu_targets(q, k, q.flip(0), past, times[:170], 10**6, bias, 0.25)
    return torch.cat([causal, targets])


def _attention(backend: Backend, dtype: torch.dtype) -> Tensor:
    q, k, past, own = _made(backend, dtype, (40, 4, 16), (40, 2, 16), (170, 2, 16), (40, 3, 2, 16))
    causal = backend.causal_attention(q, k, k.flip(0), [(past, past)], 0.25)
    beams = backend.beam_attention(q, [(past, past)], (own, own), 2, None, 0.25)
    plain = backend.beam_attention_plain(q, [(past, past)], (own, own), 2, None, 0.25)
    return torch.cat([causal, beams, plain])


def _topk(backend: Backend, dtype: torch.dtype) -> Tensor:
    (logits,) = _made(backend, dtype, (16, 64))
    lo = torch.arange(16).to(backend.device) * 8
    code = torch.arange(128, dtype=torch.int32).to(backend.device) % 64
    follow = Continuations(lo, torch.full_like(lo, 8), code)
    chosen = backend.beam_topk(logits, torch.zeros(16, device=backend.device), follow, 32)
    return torch.stack([chosen.score, chosen.parent, chosen.edge])


def _fork(backend: Backend, dtype: torch.dtype) -> Tensor:
    keys, values = _made(backend, dtype, (2, 16, 3, 2, 8), (2, 16, 3, 2, 8))
    parent = (torch.arange(16) // 3).to(backend.device)
    backend.beam_fork_(keys, values, parent, 2)
    return torch.stack([keys, values])


OPS: dict[str, Op] = {
    "hstu_attention": _hstu,
    "softmax_attention": _attention,
    "beam_topk": _topk,
    "beam_fork": _fork,
}


def table(checks: list[Check]) -> str:
    """For people: a line a check, what to do under each that is not well."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state.value:8}{check.name:{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':8}{'':{width}}  -> {check.remedy}")
    return "\n".join(lines)
