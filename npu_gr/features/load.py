"""Bulk load of an interaction log into a history store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.request import Events, UserKey
from npu_gr.features.base import HistoryStore
from npu_gr.features.interactions import Interactions

BATCH_USERS = 256


async def load_interactions(
    store: HistoryStore,
    interactions: Interactions,
    action_ids: Mapping[float, int],
    tenant: str = "",
    progress: Callable[[int], None] | None = None,
) -> int:
    """Append every user's events in time order, and return the number of events.

    Args:
        store: where to append.
        interactions: in time order.
        action_ids: value in the log -> the model's action.
        tenant: of all these users.
        progress: called with the number of events of each committed batch.

    Raises:
        DataError: a value has no action; nothing was loaded.
    """
    values, codes = np.unique(interactions.values, return_inverse=True)
    unknown = [value for value in values.tolist() if value not in action_ids]
    if unknown:
        raise DataError(f"action value {unknown[0]!r} is not one of the model's: {sorted(action_ids)}")
    actions = np.array([action_ids[value] for value in values.tolist()], np.int16)[codes]
    order = np.argsort(interactions.users, kind="stable")
    users, starts = np.unique(interactions.users[order], return_index=True)
    parts = np.split(order, starts[1:])
    batch: list[tuple[UserKey, Events]] = []
    total = 0
    for index, (user, part) in enumerate(zip(users.tolist(), parts, strict=True), 1):
        events = Events.make(interactions.items[part], actions[part], interactions.timestamps[part])
        batch.append((UserKey(tenant, interactions.user_names[user]), events))
        if len(batch) == BATCH_USERS or index == len(users):
            await store.append_many(batch)
            size = sum(len(events) for _, events in batch)
            total += size
            if progress is not None:
                progress(size)
            batch = []
    return total
