"""The pure half of a cascade: its settings, how its time is split, how candidates are merged and ordered, its hook.

A hook is the operator's business rules between retrieval and rank: a Python function that the
configuration names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import Events, UserKey
from npu_gr.core.request import OrderName, SourceName
from npu_gr.core.settings import Count, Ratio, Seconds

FUSION = 60  # the constant of reciprocal rank fusion

SHARED_ENCODER: SourceName = "shared_encoder"  # the ranker's own user vector against its own items
# what followed the last events, as counted for the ranker's fitted order
TRANSITIONS: SourceName = "transitions"
# what has most in common with the history, as counted beside the transitions
NEIGHBOURS: SourceName = "neighbours"
SECTIONS: dict[SourceName, str] = {  # source -> the section of the configuration that it needs
    SHARED_ENCODER: "checkpoint",
    TRANSITIONS: "checkpoint",
    NEIGHBOURS: "checkpoint",
    "generate": "generate",
    "match": "match",
}


class RecommendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where candidates come from, how they are ordered, and what happens when a stage fails."""

    # source -> items asked of it; the sources are taken in turns, in this order
    sources: dict[SourceName, Count] = msgspec.field(default_factory=lambda: {"generate": 100})
    max_candidates: Count = 200  # M: at most this many are ranked
    exclude_seen: bool = True  # leave out the items of the history
    hook: str | None = None  # "package.module:function", see `Hook`; None = none
    # file of item names, one a line, best first: they fill up a short retrieval
    popular: str | None = None
    # items that the ranker does not know, new ones mostly: last = after all others, without a
    # score; drop = not at all
    unknown_items: Literal["last", "drop"] = "last"
    # share of each source's items that the ranker must know, or the instance does not start; see
    # `scored_items.py`
    min_coverage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.9
    # blended: by the sum of the ranker's order file; rank: by its first task; fused: by the places
    # in retrieval and rank together, see `by_both`; retrieval: without a rank; None = blended where
    # the ranker has a score blend, else rank
    order: OrderName | None = None
    max_rank_share: Ratio = 0.5  # share of the time that the rank may keep at most
    # the rank keeps this much if the share allows, even if the cost model says less
    min_rank_s: Seconds = 0.02
    hook_budget_s: Seconds = 0.02
    margin_s: Seconds = 0.005  # kept back for writing the answer
    on_rank_failure: Literal["retrieval_order", "fail"] = "retrieval_order"
    on_hook_failure: Literal["skip", "fail"] = "skip"

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: needs at least one")

    def order_of(self, *, has_blend: bool) -> OrderName:
        """Name the order of the answers of a ranker that has a fitted order or none."""
        return self.order or ("blended" if has_blend else "rank")

    def check_ranker(
        self, name: str, *, retrieves: bool, has_blend: bool, has_neighbours: bool
    ) -> None:
        """Check that a ranker can do what the cascade asks of it.

        Raises:
            ConfigError: names the key, the ranker and what it lacks.
        """
        if SHARED_ENCODER in self.sources and not retrieves:
            raise ConfigError(
                f"recommend.sources.shared_encoder: the ranker {name} only ranks: "
                "`retrieval` of its config.json"
            )
        of_order = {
            "sources.transitions": TRANSITIONS in self.sources,
            "order": self.order == "blended",
        }
        needed = {**of_order, "sources.neighbours": NEIGHBOURS in self.sources}
        for key, is_needed in needed.items():
            if is_needed and not has_blend:
                raise ConfigError(
                    f"recommend.{key}: the ranker {name} has no fitted order: no order.safetensors"
                )
        if needed["sources.neighbours"] and not has_neighbours:
            raise ConfigError(
                f"recommend.sources.neighbours: the ranker {name} has none: its order.safetensors "
                "is of an older "
                "version; train it anew"
            )


class StageDeadlines(NamedTuple):
    """Instants (time.monotonic) at which the stages of one cascade must be done."""

    retrieve_at: float
    hook_at: float
    rank_at: float


