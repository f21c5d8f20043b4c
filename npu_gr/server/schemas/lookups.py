"""The answers of look-ups: a user, similar items, trending items."""

from __future__ import annotations

import msgspec

MOST_FOUND = 1000  # items or events of an answer
MOST_WINDOW_S = 86_400.0


class UserEventOut(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a user; null: no table has a title, no model has a name of the action."""

    item: str | int
    title: str | None
    event: str | int
    timestamp: int


class PrefixOut(msgspec.Struct, frozen=True, kw_only=True):
    """A cached prefix of a user: the model, and where it is (hbm, dram, on_its_way)."""

    model: str
    version: str
    tier: str


class UserOut(msgspec.Struct, frozen=True, kw_only=True):
    """What this instance knows of a user."""

    user_id: str
    tenant: str
    num_events: int
    events: list[UserEventOut]  # the newest first
    prefixes: list[PrefixOut]
    in_vectors: bool  # whether the vectors of match were trained with the user
    versions: dict[str, tuple[str, ...]]  # of each kind, the current one first


class FoundItemOut(msgspec.Struct, frozen=True, kw_only=True):
    """An item that was found; the score is a cosine or a count, null = the basis has none."""

    item: str | int
    title: str | None
    score: float | None


class FoundItemsOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items, best first."""

    basis: str  # neighbours | vectors | events | popular | nothing
    items: list[FoundItemOut]
