"""Training steps a second by ranks of torch.distributed on this machine, for `fleet`.

One and two processes of one thread take the same steps: those of the same global batches. Rounds
alternate, and the median of the paired ratios counts. Starts, the first steps and validations are
not timed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.frame import Line, compared, tell
from benchmarks.match_train import synthetic
from npu_gr.core.errors import Unavailable
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.data import build_log
from npu_gr.train.distributed import joined
from npu_gr.train.generate.train import QUICK, train_generator
from npu_gr.train.match.train import MatchOptions, Trainer
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.options import TrainOptions, choose_tasks
from npu_gr.train.steps import TrainingProgress
from tests.ports import free_port

SIZES = (1, 2)  # ranks
TARGET = 1.6  # steps a second of two ranks / of one
ROUNDS = 3
UNTIMED = 3  # steps at the start
ITEMS = 4_000
HISTORY = 100  # events of a user

Show = Callable[[TrainingProgress], None]


class _Enough(Exception):
    """All steps are taken."""


def lines(num_events: int, num_steps: int, seed: int) -> Iterator[Line]:
    """Yield a line for each model.

    Args:
        num_events: Events of the log, or edges of the domains.
        num_steps: Steps to time.
        seed: Seed of the data.

    Raises:
        Unavailable: a rank ended early.
    """
    for name in TRAININGS:
        rates: dict[int, list[float]] = {size: [] for size in SIZES}
        for number in range(ROUNDS):
            tell("fleet", f"{name} on ranks: round {number + 1} of {ROUNDS}")
            for size in SIZES:
                rates[size].append(_rate(size, name, num_events, num_steps, seed))
        one, two = (statistics.median(rates[size]) for size in SIZES)
        ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
        yield compared(
            "fleet", f"{name} on two ranks", two, "steps/s", "one rank", one, ratio, TARGET
        )


def _rate(size: int, name: str, num_events: int, num_steps: int, seed: int) -> float:
    """Train on ranks of their own processes; return the steps a second."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(
            target=_run,
            args=({"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port}, name, num_events, num_steps, seed, theirs),
        )
        for rank in range(size)
    ]  # fmt: skip
    for one in ranks:
        one.start()
    theirs.close()
    try:
        return float(ours.recv())
    except EOFError as error:
        raise Unavailable(f"bench fleet: {name}: a rank of {size} ended early") from error
    finally:
        for one in ranks:
            one.join()


def _run(
    variables: dict[str, str | int],
    name: str,
    num_events: int,
    num_steps: int,
    seed: int,
    answer: multiprocessing.connection.Connection,
) -> None:
    os.environ.update({key: str(value) for key, value in variables.items()})
    torch.set_num_threads(1)
    ended_at: list[float] = []

    def note(_: TrainingProgress) -> None:
        ended_at.append(time.perf_counter())
        if len(ended_at) == UNTIMED + num_steps:
            raise _Enough

    with joined() as ranks:
        try:
            TRAININGS[name](num_events, seed, note)
        except _Enough:
            if ranks.is_first:
                answer.send(num_steps / (ended_at[-1] - ended_at[UNTIMED - 1]))


def _log(num_events: int, seed: int) -> Interactions:
    random = np.random.default_rng(seed)
    num_users = max(2, num_events // HISTORY)
    return Interactions(
        np.tile(np.arange(num_users, dtype=np.int32), HISTORY),
        (ITEMS * random.random(num_users * HISTORY) ** 2).astype(np.int64),
        random.integers(0, 2, num_users * HISTORY).astype(np.float64),
        np.repeat(1_700_000_000 + 3600 * np.arange(HISTORY), num_users),
        [f"u{number}" for number in range(num_users)],
        ("view", "buy"),
    )


def _rank(num_events: int, seed: int, show: Show) -> None:
    log = build_log(_log(num_events, seed), [], "leave-one-out")
    fit(log, [], choose_tasks(log).tasks, TrainOptions(), [], "ranker: train", show)


def _generate(num_events: int, seed: int, show: Show) -> None:
    train_generator(_log(num_events, seed), [], QUICK, None, show)


def _match(num_events: int, seed: int, show: Show) -> None:
    Trainer(synthetic(num_events, seed), MatchOptions(batch_edges=65_536)).run(show)


TRAININGS: dict[str, Callable[[int, int, Show], None]] = {
    "train rank": _rank,
    "train generate": _generate,
    "train match": _match,
}
