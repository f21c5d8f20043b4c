"""Choose what a cascade asks and how it orders, by the next items of users whom no model was trained on.

Every way to ask is a set of the configured sources and an order. Half of the users choose: the way
with the highest NDCG@10, if it is measurably better than the configured one, which else stays. Of
so many ways one is soon better by chance, so what is allowed for chance is divided among them. The
other half say what it is worth beside each part alone, with paired intervals, because the best of
many looks better on its own users than it is.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from npu_gr.core.request import OrderName, SourceName
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.metrics import (
    F64,
    Difference,
    difference_of_users,
    hit_ratio,
    hits,
    ndcg,
    ndcg_of_each,
)
from npu_gr.train.next_item import MANY_REPEATS

TOP = 10
CHANCE = 0.05  # of taking another way than the configured one where none is better
# sources of which every set is tried; of more: each alone, each pair, the first three, and all
FEW = 3
ORDERS: tuple[OrderName, ...] = (
    "retrieval",
    *(name for name in get_args(OrderName) if name != "retrieval"),
)


class CascadeWay(NamedTuple):
    """One way to ask a cascade."""

    sources: tuple[SourceName, ...]
    order: OrderName

    @property
    def name(self) -> str:
        """In words."""
        found = " + ".join(self.sources).replace("_", " ")
        return (
            f"{found} alone"
            if self.order == "retrieval" and len(self.sources) == 1
            else f"{found}, {self.order}"
        )


def cascade_ways(sources: Sequence[SourceName], *, has_blend: bool) -> list[CascadeWay]:
    """List the ways to ask, those with fewer stages first.

    Args:
        sources: configured. Each further one makes so many ways more as there are orders and
            sources: of five there are 17 sets.
        has_blend: whether the ranker has a fitted order.
    """
    sizes = range(1, len(sources) + 1) if len(sources) <= FEW else (1, 2)
    sets = [chosen for size in sizes for chosen in combinations(sources, size)]
    if len(sources) > FEW:
        sets += [tuple(sources[:FEW]), tuple(sources)]
    return [
        CascadeWay(chosen, order)
        for chosen in sets
        for order in ORDERS
        if order != "blended" or has_blend
    ]


class CascadeRow(NamedTuple):
    """A way beside the chosen one, on the users who did not choose."""

    way: CascadeWay
    hr_at_10: float
    ndcg_at_10: float
    # NDCG@10 of the chosen way less this one's; None = it is the chosen one
    less: Difference | None


class CascadeChoice(NamedTuple):
    """The best way, and what it is worth."""

    way: CascadeWay
    rows: list[CascadeRow]  # the chosen way, the configured one, each part alone
    hurts: list[str]  # stages without which the configured way is measurably better, in words
    num_users: int  # who chose; as many or one fewer evaluated

    def lines(self) -> list[str]:
        """Say it in words."""
        return [
            f"recommend asks {self.way.name}: the best of all sources and orders for "
            f"{self.num_users} users. For the other users (in brackets: its NDCG@{TOP} less that "
            "of the row, 95 %):",
            *(_row_text(row) for row in self.rows),
            *self.hurts,
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has."""
        rows = [
            {"way": row.way.name, "hr_at_10": row.hr_at_10, "ndcg_at_10": row.ndcg_at_10}
            | ({} if row.less is None else {"chosen_less_it": row.less._asdict()})
            for row in self.rows
        ]
        chosen = {"sources": list(self.way.sources), "order": self.way.order}
        return chosen | {"num_users": self.num_users, "rows": rows, "hurts": self.hurts}


