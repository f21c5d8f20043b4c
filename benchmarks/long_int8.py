"""The parts `int8` and `quality` of `benchmarks long`: keys and values in int8 against bfloat16.

Both arms have the weights and the arithmetic of one bfloat16 model. Memory and time, on each of the
processor's instruction sets, are those of the shape of `benchmarks rank`. The quality is that of a
ranker trained on a log, without the newest fifth of each user's events. Each user's items are
scored from the trained events as history, at the time of the first event after them: all items for
the best ten, the events after for the AUC.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.frame import Line, compared, tell, timed, timed_in_turn
from benchmarks.long_user import Long, Prepared
from benchmarks.rank import config, layout
from npu_gr.backend.base import Backend
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import supported
from npu_gr.core.arrays import F32, I64
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.metrics import F64, auc, difference_of_auc, difference_of_users
from npu_gr.train.rank.options import TrainOptions, choose_tasks, positives
from npu_gr.train.rank.train import train_rank

AT = 4096  # events of a history
SHORT = 1024
BEST = 10  # items that are compared
USERS, BYTES, RANK, OVERLAP = 1.9, 1 / 0.52, 1.2, 0.99  # least ratios
AUC_MOVES = 0.001  # most
PAGES = {"int8": torch.int8, "bf16": torch.bfloat16}


def lines(backend: Backend, seconds: float, seed: int) -> Iterator[Line]:
    """Yield memory and time.

    Raises:
        AssertionError: The cached scores are not those of a cold rank; nothing was timed.
    """
    yield from _sizes(backend)
    isas = [isa for isa in supported() if isa != "generic"] if backend.name == "cpu" else []
    for isa in isas or [""]:
        one = CPUBackend("require", isa) if isa else backend
        for num_events in (AT, SHORT):
            yield _cached_rank(one, isa, num_events, seconds, seed)


def _sizes(backend: Backend) -> Iterator[Line]:
    ours, before = (layout(config(), backend, kind).bytes(AT) for kind in PAGES.values())
    gib = float(1 << 30)
    yield compared(
        "long", f"int8: users a GiB at {AT}", gib / ours, "users", "bfloat16", gib / before,
        before / ours, USERS,
    )  # fmt: skip
    yield compared(
        "long", f"int8: bytes of a reload at {AT}", ours, "bytes", "bfloat16", before,
        before / ours, BYTES,
    )  # fmt: skip


def _cached_rank(backend: Backend, isa: str, num_events: int, seconds: float, seed: int) -> Line:
    arms = [
        Prepared(Long.untrained(config(), backend, torch.bfloat16, seed, pages=kind), num_events)
        for kind in PAGES.values()
    ]
    for one in arms:
        assert one.rank() == one.rank(cached=False), f"{num_events} events: another score"
    ours, base = timed_in_turn([one.rank for one in arms], seconds, clock=time.process_time)
    case = f"int8: cached rank at {num_events}, {isa or backend.name}"
    return timed("long", case, ours, "bfloat16", base, RANK, unit="ms CPU")


class Scored(NamedTuple):
    """The scores of one arm."""

    best: list[list[set[int]]]  # by task and user, the rows of the best items
    liking: F64  # [events after the trained ones] logit of the task of the AUC


class Served:
    """Trained weights, and the log after the events that they were trained on."""

    def __init__(self, backend: Backend, interactions: Interactions, options: TrainOptions) -> None:
        tell("long", "trains a ranker")
        checkpoint, _ = train_rank(interactions, [], options)
        self._backend = backend
        self._weights = checkpoint.model.state_dict()
        self.config = checkpoint.model.config
        self.log = build_log(interactions, [], options.split)
        tasks = choose_tasks(self.log).tasks if options.tasks is None else options.tasks
        self.task = next(at for at, one in enumerate(tasks) if one.is_liking)
        self.labels = positives(self.log, tasks[self.task])
        self.users = [each.user for each in self.log.next_items()]

    def engine(self, dtype: torch.dtype, pages: torch.dtype) -> RankEngine:
        """Make an engine with the weights in one dtype, and pages in another."""
        model = HSTU(self.config)
        model.load_state_dict(self._weights)
        model.cast(dtype).eval().items.freeze()
        return Long(model, self._backend, 0, pages).engine(1)[0]

    def scored(self, dtype: torch.dtype, pages: torch.dtype) -> Scored:
        """Score with the weights in one dtype, and pages in another."""
        engine = self.engine(dtype, pages)
        every = np.arange(self.config.num_items)
        best: list[list[set[int]]] = [[] for _ in self.config.tasks]
        liking = np.full(len(self.log.items), np.nan)
        for user in self.users:
            start, stop = self.log.starts[user : user + 2]
            first = start + self.log.num_trained[user]
            logits = self.logits(engine, user, every)
            for task, column in enumerate(logits.T):
                best[task].append(set(np.argsort(-column, kind="stable")[:BEST].tolist()))
            liking[first:stop] = logits[self.log.items[first:stop], self.task]
        return Scored(best, liking)

    def logits(self, engine: RankEngine, user: int, candidates: I64) -> F32:
        """Score candidates after a user's trained events: [candidates, tasks]."""
        log = self.log
        start = int(log.starts[user])
        first = start + int(log.num_trained[user])
        own = slice(max(start, first - self.config.max_history_tokens), first)
        events = Events(log.items[own], log.actions[own].astype(np.int16), log.times[own])
        tokens = Tokens(
            events, log.items[own], HistoryReport(fingerprint="", num_tokens=len(events.items))
        )
        work = RankPass(tokens, 0, candidates, int(log.times[first]))
        return engine.forward([work])[0]


def quality(served: Served) -> Iterator[Line]:
    """Yield the best items that the arms share, and their AUC."""
    arms = {
        "int8": served.scored(torch.bfloat16, torch.int8),
        "bf16": served.scored(torch.bfloat16, torch.bfloat16),
        "fp32": served.scored(torch.float32, torch.float32),
    }
    about = f"{len(served.users)} users, {served.config.num_items} items"
    for task, name in enumerate(served.config.tasks):
        for mine, other, target in (("int8", "bf16", OVERLAP), ("bf16", "fp32", None)):
            shared = np.array([
                len(one & two) / BEST
                for one, two in zip(arms[mine].best[task], arms[other].best[task], strict=True)
            ])  # fmt: skip
            gap = difference_of_users(shared, np.ones_like(shared))
            yield compared(
                "long", f"{mine}: best {BEST} by {name}, {about}", float(shared.mean()), "shared",
                other, 1.0, float(shared.mean()), target, low=gap.low, high=gap.high,
            )  # fmt: skip
    yield from _areas(served.log, served, arms)


def _areas(log: InteractionLog, served: Served, arms: dict[str, Scored]) -> Iterator[Line]:
    tested = np.isfinite(arms["bf16"].liking)
    labels, users = served.labels[tested], log.users[tested]
    for mine, other, is_target in (("int8", "bf16", True), ("bf16", "fp32", False)):
        ours, theirs = arms[mine].liking[tested], arms[other].liking[tested]
        gap = difference_of_auc(ours, theirs, labels, users)
        assert gap is not None
        value, before = auc(ours, labels), auc(theirs, labels)
        yield compared(
            "long", f"{mine}: AUC of {served.config.tasks[served.task]}, {len(labels)} events",
            value, "AUC", other, before, value / before,
            ok=abs(gap.mean) <= AUC_MOVES if is_target else None, low=gap.low, high=gap.high,
        )  # fmt: skip
