"""What a log is decides what is served: never measurably below the strongest simple baseline."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from npu_gr.core.arrays import I64
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.baselines import Markov
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.train import train_rank
from npu_gr.train.site.report import ranker_words

NUM_USERS = 300
NUM_ITEMS = 240
NUM_GROUPS = 12  # of items that the same users have
QUICK = TrainOptions(
    split="leave-one-out",
    dim=16,
    qk_dim=8,
    v_dim=8,
    head_dim=16,
    epochs=3,
    learning_rate=1e-2,
    refit=False,
)

History = Callable[[np.random.Generator], I64]


def of_groups(random: np.random.Generator) -> I64:
    """Items of two groups, each once, in any order."""
    size = NUM_ITEMS // NUM_GROUPS
    groups = random.choice(NUM_GROUPS, 2, replace=False)
    own = (groups[:, None] * size + np.arange(size)).ravel()
    found: I64 = random.choice(own, 16, replace=False)
    return found


def of_chains(random: np.random.Generator) -> I64:
    """Runs of four items, each of which follows the one before: the last event is within one."""
    starts = random.choice(NUM_ITEMS // 4, 4, replace=False) * 4
    found: I64 = (starts[:, None] + np.arange(4)).ravel()[: -int(random.integers(1, 3))]
    return found


def of_favourites(random: np.random.Generator) -> I64:
    """Five items of the user's own, again and again."""
    found: I64 = random.choice(random.choice(NUM_ITEMS, 5, replace=False), 20)
    return found


def a_log(history: History) -> Interactions:
    random = np.random.default_rng(0)
    return log_of([history(random) for _ in range(NUM_USERS)])


def log_of(items: list[I64]) -> Interactions:
    """The log of users who had these items in turn, an hour from one to the next."""
    users = np.repeat(np.arange(len(items)), [len(own) for own in items])
    times = np.concatenate([np.arange(len(own)) for own in items]) * 3600 + 1_600_000_000
    order = np.argsort(times, kind="stable")
    return Interactions(
        users.astype(np.int32)[order],
        np.concatenate(items)[order],
        np.ones(len(users)),
        times[order],
        [f"u{user}" for user in range(len(items))],
    )


KINDS = {
    "order says nothing": (of_groups, "neighbours", {"ItemKNN", "EASE", "PureSVD"}),
    "order says everything": (of_chains, "transitions", {"Markov counts", "decayed transitions"}),
    "repeats": (of_favourites, "seen", {"ItemKNN", "EASE", "PureSVD"}),
}


@pytest.mark.parametrize(("history", "term", "strongest"), KINDS.values(), ids=KINDS)
def test_what_is_served_is_not_below_the_strongest_baseline(
    history: History, term: str, strongest: set[str]
) -> None:
    checkpoint, found = train_rank(a_log(history), [], QUICK)
    comparison, markov = found.comparison(), found.compared_with(Markov.name)
    assert comparison is not None
    assert markov is not None
    assert comparison.baseline in strongest
    assert found.compared_with("the oracle") is None
    # by which it is evaluated
    assert all(gap.high >= 0 for gap in list(comparison.differences.values())[:2])
    words = ranker_words(found)
    assert words[0].startswith(f"ranker against {comparison.baseline}: ")
    order = checkpoint.order
    assert order is not None
    assert max(order.weights, key=lambda name: order.weights[name]) == term
    if history is of_chains:
        # what it serves is what follows
        assert comparison.differences["NDCG@10 unseen"] == (0, 0, 0, 1)
        assert len(words) == 1
    else:
        assert all(gap.low > 0 for gap in list(markov.differences.values())[:2])
        assert words[1].startswith("ranker against Markov counts: ")
