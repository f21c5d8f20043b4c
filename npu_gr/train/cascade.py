"""Choose the sources and the order of a cascade by held-out next items of users.

A "way" is a set of the configured sources and an order. Half of the users choose the way with the
highest NDCG@10. It replaces the configured way only if it is significantly better: the
significance level is divided by the number of ways (Bonferroni), because among many ways one is
soon better by chance. One simple count alone replaces it if it is as good for every user, or better
by more than a standard error.

The other half of the users evaluate the choice: its NDCG@10 minus that of each source alone, with
paired intervals. The users who chose would overestimate it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.core.request import OrderName, SourceName
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.metrics import (
    F64,
    Difference,
    difference_of_users,
    hit_ratio,
    hits,
    is_above_0,
    ndcg,
    ndcg_of_each,
)
from npu_gr.train.next_item import MANY_REPEATS

TOP = 10
CHANCE = 0.05  # significance level: chance to replace the configured way where no way is better
FEW = 3  # up to so many sources, every set is tried
LEAST_HURT = 0.001  # of NDCG@10; a smaller loss is not worth a sentence
OTHER_MODELS: tuple[SourceName, ...] = ("generate", "match")  # sources that are no ranker's own
# sources that count events and train nothing; each alone is a simple baseline that can be served
SIMPLE: tuple[SourceName, ...] = ("transitions", "neighbours", "history")
ORDERS: tuple[OrderName, ...] = (
    "retrieval",
    *(name for name in get_args(OrderName) if name != "retrieval"),
)


class CascadeWay(NamedTuple):
    """A set of sources, and the order of what they found."""

    sources: tuple[SourceName, ...]
    order: OrderName

    @property
    def name(self) -> str:
        """Name in reports, e.g. "shared encoder + match, blended"."""
        found = " + ".join(self.sources).replace("_", " ")
        return (
            f"{found} alone"
            if self.order == "retrieval" and len(self.sources) == 1
            else f"{found}, {self.order}"
        )


def cascade_ways(sources: Sequence[SourceName], *, has_blend: bool) -> list[CascadeWay]:
    """List the ways to ask a cascade, those with fewer stages first.

    Args:
        sources: Configured sources. Up to three, every set of them is tried; of more, each alone,
            each pair, the ranker's own, these with each other model, and all (18 sets of five
            sources).
        has_blend: Whether the ranker has a fitted score blend (order `blended`).
    """
    sizes = range(1, len(sources) + 1) if len(sources) <= FEW else (1, 2)
    sets = [chosen for size in sizes for chosen in combinations(sources, size)]
    if len(sources) > FEW:
        own = tuple(name for name in sources if name not in OTHER_MODELS)
        sets += [own, *((*own, name) for name in sources if name not in own), tuple(sources)]
    return [
        CascadeWay(chosen, order)
        for chosen in dict.fromkeys(sets)
        for order in ORDERS
        if order != "blended" or has_blend
    ]


class CascadeRow(NamedTuple):
    """A way compared with the chosen one, on the users who did not choose."""

    way: CascadeWay
    hr_at_10: float
    ndcg_at_10: float
    # NDCG@10 of the chosen way minus this one's; None = this is the chosen one
    less: Difference | None


class CascadeChoice(NamedTuple):
    """The chosen way, and its evaluation."""

    way: CascadeWay
    rows: list[CascadeRow]  # the chosen way, the configured one, each part alone
    hurts: list[str]  # a sentence for each stage that makes the configured cascade worse
    num_users: int  # users who chose; as many, or one fewer, evaluated
    hr_of_all: float = 0.0  # HR@10 of the way for both halves
    seen: Mapping[str, SeenChoice] = {}  # recommend, and each source of `OTHER_MODELS`
    left_out: Sequence[str] = ()  # a sentence for each trained model that recommend does not use
    places: F64 = np.empty(0)  # [users] rank of the right item by the way; inf = not answered

    def lines(self) -> list[str]:
        """Explain the choice, a line each."""
        return [
            f"recommend uses {self.way.name}: the best of all sources and orders for "
            f"{self.num_users} users. For the other users (in brackets: its NDCG@{TOP} minus that "
            "of the row, 95 %):",
            *(_row_text(row) for row in self.rows),
            *self.hurts,
            *self.left_out,
            *(one.line(kind) for kind, one in self.seen.items() if one.less is not None),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Turn the choice into plain types for JSON."""
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
    """Choose a way by half of the users, and evaluate it by the other half.

    Args:
        places: Way -> [users] rank of the right item, from 0; inf = not answered. At least two
            users.
        configured: One of the ways; it stays unless another is significantly better, or one of
            `SIMPLE` alone is by more than a standard error, or as good for every user.
        seed: Seed of the random halves.
    """
    chooses = choosing_half(len(places[configured]), seed)
    # ties go to the first way, which has fewer stages
    best = max(places, key=lambda way: ndcg(places[way][chooses], TOP))
    each = {way: ndcg_of_each(places[way][chooses], TOP) for way in (best, configured)}
    gap = difference_of_users(each[best], each[configured])
    if gap.mean <= 0 or gap.p * len(places) > CHANCE:
        best = configured
    # A simple count costs a fraction, so it replaces what is as good for every user, or worse by a
    # standard error. A higher mean alone says little: of several counts one soon has it by chance.
    simple = [
        way for way in places if way.order == "retrieval" and way.sources in {(x,) for x in SIMPLE}
    ]
    if simple:
        count = max(simple, key=lambda way: ndcg(places[way][chooses], TOP))
        of_count, of_best = (ndcg_of_each(places[way][chooses], TOP) for way in (count, best))
        if is_above_0(of_count - of_best) or np.array_equal(of_count, of_best):
            best = count
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
    hurts = list(_hurting(places, configured))
    others = {way: each[~chooses] for way, each in places.items()}
    return CascadeChoice(
        best,
        rows,
        hurts,
        int(chooses.sum()),
        hit_ratio(places[best], TOP),
        left_out=[
            _without(name, best, others)
            for name in OTHER_MODELS
            if name not in best.sources and CascadeWay((name,), "retrieval") in places
        ],
        places=places[best],
    )


