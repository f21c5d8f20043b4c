"""`npu-gr train match`: trains, prints, writes vectors; bad options are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.vector_search.vectors import load
from tests.train.match.synthetic import write


def test_the_command_trains_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.train.match.domains.MOST_TESTED", 30)
    source, target = map(str, write(tmp_path))
    short = [
        f"--set={name}=4"
        for name in ("source_steps", "target_steps", "inter_steps", "evaluate_every")
    ]
    options = [*short, "--set=dim=8", "--num-validation=40", "--threads=1"]
    out = CliRunner().invoke(
        main, ["train", "match", source, target, "--out", str(tmp_path / "v"), *options]
    )
    assert out.exit_code == 0, out.output
    vectors = load(tmp_path / "v")
    assert vectors.version in out.output
    assert len(vectors.users) == 160
    assert "the strongest baseline" in out.output
    assert "validated on 40 users (at most 40, drawn at random), tested on 30" in out.output
    assert " drawn at random of " in out.output
    assert "EASE, both: hit_10" in out.output
    assert set(vectors.figures) >= {"hit_50", "hit_50_near_duplicates", "validation_smooth_hit"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "tua=1"], "unknown key tua; did you mean tau?"),
        (["--set", "tau=0"], "> 0"),
        (["--set", "encoder=lightgcn"], "encoder was removed"),
        (["--density", "1.5"], "must be above 0 and at most 1, got 1.5"),
    ],
)
def test_bad_options_are_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    source, target = map(str, write(tmp_path))
    out = CliRunner().invoke(
        main, ["train", "match", source, target, "--out", str(tmp_path / "v"), *words]
    )
    assert out.exit_code == 2
    assert says in out.output
