"""The part `attention` of `benchmarks long`: what a window of attention costs in quality.

Three rankers of a log are trained with the same options and events: with full attention, with a
window, and one that reads no more than the newest tokens, as many as a row of the window's reads.
The log is that of its users with the longest histories. Scores are those of the engine and the
kernels that serve, of the events after the trained ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.frame import Line, compared
from benchmarks.long_int8 import Served
from npu_gr.backend.base import Backend
from npu_gr.core.arrays import I64
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.metrics import F64, auc, difference_of_auc, difference_of_users, hits
from npu_gr.train.rank.options import QUICK

WITHIN = 0.003  # most that a window may cost
USERS = 300
LONGEST = 256  # events of a training's window, so that full attention is trained on far ones
RECENT, FIRST = 64, 16  # tokens
OPTIONS = msgspec.structs.replace(
    QUICK, refit=False, test_users=1, window_tokens=LONGEST, batch_tokens=2 * LONGEST
)
ARMS = {
    "full attention": OPTIONS,
    "window": msgspec.structs.replace(
        OPTIONS, attention_window_tokens=RECENT, attention_first_tokens=FIRST
    ),
    "truncated": msgspec.structs.replace(
        OPTIONS, max_history_tokens=RECENT + FIRST, window_tokens=RECENT + FIRST
    ),
}


class Scored(NamedTuple):
    """The scores of one arm."""

    liking: F64  # [events after the trained ones, else NaN] logit of the task of the AUC
    ranks: F64  # [users] rank of the next item among the items that the user has not had


def lines(backend: Backend, interactions: Interactions, seed: int) -> Iterator[Line]:
    """Train the arms, and yield their differences."""
    longest = _longest(interactions, USERS)
    rankers = {
        name: Served(backend, longest, msgspec.structs.replace(options, seed=seed))
        for name, options in ARMS.items()
    }
    arms = {name: _scored(served) for name, served in rankers.items()}
    served = rankers["window"]
    trained = served.log.num_trained
    about = f"{len(trained)} users of {int(trained.min())} to {int(trained.max())} events"
    for mine, other, is_target in (
        ("window", "full attention", True),
        ("window", "truncated", False),
        ("truncated", "full attention", False),
    ):
        pair = arms[mine], arms[other]
        yield from _differences(served, f"{mine}, {about}", other, pair, is_target)


def _longest(interactions: Interactions, num_users: int) -> Interactions:
    """Keep the events of the users with the most of them."""
    counts = np.bincount(interactions.users)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:num_users])
    kept = interactions[np.isin(interactions.users, chosen)]
    return dataclasses.replace(
        kept,
        users=np.searchsorted(chosen, kept.users).astype(np.int32),
        user_names=[interactions.user_names[user] for user in chosen],
    )


def _scored(served: Served) -> Scored:
    engine = served.engine(torch.float32, torch.float32)
    log = served.log
    every: I64 = np.arange(served.config.num_items)
    following = served.config.tasks.index("next")
    liking = np.full(len(log.items), np.nan)
    ranks = np.full(log.num_users, np.nan)
    for user in served.users:
        start, stop = (int(each) for each in log.starts[user : user + 2])
        first = start + int(log.num_trained[user])
        logits = served.logits(engine, user, every)
        liking[first:stop] = logits[log.items[first:stop], served.task]
        scores, own = logits[:, following].copy(), log.items[first]
        scores[np.setdiff1d(log.items[start:first], own)] = -np.inf
        ranks[user] = (scores > scores[own]).sum()
    return Scored(liking, ranks)


def _differences(
    served: Served, case: str, other: str, pair: tuple[Scored, Scored], is_target: bool
) -> Iterator[Line]:
    ours, theirs = pair
    tested = np.isfinite(ours.ranks)
    mine, before = (hits(each.ranks[tested], 10) for each in pair)
    gap = difference_of_users(mine, before)
    yield compared(
        "long", f"HR@10: {case}", float(mine.mean()), "HR", other, float(before.mean()),
        float(mine.mean() / before.mean()), low=gap.low, high=gap.high,
        ok=gap.mean >= -WITHIN if is_target else None,
    )  # fmt: skip
    events = np.isfinite(ours.liking)
    labels = served.labels[events]
    areas = [auc(each.liking[events], labels) for each in pair]
    of_auc = difference_of_auc(
        ours.liking[events], theirs.liking[events], labels, served.log.users[events]
    )
    assert of_auc is not None
    yield compared(
        "long", f"AUC: {case}", areas[0], "AUC", other, areas[1], areas[0] / areas[1],
        low=of_auc.low, high=of_auc.high, ok=of_auc.mean >= -WITHIN if is_target else None,
    )  # fmt: skip
