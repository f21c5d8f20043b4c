"""The baselines' ranks of the next items: fitted once, and shared by the trainings of a site.

A training needs no fitted baseline but ItemKNN, only how the baselines rank its test users' next
items. So one baseline is in memory at a time. `SharedBaselines` keeps the ranks in a file, so that
the trainings of a site, which are processes of their own, fit the baselines once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npu_gr.train.baselines import (
    ITEM_KNN,
    LinearBaseline,
    fit_baselines,
    fit_linear,
    sample_users,
    skipped_baselines,
)
from npu_gr.train.data import InteractionLog, NextItem, Split, events_of
from npu_gr.train.linear import LinearModel, Tuned, item_knns
from npu_gr.train.next_item import Baseline, NextItemRanks, RetrievalFigures, rank_next_items
from npu_gr.train.sasrec import SASRec

LOCK = "baselines.lock"


class RankedBaselines(NamedTuple):
    """Next items as ranked by the baselines. n = targets."""

    ranks: dict[str, NextItemRanks]  # name -> [n]
    skipped: tuple[str, ...]  # a sentence for what was skipped, or fitted to a sample of the users
    # with its chosen settings, to be refitted; None = skipped, or fitted to a sample
    item_knn: LinearBaseline | None
    notes: tuple[str, ...] = ()  # what else was trained

    def and_one(
        self, log: InteractionLog, targets: Sequence[NextItem], learnt: SASRec
    ) -> RankedBaselines:
        """Add SASRec, trained on the same log, which ranks the same targets."""
        ranks = self.ranks | {learnt.name: _ranks(log, targets, learnt)}
        return self._replace(ranks=ranks, notes=(*self.notes, learnt.words))

    def figures(self) -> tuple[RetrievalFigures, ...]:
        """Compute the figures of each baseline."""
        return tuple(RetrievalFigures.from_ranks(found, name) for name, found in self.ranks.items())


RankBaselines = Callable[[InteractionLog, Split, int, Sequence[NextItem]], RankedBaselines]


def rank_baselines(
    log: InteractionLog, split: Split, seed: int, targets: Sequence[NextItem]
) -> RankedBaselines:
    """Fit the next-item baselines to the trained events, and rank the targets by each.

    Of a log that is too large for the linear ones, these are fitted to a sample of its users.

    Args:
        log: The log, split into trained and tested events.
        split: The rule of that split, which also splits the trained events to choose settings.
        seed: Seed of the validation users' sample.
        targets: Next items to rank.
    """
    ranks: dict[str, NextItemRanks] = {}
    item_knn = None
    for baseline in fit_baselines(log, split, seed):
        ranks[baseline.name] = _ranks(log, targets, baseline)
        if isinstance(baseline, LinearBaseline) and baseline.name == ITEM_KNN:
            item_knn = baseline
        del baseline  # before the next one is fitted
    skipped = skipped_baselines(log)
    tested = np.array([user for user, _ in targets], np.int64)
    users = sample_users(log, tested, seed)
    if len(users):
        part, rows = events_of(log, users), np.searchsorted(users, tested).tolist()
        for linear in fit_linear(part, split, seed):
            scores = (linear.next_items(part, row) for row in rows)
            ranks[linear.name] = rank_next_items(log, targets, scores)
            del linear
        words = (
            f"the linear baselines are fitted to a sample, the tested users and others at random: "
            f"{part.num_users:,} of {log.num_users:,} users"
        )
        skipped = (words, *skipped_baselines(part))
    return RankedBaselines(ranks, skipped, item_knn)


def _ranks(log: InteractionLog, targets: Sequence[NextItem], baseline: Baseline) -> NextItemRanks:
    return rank_next_items(log, targets, (baseline.next_items(log, user) for user, _ in targets))


class SharedBaselines:
    """`rank_baselines` with its results in a folder. A second process waits for the first."""

    def __init__(self, folder: Path) -> None:
        """Use a folder that lasts as long as its log and the program's version."""
        self._folder = folder

    def __call__(
        self, log: InteractionLog, split: Split, seed: int, targets: Sequence[NextItem]
    ) -> RankedBaselines:
        """Rank the targets, or read how another training of the same log ranked them."""
        path = self._folder / f"baselines-{_key(log, split, seed, targets)}.npz"
        lock = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _write(path, rank_baselines(log, split, seed, targets))
            return _read(path)
        finally:
            os.close(lock)


def _key(log: InteractionLog, split: Split, seed: int, targets: Sequence[NextItem]) -> str:
    state = blake2b(f"{split} {seed} {log.num_items} {log.num_users}".encode(), digest_size=16)
    events = np.array([target.event for target in targets], np.int64)
    for part in (log.items, log.times, log.starts, log.num_trained, events):
        state.update(np.ascontiguousarray(part).tobytes())
    return state.hexdigest()


def _write(path: Path, found: RankedBaselines) -> None:
    knn = found.item_knn
    settings = [] if knn is None else [(knn.tuned.exponent, knn.tuned.weight, knn.tuned.validation)]
    whole = path.with_suffix(".tmp")
    with whole.open("wb") as file:
        np.savez_compressed(
            file,
            names=np.array([*found.ranks], np.str_),
            ranks=np.array([(one.overall, one.unseen) for one in found.ranks.values()]),
            is_repeat=next(iter(found.ranks.values())).is_repeat,
            skipped=np.array(found.skipped, np.str_),
            item_knn=np.array([] if knn is None else [knn.tuned.name], np.str_),
            item_knn_settings=np.array(settings, np.float64),
            scale_users=np.empty(0, np.int64) if knn is None else knn.scale_users,
        )
    os.replace(whole, path)


def _read(path: Path) -> RankedBaselines:
    with np.load(path, allow_pickle=False) as file:
        named = zip(file["names"].tolist(), file["ranks"], strict=True)
        is_repeat = file["is_repeat"]
        knn = None
        if len(file["item_knn"]):
            tuned: Tuned[LinearModel] = Tuned.unfitted(
                str(file["item_knn"][0]), *file["item_knn_settings"][0].tolist()
            )
            knn = LinearBaseline(ITEM_KNN, tuned, item_knns, file["scale_users"])
        return RankedBaselines(
            {name: NextItemRanks(overall, unseen, is_repeat) for name, (overall, unseen) in named},
            tuple(file["skipped"].tolist()),
            knn,
        )
