"""Two ranks on gloo take the steps of one process, and go on after kill -9 with the same bits.

A fresh process forks the ranks: it imports torch once for all of them, and has no threads yet.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

from npu_gr.core.errors import ConfigError
from npu_gr.history_store.interactions import Interactions
from npu_gr.train import resume
from npu_gr.train.data import batches, build_log, windows
from npu_gr.train.distributed import Ranks, joined, num_events, reject_ranks, rows_of
from npu_gr.train.generate.train import train_generator
from npu_gr.train.match.train import Trainer
from npu_gr.train.rank.fit import Fitted, fit
from npu_gr.train.rank.losses import hold_out
from npu_gr.train.rank.options import TrainOptions, choose_tasks
from npu_gr.train.rank.train import train_rank
from npu_gr.train.resume import NO_STATES, TrainingStates
from tests.ports import free_port
from tests.train.match.synthetic import data, quick
from tests.train.rank.test_train import GENRES
from tests.train.test_resume import GENERATOR, LOG, RANKER

FIXED = {"dropout": 0.0, "epochs": 1}  # no random draws: those of two ranks differ from one's
EXACT_RANKER = msgspec.structs.replace(
    RANKER, **FIXED, row_dropout=0.0, vector_dropout=0.0, click_weight=0.0
)
EXACT_GENERATOR = msgspec.structs.replace(
    GENERATOR,
    **FIXED,
    skip_ratio=0.0,
    swap_ratio=0.0,
    refit=False,
    validation_users=2,
    test_users=2,
)
# users with 2 to 10 events: the parts of a batch have different numbers of events
RAGGED = LOG[np.random.default_rng(0).random(len(LOG)) < np.linspace(0.3, 1.0, 24)[LOG.users]]
TOLERANCE = 1e-5
WRITING = patch.multiple(resume, EVERY_S=0.0, MOST_SHARE=1e9)  # after every step
DIES_AT = 5  # step of a rank; an epoch has 3

Steps = list[tuple[float, list[torch.Tensor | None]]]
Train = Callable[[Path | None], tuple[dict[str, torch.Tensor], Any]]  # states -> weights, figures


def recorded(train: Callable[[], Any]) -> Steps:
    """Train, and return the loss and the gradients of every step."""
    steps: Steps = []
    gradients = Ranks.gradients

    def record(self: Ranks, own: torch.Tensor, parameters: Any, *args: Any) -> float:
        loss = gradients(self, own, parameters, *args)
        found = [None if one.grad is None else one.grad.clone() for one in parameters]
        steps.append((loss, found))
        return loss

    Ranks.gradients = record  # type: ignore[method-assign,assignment]
    try:
        train()
    finally:
        Ranks.gradients = gradients  # type: ignore[method-assign]
    return steps


def fitted(
    options: TrainOptions, states: TrainingStates = NO_STATES, events: Interactions = LOG
) -> Fitted:
    log = build_log(events, GENRES, "leave-one-out")
    held_out = hold_out(log, options)
    tasks = choose_tasks(log).tasks
    targets = held_out.targets
    return fit(
        held_out.log,
        GENRES,
        tasks,
        options,
        targets,
        "ranker: train",
        lambda _: None,
        states=states,
    )


def ranker_steps() -> Steps:
    return recorded(lambda: fitted(EXACT_RANKER, events=RAGGED))


def generator_steps() -> Steps:
    return recorded(lambda: train_generator(RAGGED, [], EXACT_GENERATOR, None, lambda _: None))


@WRITING
def trained(folder: Path | None) -> tuple[dict[str, torch.Tensor], tuple[float, ...]]:
    """Train a ranker with all its random draws; only rank 0 keeps states."""
    states = TrainingStates(folder, "x") if folder is not None and Ranks().is_first else NO_STATES
    found = fitted(RANKER, states)
    return found.model.state_dict(), found.curve


def match_steps() -> Steps:
    """Train on a single anchor, of which the second rank has none, and an odd number of edges."""
    return recorded(lambda: matched(None, batch_anchors=1, batch_edges=301))


@WRITING
def matched(folder: Path | None, **changes: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Train vectors of two domains; all draws are those of one process."""
    states = TrainingStates(folder, "x") if folder is not None and Ranks().is_first else NO_STATES
    options = quick(source_steps=3, target_steps=4, inter_steps=4, evaluate_every=2, **changes)
    with TemporaryDirectory() as files:
        found = Trainer(data(Path(files)), options, states).run()
    return {"users": found.users, "items": found.items}, found.validation


def dying(train: Train, folder: Path) -> None:
    gradients, steps = Ranks.gradients, [0]

    def die(self: Ranks, *args: Any) -> float:
        steps[0] += 1
        if self.rank == 1 and steps[0] == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradients(self, *args)

    Ranks.gradients = die  # type: ignore[method-assign,assignment]
    train(folder)


