"""Fold-in: computes the vector of a user whose history is newer than the training.

It runs the encoder on one more node, whose neighbours are the items of the history with their
states in the trained graph; no other node changes. A user of the training, with the items of the
training, gets the trained vector. Items without an edge in the trained graph are not trained, and
are ignored.

A `decay` gives newer events of the history more weight. `SourceItems` are the items of the source
domain, with the users that had them and the target items that are near-duplicates of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64

NO_ITEMS: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceItems:
    """The items of the source domain. J = its items, U = users."""

    # [J] external ids, ascending and distinct; None = the domains use an id for different items
    ids: I64 | None
    seen_starts: I64  # [U + 1] user u had seen_items[seen_starts[u] : seen_starts[u + 1]]
    seen_items: npt.NDArray[np.int32]  # [source edges] rows, by user
    # [J + 1] item j has the near-duplicates near_duplicate_items[near_duplicate_starts[j] :
    # near_duplicate_starts[j + 1]]
    near_duplicate_starts: I64
    # rows of target items, not to be shown to a user that has the source item
    near_duplicate_items: npt.NDArray[np.int32]

    def rows(self, item_ids: I64) -> I64:
        """Look up the rows of the known ids, ascending and distinct."""
        return NO_ITEMS if self.ids is None else np.unique(rows_of(self.ids, item_ids))

    def seen(self, user: int) -> I64:
        """List the rows of a user's items in the training; none for user -1."""
        if user < 0:
            return NO_ITEMS
        return self.seen_items[slice(*self.seen_starts[user : user + 2])].astype(np.int64)

    def near_duplicates(self, rows: I64) -> I64:
        """List the target rows that are near-duplicates of these rows, ascending and distinct."""
        starts = self.near_duplicate_starts[rows]
        counts = self.near_duplicate_starts[rows + 1] - starts
        places = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return np.unique(self.near_duplicate_items[places]).astype(np.int64)


def rows_of(known: I64, item_ids: I64) -> I64:
    """Look up the rows of ids, in the order of `item_ids`; unknown ids are ignored.

    Args:
        known: int64 [n] ids by row, ascending, at least one.
        item_ids: int64 ids to look up.
    """
    places = np.searchsorted(known, item_ids)
    places[places == len(known)] = 0
    rows: I64 = places[known[places] == item_ids]
    return rows


Norm = Literal["mean", "symmetric"]
Activation = Literal["none", "tanh", "leaky_relu"]
LEAK = 0.2  # slope of leaky_relu below zero


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folding:
    """The parts of an encoder that a fold-in needs.

    L = layers, U = users, I = items, d = dimension.
    """

    users: F32 | None  # [U, d] embedding table; None = every user starts at zero
    states: F32  # [L, I, d] vectors of the items before each layer
    # [L, 2 d, d], multiplied by (own state || neighbours); None = LightGCN, which has none
    matrices: F32 | None
    degrees: I64  # [I] edges of each item in the trained graph
    norm: Norm
    activation: Activation
    # factor of an event's weight for each newer event; None = order does not matter
    decay: float | None = None

    def trained(self, items: I64) -> I64:
        """Select the item rows that have an edge in the trained graph."""
        return items[self.degrees[items] > 0]

    def vector(self, user: int, items: I64, source_items: I64 = NO_ITEMS) -> F32:
        """Compute a user's vector.

        Args:
            user: Row of the user; -1 = not in the training, so it starts at zero.
            items: Rows of `trained` items, one or more, distinct; with a decay one for each event,
                oldest first.
            source_items: Rows of source items, which this encoder ignores.

        Returns:
            float32 [d].
        """
        weights = self._weights(items)
        dim = self.states.shape[2]
        own: F32 = (
            self.users[user] if self.users is not None and user >= 0 else np.zeros(dim, np.float32)
        )
        total = own
        for layer, states in enumerate(self.states):
            near = weights @ states[items]
            own = (
                near
                if self.matrices is None
                else self._activated(np.concatenate((own, near)) @ self.matrices[layer])
            )
            total = total + own
        return total / np.float32(len(self.states) + 1)

    def _weights(self, items: I64) -> F32:
        if self.decay is not None:
            by_age = self.decay ** np.arange(len(items) - 1, -1, -1.0)
            return np.asarray(by_age / by_age.sum(), np.float32)
        by_item = (
            np.ones(len(items))
            if self.norm == "mean"
            else (len(items) / self.degrees[items]) ** 0.5
        )
        return np.asarray(by_item / len(items), np.float32)

    def _activated(self, x: F32) -> F32:
        match self.activation:
            case "none":
                return x
            case "tanh":
                return np.tanh(x)
            case "leaky_relu":
                return np.where(x >= 0, x, x * np.float32(LEAK))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedFolding:
    """Fold-in for vectors of several optional parts: [spectral | encoder | popularity].

    The spectral part is the sum of a row for each known item of the user, in both domains, divided
    by the square root of their number. I = target items, J = source items, k = singular values.
    """

    target_states: F32 | None  # [I, k] rows of target items; None = no spectral part
    source_states: F32 | None  # [J, k] rows of source items
    encoder: Folding | None  # None = no encoder part
    encoder_weight: float
    popularity: float  # the last column; 0 = none
    degrees: I64  # [I] edges of each item in the trained graph
    decay: float | None = None  # always None: order does not matter

    def trained(self, items: I64) -> I64:
        """Select the item rows that have an edge in the trained graph."""
        return items[self.degrees[items] > 0]

    def vector(self, user: int, items: I64, source_items: I64 = NO_ITEMS) -> F32:
        """Compute a user's vector (see `Folding.vector`) from distinct items of either domain."""
        parts = []
        if self.target_states is not None and self.source_states is not None:
            total = self.target_states[items].sum(0) + self.source_states[source_items].sum(0)
            parts.append(total / np.float32(max(1, len(items) + len(source_items)) ** 0.5))
        if self.encoder is not None:
            dim = self.encoder.states.shape[2]
            own = self.encoder.vector(user, items) if len(items) else np.zeros(dim, np.float32)
            parts.append(own * np.float32(self.encoder_weight))
        if self.popularity:
            parts.append(np.array([self.popularity], np.float32))
        return np.concatenate(parts).astype(np.float32)
