"""The framework of the benchmarks: their table, options, result lines and printing.

A benchmark is a module with `OPTIONS` (in addition to `--json`) and `lines(...)`, which takes them
by name and yields one `Line` a case. The first paragraph of the module's docstring is its help.
Nothing here imports numpy or torch before a benchmark does.
"""

from __future__ import annotations

import importlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from npu_gr import __version__
from npu_gr.core import shipped
from npu_gr.core.errors import NpuGrError

if TYPE_CHECKING:
    from rich.table import Table

BENCHES = {
    "rank": "benchmarks.rank",
    "long": "benchmarks.long",
    "delta": "benchmarks.delta",
    "tables": "benchmarks.tables",
    "features": "benchmarks.features",
    "generate": "benchmarks.generate",
    "match": "benchmarks.match",
    "kernels": "benchmarks.kernels",
    "device": "benchmarks.device",
    "emulator": "benchmarks.emulator",
    "handover": "benchmarks.handover",
    "store": "benchmarks.store",
    "fleet": "benchmarks.fleet",
    "prepare": "benchmarks.prepare",
    "cascade": "benchmarks.cascade",
    "shared_encoder": "benchmarks.shared_encoder",
    "rules": "benchmarks.rules",
    "relay": "benchmarks.relay",
    "wire": "benchmarks.wire",
    "metrics": "benchmarks.metrics",
    "protocols": "benchmarks.protocols",
    "door": "benchmarks.door",
    "quality": "benchmarks.quality",
    "large": "benchmarks.large",
    "match-train": "benchmarks.match_train",
}
OLD_NAMES = {"trunk": "shared_encoder", "twin": "emulator"}  # that still work
LEAST_WIDTH = 100
FILE_WIDTH = 200  # width of a line if the output is no terminal
CASE_WIDTH = 30


# ---- options


class Numbers(click.ParamType[tuple[int, ...]]):
    """Integers, comma-separated."""

    name = "N,N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse the numbers, or fail."""
        try:
            return (
                tuple(int(part) for part in value.split(","))
                if isinstance(value, str)
                else tuple(value)
            )
        except ValueError:
            self.fail(f"{value!r} is not a comma-separated list of integers", param, ctx)


def option(*names: str, **settings: Any) -> click.Option:
    """Make an option of a benchmark; its default is shown."""
    return click.Option(names, **{"show_default": True, **settings})


def timed_for(default: float, about: str = "Seconds of each case.") -> click.Option:
    """Make the option for the duration of each case."""
    return option("--seconds", default=default, help=about)


def only(parts: Sequence[str]) -> click.Option:
    """Make the option for the parts of a benchmark; the argument is `parts`, by default all."""
    return option(
        "--only", "parts", multiple=True, type=click.Choice(parts), default=parts,
        show_default=False, help="Run this part; repeatable.",
    )  # fmt: skip


COUNT = click.IntRange(1)
FILE = click.Path(path_type=Path)
BACKEND = option("--backend", default="cpu", help="Name of the backend, as in a configuration.")
SEED = option("--seed", default=0)
THREADS = option("--threads", default=1, type=COUNT, help="Number of torch's threads.")
SET = option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one setting.")
SHIPPED_CONFIG = option(
    "--config",
    type=FILE,
    default="configs/cpu.yaml",
    callback=lambda _context, _option, path: shipped.found(path),
    help="Configuration of the instance.",
)


class Benches(click.Group):
    """One command for each benchmark of the table, imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, in the table's order."""
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a benchmark and make its command; None = unknown name."""
        if cmd_name in OLD_NAMES:
            click.echo(f"{cmd_name} is now {OLD_NAMES[cmd_name]}", err=True)
            cmd_name = OLD_NAMES[cmd_name]
        if cmd_name not in BENCHES:
            return None
        module = importlib.import_module(BENCHES[cmd_name])
        options = [
            *module.OPTIONS,
            option("--json", "as_json", is_flag=True, help="Print one JSON object a line."),
        ]
        about = (module.__doc__ or "").partition("\n\n")[0].partition(": ")[2].replace("\n", " ")
        return click.Command(cmd_name, callback=_callback(module.lines), params=options, help=about)


def _callback(lines: Callable[..., Iterable[Line]]) -> Callable[..., None]:
    def run(as_json: bool, threads: int = 1, **given: Any) -> None:
        import torch

        torch.set_num_threads(threads)
        device = str(given.get("backend", given.get("device", "cpu")))
        try:
            show(lines(**given), device, int(given.get("seed", 0)), as_json)
        except NpuGrError as error:
            raise click.ClickException(str(error)) from error

    return run


@click.group(cls=Benches)
def bench() -> None:
    """Run a benchmark. Every benchmark checks its results before it measures time."""


# ---- lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One case of a benchmark: our figure and a baseline's, measured in turn in one run."""

    bench: str
    case: str
    ours: float  # in `unit`; times are medians
    unit: str
    baseline: str  # name of the baseline
    baseline_value: float  # in `unit`
    ratio: float  # how many times better ours is
    target: float | None  # target of the ratio; None = no target
    ok: bool | None  # whether the target is met; None = no target
    floor: float | None = None  # the best possible ratio
    of_floor: float | None = None  # `ratio` / `floor`
    p10: float | None = None  # percentiles of ours, in `unit`
    p90: float | None = None
    low: float | None = None  # 95 % interval of ours less the baseline's, in `unit`
    high: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def compared(
    bench: str,
    case: str,
    ours: float,
    unit: str,
    baseline: str,
    value: float,
    ratio: float,
    target: float | None = None,
    ok: bool | None = None,
    **more: float | None,
) -> Line:
    """Make the line of a case.

    Args:
        bench, case: Benchmark and case.
        ours: Our figure.
        unit: Unit of both figures.
        baseline: Name of the baseline.
        value: Figure of the baseline.
        ratio: How many times better ours is.
        target: Target of the ratio; None = no target.
        ok: Whether the target is met; None = compare `ratio` with `target`.
        more: Other fields of the line.
    """
    if ok is None and target is not None:
        ok = ratio >= target
    return Line(
        bench=bench,
        case=case,
        ours=ours,
        unit=unit,
        baseline=baseline,
        baseline_value=value,
        ratio=ratio,
        target=target,
        ok=ok,
        **more,
    )


