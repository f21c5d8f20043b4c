"""The steps of `npu-gr doctor --acceptance`: what each runs and finds. Each runs in a process of its own.

`acceptance_run.py` starts the processes; `npu-gr doctor --backend NAME --step STEP` is what it starts. A step is what
hangs or crashes as one: an operator is a step, and so is each kind of request.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from npu_gr.backend.checks import Finding, FindingState
from npu_gr.backend.choose import choose
from npu_gr.backend.names import ASCEND, BackendName
from npu_gr.backend.npu import check
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.tools.acceptance import EXACT, PRODUCTION, ShapeLatency, accept, attention_ways, latencies
from npu_gr.tools.doctor import examine

QUICK = PRODUCTION._replace(
    tokens=300, cached=250, candidates=40, layers=2, head_dim=32, codes=256, searches=((40, 32),)
)
RUNS = 20
OPERATOR = "operator "
AT_PRODUCTION = {"ranks at production shapes": "rank", "generates at production shapes": "generate"}


class StepResult(NamedTuple):
    """What a step found, and what it timed."""

    findings: list[Finding]
    latencies: list[ShapeLatency]


def names(backend: BackendName) -> list[str]:
    """Name the steps in their order: first what is there, then single operators, then requests, times last."""
    operators = [OPERATOR + name for name in ascend_ops.names()] if backend == ASCEND else []
    return ["machine", *operators, "requests in fp32", *AT_PRODUCTION, "ways of attention", "latency"]


def run(backend: BackendName, name: str, quick: bool) -> StepResult:
    """Run a step in this process.

    Args:
        backend: by name.
        name: one of `names`.
        quick: small shapes in place of a service's.

    Raises:
        ConfigError: the backend is not there.
    """
    sizes = QUICK if quick else PRODUCTION
    if name == "machine":
        return StepResult(examine(backend), [])
    if name.startswith(OPERATOR):
        return StepResult(_operator(backend, name.removeprefix(OPERATOR), quick), [])
    if name == "requests in fp32":
        return StepResult(accept(backend, EXACT), [])
    if name in AT_PRODUCTION:
        return StepResult(accept(backend, sizes, [AT_PRODUCTION[name]]), [])
    if name == "ways of attention":
        return StepResult(asyncio.run(attention_ways(backend, sizes)), [])
    assert name == "latency", name
    timed = latencies(backend, sizes, 3 if quick else RUNS)
    if backend == ASCEND:
        timed += _operator_latencies(backend, quick)
    return StepResult([], timed)


def _operator(backend: BackendName, op: str, quick: bool) -> list[Finding]:
    """Compare a native operator with its definition, on the calls that a service makes."""
    device = choose(backend, "require").device
    found = []
    for what, arguments in check.service_calls(op, quick):
        wrong = check.difference(op, arguments, device)
        state = FindingState.BROKEN if wrong else FindingState.OK
        remedy = "set `native: off`, and attach the bundle to a report" if wrong else ""
        found.append(Finding(f"{op}: {what}", state, wrong or "as defined", remedy))
    return found


def _operator_latencies(backend: BackendName, quick: bool) -> list[ShapeLatency]:
    made = choose(backend, "require")
    timed = []
    for op in ascend_ops.names():
        for what, arguments in check.service_calls(op, quick):
            moved = [x.to(made.device) if isinstance(x, torch.Tensor) else x for x in arguments]
            call: Callable[..., Any] = getattr(torch.ops.npu_gr, op)
            taken_ms = []
            for _ in range(RUNS + 3):
                made.synchronize()
                began_at = time.perf_counter()
                call(*moved)
                made.synchronize()
                taken_ms.append((time.perf_counter() - began_at) * 1e3)
            deciles = statistics.quantiles(taken_ms[3:], n=10)
            timed.append(ShapeLatency(f"{op}: {what}", deciles[4], deciles[8]))
    return timed
