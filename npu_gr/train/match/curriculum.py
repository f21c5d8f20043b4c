"""Draw negatives from easy to hard, by Katz centrality: the closer two nodes' centralities, the harder.

    difficulty   of a negative v for an anchor u: -|log c_u - log c_v|
    pacing       share(x) = s + (1 - s) x, x = done share of the stage, s = START_SHARE

Source: SCCDR (arXiv:2502.16239) orders negatives by a pre-computed Katz centrality; both formulas are our reading.
"""

from __future__ import annotations

import torch
from torch import Tensor

START_SHARE = 0.3


def share(done_ratio: float) -> float:
    """Compute the share of all negatives, the easiest ones, that may be drawn at a point of the stage.

    Args:
        done_ratio: done share of the stage, 0 .. 1.
    """
    return min(1.0, START_SHARE + (1 - START_SHARE) * done_ratio)


class Negatives:
    """Nodes to draw negatives from, sorted by centrality."""

    def __init__(self, centrality: Tensor) -> None:
        """Sort the nodes; `centrality` is float32 [n], positive."""
        self.logs, self.nodes = centrality.log().sort()

    def draw(self, anchors: Tensor, k: int, easiest: float, generator: torch.Generator) -> Tensor:
        """Draw nodes evenly from the share that is easiest for each anchor.

        The nodes that are too hard are a window of the sorted centralities around the anchor's own:

            sorted nodes   0 .. first - 1 | first .. first + num_hidden - 1 | first + num_hidden ..
                           may be drawn     hidden: closest to the anchor     may be drawn

        Args:
            anchors: float32 [B] log centrality of each anchor.
            k: nodes to draw for each anchor.
            easiest: share that may be drawn, in (0, 1].
            generator: draws them.

        Returns:
            int64 [B, k].
        """
        num_nodes = len(self.nodes)
        num_hidden = min(num_nodes - 1, int((1 - easiest) * num_nodes))
        drawn = torch.randint(num_nodes - num_hidden, (len(anchors), k), generator=generator)
        if num_hidden:
            # The window moves up from i to i + 1 if node i + num_hidden is closer to the anchor than node i is:
            # logs[i] + logs[i + num_hidden] < 2 x anchor.
            ends = self.logs[:-num_hidden] + self.logs[num_hidden:]
            first = torch.searchsorted(ends, 2 * anchors)[:, None]
            drawn = torch.where(drawn < first, drawn, drawn + num_hidden)
        return self.nodes[drawn]
