"""Say in one line whether a site is worth serving: recommend against the strongest baseline.

The ranker's training ranks the next item of the test users by every baseline, and writes the ranks
next to its model. Here they are compared with those of `recommend` as configured, by the same
users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.train.cascade import MISSED, TOP, NextEventCase
from npu_gr.train.metrics import (
    F64,
    Difference,
    difference_of_users,
    hit_ratio,
    hits,
    ndcg,
    ndcg_of_each,
)
from npu_gr.train.next_item import NextItemRanks
from npu_gr.train.rank.evaluate import Evaluation

RANKS = "ranks.npz"  # in the folder of the evaluated ranker
RANKER = "ranker"
LEAST_USERS = 20  # an interval of fewer says nothing
FEW_USERS = 200  # a verdict of fewer says how little it knows


class SiteVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """`recommend` compared with the strongest baseline, by the same users."""

    text: str  # one line
    baseline: str = ""  # name of the strongest baseline; empty = nothing was compared
    # NDCG@10 minus the baseline's: the mean, and the 95 % interval
    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def is_better(self) -> bool:
        """Whether `recommend` is significantly better than every baseline."""
        return self.low > 0


class NextItemTest(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of the test users' next items by the ranker and by every baseline."""

    users: Sequence[str]
    ranks: Mapping[str, F64]  # model -> [users] rank, from 0

    @classmethod
    def read(cls, folder: Path, *, exclude_seen: bool) -> NextItemTest | None:
        """Read what `keep` wrote; None = an older version made the model.

        Args:
            folder: Folder of the evaluated ranker.
            exclude_seen: Whether to rank among unseen items, where a repeat is missed.
        """
        try:
            with np.load(folder / RANKS, allow_pickle=False) as file:
                table, models = file["ranks"][int(exclude_seen)], file["models"].tolist()
                return cls(
                    users=file["users"].tolist(), ranks=dict(zip(models, table, strict=True))
                )
        except FileNotFoundError:
            return None

    def strongest(self, rows: I64) -> str:
        """Name the baseline with the best figures for some of the users."""

        def figures(name: str) -> tuple[float, float]:
            ranks = self.ranks[name][rows]
            return hit_ratio(ranks, TOP), ndcg(ranks, TOP)

        return max((name for name in self.ranks if name != RANKER), key=figures)


def keep(found: Evaluation, user_names: Sequence[str], folder: Path) -> None:
    """Write the ranks of the ranker and of the baselines for `NextItemTest.read`."""

    def row(ranks: NextItemRanks) -> tuple[F64, F64]:
        return ranks.overall, np.where(ranks.is_repeat, MISSED, ranks.unseen)

    models = {RANKER: found.ranker, **{one.model: one for one in found.baselines}}
    np.savez_compressed(
        folder / RANKS,
        users=np.array([user_names[user] for user in found.next_users.tolist()], np.str_),
        models=np.array([*models], np.str_),
        ranks=np.array([row(one.ranks) for one in models.values()]).transpose(1, 0, 2),
    )


def verdict_of(
    cases: Sequence[NextEventCase], places: F64, test: NextItemTest, what: str = "recommend"
) -> SiteVerdict:
    """Compare ranks of next items with those of the strongest baseline.

    Args:
        cases: Cases that did not choose what is compared.
        places: [cases] rank of the right item, from 0; inf = not answered.
        test: Ranks of the baselines.
        what: What is compared, in words.
    """
    at = {user: row for row, user in enumerate(test.users)}
    both = [(row, at[case.user]) for row, case in enumerate(cases) if case.user in at]
    if len(both) < LEAST_USERS or len(test.ranks) < 2:
        return SiteVerdict(
            text=f"Verdict: none. {len(both)} users can be compared, which is fewer than "
            f"{LEAST_USERS}."
        )
    mine, theirs = np.array(both).T
    return _compared(places[mine], test, theirs, what)


def verdict_of_ranker(test: NextItemTest, served: str = "") -> SiteVerdict:
    """Compare the ranker with the strongest baseline, where too few users choose a cascade.

    Args:
        test: Ranks of the ranker and of the baselines.
        served: Source that is served alone, because the ranker is not better; empty = the ranker.
    """
    rows = np.arange(len(test.users))
    if len(rows) < LEAST_USERS or len(test.ranks) < 2:
        return verdict_of([], np.empty(0), test)
    return _compared(test.ranks[RANKER], test, rows, "the ranker", served)


def _compared(ours: F64, test: NextItemTest, rows: I64, what: str, served: str = "") -> SiteVerdict:
    name = test.strongest(rows)
    theirs = test.ranks[name][rows]
    gap = difference_of_users(ndcg_of_each(ours, TOP), ndcg_of_each(theirs, TOP))
    by_hit = difference_of_users(hits(ours, TOP), hits(theirs, TOP))
    few = len(ours) < FEW_USERS
    instead = f"serve {served} alone, as configured" if served else "do not serve this"
    words = (
        f"serve this{' for now' * few}: {what} is better than {name}, the strongest baseline"
        if gap.low > 0
        else f"{instead}: {name} is better than {what}"
        if gap.high < 0
        else f"{instead}: " * bool(served)
        + f"{what} is not shown to be better than {name}, the strongest baseline"
    )
    return SiteVerdict(
        text=f"Verdict: {words}. HR@{TOP} {hit_ratio(ours, TOP):.3f} against "
        f"{hit_ratio(theirs, TOP):.3f} ({_interval(by_hit)}), NDCG@{TOP} {ndcg(ours, TOP):.3f} "
        f"against {ndcg(theirs, TOP):.3f} ({_interval(gap)}) for {len(ours):,} held-out users"
        + (", too few to be sure: compare again with more users." if few else "."),
        baseline=name,
        mean=gap.mean,
        low=gap.low,
        high=gap.high,
    )


def _interval(gap: Difference) -> str:
    return f"{gap.mean:+.3f}, 95 % interval {gap.low:+.3f} to {gap.high:+.3f}"
