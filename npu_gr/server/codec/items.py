"""The answer of `GET /v1/items`."""

from __future__ import annotations

import msgspec

MOST_ITEMS = 1000  # of one request


class ItemOut(msgspec.Struct, frozen=True, kw_only=True):
    """An item: raw columns hold its id, lists its name. null: no table that is served knows it."""

    id: int
    name: str | int | None
    title: str | None
