"""The table of a bench: what no line has is left out, baselines that differ are named, and a file gets whole words."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from benchmarks.commands.show import show, table
from benchmarks.line import Line, compared

LONG = "closed loop of 256: 1427 in time, 3349 refused, 92 late, 0 lost a second, P99 67 ms; off 140 in time"


def line(case: str = LONG, baseline: str = "admission off", ratio: float = 0.764, target: float | None = 0.95) -> Line:
    return compared("door", case, 1427.0, "in time/s", baseline, 1868.0, ratio, target)


def text(*lines: Line, width: int = 200) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(table(lines, "2 x a CPU"))
    return file.getvalue()


def test_columns_that_nobody_fills_are_left_out() -> None:
    shown = text(line())
    assert LONG in " ".join(shown.split())
    for cell in ("bench door", "1.87e+03 in time/s", "0.764x", "0.95x", "baseline: admission off; 2 x a CPU"):
        assert cell in shown
    assert next(row for row in shown.splitlines() if "0.764x" in row).split()[-1] == "no"
    for column in ("floor", "of it", "difference", "against"):
        assert column not in shown
    assert "target" not in text(line(target=None))


def test_baselines_that_differ_are_named_in_their_rows() -> None:
    shown = text(line(), line("a second row", "the target", math.inf, 1.0))
    rows = {row.split()[0]: row for row in shown.splitlines() if row.strip()}
    assert "admission off" in rows["closed"]
    assert "the target" in rows["a"]
    assert " - " in rows["a"]
    assert "baseline:" not in shown


def test_a_file_gets_lines_whose_words_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    show([line(), line("another", "the target")], "cpu", 0, as_json=False)
    words = capsys.readouterr().out.split()
    assert set(LONG.split()) <= set(words)
