"""A training that is interrupted goes on with the same bits, after kill -9 too."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from npu_gr.core.errors import DataError
from npu_gr.train import resume
from npu_gr.train.generate.train import train_generator
from npu_gr.train.match.train import Trainer
from npu_gr.train.rank.train import train_rank
from npu_gr.train.resume import NO_STATES, TrainingStates
from npu_gr.train.site.side_by_side import Show, Training, side_by_side
from npu_gr.train.steps import TrainingProgress
from tests.train.generate.test_train import TINY as TINY_GENERATOR
from tests.train.match.synthetic import data, quick
from tests.train.rank.test_train import GENRES
from tests.train.rank.test_train import TINY as TINY_RANKER
from tests.train.synthetic import planted

LOG = planted(num_users=24, num_events=10)
RANKER = msgspec.structs.replace(
    TINY_RANKER, epochs=2, patience=2, refit=True, window_tokens=8, batch_tokens=64
)
GENERATOR = msgspec.structs.replace(
    TINY_GENERATOR,
    epochs=3,
    validate_every=1,
    dropout=0.1,
    skip_ratio=0.1,
    batch_tokens=128,
    validation_users=8,
    test_users=8,
    refit=True,
)
Train = Callable[[TrainingStates, Show], tuple[Any, Any]]  # -> weights, figures


def ranker(states: TrainingStates, show: Show) -> tuple[Any, Any]:
    checkpoint, found = train_rank(LOG, GENRES, RANKER, show, states=states)
    return checkpoint.model.state_dict(), found.as_dict()


def generator(states: TrainingStates, show: Show) -> tuple[Any, Any]:
    found = train_generator(LOG, [], GENERATOR, None, show, states=states)
    return found.model.state_dict(), found.report.chosen


def vectors(folder: Path, states: TrainingStates, show: Show) -> tuple[Any, Any]:
    options = quick(source_steps=4, target_steps=6, inter_steps=6, evaluate_every=3)
    found = Trainer(data(folder), options, states).run(show)
    return {"users": found.users, "items": found.items}, found.validation


@pytest.fixture(autouse=True)
def after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(resume, "EVERY_S", 0.0)
    monkeypatch.setattr(resume, "MOST_SHARE", 1e9)


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    same_weights = all(torch.equal(value, other[0][name]) for name, value in one[0].items())
    return same_weights and one[0].keys() == other[0].keys() and one[1] == other[1]


class Interrupted(Exception):
    pass


def interrupted_at(step: int) -> Show:
    """Raise after so many steps of training."""
    seen = 0

    def show(progress: TrainingProgress) -> None:
        nonlocal seen
        seen += "evaluate" not in progress.stage
        if seen == step:
            raise Interrupted

    return show


def passed(steps: list[TrainingProgress]) -> list[TrainingProgress]:
    """Keep what is a step of a training, not of codes, neighbours or an evaluation."""
    return [step for step in steps if not math.isnan(step.loss) and "evaluate" not in step.stage]


@pytest.mark.parametrize("model", ["ranker", "generator", "vectors"])
def test_an_interrupted_training_goes_on_with_the_same_bits(tmp_path: Path, model: str) -> None:
    trains: dict[str, Train] = {
        "ranker": ranker,
        "generator": generator,
        "vectors": partial(vectors, tmp_path),
    }
    train = trains[model]
    steps: list[TrainingProgress] = []
    want = train(NO_STATES, steps.append)
    num_steps = len(passed(steps))
    states = TrainingStates(tmp_path / "states", "made from this")
    for _ in range(1 if model == "ranker" else 2):  # the second time in another stage
        with pytest.raises(Interrupted):
            train(states, interrupted_at(2 * num_steps // 5))
    left: list[TrainingProgress] = []
    assert same(train(states, left.append), want)
    assert len(passed(left)) < num_steps * 0.7
    states.remove()
    assert not (tmp_path / "states").exists()


def killed(folder: Path, _show: Show) -> None:
    resume.EVERY_S, resume.MOST_SHARE = 0.0, 1e9
    states = TrainingStates(folder, "x")
    write = states.write

    def write_and_die(stage: str, key: str, state: dict[str, Any]) -> None:
        write(stage, key, state)
        if state.get("num_epochs") == 1 and state["num_steps"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    states.write = write_and_die  # type: ignore[method-assign]
    generator(states, lambda _: None)


def test_killed_in_the_middle_of_an_epoch_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    want = generator(NO_STATES, lambda _: None)
    with pytest.raises(DataError, match="was killed"):
        side_by_side([Training("generator", partial(killed, tmp_path))], 1, lambda _: None)
    seen: list[TrainingProgress] = []
    assert same(generator(TrainingStates(tmp_path, "x"), seen.append), want)
    assert passed(seen)[0].done > 1


def test_a_state_of_something_else_or_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    states = TrainingStates(tmp_path, "x")
    states.write("ranker: train", "options", {"step": 3})
    [path] = tmp_path.iterdir()
    assert path.name == "ranker-train.state"
    assert states.read("ranker: train", "options") == {"step": 3}
    assert states.read("ranker: train", "others") is None
    assert states.read("ranker: refit", "options") is None
    assert TrainingStates(tmp_path, "y").read("ranker: train", "options") is None
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert states.read("ranker: train", "options") is None
    path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    assert states.read("ranker: train", "options") is None


def test_writing_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    now = [0.0]

    def clock() -> float:
        now[0] += 3.0  # a write takes so long
        return now[0]

    states = TrainingStates(tmp_path, "x", clock)
    now[0] = 100.0
    assert states.is_due()
    states.write("train", "", {})
    now[0] += 50.0
    assert not states.is_due()
    now[0] += 20.0
    assert states.is_due()
    assert not NO_STATES.is_due()


def test_a_state_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"train\.state: cannot be written"):
        TrainingStates(tmp_path / "file", "x").write("train", "", {})
