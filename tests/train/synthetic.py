"""A log with a planted rule: the next item is the last one's successor, mostly.

Users differ in how much they like.
"""

from __future__ import annotations

import numpy as np

from npu_gr.history_store.interactions import Interactions

NUM_ITEMS = 30


def planted(num_users: int = 60, num_events: int = 30, seed: int = 0) -> Interactions:
    random = np.random.default_rng(seed)
    users, items, values = [], [], []
    for user in range(num_users):
        item, generous = int(random.integers(NUM_ITEMS)), bool(random.integers(2))
        for _ in range(num_events):
            item = (
                (item * 7 + 3) % NUM_ITEMS
                if random.random() < 0.9
                else int(random.integers(NUM_ITEMS))
            )
            users.append(user)
            items.append(item)
            values.append(5.0 if generous ^ (random.random() < 0.1) else 1.0)
    times = np.tile(np.arange(num_events) * 3600, num_users) + 1_600_000_000
    order = np.argsort(times, kind="stable")
    return Interactions(
        np.array(users, np.int32)[order],
        np.array(items, np.int64)[order] * 10,
        np.array(values)[order],
        times[order],
        [f"u{user}" for user in range(num_users)],
    )
