"""What `make test` makes of tests that fail beside others: runs of pytest on small files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

START = """
import os
from pathlib import Path
import pytest

def first(name):
    seen = Path(__file__).with_suffix("." + name)
    found = not seen.exists()
    seen.touch()
    return found

"""
FLAKY = "def test_{0}(): assert not first('{0}')\n"
BROKEN = "def test_broken(): assert False\n"
FIXTURE = "@pytest.fixture\ndef own(): assert not first('own')\ndef test_own(own): pass\n"
SKIPPED = "def test_skipped():\n    assert not first('skipped')\n    pytest.skip('today')\n"
CRASH = "def test_crash():\n    if first('crash'): os._exit(1)\n"


def run(folder: Path, text: str, *words: str) -> tuple[int, list[str]]:
    """Run the tests of a text; return the exit code, and the names that are said to be flaky."""
    (folder / "test_it.py").write_text(START + text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.again", *words, str(folder)]
    # other plugins take seconds to load
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True
    )
    alone = re.compile(r"^flaky: test_it.py::test_(\w+) passed alone$", re.MULTILINE)
    return done.returncode, sorted(alone.findall(done.stdout))


@pytest.mark.parametrize(
    ("text", "words", "code", "flaky"),
    [
        (FLAKY.format("a") + FIXTURE, ("-p", "xdist", "-n", "2"), 0, ["a", "own"]),
        (FLAKY.format("a") + BROKEN + SKIPPED, (), 1, ["a"]),
        ("".join(map(FLAKY.format, "abcd")), (), 1, []),
        (FLAKY.format("a"), ("-x",), 1, []),  # what comes after it never ran
        ("import nowhere\n", ("-p", "xdist", "-n", "1"), 1, []),
        (CRASH, ("-p", "xdist", "-n", "1"), 1, []),
    ],
)
def test_only_what_passes_alone_is_forgiven(
    text: str, words: tuple[str, ...], code: int, flaky: list[str], tmp_path: Path
) -> None:
    assert run(tmp_path, text, *words) == (code, flaky)