def timed(
    bench: str,
    case: str,
    ours_s: list[float],
    baseline: str,
    baseline_s: list[float],
    target: float | None = None,
    unit: str = "ms",
    **more: Any,
) -> Line:
    """Make the line of two times: their medians, and how many times as fast ours is.

    Args:
        bench, case: Benchmark and case.
        ours_s: Seconds of our runs.
        baseline: Name of the baseline.
        baseline_s: Seconds of the baseline's runs.
        target: Target of the ratio; None = no target.
        unit: Unit, which begins with ms or us.
        more: Other fields of the line; `floor` also sets `of_floor`.
    """
    scale = {"ms": 1e3, "us": 1e6}[unit[:2]]
    ours, p10, p90 = (value * scale for value in percentiles(ours_s))
    value = percentiles(baseline_s)[0] * scale
    if more.get("floor") is not None:
        more.setdefault("of_floor", value / ours / more["floor"])
    return compared(
        bench, case, ours, unit, baseline, value, value / ours, target, p10=p10, p90=p90, **more
    )


def timed_in_turn(
    functions: list[Callable[[], object]],
    budget_s: float,
    min_runs: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Time functions in turn (A B A B ...), after one warm-up run of each.

    Args:
        functions: Functions to time.
        budget_s: Total seconds.
        min_runs: Least number of runs, even if they take longer than `budget_s`.
        clock: Clock in seconds; by default wall time.

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
    """Return the median, 10th and 90th percentile."""
    import numpy as np

    p50, p10, p90 = np.percentile(seconds, [50, 10, 90])
    return float(p50), float(p10), float(p90)


def tell(bench: str, text: str) -> None:
    """Print the progress of a long benchmark on standard error."""
    sys.stderr.write(f"bench {bench}: {text}\n")


# ---- printing


def show(lines: Iterable[Line], device: str, seed: int, as_json: bool) -> None:
    """Print the environment and the lines: as JSON, each immediately, or as one table."""
    from rich.console import Console

    about = environment(device, seed)
    if as_json:
        click.echo(json.dumps(about))
        for line in lines:
            click.echo(json.dumps(line.as_dict()))
        return
    console = Console()
    console.width = max(console.width, LEAST_WIDTH if console.is_terminal else FILE_WIDTH)
    console.print(table(list(lines), about["environment"]["machine"]))


def table(lines: Sequence[Line], machine: str) -> Table:
    """Make the table of a benchmark's lines; empty columns are omitted.

    Args:
        lines: One or more lines.
        machine: Description of the machine.
    """
    from rich import box
    from rich.table import Table

    baselines = {line.baseline for line in lines}
    columns = {
        "against": [line.baseline if len(baselines) > 1 else "" for line in lines],
        "baseline": [f"{line.baseline_value:.3g} {line.unit}" for line in lines],
        "ours": [f"{line.ours:.3g} {line.unit}" for line in lines],
        "ratio": [f"{line.ratio:.3g}x" if math.isfinite(line.ratio) else "-" for line in lines],
        "difference, 95 %": [
            "" if line.low is None else f"{line.low:+.4f} .. {line.high:+.4f}" for line in lines
        ],
        "floor": ["" if line.floor is None else f"{line.floor:.1f}x" for line in lines],
        "of it": ["" if line.of_floor is None else f"{line.of_floor:.0%}" for line in lines],
        "target": ["" if line.target is None else f"{line.target:.3g}x" for line in lines],
        "ok": ["" if line.ok is None else "yes" if line.ok else "no" for line in lines],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    found = Table(title=f"bench {lines[0].bench}", box=box.SIMPLE)
    found.caption = "; ".join(
        [*(f"baseline: {name}" for name in baselines if len(baselines) == 1), machine]
    )
    found.add_column("case", min_width=CASE_WIDTH)
    for name in filled:
        found.add_column(
            name, justify="left" if name == "against" else "right", no_wrap=name != "against"
        )
    for line, *cells in zip(lines, *filled.values(), strict=True):
        found.add_row(line.case, *cells)
    return found


def environment(device: str, seed: int) -> dict[str, Any]:
    """Describe the machine and the versions."""
    import torch

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
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return f"{len(names)} x {names[0]}" if names else platform.machine()