def _without(source: SourceName, way: CascadeWay, places: Mapping[CascadeWay, F64]) -> str:
    """Say that a way does not use a source, and what it would add."""
    text = f"recommend does not use {source}"
    with_it = places.get(CascadeWay((*way.sources, source), way.order))
    if with_it is None:
        return text
    gap = difference_of_users(ndcg_of_each(with_it, TOP), ndcg_of_each(places[way], TOP))
    return f"{text}: with it NDCG@{TOP} {_interval(gap)}"


def choosing_half(num_users: int, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Draw the half of the users who choose: bool [num_users]."""
    chooses = np.zeros(num_users, np.bool_)
    chooses[np.random.default_rng(seed).permutation(num_users)[: (num_users + 1) // 2]] = True
    return chooses


class SeenChoice(NamedTuple):
    """Whether a way excludes the items of the history, and what that costs or gives."""

    excludes: bool
    less: Difference | None = None  # NDCG@10 with seen items minus without; None = no repeats

    @classmethod
    def of(cls, with_seen: F64, without: F64) -> SeenChoice:
        """Choose by the higher NDCG@10 of the half of the users who choose; a tie excludes.

        Args:
            with_seen: [users] rank of the right item, from 0, where seen items may be answered.
            without: [users] likewise, where they are excluded.
        """
        chooses = choosing_half(len(with_seen))
        gap = difference_of_users(
            ndcg_of_each(with_seen[chooses], TOP), ndcg_of_each(without[chooses], TOP)
        )
        return cls(gap.mean <= 0, gap)

    def line(self, kind: str) -> str:
        """Say what was chosen for a kind of request, and what to write for the other choice."""
        does = "leaves out" if self.excludes else "also answers"
        other = "" if self.less is None else f": NDCG@{TOP} with them {_interval(self.less)}"
        return f"{kind} {does} items that the user had{other}"


def why(name: str, ours: F64, part: str, theirs: F64) -> str:
    """Compare a cascade with its best part in one sentence.

    Args:
        name: Name of the cascade.
        ours: [users] ranks of the right items, from 0.
        part: Name of its best part.
        theirs: [users] ranks of the same users' right items.
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
    return f"{name} does not differ significantly from {part}, its best part: {figures}"


def _hurting(places: Mapping[CascadeWay, F64], whole: CascadeWay) -> Iterator[str]:
    """Describe the stages without which the configured way is significantly better."""
    for source in whole.sources if len(whole.sources) > 1 else ():
        without = CascadeWay(tuple(name for name in whole.sources if name != source), whole.order)
        name = source.replace("_", " ")
        yield from _hurt(
            places, whole, without, f"source {name}", f"recommend.sources without {source}"
        )
    if whole.order != "retrieval":
        without = CascadeWay(whole.sources, "retrieval")
        stage = f"order {whole.order}"
        yield from _hurt(places, whole, without, stage, "recommend.order: retrieval")


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
        if gap.mean < -LEAST_HURT and gap.p * len(places) <= CHANCE:
            yield (
                f"{stage} makes the answers worse: NDCG@{TOP} {_interval(gap)} against the same "
                f"cascade without it; set {setting} in serve.yaml"
            )


def _row_text(row: CascadeRow) -> str:
    gap = "" if row.less is None else f"  {_interval(row.less)}"
    return f"  {row.way.name:<34} HR@{TOP} {row.hr_at_10:.4f}  NDCG@{TOP} {row.ndcg_at_10:.4f}{gap}"


def _interval(gap: Difference) -> str:
    return f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"


EVALUATED_USERS = 300  # users who evaluate a site's cascade; other users choose it
MISSED = float("inf")  # the rank of an item that was not answered


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
    item_key: bytes = b""  # key of the ids; empty = they have none

    def body(self, tenant: str) -> dict[str, Any]:
        """Return the part of a request body that every route reads: the user and the history.

        Args:
            tenant: Tenant of the user. Another tenant for each way keeps the requests of one way
                from warming the cache of another.
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


def drawn_users(
    log: Interactions, known: npt.NDArray[np.bool_], num_users: int | None = None
) -> I64:
    """List users who have known and later events, ascending rows.

    Args:
        log: n events.
        known: bool [n] the events that the models may have seen.
        num_users: Most users, drawn at random (seed 0); None = all.
    """
    counts, num_known = (
        np.bincount(of, minlength=len(log.user_names)) for of in (log.users, log.users[known])
    )
    users = np.flatnonzero((num_known > 0) & (num_known < counts))
    if num_users is None or num_users >= len(users):
        return users
    return np.sort(np.random.default_rng(0).choice(users, num_users, replace=False))


def next_events(
    log: Interactions,
    known: npt.NDArray[np.bool_],
    num_users: int | None = None,
    *,
    users: I64 | None = None,
) -> list[NextEventCase]:
    """List the first event after the known ones, of each user who has known and later events.

    Args:
        log: n events.
        known: bool [n] the events that the models may have seen.
        num_users: Most cases, drawn at random (seed 0); None = all.
        users: Rows of the users instead, as `drawn_users` lists them.
    """
    if users is None:
        users = drawn_users(log, known, num_users)
    order = np.argsort(log.users, kind="stable")
    counts = np.bincount(log.users, minlength=len(log.user_names))
    num_known = np.bincount(log.users[known], minlength=len(log.user_names))
    starts = np.cumsum(counts) - counts
    cases = []
    for user in users.tolist():
        own = order[starts[user] : starts[user] + num_known[user] + 1]
        *items, target = log.items[own].tolist()
        *timestamps, happened_at = log.timestamps[own].tolist()
        values = log.values[own[:-1]]
        cases.append(
            NextEventCase(
                user=log.user_names[user],
                items=items,
                values=values.tolist(),
                actions=_names(values, log.action_names),
                timestamps=timestamps,
                target=target,
                happened_at=happened_at,
                item_key=log.item_key,
            )
        )
    return cases


def hides_seen(cases: Sequence[NextEventCase]) -> bool:
    """Whether to exclude items that the user had before, by the share of repeats alone."""
    return repeat_ratio(cases) <= MANY_REPEATS


def repeat_ratio(cases: Sequence[NextEventCase]) -> float:
    """Return the share of the next items that their users had before; 0 of none."""
    return sum(case.target in case.items for case in cases) / max(1, len(cases))


def _names(values: npt.NDArray[np.float64], names: Sequence[str]) -> list[str | float]:
    """Name the action of each value; in a log without action names the value is the name."""
    return [names[int(value)] if names else value for value in values.tolist()]


def raw_column(items: Sequence[int]) -> str:
    """Encode ids as a raw column (base64, little-endian int64): a list would be read as names."""
    return b64encode(np.array(items, "<i8").tobytes()).decode()
