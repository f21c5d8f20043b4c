"""Trainings run side by side; one that fails or dies ends all of them, in words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from npu_gr.core.errors import DataError
from npu_gr.train.site.side_by_side import Show, Training, side_by_side
from npu_gr.train.steps import TrainingProgress

MANY = 10**6


def count(name: str, num_steps: int, folder: Path, show: Show) -> tuple[str, int]:
    (folder / name).write_text(str(os.getpid()))
    for step in range(num_steps):
        show(TrainingProgress("train", step + 1, num_steps))
        if num_steps == MANY:
            time.sleep(0.001)
    return name, os.getpid()


def say_nothing(folder: Path, _show: Show) -> tuple[str, int]:
    (folder / "silent").write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def fail(folder: Path, show: Show) -> tuple[str, int]:
    until_written(folder / "endless")
    raise DataError("no events")


def die(folder: Path, show: Show) -> tuple[str, int]:
    until_written(folder / "endless")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_every_job_is_shown_and_done(tmp_path: Path) -> None:
    shown: list[TrainingProgress] = []
    done: dict[str, tuple[str, int]] = {}
    jobs = [Training(name, partial(count, name, 3, tmp_path)) for name in ("a", "b", "c")]
    side_by_side(jobs, 2, shown.append, lambda name, result: done.update({name: result}))
    assert {name: result[0] for name, result in done.items()} == {"a": "a", "b": "b", "c": "c"}
    # each in a process of its own
    assert len({result[1] for result in done.values()} | {os.getpid()}) == 4
    assert sorted(step.stage for step in shown) == ["train"] * 9


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (fail, "no events"),
        (die, "bad: .* was killed, probably because the machine ran out of memory"),
    ],
)
def test_one_that_ends_badly_ends_all(
    tmp_path: Path, bad: Callable[..., tuple[str, int]], message: str
) -> None:
    jobs = [
        Training("endless", partial(count, "endless", MANY, tmp_path)),
        Training("bad", partial(bad, tmp_path)),
    ]
    with pytest.raises(DataError, match=message):
        side_by_side(jobs, 2, lambda _: None)
    assert is_gone(int((tmp_path / "endless").read_text()))


def test_without_its_parent_a_training_ends(tmp_path: Path) -> None:
    parent = os.fork()
    if not parent:
        side_by_side([Training("silent", partial(say_nothing, tmp_path))], 1, lambda _: None)
        os._exit(1)
    pid = int(until_written(tmp_path / "silent"))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ends_at = time.monotonic() + 30
    while not is_gone(pid):
        assert time.monotonic() < ends_at, f"process {pid} still runs"
        time.sleep(0.01)


def until_written(path: Path) -> str:
    ends_at = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < ends_at, f"nothing in {path}"
        time.sleep(0.01)
    return path.read_text()


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # its parent has not asked for it yet
