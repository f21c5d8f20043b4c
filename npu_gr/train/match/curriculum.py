"""Negatives from easy to hard by Katz centrality: the more alike two nodes' centralities, the harder (our reading).

difficulty  of a negative v for an anchor u: -|log c_u - log c_v|
pacing      share(x) = min(1, start + (1 - start) x^p) at x = how much of the stage is done
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def share(done_ratio: float, start: float, power: float) -> float:
    """Share of all negatives, the easiest, that may be drawn at this point of the stage."""
    return min(1.0, start + (1 - start) * math.pow(done_ratio, power))


class Negatives:
    """Nodes to draw negatives from, by centrality."""

    def __init__(self, centrality: Tensor) -> None:
        """Take each node's centrality: float32 [n], positive."""
        self.logs, self.nodes = centrality.log().sort()

    def draw(self, anchors: Tensor, k: int, easiest: float, generator: torch.Generator) -> Tensor:
        """int64 [B, k] nodes, evenly from the easiest share for each anchor.

        The hardest ones are a window of the sorted centralities around the anchor's own.

        Args:
            anchors: float32 [B] log centralities.
            k: how many for each anchor.
            easiest: share in (0, 1].
            generator: of the draws.
        """
        num_nodes = len(self.nodes)
        num_hidden = min(num_nodes - 1, int((1 - easiest) * num_nodes))
        drawn = torch.randint(num_nodes - num_hidden, (len(anchors), k), generator=generator)
        if num_hidden:
            ends = self.logs[:-num_hidden] + self.logs[num_hidden:]
            first = torch.searchsorted(ends, 2 * anchors)[:, None]
            drawn = torch.where(drawn < first, drawn, drawn + num_hidden)
        return self.nodes[drawn]
