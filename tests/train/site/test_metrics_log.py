"""The curves of trainings: a line a second for each stage, and no more."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.train.site.metrics_log import METRICS, metrics_log
from npu_gr.train.site.tensorboard_log import tensorboard_log
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


def test_events_a_second_and_the_last_validation_are_in_it(tmp_path: Path) -> None:
    clock = 100.0
    with metrics_log(tmp_path, lambda _: None, goes_on=False, now=lambda: clock) as write:
        for num_events, hit in ((200, math.nan), (500, 0.25), (500, 0.25)):
            write(TrainingProgress("ranker: train", 1.0, 3.0, num_events=num_events, hr_at_10=hit))
            clock += 2
    found = [(line.get("events_per_s"), line.get("hr_at_10")) for line in lines(tmp_path)]
    assert found == [(None, None), (150.0, 0.25), (None, 0.25)]


def test_tensorboard_reads_what_the_file_has(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra tensorboard is not installed",
    )
    with (
        tensorboard_log(tmp_path / "runs") as also,
        metrics_log(tmp_path, lambda _: None, goes_on=False, now=lambda: 7.0, also=also) as write,
    ):
        write(TrainingProgress("ranker: train", 1.5, 3.0, 0.5))
        write(TrainingProgress("ranker: train", 3.0, 3.0, 0.25, hr_at_10=0.125))
    [run] = (tmp_path / "runs").iterdir()
    events = reader.EventAccumulator(str(run)).Reload()
    assert events.Tags()["scalars"] == ["ranker/train/loss", "ranker/train/hr_at_10"]
    assert [(one.step, one.value) for one in events.Scalars("ranker/train/loss")] == [
        (150, 0.5),
        (300, 0.25),
    ]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--tensorboard"), tensorboard_log(tmp_path / "file"):
        pass


def test_without_tensorboard_the_option_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'npu_gr\[tensorboard\]'"),
        tensorboard_log(tmp_path),
    ):
        pass
    with tensorboard_log(None):
        pass
