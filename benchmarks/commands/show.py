"""How the lines of a bench are printed: a table, or a JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.line import Line

LEAST_WIDTH = 100
FILE_WIDTH = 200  # where nothing says how wide a line may be
CASE_WIDTH = 30


def show(lines: Iterable[Line], device: str, seed: int, as_json: bool) -> None:
    """Print lines below their environment: each at once as JSON, or all of them as one table."""
    from rich.console import Console

    from benchmarks.line import environment

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
    """Lay out the lines of a bench; a column that none of them fills is left out.

    Args:
        lines: at least one.
        machine: that they were timed on.
    """
    from rich import box
    from rich.table import Table

    baselines = {line.baseline for line in lines}
    columns = {
        "against": [line.baseline if len(baselines) > 1 else "" for line in lines],
        "baseline": [f"{line.baseline_value:.3g} {line.unit}" for line in lines],
        "ours": [f"{line.ours:.3g} {line.unit}" for line in lines],
        "ratio": [f"{line.ratio:.3g}x" if math.isfinite(line.ratio) else "-" for line in lines],
        "difference, 95 %": ["" if line.low is None else f"{line.low:+.4f} .. {line.high:+.4f}" for line in lines],
        "floor": ["" if line.floor is None else f"{line.floor:.1f}x" for line in lines],
        "of it": ["" if line.of_floor is None else f"{line.of_floor:.0%}" for line in lines],
        "target": ["" if line.target is None else f"{line.target:.3g}x" for line in lines],
        "ok": ["" if line.ok is None else "yes" if line.ok else "no" for line in lines],
    }
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    found = Table(title=f"bench {lines[0].bench}", box=box.SIMPLE)
    found.caption = "; ".join([*(f"baseline: {name}" for name in baselines if len(baselines) == 1), machine])
    found.add_column("case", min_width=CASE_WIDTH)
    for name in filled:
        found.add_column(name, justify="left" if name == "against" else "right", no_wrap=name != "against")
    for line, *cells in zip(lines, *filled.values(), strict=True):
        found.add_row(line.case, *cells)
    return found
