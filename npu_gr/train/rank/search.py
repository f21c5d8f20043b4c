"""Choose a ranker's settings on the validation of the log at hand, within some seconds.

The first trial is what was asked for. Each next one changes one thing of the best so far, and takes its place if it
makes the validation's events, their items and what users did with them, more likely by more than chance. A trial that
falls behind the best one's likelihood at the same share of its epochs is given up. The test is never looked at.

How many trials there are depends on the machine, so a search does not repeat bit for bit; the training of what it chose
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from npu_gr.core.feature_schema.factors import MF_SCORE
from npu_gr.train.metrics import F64
from npu_gr.train.rank.fit import Fitted, GivesUp
from npu_gr.train.rank.options import TrainOptions

FIRST_LOOK = 0.25  # share of the epochs before which no trial is given up
BEHIND = 0.05  # nats below the best trial at the same share of the epochs that end a trial

Train = Callable[[TrainOptions, str, GivesUp], Fitted]  # options, stage, when to give up


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedOptions:
    """What a search chose."""

    options: TrainOptions
    fitted: Fitted
    num_trials: int
    changes: dict[str, Any]  # option -> value, where it is not what was asked for


def changes(options: TrainOptions, *, has_likes: bool = False) -> Iterator[dict[str, Any]]:
    """List what may be changed, the most telling first: each is tried alone, on the best settings so far.

    Args:
        options: what was asked for.
        has_likes: whether a task says which events are likes, so that they can be factorised.
    """
    if has_likes and MF_SCORE not in options.computed:
        yield {"computed": (*options.computed, MF_SCORE)}
    yield {"dropout": options.dropout / 2}
    yield {"item_weight_decay": options.item_weight_decay * 4}
    yield {"window_tokens": max(2, options.window_tokens // 2)}
    yield {"item_length": options.item_length / 2}
    yield {"learning_rate": options.learning_rate / 2}
    yield {"click_weight": 0.0}
    yield {"task_weight": options.task_weight * 0.3}
    yield {"dim": options.dim * 2, "qk_dim": options.qk_dim * 2, "v_dim": options.v_dim * 2}
    yield {"num_layers": options.num_layers + 1}
    yield {"dropout": min(0.5, options.dropout * 1.5)}
    yield {"item_weight_decay": options.item_weight_decay / 4}
    yield {"epochs": options.epochs * 2}


def search(
    options: TrainOptions,
    train: Train,
    judge: Callable[[Fitted], F64],
    now: Callable[[], float] = time.monotonic,
    *,
    has_likes: bool = False,
) -> SearchedOptions:
    """Search for `options.budget_s` seconds. The first trial is never given up, however long it takes.

    Args:
        options: what was asked for.
        train: trains a trial; ends it where `gives_up` of (share of the epochs, likelihood) says so.
        judge: log-probability of each of the validation's events under a trial.
        now: seconds of a clock.
        has_likes: as of `changes`.

    Raises:
        DataError, ConfigError: as `train`.
    """
    ends_at = now() + options.budget_s
    best, fitted = options, train(options, "ranker: train", lambda *_: False)
    if not options.budget_s:
        return SearchedOptions(options=best, fitted=fitted, num_trials=1, changes={})
    likelihood = judge(fitted)
    kept: dict[str, Any] = {}
    num_trials = 1
    for change in changes(options, has_likes=has_likes):
        tried = msgspec.structs.replace(best, **change)
        if tried == best:
            continue
        if now() >= ends_at:
            break
        num_trials += 1
        found = train(tried, f"ranker: trial {num_trials}", _gives_up(best, fitted, ends_at, now))
        gap = judge(found) - likelihood
        if gap.mean() > gap.std() / np.sqrt(len(gap)):
            best, fitted = tried, found
            likelihood = likelihood + gap
            kept |= change
    return SearchedOptions(options=best, fitted=fitted, num_trials=num_trials, changes=kept)


def _gives_up(options: TrainOptions, best: Fitted, ends_at: float, now: Callable[[], float]) -> GivesUp:
    """Decide by the best trial's likelihoods, and by the clock."""

    def decide(share: float, likelihood: float) -> bool:
        place = min(max(1, round(share * options.epochs)), len(best.curve)) - 1
        return now() >= ends_at or (share >= FIRST_LOOK and likelihood < best.curve[place] - BEHIND)

    return decide
