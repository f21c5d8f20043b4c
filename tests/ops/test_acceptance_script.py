"""The acceptance of a device: what is cut off or fails is named, and the rest is in the table."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "ops" / "acceptance.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("acceptance_script", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def python(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


LINE = {
    "bench": "device", "case": "rank", "ours": 1.0, "unit": "ms", "baseline": "FastAPI",
    "baseline_value": 3.0, "ratio": 3.0,
}  # fmt: skip


def test_each_step_has_its_limit_and_its_line(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that hangs is killed with its children; later ones run, and the bundle has all."""
    out = tmp_path / "acc"
    hang = "import subprocess, sys, time; print('child', flush=True); " + (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    )

    def steps(device: str, folder: Path, *, is_quick: bool) -> Iterator[Any]:
        assert (device, folder, is_quick) == ("cpu", out, True)
        yield script.Step("hangs", 1.0, python(hang))
        yield script.Step("fails", 20.0, python("print('no device'); raise SystemExit(3)"))
        yield script.Step("lacks", 20.0, ("no-such-profiler",), "no-such-profiler")
        yield script.Step("measures", 20.0, python(f"print({json.dumps(LINE)!r})"))

    monkeypatch.setattr(script, "steps", steps)
    began_at = time.monotonic()
    assert script.main(["cpu", "--quick", "--out", str(out)]) == 1
    assert time.monotonic() - began_at < 50, "the child does not hold it"
    table = capsys.readouterr().out
    rows = [line.split(" | ") for line in table.splitlines()]
    assert ["| hangs", "cut off"] in [row[:2] for row in rows]
    assert "at 1 s: child" in table
    assert ["| fails", "failed"] in [row[:2] for row in rows]
    assert ["| lacks", "skipped"] in [row[:2] for row in rows]
    assert "| rank | 1 ms | FastAPI | 3 ms | 3.00x |" in table
    with tarfile.open(tmp_path / "acc.tar.gz") as bundle:
        assert {"acc/table.md", "acc/hangs.log", "acc/measures.log"} <= set(bundle.getnames())


def test_no_time_left_is_no_failure(script: Any, tmp_path: Path) -> None:
    done = script.run(script.Step("late", 9.0, python("1")), tmp_path, 0.0)
    assert (done.state, done.words) == ("skipped", "no time is left")


@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
def test_the_commands_exist(script: Any, device: str, tmp_path: Path) -> None:
    """The limits add up to ten minutes but for the last steps; each file of tests is there."""
    found = list(script.steps(device, tmp_path, is_quick=False))
    assert found[0].name == "doctor with parity"
    assert sum(step.limit_s for step in found[:3]) <= script.BUDGET_S
    for step in found:
        assert step.needs or shutil.which(step.command[0])
        for word in step.command:
            assert not word.startswith("tests/") or (PATH.parents[1] / word).exists(), word
    assert any(step.name == "kernel profile" for step in found) == (device != "cpu")


def test_the_list_of_what_is_missing(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.NEEDED, "no_such_module", "no-such-wheel")
    assert script.main(["cpu", "--list"]) == 0
    assert "no-such-wheel" in capsys.readouterr().out.splitlines()
