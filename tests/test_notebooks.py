"""The notebooks run from their first cell to their last, in one folder, and show what they say.

It trains a small site, about 30 s on a quiet machine, so `make docs` runs it and `make test` does
not.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.sources import ROOT

FOLDER = ROOT / "docs" / "notebooks"


def executed(name: str, folder: Path) -> str:
    """Everything that a notebook prints."""
    book = nbformat.read(FOLDER / name, 4)
    client = NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", ())
    )


@pytest.mark.notebooks
def test_a_csv_becomes_recommendations_with_titles_and_a_change_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told = executed("csv_to_recommendations.ipynb", tmp_path)
    assert "2,100 events, 150 users, 32 items" in told
    assert "Verdict: " in told
    before, after = told.partition("reader-7 has read")[2].split("has just bought:")
    assert before.splitlines()[1].endswith("sailing"), (
        "what is left of the reader's subject comes first"
    )
    assert after.splitlines()[1].endswith("chess"), "and what was bought a moment ago counts"
    told = executed("replay_comparison.ipynb", tmp_path)
    assert "bit for bit the same" in told
    assert "as-it-is against as-it-is - exit code 0" in told
    assert "as-it-is against bfloat16 - exit code 1" in told


def test_every_notebook_is_executed() -> None:
    text = Path(__file__).read_text()
    for path in FOLDER.glob("*.ipynb"):
        assert f'executed("{path.name}"' in text


def test_the_first_notebook_is_kept_with_what_it_prints() -> None:
    """A reader sees the answers without running it; no path of a machine is in them."""
    book = nbformat.read(FOLDER / "csv_to_recommendations.ipynb", 4)
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "reader-7 has read" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not re.search(r"/(root|home|work|tmp|Users)/", text)
    assert not [output for output in outputs if output["output_type"] == "error"]


def test_figures_of_a_replay_are_those_of_the_readers_machine() -> None:
    for cell in nbformat.read(FOLDER / "replay_comparison.ipynb", 4).cells:
        assert not cell.get("outputs"), cell["source"][:80]
