"""`python -m benchmarks store`: event-loop time of a DRAM tier with a million entries.

Keys, LRU order, TTL with jitter, pages and eviction are real; the arena is on torch's meta device,
without bytes. A turn is one user's return: find, lease, and at the end of the rank a new copy,
which evicts the least recently used entry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.frame import SEED, Line, timed
from npu_gr.core.history import UserKey
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.kv_cache.tier import DramStore, PrefixKey

OPTIONS = (SEED,)
FEW = 10_000
MANY = 1_000_000
TURNS = 2_000  # turns per sample
SAMPLES = 15
AT_MOST = 3.0  # target: time relative to the small tier, which fits the CPU's caches


class FullTier:
    """A full DRAM tier; every entry has one page."""

    def __init__(self, num_entries: int, seed: int) -> None:
        layout = KVLayout(num_layers=1, num_heads=1, qk_dim=1, v_dim=1)
        arena = KVArena(layout, num_entries, torch.device("meta"))
        self.store = DramStore(
            arena, ttl_s=600.0, ttl_jitter_ratio=0.1, seed=seed, clock=lambda: 0.0
        )
        self._random = np.random.default_rng(seed)
        self._layout_id = layout.layout_id
        self._size = num_entries
        self._next = 0  # user
        for _ in range(num_entries):
            self.add()

    def add(self) -> None:
        """Add the next user's copy."""
        key = PrefixKey(UserKey("", str(self._next)), "v", self._layout_id, "f")
        self.store.commit(self.store.reserve(key, 1))
        self._next += 1

    def turns(self) -> None:
        """Run `TURNS` turns of random users, each followed by a new copy of another user."""
        for number in self._random.integers(
            self._next - self._size // 2, self._next, TURNS
        ).tolist():
            for entry in self.store.find(UserKey("", str(number)), "v", self._layout_id):
                with self.store.lease(entry):
                    pass
            self.add()


def lines(seed: int) -> Iterator[Line]:
    """Yield one line: a turn in the large tier against one in the small tier."""
    tiers = [FullTier(size, seed) for size in (MANY, FEW)]
    samples: list[list[float]] = [[] for _ in tiers]
    for _ in range(SAMPLES):
        for tier, row in zip(tiers, samples, strict=True):
            began_at = time.thread_time()
            tier.turns()
            row.append((time.thread_time() - began_at) / TURNS)
    for tier in tiers:
        assert len(tier.store) == tier.store.arena.num_pages, "a full tier stays full"
    case = f"find, lease, evict and add in a DRAM tier of {MANY:,} entries"
    yield timed("store", case, samples[0], f"of {FEW:,}", samples[1], 1 / AT_MOST, unit="us")
