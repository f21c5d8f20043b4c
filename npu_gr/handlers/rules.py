"""Business rules after the rank: the last step of a recommend, over all of its ranked candidates.

    ranked candidates -> hook_after -> cap -> boost -> pins, diversity, exploration -> answer

Which items may be shown at all (`deny`, `allow`) is a filter of the whole recommend, so sources
find others instead (`item_filters.py`).

Without rules the order is that of the rank, bit for bit. Scores of the answer are the ranker's
whatever the rules do; `boost` and `explore` use them as they are, or (if nothing was ranked, or in
the order "fused") the reciprocal of the place, 60 / (60 + place).

Properties, of every answer:
  R1  a pinned item is at its place, or last in a shorter list, unless it is denied or withdrawn
  R2  at most `most` items have one value of an attribute; pins count first, and stay
  R3  the propensity of an item is the probability that its place shows it, given the places before;
      1 where nothing was drawn
  R4  items that no rule concerns keep their order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.catalogue.filters import attribute_in
from npu_gr.catalogue.records import Column
from npu_gr.core.arrays import I64
from npu_gr.core.history import Events
from npu_gr.core.item_rules import Boost, Cap, Explore, OrderRules
from npu_gr.handlers.cascade_plan import FUSION, Shown, best_first, is_in
from npu_gr.handlers.item_filters import ItemFilters, Mask

F64 = npt.NDArray[np.float64]


class Asked(NamedTuple):
    """What the rules need to know about a request."""

    num_items: int
    shown_items: I64 | None  # showings that the request names, with repeats
    events: Events  # of the user
    actions: Sequence[str]  # names of the actions of the events
    now_s: int  # unix seconds
    banned: Callable[[I64], Mask]  # which of some ids are denied or withdrawn
    by_place: bool  # whether the order is not that of the scores


def apply(
    rules: OrderRules,
    shown: Shown,
    asked: Asked,
    filters: ItemFilters,
    random: np.random.Generator,
) -> Shown:
    """Apply rules to all candidates, and cut the list to the requested number.

    Raises:
        Unprocessable: a rule names an attribute that the catalogue lacks.
    """
    ids, scores = shown.items, shown.scores
    pins = _pins(rules, asked, filters)
    if rules.cap is not None and len(ids):
        is_free = _showings(rules.cap, ids, asked) < rules.cap.most
        for item in pins.values():
            is_free |= ids == item
        ids, scores = ids[is_free], scores[is_free]
    rows = ids.tolist() if pins else []
    row_of = {item: rows.index(item) for item in pins.values() if item in rows}
    if added := [item for item in pins.values() if item not in row_of]:
        row_of |= {item: row for row, item in enumerate(added, len(ids))}
        ids = np.append(ids, added)
        scores = np.append(scores, np.full(len(added), np.nan, np.float32))
    names = {one.by for one in rules.diversity} | {n for one in rules.boost for n in one.attributes}
    columns = filters.columns(sorted(names), ids)
    working = scores.astype(np.float64)
    if asked.by_place or np.isnan(working).all():
        working = FUSION / (FUSION + np.arange(len(ids), dtype=np.float64))
    order = np.arange(len(ids))
    if rules.boost:
        for boost in rules.boost:
            working = _boosted(boost, working, ids, columns, filters)
        order = best_first(working.astype(np.float32))
    choice = _Choice(rules, ids, columns, asked.num_items)
    pinned = {place: row_of[item] for place, item in pins.items()}
    chosen, propensities = choice.choose(order, pinned, working, random)
    drawn = None if rules.explore is None else np.array(propensities, np.float32)
    return Shown(ids[chosen], scores[chosen], drawn)


def _showings(cap: Cap, ids: I64, asked: Asked) -> I64:
    """Count how often each item was shown."""
    counted = [] if asked.shown_items is None else [asked.shown_items]
    if cap.action is not None and cap.action in asked.actions:
        events = asked.events
        is_showing = events.actions == list(asked.actions).index(cap.action)
        is_showing &= events.timestamps > asked.now_s - cap.window_s
        counted.append(events.items[is_showing])
    shown = np.sort(np.concatenate([*counted, ids[:0]]))
    return np.searchsorted(shown, ids, "right") - np.searchsorted(shown, ids)


def _pins(rules: OrderRules, asked: Asked, filters: ItemFilters) -> dict[int, int]:
    """Return the item of each pinned place, counted from 0, in the order of the places."""
    pins: dict[int, int] = {}
    wanted = (
        filters.ids_of([one.item for one in rules.pin]) if rules.pin else asked.events.items[:0]
    )
    is_banned = asked.banned(wanted).tolist()
    for one, item, banned in zip(rules.pin, wanted.tolist(), is_banned, strict=True):
        place = one.place - 1
        is_taken = place in pins or item in pins.values()
        if not (banned or is_taken) and place < asked.num_items:
            pins[place] = item
    return dict(sorted(pins.items()))


def _boosted(
    boost: Boost,
    scores: F64,
    ids: I64,
    columns: dict[str, tuple[Column, Mask]],
    filters: ItemFilters,
) -> F64:
    is_chosen = np.zeros(len(ids), np.bool_)
    if boost.items:
        is_chosen |= is_in(ids, np.sort(filters.ids_of(boost.items)))
    if boost.attributes:
        has_all = np.ones(len(ids), np.bool_)
        for name, values in boost.attributes.items():
            column, is_known = columns[name]
            has_all &= is_known & attribute_in({name: column}, name, values)
        is_chosen |= has_all
    raised = np.where(scores > 0, scores * boost.factor, scores / boost.factor) + boost.add
    return np.where(is_chosen, raised, scores)


def _or_none(column: Column, is_known: Mask) -> list[object]:
    values: list[object] = column.tolist()
    for row in np.flatnonzero(~is_known).tolist():
        values[row] = None
    return values


class _Choice:
    """Chooses the item of each place, with pins, diversity and exploration."""

    def __init__(
        self,
        rules: OrderRules,
        ids: I64,
        columns: dict[str, tuple[Column, Mask]],
        num_items: int,
    ) -> None:
        self._explore = rules.explore
        self._most = [one.most for one in rules.diversity]
        # of each limited attribute: the value of each candidate, None = free; how often each value
        # is shown; and the values that are used up
        self._columns = [_or_none(*columns[one.by]) for one in rules.diversity]
        self._counts: list[Counter[object]] = [Counter() for _ in rules.diversity]
        self._full: list[set[object]] = [set() for _ in rules.diversity]
        self._num_items = num_items

    def choose(
        self,
        order: I64,
        pinned: dict[int, int],
        scores: F64,
        random: np.random.Generator,
    ) -> tuple[list[int], list[float]]:
        """Return the candidates to show, and their propensities.

        Args:
            order: Candidates, best first.
            pinned: Place -> candidate, ascending.
            scores: Of each candidate; NaN = it is not drawn.
            random: Source of the draws.
        """
        for candidate in pinned.values():
            self._count(candidate)
        is_pinned = set(pinned.values())
        free = [one for one in order.tolist() if one not in is_pinned]
        num_free = self._num_items - len(pinned)
        chosen = self._fill(free, num_free, scores, random)
        for place, candidate in pinned.items():  # ascending, so earlier insertions are done
            chosen.insert(place, (candidate, 1.0))
        return [one for one, _ in chosen], [propensity for _, propensity in chosen]

    def _fill(
        self, free: list[int], num_free: int, scores: F64, random: np.random.Generator
    ) -> list[tuple[int, float]]:
        """Choose up to `num_free` of the candidates, which are best first."""
        explore = self._explore
        if explore is None:
            return self._take(free, num_free)
        chosen = self._take(free, min(explore.keep, num_free))
        taken = {one for one, _ in chosen}
        rest = self._fitting([one for one in free if one not in taken])
        is_scored = ~np.isnan(scores)
        tail = [one for one in rest if is_scored[one]]
        chosen += self._draw(tail, num_free - len(chosen), scores, explore, random)
        last = [one for one in rest if not is_scored[one]]
        return chosen + self._take(last, num_free - len(chosen))

    def _take(self, free: list[int], count: int) -> list[tuple[int, float]]:
        """Take the first candidates that fit."""
        if not self._columns:
            return [(one, 1.0) for one in free[:count]]
        chosen: list[tuple[int, float]] = []
        limits = list(zip(self._columns, self._full, strict=True))
        for one in free:
            if len(chosen) == count:
                break
            for column, full in limits:  # a generator in any() would double the time
                if column[one] in full:
                    break
            else:
                self._count(one)
                chosen.append((one, 1.0))
        return chosen

    def _draw(
        self,
        tail: list[int],
        count: int,
        scores: F64,
        explore: Explore,
        random: np.random.Generator,
    ) -> list[tuple[int, float]]:
        """Draw candidates, which are best first and fit, place by place."""
        if not tail or count <= 0:
            return []
        if explore.temperature is not None:
            return self._draw_by_weight(tail, count, scores[tail] / explore.temperature, random)
        epsilon = explore.epsilon or 0.0
        chosen: list[tuple[int, float]] = []
        while tail and len(chosen) < count:
            place = int(random.integers(len(tail))) if random.random() < epsilon else 0
            propensity = epsilon / len(tail) + (1 - epsilon) * (place == 0)
            chosen.append((tail.pop(place), propensity))
            if self._count(chosen[-1][0]):
                tail = self._fitting(tail)
        return chosen

    def _draw_by_weight(
        self, tail: list[int], count: int, logits: F64, random: np.random.Generator
    ) -> list[tuple[int, float]]:
        """Draw candidates by softmax of their logits.

        With Gumbel noise the order is one of Plackett-Luce, and what is left of it after removing
        candidates is that of the others. The probability of a place is the weight of its candidate
        among those that still fit there.
        """
        noisy = np.argsort(-(logits + random.gumbel(size=len(tail))), kind="stable")
        tail, logits = [tail[place] for place in noisy.tolist()], logits[noisy]
        drawn: list[int] = []  # places in the tail
        limits = list(zip(self._columns, self._full, strict=True))
        filled: list[dict[object, int]] = [{} for _ in limits]  # value -> first place without it
        for at, one in enumerate(tail):
            if len(drawn) == count:
                break
            for column, full in limits:
                if column[one] in full:
                    break
            else:
                drawn.append(at)
                if limits and self._count(one):
                    for (column, full), since in zip(limits, filled, strict=True):
                        if column[one] in full:
                            since[column[one]] = len(drawn)
        ends = [len(drawn)] * len(tail)  # first place without each
        for (column, _), since in zip(limits, filled, strict=True):
            if since:
                for at, one in enumerate(tail):
                    if column[one] in since:
                        ends[at] = min(ends[at], since[column[one]])
        for place, at in enumerate(drawn, 1):
            ends[at] = place
        # logarithm of the total weight of the candidates that fit at each place
        last_first = np.argsort(-np.array(ends), kind="stable")
        totals = np.logaddexp.accumulate(logits[last_first])
        places = np.arange(1, len(drawn) + 1)
        num_left = np.searchsorted(-np.array(ends)[last_first], -places, "right")
        propensities = np.exp(logits[drawn] - totals[num_left - 1]).tolist()
        return [(tail[at], propensity) for at, propensity in zip(drawn, propensities, strict=True)]

    def _fitting(self, candidates: list[int]) -> list[int]:
        """Return the candidates whose values may all be shown once more."""
        for column, full in zip(self._columns, self._full, strict=True):
            if full:
                candidates = [one for one in candidates if column[one] not in full]
        return candidates

    def _count(self, candidate: int) -> bool:
        """Count a candidate that is shown; return whether one of its values is used up."""
        is_full = False
        for place, column in enumerate(self._columns):
            value = column[candidate]
            if value is not None:
                self._counts[place][value] += 1
                if self._counts[place][value] >= self._most[place]:
                    self._full[place].add(value)
                    is_full = True
        return is_full
