"""The calls that try a site out: a user whom it knows, one whom it does not, an item that it has never seen."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.names import value_name
from npu_gr.features.interactions import Interactions

LEAST_EVENTS = 5
OLD_S = 30 * 86_400  # a log that ends earlier than this is asked as of its end: no model has seen such a gap
NEW_ITEM = "an-item-of-tomorrow"
COLD_USER = "somebody-new"


class Examples(NamedTuple):
    """Real names of a dataset."""

    user: str
    num_events: int  # of that user
    items: list[str | int]  # the newest of that user, oldest first
    actions: list[str]
    timestamp: int  # right after every event
    asked_at: int | None  # the moment to ask for; None = now


def examples(log: Interactions, names: ItemNames, num_items: int = 3) -> Examples:
    """Choose a user with an ordinary number of events: the median of those with at least five, or of all."""
    counts = np.bincount(log.users, minlength=len(log.user_names))
    enough = np.flatnonzero(counts >= LEAST_EVENTS)
    some = enough if len(enough) else np.flatnonzero(counts)
    user = int(some[np.argsort(counts[some], kind="stable")[len(some) // 2]])
    own = log[np.flatnonzero(log.users == user)[-num_items:]]
    return Examples(
        user=log.user_names[user],
        num_events=int(counts[user]),
        items=names.names(own.items),
        actions=[_action(log, value) for value in own.values.tolist()],
        timestamp=int(log.timestamps[-1]) + 60,
        asked_at=asked_at(log),
    )


def asked_at(log: Interactions) -> int | None:
    """Choose the moment to ask for: right after the log where that is long ago, or None, which is now."""
    after = int(log.timestamps[-1]) + 60
    return after if after < time.time() - OLD_S else None


def recommend(user: str, timestamp: int | None = None, **more: Any) -> dict[str, Any]:
    """The body of a recommend of five items with titles; no timestamp asks for now."""
    when = {} if timestamp is None else {"timestamp": timestamp}
    return {"user_id": user, "num_items": 5, "fields": ["title"], **when, **more}


def known_user(found: Examples) -> dict[str, Any]:
    """The body of a recommend for a user whose history is in the store."""
    return recommend(found.user, found.asked_at)


def with_new_item(found: Examples) -> dict[str, Any]:
    """The body of a recommend whose history ends with an item that no model has seen."""
    items = [*found.items, NEW_ITEM]
    times = [found.timestamp + place - len(items) for place in range(len(items))]
    columns = {"items": items, "actions": [*found.actions, found.actions[-1]], "timestamps": times}
    return recommend("somebody-else", found.asked_at, history=columns)


def _action(log: Interactions, value: float) -> str:
    return log.action_names[int(value)] if log.action_names else value_name(value)
