"""One line of a bench: our figure beside that of a named baseline, timed in turn in one run."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from npu_gr import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One case of a bench."""

    bench: str
    case: str
    ours: float  # in `unit`; of times the median
    unit: str
    baseline: str  # its name
    baseline_value: float  # in `unit`
    ratio: float  # how many times better ours is
    target: float | None  # the ratio to reach; None = none is set
    ok: bool | None  # reached; None = none is set
    floor: float | None = None  # the best ratio that arithmetic allows
    of_floor: float | None = None  # `ratio` as a share of it
    p10: float | None = None  # of ours, in `unit`
    p90: float | None = None
    low: float | None = None  # 95 % interval of ours less the baseline's, in `unit`
    high: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has."""
        return asdict(self)


def compared(
    bench: str, case: str, ours: float, unit: str, baseline: str, value: float, ratio: float, target: float | None
) -> Line:
    """Make the line of a case whose ratio has a target, or none.

    Args:
        bench, case: its names.
        ours: our figure.
        unit: of both figures.
        baseline: its name.
        value: its figure.
        ratio: how many times better ours is.
        target: the ratio to reach; None = none is set.
    """
    return Line(
        bench=bench,
        case=case,
        ours=ours,
        unit=unit,
        baseline=baseline,
        baseline_value=value,
        ratio=ratio,
        target=target,
        ok=None if target is None else ratio >= target,
    )


def timed_in_turn(
    functions: list[Callable[[], object]],
    budget_s: float,
    min_runs: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Time functions in turn (A B A B ...), after one run of each that does not count.

    Args:
        functions: what to time.
        budget_s: seconds to go on for.
        min_runs: of each function, also if they take longer than `budget_s`.
        clock: seconds; by default of the wall.

    Returns:
        For each function, the seconds of each run.
    """
    for function in functions:
        function()
    samples: list[list[float]] = [[] for _ in functions]
    ends_at = time.perf_counter() + budget_s
    while len(samples[0]) < min_runs or time.perf_counter() < ends_at:
        for function, row in zip(functions, samples, strict=True):
            began_at = clock()
            function()
            row.append(clock() - began_at)
    return samples


def percentiles(seconds: list[float]) -> tuple[float, float, float]:
    """The median, 10th and 90th percentile."""
    p50, p10, p90 = np.percentile(seconds, [50, 10, 90])
    return float(p50), float(p10), float(p90)


def environment(device: str, seed: int) -> dict[str, Any]:
    """The machine and the versions that the figures were measured with."""
    return {
        "environment": {
            "npu_gr": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": _cpu_name(),
            "device": device,
            "threads": torch.get_num_threads(),
            "seed": seed,
        }
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{len(names)} x {names[0]}" if names else platform.machine()
