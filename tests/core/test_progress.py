"""Long work says from a pipe how far it is."""

from __future__ import annotations

import io
import threading
import time
from functools import partial

import pytest
from rich.console import Console

from npu_gr.core.progress import heartbeat, time_left
from npu_gr.train import steps
from npu_gr.train.steps import TrainingProgress, training_progress


def test_the_status_is_written_at_an_interval_until_the_end() -> None:
    lines: list[str] = []
    is_written = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        is_written.set()

    with heartbeat(write, every_s=0.001) as progress:
        progress.status = "half"
        assert is_written.wait(10)
    assert set(lines) == {"half"}
    assert not [one for one in threading.enumerate() if one.name == "heartbeat"]


def test_the_time_that_is_left_follows_from_the_pace() -> None:
    assert time_left(0, 10, 5) == ""
    assert time_left(1, 4, 10) == "about 30 s left"
    assert time_left(1, 61, 10) == "about 10 min left"
    assert time_left(10, 10, 5) == "about 0 s left"


def test_a_pipe_gets_lines_of_a_training_and_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "heartbeat", partial(heartbeat, every_s=0.01))
    out = io.StringIO()
    with training_progress(Console(file=out, width=200)) as show:
        show(TrainingProgress("ranker: train", 1, 4))
        show(TrainingProgress("vectors: choose", 0, 4))
        show(TrainingProgress("generator: train", 3.98, 4))
        time.sleep(0.5)
    text = out.getvalue()
    assert "ranker: train 25%" in text
    assert "vectors: choose 0%" in text
    assert "generator: train: finishing" in text
    assert "━" not in text
