"""Pure functions of a cascade: settings, deadlines of stages, merging, ordering; and its hook.

A hook is a Python function with business rules of the operator, between retrieval and rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError, DeadlineExceeded, Overloaded
from npu_gr.core.item_rules import ItemRules
from npu_gr.core.request import LimitedBy, OrderName, SourceName, StageReport, StageResult
from npu_gr.core.settings import Count, Ratio, Seconds
from npu_gr.vector_search.config import IndexName

log = logging.getLogger(__name__)

FUSION = 60  # the constant of reciprocal rank fusion

# stages that are no source, and sources of the items that they add
HOOK = "hook"
HOOK_AFTER = "hook_after"
PIN = "pin"
POPULAR = "popular"  # the list of popular items
RULES = "rules"

SHARED_ENCODER: SourceName = "shared_encoder"  # the ranker's own user vector against its own items
# items that followed the last events in the training data
TRANSITIONS: SourceName = "transitions"
# items that co-occur with those of the history in the training data
NEIGHBOURS: SourceName = "neighbours"
HISTORY: SourceName = "history"  # the user's own items
SECTIONS: dict[SourceName, str] = {  # source -> required section of the configuration
    SHARED_ENCODER: "checkpoint",
    TRANSITIONS: "checkpoint",
    NEIGHBOURS: "checkpoint",
    HISTORY: "checkpoint",
    "generate": "generate",
    "match": "match",
}


class RecommendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sources of candidates, their order, and the treatment of failed stages."""

    # source -> items requested from it; sources are interleaved in this order
    sources: dict[SourceName, Count] = msgspec.field(default_factory=lambda: {"generate": 100})
    # search of shared_encoder: ivf is approximate, for many millions of items on a CPU
    index: IndexName = "exact"
    max_candidates: Count = 200  # maximum M of candidates to rank
    exclude_seen: bool = True  # exclude items of the history
    hook: str | None = None  # before the rank: "package.module:function", see `Hook`
    # after the rank: "package.module:function", see `HookAfter`
    hook_after: str | None = None
    rules: ItemRules | None = None  # business rules after the rank
    # file of item names, one per line, best first, which fill up a short retrieval
    popular: str | None = None
    # items unknown to the ranker, mostly new ones: last = after all others, without a score; drop
    unknown_items: Literal["last", "drop"] = "last"
    # minimum share of each source's items that the ranker knows, else the instance does not start;
    # see `scored_items.py`
    min_coverage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.9
    # blended: by the ranker's score blend; rank: by its first task; fused: by reciprocal rank
    # fusion of retrieval and rank; retrieval: without a rank; None = blended if the ranker has a
    # score blend, else rank
    order: OrderName | None = None
    max_rank_share: Ratio = 0.5  # maximum share of the time reserved for the rank
    # minimum time reserved for the rank, within the share
    min_rank_s: Seconds = 0.02
    hook_budget_s: Seconds = 0.02  # of each hook
    margin_s: Seconds = 0.005  # reserved for writing the answer
    on_rank_failure: Literal["retrieval_order", "fail"] = "retrieval_order"
    on_hook_failure: Literal["skip", "fail"] = "skip"

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: needs at least one")

    def chosen_by(self, other: RecommendConfig) -> RecommendConfig:
        """Return this section with what a training chooses taken from another one."""
        return msgspec.structs.replace(self, **{name: getattr(other, name) for name in CHOSEN})

    def order_of(self, *, has_blend: bool) -> OrderName:
        """Return the order of answers, for a ranker with or without a score blend."""
        return self.order or ("blended" if has_blend else "rank")

    def check_ranker(
        self, name: str, *, retrieves: bool, has_blend: bool, has_neighbours: bool
    ) -> None:
        """Check that a ranker supports the configured sources and order.

        Raises:
            ConfigError: it does not; the message names the key, the ranker and what it lacks.
        """
        if SHARED_ENCODER in self.sources and not retrieves:
            raise ConfigError(
                f"recommend.sources.shared_encoder: the ranker {name} only ranks: "
                "its config.json does not set `retrieval`"
            )
        of_order = {
            "sources.transitions": TRANSITIONS in self.sources,
            "order": self.order == "blended",
        }
        needed = {**of_order, "sources.neighbours": NEIGHBOURS in self.sources}
        for key, is_needed in needed.items():
            if is_needed and not has_blend:
                raise ConfigError(
                    f"recommend.{key}: the ranker {name} has no score blend (order.safetensors)"
                )
        if needed["sources.neighbours"] and not has_neighbours:
            raise ConfigError(
                f"recommend.sources.neighbours: the ranker {name} has none, since its "
                "order.safetensors is of an older version; train it again"
            )


CHOSEN = ("sources", "max_candidates", "exclude_seen", "popular", "order")
"""What a training chooses, which belongs to its models; the rest is the operator's."""


class StageDeadlines(NamedTuple):
    """Deadlines of the stages of a cascade, as time.monotonic()."""

    retrieve_at: float
    hook_at: float
    rank_at: float
    answer_at: float  # of what follows the rank


def split(
    now_at: float, deadline_at: float, rank_s: float, config: RecommendConfig
) -> StageDeadlines:
    """Split the time of a cascade among its stages.

        now ------- retrieve ------- hook -- rank ------- hook_after ------- deadline
             the rest        hook budget  |  rank_s      hook budget  margin_s
                                          at most max_rank_share of the time

    Args:
        now_at, deadline_at: Times of time.monotonic().
        rank_s: Predicted seconds of the rank, including the encoding of the full history.
        config: Shares and budgets.
    """
    end_at = max(deadline_at - config.margin_s, now_at)
    after_s = config.hook_budget_s if config.hook_after else 0.0
    rank_at = end_at - min(after_s, (end_at - now_at) / 4)
    left_s = rank_at - now_at
    hook_at = rank_at - min(max(rank_s, config.min_rank_s), left_s * config.max_rank_share)
    hook_s = config.hook_budget_s if config.hook else 0.0
    retrieve_at = hook_at - min(hook_s, (hook_at - now_at) / 2)
    return StageDeadlines(retrieve_at, hook_at, rank_at, end_at)


