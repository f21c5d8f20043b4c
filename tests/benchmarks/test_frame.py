"""Each benchmark has a command; the table omits empty columns and names baselines that differ."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks import store
from benchmarks.frame import (
    BENCHES,
    OLD_NAMES,
    Line,
    bench,
    compared,
    show,
    table,
    timed,
    timed_in_turn,
)
from npu_gr.core.errors import ConfigError

LONG = (
    "closed loop of 256: 1427 within SLO, 3349 rejected, 92 late, 0 lost a second, P99 67 ms; off "
    "140 within SLO"
)


def line(
    case: str = LONG,
    baseline: str = "admission off",
    ratio: float = 0.764,
    target: float | None = 0.95,
) -> Line:
    return compared("door", case, 1427.0, "within SLO/s", baseline, 1868.0, ratio, target)


def text(*lines: Line, width: int = 200) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(table(lines, "2 x a CPU"))
    return file.getvalue()


def test_empty_columns_are_left_out() -> None:
    shown = text(line())
    assert LONG in " ".join(shown.split())
    for cell in (
        "bench door",
        "1.87e+03 within SLO/s",
        "0.764x",
        "0.95x",
        "baseline: admission off; 2 x a CPU",
    ):
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


def test_every_bench_of_the_table_has_its_options_and_says_what_it_is() -> None:
    for name, module in BENCHES.items():
        out = CliRunner().invoke(bench, [name, "--help"])
        assert out.exit_code == 0, (module, out.output)
        assert "--json" in out.output
        about = out.output.split("\n\n")[1].strip()
        assert len(about) > 20, name
    assert CliRunner().invoke(bench, ["none"]).exit_code == 2


def test_lines_are_printed_as_json_with_their_machine_and_an_error_is_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lines(seed: int) -> Iterator[Line]:
        yield line()
        if seed:
            raise ConfigError("no such thing")

    monkeypatch.setattr(store, "lines", lines)
    out = CliRunner().invoke(bench, ["store", "--json"])
    about, printed = map(json.loads, out.output.splitlines())
    assert about["environment"]["seed"] == 0
    assert printed == line().as_dict()
    failed = CliRunner().invoke(bench, ["store", "--json", "--seed", "1"])
    assert failed.exit_code == 1
    assert failed.output.splitlines()[-1] == "Error: no such thing"


def test_functions_take_turns() -> None:
    calls: list[str] = []
    samples = timed_in_turn([lambda: calls.append("a"), lambda: calls.append("b")], 0.0, min_runs=3)
    assert "".join(calls) == "ab" + "ab" * 3
    assert [len(row) for row in samples] == [3, 3]


def test_a_time_is_compared_by_its_medians() -> None:
    found = timed("x", "case", [0.001, 0.002, 0.003], "other", [0.004] * 3, 1.5, floor=4.0)
    assert (found.ours, found.baseline_value, found.ratio, found.ok) == (2.0, 4.0, 2.0, True)
    assert found.of_floor == 0.5


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_name_of_a_bench_works_with_a_word(old: str, new: str) -> None:
    done = CliRunner().invoke(bench, [old, "--help"])
    assert done.exit_code == 0
    assert new in BENCHES
    assert f"{old} is now {new}" in done.stderr