def choose_way(
    places: Mapping[CascadeWay, F64], configured: CascadeWay, seed: int = 0
) -> CascadeChoice:
    """Choose by half of the users.

    Args:
        places: way -> [users] place of the right item, from 0; inf = not answered. At least two
            users.
        configured: one of the ways; it stays unless another is measurably better.
        seed: draws the half.
    """
    num_users = len(places[configured])
    chooses = np.zeros(num_users, np.bool_)
    chooses[np.random.default_rng(seed).permutation(num_users)[: (num_users + 1) // 2]] = True
    # of equals the first: fewer stages
    best = max(places, key=lambda way: ndcg(places[way][chooses], TOP))
    each = {way: ndcg_of_each(places[way][chooses], TOP) for way in (best, configured)}
    gap = difference_of_users(each[best], each[configured])
    if gap.mean <= 0 or gap.p * len(places) > CHANCE:
        best = configured
    shown = [
        best,
        configured,
        *(way for way in places if way.order == "retrieval" and len(way.sources) == 1),
    ]
    evaluated = {way: places[way][~chooses] for way in dict.fromkeys(shown)}
    rows = [
        CascadeRow(
            way,
            hit_ratio(own, TOP),
            ndcg(own, TOP),
            None
            if way == best
            else difference_of_users(ndcg_of_each(evaluated[best], TOP), ndcg_of_each(own, TOP)),
        )
        for way, own in evaluated.items()
    ]
    return CascadeChoice(best, rows, list(_hurting(places, configured)), int(chooses.sum()))


def why(name: str, ours: F64, part: str, theirs: F64) -> str:
    """Say in one sentence how a cascade stands beside its best part.

    Args:
        name, part: of the two.
        ours, theirs: [users] places of the same users.
    """
    by_place, by_hit = (
        difference_of_users(figure(ours, TOP), figure(theirs, TOP))
        for figure in (ndcg_of_each, hits)
    )
    figures = (
        f"NDCG@{TOP} {_interval(by_place)}, HR@{TOP} {_interval(by_hit)} (95 %, paired, "
        f"{len(ours)} users)"
    )
    if by_place.low > 0:
        return f"{name} is better than {part}, its best part: {figures}"
    if by_place.high < 0:
        return (
            f"{name} is worse than {part}: {figures}; `npu-gr train all` chooses the sources "
            "and the order"
        )
    return f"{name} cannot be told from {part}, its best part: {figures}"


def _hurting(places: Mapping[CascadeWay, F64], whole: CascadeWay) -> Iterator[str]:
    """Name the stages without which the configured way is better on all users."""
    for source in whole.sources if len(whole.sources) > 1 else ():
        without = CascadeWay(tuple(name for name in whole.sources if name != source), whole.order)
        name = source.replace("_", " ")
        yield from _hurt(
            places, whole, without, f"source {name}", f"recommend.sources without {source}"
        )
    for order in ORDERS[1:]:
        way = CascadeWay(whole.sources, order)
        if way in places:
            without = CascadeWay(whole.sources, "retrieval")
            yield from _hurt(places, way, without, f"order {order}", "recommend.order: retrieval")


def _hurt(
    places: Mapping[CascadeWay, F64],
    whole: CascadeWay,
    without: CascadeWay,
    stage: str,
    setting: str,
) -> Iterator[str]:
    if whole in places and without in places:
        gap = difference_of_users(
            ndcg_of_each(places[whole], TOP), ndcg_of_each(places[without], TOP)
        )
        if gap.mean < 0 and gap.p * len(places) <= CHANCE:
            yield (
                f"{stage} makes the answers worse: NDCG@{TOP} {_interval(gap)} against the same "
                f"cascade without it; set {setting} in serve.yaml"
            )


def _row_text(row: CascadeRow) -> str:
    gap = "" if row.less is None else f"  {_interval(row.less)}"
    return f"  {row.way.name:<34} HR@{TOP} {row.hr_at_10:.4f}  NDCG@{TOP} {row.ndcg_at_10:.4f}{gap}"


def _interval(gap: Difference) -> str:
    return f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"


JUDGED_USERS = 300  # who evaluate a site's cascade; others choose it
MISSED = float("inf")  # the place of an item that was not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class NextEventCase:
    """A user's history, oldest first, and the event that came next."""

    user: str
    items: list[int]  # ids
    values: list[float]
    actions: list[str | float]  # names
    timestamps: list[int]  # unix seconds
    target: int  # the item of the next event
    happened_at: int  # unix seconds of the next event

    def body(self, tenant: str) -> dict[str, Any]:
        """The part of a request body that every route reads: the user and the history.

        Args:
            tenant: a tenant of its own keeps the requests of one way from warming the cache of
                another.
        """
        return {
            "user_id": self.user,
            "tenant": tenant,
            "history": {
                "items": raw_column(self.items),
                "actions": self.actions,
                "timestamps": self.timestamps,
            },
        }


def next_events(
    log: Interactions, known: npt.NDArray[np.bool_], num_users: int | None = None
) -> list[NextEventCase]:
    """One case for each user who has known events and then others: the first of these others.

    Args:
        log: n events.
        known: [n] the events that the models may have seen.
        num_users: keep so many cases at most, drawn at random (seed 0); None = all.
    """
    cases = []
    for user, name in enumerate(log.user_names):
        mine = log.users == user
        own = log[mine]
        at = int(known[mine].sum())
        if 0 < at < len(own):
            cases.append(
                NextEventCase(
                    user=name,
                    items=own.items[:at].tolist(),
                    values=own.values[:at].tolist(),
                    actions=_names(own.values[:at], log.action_names),
                    timestamps=own.timestamps[:at].tolist(),
                    target=int(own.items[at]),
                    happened_at=int(own.timestamps[at]),
                )
            )
    if num_users is None or num_users >= len(cases):
        return cases
    chosen = np.random.default_rng(0).choice(len(cases), num_users, replace=False)
    return [cases[index] for index in sorted(chosen.tolist())]


def hides_seen(cases: Sequence[NextEventCase]) -> bool:
    """Whether to leave out what each user had before: not where most of the next items are repeats."""
    return repeat_ratio(cases) <= MANY_REPEATS


def repeat_ratio(cases: Sequence[NextEventCase]) -> float:
    """Return the share of the next items that their users had before; 0 of none."""
    return sum(case.target in case.items for case in cases) / max(1, len(cases))


def _names(values: npt.NDArray[np.float64], names: Sequence[str]) -> list[str | float]:
    """Name the action of each value; a value of a log without names stands for its own."""
    return [names[int(value)] if names else value for value in values.tolist()]


def raw_column(items: Sequence[int]) -> str:
    """Write ids as a raw column: a list would be read as names."""
    return b64encode(np.array(items, "<i8").tobytes()).decode()
