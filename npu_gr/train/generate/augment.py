"""Vary a log from epoch to epoch: what is short and sparse is read in more ways than one.

    skip    an event is left out, so the items around it follow each other
    swap    an item gives place to another that followed the item before it, in anybody's history

Histories of ten items say little, and a decoder soon knows them by heart. Counts of what follows what are then the
strongest baseline there is; swaps are drawn from just these counts, so the decoder learns them too.

Source: item dropout and substitution of correlated items as in CoSeRec (arXiv:2108.06479), which adds a contrastive
loss; here the varied histories are simply trained on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from npu_gr.train.data import InteractionLog

MAX_APART = 2  # events between which one item counts as following the other


class Augmentation:
    """Draws variations of a log's trained events."""

    def __init__(self, log: InteractionLog, skip_ratio: float, swap_ratio: float) -> None:
        """Count what follows what.

        Args:
            log: its trained events count.
            skip_ratio: share of the events to leave out, 0 .. 1.
            swap_ratio: share of the events with another item, 0 .. 1; a user's first event has none.
        """
        self._log = log
        self._skip_ratio = skip_ratio
        self._swap_ratio = swap_ratio
        self._users = log.users
        self._trained = log.trained
        near = [
            (apart, self._trained[apart:] & (self._users[apart:] == self._users[:-apart]))
            for apart in range(1, MAX_APART + 1)
        ]
        leads = np.concatenate([log.items[:-apart][both] for apart, both in near])
        follows = np.concatenate([log.items[apart:][both] for apart, both in near])
        self._follows = follows[np.argsort(leads, kind="stable")]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(leads, minlength=log.num_items))])

    def draw(self, random: np.random.Generator) -> InteractionLog:
        """Draw one variation; without skips and swaps it is the log itself.

        Args:
            random: draws it.

        Returns:
            A log of trained events alone, some left out, some with other items.
        """
        if not self._skip_ratio and not self._swap_ratio:
            return self._log
        log = self._log
        items = log.items.copy()
        has_before = self._trained & (np.diff(self._users, prepend=-1) == 0)
        at = np.flatnonzero(has_before & (random.random(len(items)) < self._swap_ratio))
        before = log.items[at - 1]
        # what follows the item before is at least the item that is swapped
        counts = self._starts[before + 1] - self._starts[before]
        items[at] = self._follows[self._starts[before] + (random.random(len(at)) * counts).astype(np.int64)]
        kept = self._trained & (random.random(len(items)) >= self._skip_ratio)
        num_kept = np.bincount(self._users[kept], minlength=log.num_users)
        return replace(
            log,
            items=items[kept],
            actions=log.actions[kept],
            times=log.times[kept],
            starts=np.concatenate([[0], np.cumsum(num_kept)]),
            num_trained=num_kept,
        )