def split(
    now_at: float, deadline_at: float, rank_s: float, config: RecommendConfig
) -> StageDeadlines:
    """Split the time of a cascade among its stages.

        now ------- retrieve ------- hook -- rank ------- deadline
             the rest        hook budget  |  rank_s   margin_s
                                          at most max_rank_share of the time

    Args:
        now_at, deadline_at: instants (time.monotonic).
        rank_s: seconds that the rank takes if it has to encode the whole history.
        config: shares and budgets.
    """
    rank_at = max(deadline_at - config.margin_s, now_at)
    left_s = rank_at - now_at
    hook_at = rank_at - min(max(rank_s, config.min_rank_s), left_s * config.max_rank_share)
    hook_s = config.hook_budget_s if config.hook else 0.0
    return StageDeadlines(hook_at - min(hook_s, (hook_at - now_at) / 2), hook_at, rank_at)


def in_turns(rows: Sequence[I64]) -> tuple[I64, I64]:
    """Take the best of each row, then the second of each, and so on.

    Keep an item where it comes first.

    Args:
        rows: int64 [n_i] each, best first.

    Returns:
        Items int64 [n], and the index of the row that each came from, int64 [n].
    """
    items = np.concatenate([*rows, np.empty(0, np.int64)])
    row = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    place = np.concatenate([np.arange(len(r)) for r in rows] or [items])
    order = np.lexsort((row, place))
    items, row = items[order], row[order]
    first = np.sort(np.unique(items, return_index=True)[1])
    return items[first], row[first]


def among(items: I64, ascending: I64) -> npt.NDArray[np.bool_]:
    """Tell which items, int64 [n], stand among others, int64 [m] in ascending order: bool [n].

    np.isin sorts both at every call, which takes over a millisecond for the thousands of items of a
    history.
    """
    if not len(ascending):
        return np.zeros(len(items), np.bool_)
    at = np.searchsorted(ascending, items).clip(max=len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[at] == items
    return found


def each_once(items: I64) -> I64:
    """Return the items in ascending order, each once.

    As np.unique, which takes five times as long for the thousands of items of a history.
    """
    ascending = np.sort(items)
    is_first = np.ones(len(ascending), np.bool_)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return ascending[is_first]


class Denied:
    """The items that must not come: those that the request denies, and those that the user has seen."""

    def __init__(self, given: I64 | None, seen: I64 | None) -> None:
        """Keep them as they are: external ids, in any order, maybe more than once."""
        self.given = given
        self.seen = seen

    @cached_property
    def ids(self) -> I64:
        """External ids [n], ascending, each once."""
        parts = [ids for ids in (self.given, self.seen) if ids is not None]
        return each_once(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def best_first(scores: F32) -> I64:
    """Return the places of the scores from high to low.

    Of equal scores the earlier first, NaN last.
    """
    order: I64 = (-scores).argsort(kind="stable")  # numpy sorts NaN to the end
    return order


def by_both(scores: F32) -> I64:
    """Return the places of candidates by their ranks in the retrieval and under the scores together.

    Args:
        scores: float32 [n] of candidates that stand in the order of the retrieval.

    Source: reciprocal rank fusion with its constant of 60 (Cormack, Clarke and Buettcher, SIGIR
    2009).
    """
    retrieved = np.arange(len(scores))
    ranked = np.empty_like(retrieved)
    ranked[best_first(scores)] = retrieved
    order: I64 = np.argsort(-1.0 / (FUSION + retrieved) - 1.0 / (FUSION + ranked), kind="stable")
    return order


class HookContext(NamedTuple):
    """What a hook gets beside the items."""

    user: UserKey
    history: Events
    context: Mapping[str, bool | int | float | str]  # of the request
    timestamp: int  # unix seconds at which the items are shown


Hook = Callable[[I64, HookContext], Any]
"""`hook(items, context)` gets the candidates, int64 [n], best first, and returns the items to rank: fewer, in another
order, or others. An `async def` runs on the event loop, a `def` in a thread. An exception degrades
the answer."""


def load_hook(name: str) -> Hook:
    """Import the function that `package.module:function` names.

    Raises:
        ConfigError: there is no such function, or it does not take two arguments.
    """
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
        inspect.signature(hook).bind("items", "context")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"recommend.hook: {name!r}: {error}") from error
    found: Hook = hook
    return found


def as_items(returned: object) -> I64:
    """Read what a hook returned as item ids, int64 [n].

    Raises:
        TypeError: it is no row of integers.
    """
    items = np.asarray(returned)
    if items.ndim != 1 or (len(items) and items.dtype.kind not in "iu"):
        raise TypeError(f"needs a row of item ids, got {type(returned).__name__}")
    return items.astype(np.int64)