def interleave(rows: Sequence[I64]) -> tuple[I64, I64]:
    """Interleave rows: the best of each, then the second of each, and so on, without duplicates.

    Args:
        rows: Items of each row, int64 [n_i], best first.

    Returns:
        Items int64 [n], and the index of the row of each, int64 [n].
    """
    items = np.concatenate([*rows, np.empty(0, np.int64)])
    row = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    place = np.concatenate([np.arange(len(r)) for r in rows] or [items])
    order = np.lexsort((row, place))
    items, row = items[order], row[order]
    first = np.sort(np.unique(items, return_index=True)[1])
    return items[first], row[first]


def is_in(items: I64, ascending: I64) -> npt.NDArray[np.bool_]:
    """Whether each of int64 [n] is in ascending int64 [m]: bool [n].

    np.isin sorts both, which takes over a millisecond for a history of thousands of items.
    """
    if not len(ascending):
        return np.zeros(len(items), np.bool_)
    at = np.searchsorted(ascending, items).clip(max=len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[at] == items
    return found


def each_once(items: I64) -> I64:
    """Return the distinct items, ascending; five times as fast as np.unique for long histories."""
    ascending = np.sort(items)
    is_first = np.ones(len(ascending), np.bool_)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return ascending[is_first]


class Denied:
    """Items to exclude: denied ones, seen ones, and all but the allowed ones."""

    def __init__(self, given: I64 | None, seen: I64 | None, allowed: I64 | None = None) -> None:
        """Store external ids.

        Args:
            given, seen: Denied and seen items, in any order, possibly repeated.
            allowed: All that may be shown, ascending and distinct; None = no such list.
        """
        self.given = given
        self.seen = seen
        self.allowed = allowed

    def bans(self, items: I64) -> npt.NDArray[np.bool_]:
        """Whether each of int64 [n] is denied or not allowed; seen ones are not banned."""
        given = np.empty(0, np.int64) if self.given is None else np.sort(self.given)
        banned = is_in(items, given)
        return banned if self.allowed is None else banned | ~is_in(items, self.allowed)

    def left(self, items: I64) -> I64:
        """Return the items that are not excluded."""
        items = items[~is_in(items, self.ids)]
        return items if self.allowed is None else items[is_in(items, self.allowed)]

    @cached_property
    def ids(self) -> I64:
        """Distinct external ids [n], ascending."""
        parts = [ids for ids in (self.given, self.seen) if ids is not None]
        return each_once(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def best_first(scores: F32) -> I64:
    """Return indices by descending score; ties keep their order, NaN is last."""
    order: I64 = (-scores).argsort(kind="stable")  # numpy sorts NaN to the end
    return order


def fused_order(scores: F32) -> I64:
    """Return indices by reciprocal rank fusion of retrieval order and scores.

    Args:
        scores: Float32 [n] of the candidates in the order of retrieval.

    Source: Cormack, Clarke and Buettcher, SIGIR 2009, with their constant of 60.
    """
    retrieved = np.arange(len(scores))
    ranked = np.empty_like(retrieved)
    ranked[best_first(scores)] = retrieved
    order: I64 = np.argsort(-1.0 / (FUSION + retrieved) - 1.0 / (FUSION + ranked), kind="stable")
    return order


def why_short(
    *, is_full: bool, asked: Mapping[str, int], reports: Sequence[StageReport], excludes: bool
) -> LimitedBy:
    """Say why a cascade has fewer items than requested.

    Args:
        is_full: It has as many as candidates are allowed.
        asked: Source -> number of items that it was asked for.
        reports: Reports of the stages; a source that found all it was asked for may have more.
        excludes: Whether items were denied, seen, withdrawn, unknown and dropped, or left to a
            hook.
    """
    if is_full or any(0 < asked.get(one.stage, 0) <= one.num_items for one in reports):
        return LimitedBy.LIMIT
    return LimitedBy.FILTER if excludes else LimitedBy.SOURCES


class Shown(NamedTuple):
    """Items of an answer, best first. n = items."""

    items: I64  # [n] external ids
    scores: F32  # [n] of the ranker; NaN = not ranked
    propensities: F32 | None = None  # [n]; None = nothing was drawn

    def first(self, count: int) -> Shown:
        """Return the first items."""
        drawn = self.propensities
        return Shown(
            self.items[:count], self.scores[:count], None if drawn is None else drawn[:count]
        )


class Origins(dict[int, str]):
    """The first source of each item, with a default for other items."""

    def __init__(self, other: str, items: Iterable[tuple[int, str]] = ()) -> None:
        super().__init__(items)
        self._other = other

    def __missing__(self, item: int) -> str:
        return self._other


def failed_sources(reports: Iterable[StageReport]) -> str:
    """Name the failed sources; an empty result is no failure."""
    return ", ".join(f"{r.stage} {r.result.value}" for r in reports if r.result.is_degraded)


def result_of(stage: str, error: Exception) -> StageResult:
    """Return the result of a stage that raised an error, which the log gets."""
    if isinstance(error, Overloaded):
        return StageResult.OVERLOADED
    if isinstance(error, DeadlineExceeded):
        return StageResult.OUT_OF_TIME
    log.warning("recommend: stage %s failed: %s: %s", stage, type(error).__name__, error)
    return StageResult.FAILED
