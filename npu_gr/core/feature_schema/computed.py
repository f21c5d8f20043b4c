"""Features that trainer and service compute: of history and candidate, and of the request time.

    events    log(1 + matching events of the history)
    share     matching events / all events of the history
    rate      share of matching events with one of the feature's actions, smoothed by 5 events at
              the rate of the full history
    recency   log(1 + seconds since the newest matching event)

An event matches a candidate if it is of the same item; with `events_by:genre`, if both share a
value of the item feature `genre`; with `events_by:*`, always. A candidate with several values gets
the mean count over them, and the newest event. If a feature has `actions`, only events with one of
them count (`rate` compares them with all events). The value is missing for a share or rate of an
empty history, a recency without an event, and a candidate without the item feature.

    mf_score  the prediction of matrix factorisation, see `factors.py`; only by item

    hour      hour of the day, 0 to 23, UTC
    weekday   0 = Monday to 6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from npu_gr.core.feature_schema.factors import MF_SCORE, ItemFactors

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
ItemCodes = npt.NDArray[np.integer]

OF_HISTORY = ("events", "share", "rate", "recency")
OF_TIME = {"hour": 24, "weekday": 7}  # name -> number of values
BY = "_by:"
ALL = "*"  # instead of an item feature: all events match
PRIOR = 5.0  # pseudo-events at the rate of the history
_DENSE = 1 << 16  # up to this many values, a table is faster than sorting
NEVER = int(np.iinfo(np.int64).min)  # the time if there is no event
_DAY_S = 86_400
_THURSDAY = 3  # weekday of 1970-01-01


class ComputedFeature(Protocol):
    """The fields of a feature that are read here."""

    @property
    def name(self) -> str:
        """Name of the feature."""
        ...

    @property
    def computed(self) -> str:
        """The rule, as in `read_rule`."""
        ...

    @property
    def actions(self) -> tuple[str, ...]:
        """Names of the actions that count; empty for all."""
        ...


class ComputedRule(NamedTuple):
    """The rule of a feature of history and candidate."""

    what: str  # one of OF_HISTORY, or MF_SCORE
    by: str  # an item feature, ALL, or "" for the item itself


def read_rule(computed: str) -> ComputedRule:
    """Parse `WHAT`, `WHAT_by:FEATURE` or `mf_score`.

    Raises:
        ValueError: it is none of these.
    """
    if computed == MF_SCORE:
        return ComputedRule(MF_SCORE, "")
    what, by, feature = computed.partition(BY)
    if what not in OF_HISTORY or bool(by) != bool(feature):
        known = f"{', '.join(OF_HISTORY)}, alone or with {BY}FEATURE, or {MF_SCORE}"
        raise ValueError(f"computed: {computed!r} must be one of {known}")
    return ComputedRule(what, feature)


class ItemValueTable(NamedTuple):
    """One feature of all items."""

    codes: ItemCodes  # [items, max_values] values of each item, filled with `padding`
    padding: int  # one past the last value


@dataclass(frozen=True, slots=True, eq=False)
class MatchCounts:
    """Counts of matching events. [...] is the shape of the candidates, k the values of each."""

    num_all: I64  # [..., k] events with the value
    num_counted: I64  # [..., k] of these, with one of the actions
    newest: I64  # [..., k] unix seconds of the newest counted event, or NEVER
    is_value: Bools  # [..., k]
    num_history: I64 | int  # broadcasts to [...]: all events of the history
    num_history_counted: I64 | int  # broadcasts to [...]: of these, with one of the actions
    now: I64 | int  # broadcasts to [...]: unix seconds

    def column(self, what: str) -> F32:
        """Compute one of OF_HISTORY: float32 [...], NaN = missing."""
        return self._wide(what).astype(np.float32)

    def _wide(self, what: str) -> F64:
        counted = np.where(self.is_value, self.num_counted, 0).sum(-1)
        if what == "recency":
            newest = np.where(self.is_value, self.newest, NEVER).max(-1, initial=NEVER)
            ago = np.maximum(self.now - np.where(newest == NEVER, self.now, newest), 0)
            return np.where(newest == NEVER, np.nan, np.log1p(ago))
        if what == "rate":
            matching = np.where(
                self.is_value.any(-1), np.where(self.is_value, self.num_all, 0).sum(-1), np.nan
            )
            own = _ratio(np.asarray(self.num_history_counted), self.num_history)
            return np.asarray((counted + PRIOR * own) / (matching + PRIOR))
        mean = _ratio(counted, self.is_value.sum(-1))
        return np.log1p(mean) if what == "events" else _ratio(mean, self.num_history_counted)


def _ratio(part: I64 | F64, total: I64 | int) -> F64:
    """Divide; NaN if the divisor is 0."""
    divisor = np.where(np.asarray(total) == 0, np.nan, total)
    return np.asarray(part / divisor, np.float64)


class CrossFeatures:
    """The computed cross features of one model."""

    def __init__(
        self,
        features: Sequence[ComputedFeature],
        actions: Sequence[str],
        item_values: Mapping[str, ItemValueTable],
        factors: ItemFactors | None = None,
    ) -> None:
        """Resolve the rules of the features.

        Args:
            features: Cross features; those that are not computed are ignored.
            actions: Action names of the model.
            item_values: Item feature -> values. A table may change between calls.
            factors: Matrix factorisation, needed for `mf_score`.

        Raises:
            ValueError: a feature names an action or an item feature that the model lacks.
        """
        # (name, rule, whether each action counts)
        self.rules: list[tuple[str, ComputedRule, Bools]] = []
        for feature in features:
            if not feature.computed:
                continue
            rule = read_rule(feature.computed)
            if rule.by and rule.by != ALL and rule.by not in item_values:
                there = ", ".join(item_values) or "none"
                raise ValueError(
                    f"features.{feature.name}: unknown item feature {rule.by!r}; there are {there}"
                )
            if rule.what == MF_SCORE and factors is None:
                raise ValueError(
                    f"features.{feature.name}: {MF_SCORE}: the model has no factorisation"
                )
            if missing := [action for action in feature.actions if action not in actions]:
                raise ValueError(
                    f"features.{feature.name}: unknown action {missing[0]!r}; there are "
                    f"{', '.join(actions)}"
                )
            counts = np.array(
                [not feature.actions or action in feature.actions for action in actions]
            )
            self.rules.append((feature.name, rule, counts))
        self._item_values = item_values
        self.factors = factors

    def num_values(self, by: str) -> int:
        """Return the number of values of an item feature, or of ALL."""
        return 1 if by == ALL else self._item_values[by].padding

    def values_of(self, by: str, items: I64) -> tuple[ItemCodes, Bools]:
        """Look up values: item rows [...] -> values [..., k], and whether each is a value.

        A row beyond the table has none.
        """
        if by in ("", ALL):
            own = items[..., None] * (by == "")
            return own, np.ones(own.shape, np.bool_)
        codes, padding = self._item_values[by]
        if items.max(initial=0) < len(codes):
            values = codes.take(items, 0)
        else:
            is_known = items < len(codes)
            values = np.where(is_known[..., None], codes[np.where(is_known, items, 0)], padding)
        return values, values != padding

    def columns(
        self, items: I64, actions: I64, times: I64, candidates: I64, shown_at: int
    ) -> dict[str, F32]:
        """Compute the features of one request.

        Args:
            items: [n] item rows of the history.
            actions: [n] action indices.
            times: [n] unix seconds, ascending.
            candidates: [c] item rows.
            shown_at: Unix seconds of the request.

        Returns:
            Name -> float32 [c], NaN = missing.
        """
        found: dict[tuple[str, bytes], MatchCounts] = {}
        columns = {}
        for name, rule, counts in self.rules:
            if rule.what == MF_SCORE:
                assert self.factors is not None, "checked by the constructor"
                columns[name] = self.factors.scores(items, actions, candidates)
                continue
            key = (rule.by, counts.tobytes())
            if key not in found:
                is_counted = None if counts.all() else counts[actions]
                found[key] = self._match_counts(
                    rule.by, items, is_counted, times, candidates, shown_at
                )
            columns[name] = found[key].column(rule.what)
        return columns

    def _match_counts(
        self,
        by: str,
        items: I64,
        is_counted: Bools | None,
        times: I64,
        candidates: I64,
        shown_at: int,
    ) -> MatchCounts:
        wanted, is_value = self.values_of(by, candidates)
        # padding is counted too, but never looked up
        own, _ = self.values_of(by, items)
        most = 1 + int(max(own.max(initial=0), wanted.max(initial=0)))
        if most > _DENSE and wanted.size:  # renumber by the candidates' values
            asked, place = np.unique(wanted, return_inverse=True)
            wanted, most = place.reshape(wanted.shape), len(asked)
            nearest = np.searchsorted(asked, own).clip(max=most - 1)
            own = np.where(asked[nearest] == own, nearest, most)
        counted = own if is_counted is None else own[is_counted]
        num_all = np.bincount(own.ravel(), minlength=most + 1)
        num_counted = (
            num_all if is_counted is None else np.bincount(counted.ravel(), minlength=most + 1)
        )
        newest = np.full(most + 1, NEVER)
        # the last assignment of an index wins
        newest[counted] = (times if is_counted is None else times[is_counted])[:, None]
        counts = num_all[wanted], num_counted[wanted], newest[wanted]
        return MatchCounts(*counts, is_value, len(items), len(counted), shown_at)


def time_column(computed: str, times: I64) -> I64:
    """Compute a feature of a request's time.

    Args:
        computed: One of OF_TIME.
        times: [n] unix seconds.

    Returns:
        [n] integers, which are category names as decimal text.
    """
    if computed == "hour":
        return times % _DAY_S // 3600
    return (times // _DAY_S + _THURSDAY) % 7
