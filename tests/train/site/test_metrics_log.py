"""The curves of trainings: a line a second for each stage, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import DataError
from npu_gr.train.site.metrics_log import METRICS, metrics_log
from npu_gr.train.steps import TrainingProgress


def lines(site: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (site / METRICS).read_text().splitlines()]


def test_each_stage_has_a_line_a_second_its_first_and_its_last(tmp_path: Path) -> None:
    clock = 100.0
    shown: list[TrainingProgress] = []
    with metrics_log(tmp_path, shown.append, goes_on=False, now=lambda: clock) as write:
        for step in range(13):
            write(TrainingProgress("ranker: train", step / 4, 3.0, 5.0 - step / 4))
            write(TrainingProgress("generator: train", step, 40, hit=0.25))
            clock += 0.25
        assert len(lines(tmp_path)) == 8, "written at once, so that a killed training has its curve"
    assert len(shown) == 26
    ranker = [line for line in lines(tmp_path) if line["model"] == "ranker"]
    assert [line["done"] for line in ranker][::3] == [0.0, 3.0]
    assert ranker[0] == {
        "at": 100.0,
        "model": "ranker",
        "stage": "train",
        "done": 0.0,
        "total": 3.0,
        "loss": 5.0,
    }
    generator = [line for line in lines(tmp_path) if line["model"] == "generator"]
    assert generator[0]["hit"] == 0.25
    assert "loss" not in generator[0]


def test_an_interrupted_run_goes_on_in_its_file_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    for goes_on, num in ((False, 1), (True, 2), (False, 1)):
        with metrics_log(tmp_path, lambda _: None, goes_on=goes_on) as write:
            write(TrainingProgress("ranker: train", 1.0, 2.0))
        assert len(lines(tmp_path)) == num


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    with (
        pytest.raises(DataError, match=r"metrics\.jsonl: cannot be written"),
        metrics_log(tmp_path, lambda _: None, goes_on=False),
    ):
        pass
