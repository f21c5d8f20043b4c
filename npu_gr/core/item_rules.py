"""Business rules of recommends, as the configuration and requests write them.

`npu_gr/handlers/rules.py` applies them.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from npu_gr.core.settings import Count, Positive, Seconds

MOST_RULES = 100  # boosts, pins or diversities of one list; attributes of a selection
MOST_NAMED = 10_000  # items that one rule names

Scalar = bool | int | float | Annotated[str, msgspec.Meta(max_length=1024)]
ItemName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | int
ItemList = Annotated[tuple[ItemName, ...], msgspec.Meta(max_length=MOST_NAMED)]
Accepted = Annotated[tuple[Scalar, ...], msgspec.Meta(min_length=1, max_length=1000)]
AttributeName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Items by name, and by attributes of the catalogue."""

    items: ItemList = ()
    # attribute -> values; an item must have one of the values of every attribute
    attributes: Annotated[dict[AttributeName, Accepted], msgspec.Meta(max_length=MOST_RULES)] = (
        msgspec.field(default_factory=dict)
    )

    @property
    def is_empty(self) -> bool:
        """Whether it selects nothing, whatever the items are."""
        return not (self.items or self.attributes)


class Boost(Selection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the scores of the selected items, for the order only."""

    factor: Positive = 1.0  # multiplies scores above 0 and divides the others, so 2 always raises
    add: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)] = 0.0  # added after the factor

    def __post_init__(self) -> None:
        if self.is_empty:
            raise ValueError("boost: needs `items` or `attributes`")
        if not (math.isfinite(self.factor) and math.isfinite(self.add)):
            raise ValueError("boost: factor and add must be finite")


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Show an item at a place, also if no source found it or the user has seen it."""

    item: ItemName
    place: Annotated[int, msgspec.Meta(ge=1, le=10_000)]  # 1 = first


class Diversity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Show few items with the same value of an attribute; items without the attribute are free."""

    by: AttributeName  # attribute of the catalogue, such as brand
    most: Count


class Cap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Leave out items that were shown often enough.

    A showing is an entry of the request's `shown_items`, and an event of `action`.
    """

    most: Count = 1
    action: Annotated[str, msgspec.Meta(max_length=512)] | None = None  # None: only `shown_items`
    window_s: Seconds = 86_400.0  # events before the window do not count


class Explore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Draw the places after the first `keep` at random, and log the propensity of each item.

    Set one of both: with `epsilon` each place shows a uniformly random item with that probability,
    else the best one left; with `temperature` the item is drawn by exp(score / temperature).
    """

    keep: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    epsilon: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)] | None = None

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.temperature is None):
            raise ValueError("explore: needs either `epsilon` or `temperature`")


class OrderRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules about the order of an answer, of the configuration or of a request."""

    boost: Annotated[tuple[Boost, ...], msgspec.Meta(max_length=MOST_RULES)] = ()
    # of two at one place or with one item the first counts
    pin: Annotated[tuple[Pin, ...], msgspec.Meta(max_length=MOST_RULES)] = ()
    diversity: Annotated[tuple[Diversity, ...], msgspec.Meta(max_length=MOST_RULES)] = ()
    cap: Cap | None = None
    explore: Explore | None = None

    def then(self, more: OrderRules | None) -> OrderRules:
        """Return these rules and those of a request, whose `cap` and `explore` replace these."""
        if more is None:
            return self
        return OrderRules(
            boost=self.boost + more.boost,
            pin=self.pin + more.pin,
            diversity=self.diversity + more.diversity,
            cap=more.cap or self.cap,
            explore=more.explore or self.explore,
        )

    @property
    def is_empty(self) -> bool:
        """Whether they change nothing."""
        return not (self.boost or self.pin or self.diversity or self.cap or self.explore)


class ItemRules(OrderRules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of the configuration: which items may be shown at all, and in what order."""

    deny: Selection = Selection()  # never shown
    allow: Selection = Selection()  # if not empty, no other items are shown
