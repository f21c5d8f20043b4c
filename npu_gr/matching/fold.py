"""A vector for a user whose target history is newer than the training: the encoder, applied to one more node.

The user's neighbours are the items of the history, in the states that the trained graph gave them; nothing else moves.
A user of the training with the items of the training gets the trained vector. Items without an edge in the trained
graph never learnt anything: they are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from npu_gr.core.request import F32, I64

Norm = Literal["mean", "symmetric"]
Activation = Literal["none", "tanh", "leaky_relu"]
LEAK = 0.2  # of leaky_relu


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folding:
    """What of the encoder is needed. L = layers, U = users, I = items, d = dimension."""

    users: F32  # [U, d] the embedding table
    states: F32  # [L, I, d] of the items, before each layer
    matrices: F32 | None  # [L, 2 d, d] of own state and neighbours; None: LightGCN
    degrees: I64  # [I] in the trained graph
    norm: Norm
    activation: Activation

    def trained(self, items: I64) -> I64:
        """Those of the item rows that have learnt something."""
        return items[self.degrees[items] > 0]

    def vector(self, user: int, items: I64) -> F32:
        """float32 [d] of a user.

        Args:
            user: row; -1: not in the training, which starts at zero.
            items: distinct rows of `trained` items, at least one.
        """
        by_item = np.ones(len(items)) if self.norm == "mean" else (len(items) / self.degrees[items]) ** 0.5
        weights = (by_item / len(items)).astype(np.float32)
        own: F32 = self.users[user] if user >= 0 else np.zeros(self.users.shape[1], np.float32)
        total = own
        for layer, states in enumerate(self.states):
            near = weights @ states[items]
            own = near if self.matrices is None else self._activated(np.concatenate((own, near)) @ self.matrices[layer])
            total = total + own
        return total / np.float32(len(self.states) + 1)

    def _activated(self, x: F32) -> F32:
        match self.activation:
            case "none":
                return x
            case "tanh":
                return np.tanh(x)
            case "leaky_relu":
                return np.where(x >= 0, x, x * np.float32(LEAK))
