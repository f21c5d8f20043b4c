"""How the lines of a bench are printed: a table, or a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from npu_gr.bench.line import Line


def show(lines: Iterable[Line], device: str, seed: int, as_json: bool) -> None:
    """Print lines below their environment: each at once as JSON, or all of them as one table."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from npu_gr.bench.line import environment

    about = environment(device, seed)
    if as_json:
        click.echo(json.dumps(about))
        for line in lines:
            click.echo(json.dumps(line.as_dict()))
        return
    found = list(lines)
    columns = ("baseline", "ours", "ratio", "difference, 95 %", "floor", "of it", "ok")
    numbers = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table(Column("case", overflow="fold"), *numbers, box=box.SIMPLE)
    for line in found:
        table.title = f"bench {line.bench}"
        table.add_row(
            line.case,
            f"{line.baseline_value:.3g} {line.unit}",
            f"{line.ours:.3g} {line.unit}",
            f"{line.ratio:.1f}x" if line.low is None else f"{line.ratio:.2f}x",
            "" if line.low is None else f"{line.low:+.4f} .. {line.high:+.4f}",
            "" if line.floor is None else f"{line.floor:.1f}x",
            "" if line.of_floor is None else f"{line.of_floor:.0%}",
            "" if line.ok is None else "yes" if line.ok else "no",
        )
    table.caption = f"baseline: {line.baseline}; {about['environment']['machine']}"
    Console(width=max(100, Console().width)).print(table)