class Kind(NamedTuple):
    """A training on ranks."""

    steps: Callable[[], Steps]
    train: Train | None = None  # with all its random draws


KINDS = {
    "ranker": Kind(ranker_steps, trained),
    "generator": Kind(generator_steps),
    "match": Kind(match_steps, matched),
}


def _rank(rank: int, port: int, work: Callable[[], Any], path: Path) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with joined():
        found = work()
    torch.save(found, f"{path}-{rank}")


def _on_two_ranks(work: Callable[[], Any], path: Path) -> list[int | None]:
    """Run a function on two ranks, which save what it returns; returns the exit codes."""
    port = free_port()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, port, work, path)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    return [one.exitcode for one in ranks]


def _all_on_two_ranks(folder: Path) -> None:
    torch.set_num_threads(1)
    # the first optimizer of a process imports for 1.4 CPU seconds: once, not in each of six ranks
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    assert _on_two_ranks(_whole, folder / "whole") == [0, 0]
    for name, kind in KINDS.items():
        if kind.train is None:
            continue
        states = folder / name
        codes = _on_two_ranks(partial(dying, kind.train, states), folder / "killed")
        assert codes[1] == -signal.SIGKILL
        assert codes[0]  # the other one does not go on alone
        (state,) = states.iterdir()
        again = partial(_resumed, kind.train, state)
        assert _on_two_ranks(again, folder / f"{name}-resumed") == [0, 0]


def _whole() -> dict[str, Any]:
    return {name: (kind.steps(), kind.train and kind.train(None)) for name, kind in KINDS.items()}


def _resumed(train: Train, state: Path) -> Any:
    return num_kept(state), train(state.parent)


def num_kept(path: Path) -> int:
    """Count the steps of an epoch or a stage that a state says are done."""
    content = path.read_bytes()[resume.DIGEST_BYTES :]
    found = torch.load(io.BytesIO(content), weights_only=True)["state"]
    return int(found["num_steps"] if "num_steps" in found else found["step"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("ranks")
    driver = multiprocessing.get_context("spawn").Process(target=_all_on_two_ranks, args=(path,))
    driver.start()
    driver.join()
    assert driver.exitcode == 0
    return path


@pytest.mark.parametrize("name", KINDS)
def test_gradients_and_losses_are_those_of_one_process(folder: Path, name: str) -> None:
    want = KINDS[name].steps()
    for rank in range(2):
        found: Steps = torch.load(f"{folder}/whole-{rank}")[name][0]
        assert len(found) == len(want) > 2
        for (loss, _), (other, _) in zip(found, want, strict=True):
            assert loss == pytest.approx(other, rel=TOLERANCE)
        for (_, gradients), (_, others) in zip(found[:4], want[:4], strict=True):
            for gradient, same in zip(gradients, others, strict=True):
                assert (gradient is None) == (same is None)
                if gradient is not None and same is not None:
                    torch.testing.assert_close(gradient, same, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["ranker", "match"])
def test_the_ranks_have_the_same_bits(folder: Path, name: str) -> None:
    (first, figures), (other, others) = (
        torch.load(f"{folder}/whole-{rank}")[name][1] for rank in range(2)
    )
    assert all(torch.equal(value, other[name]) for name, value in first.items())
    assert figures == others


@pytest.mark.parametrize("name", ["ranker", "match"])
def test_after_kill_9_of_a_rank_it_goes_on_with_the_same_bits(folder: Path, name: str) -> None:
    weights, figures = torch.load(f"{folder}/whole-0")[name][1]
    num_done, (again, found) = torch.load(f"{folder}/{name}-resumed-0")
    assert num_done
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    assert found == figures


def test_parts_of_a_batch_are_the_batch() -> None:
    log = build_log(LOG, [], "leave-one-out")
    [batch] = batches(log, windows(log, 8, np.random.default_rng(0)), 10_000)
    parts = [rows_of(batch, rank, 3) for rank in range(3)]
    assert sum(map(num_events, parts)) == num_events(batch)
    rows = [row.tolist() for part in parts for row in part.items]
    assert sorted(rows) == sorted(row.tolist() for row in batch.items)


def test_a_command_of_one_process_refuses_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    reject_ranks("train all")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="train all runs in one process, not in 2"):
        reject_ranks("train all")


def test_a_search_by_the_clock_refuses_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.train.rank.train.Ranks", lambda: SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match="budget_s: must be 0 on 2 ranks"):
        train_rank(LOG, GENRES, msgspec.structs.replace(RANKER, budget_s=1.0))
