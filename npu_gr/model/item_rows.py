"""What an item's vector is made of: a row of its own, and what it has in common with other items.

    e_i = residual_i + the mean of each side feature's values + features of the schema + the row of each code

An item that the model was not trained with has no residual row: its vector is the rest of the sum. Row dropout
(`HSTUConfig.row_dropout`) makes the rest worth something by itself: every step of the training leaves the residual rows
of some items out, in histories, among candidates and in the softmax alike.

Serving reads one frozen table: the sums of the trained items, spare rows for the sums of new ones, and NEXT's row last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.encode import Encoded

I32 = npt.NDArray[np.int32]


class NewItems(NamedTuple):
    """What is known of items that a model was not trained with. n = items."""

    features: tuple[I64, ...]  # of each of `item_features`: [n, max_values] value ids, num_values = padding
    codes: I32  # [n, levels of `item_codes`]; a level's number of codes = the item has none
    values: Encoded | None = None  # [n] of the schema's features of items; None = the model has none


class ItemCodeRows(nn.Module):
    """The codes of the trained items, and a row for each code of each level."""

    of_item: Tensor  # int32 [num_items, levels]; a level's number of codes = the item has none

    def __init__(self, num_items: int, code_count: tuple[int, ...], dim: int) -> None:
        """Give no item a code."""
        super().__init__()
        self.levels = nn.ModuleList(nn.Embedding(count + 1, dim, padding_idx=count) for count in code_count)
        for table in self.levels:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=0.02)
            with torch.no_grad():
                table.weight[-1] = 0
        self.register_buffer("of_item", torch.tensor(code_count, dtype=torch.int32).repeat(num_items, 1))

    def add(self, x: Tensor, codes: Tensor) -> Tensor:
        """Add the rows of codes, int [..., levels], to x [..., dim]."""
        for level, table in enumerate(self.levels):
            x = x + table(codes[..., level])
        return x

    @torch.no_grad()
    def start(self, codes: I32, residual: Tensor) -> None:
        """Give the items their codes; a code's row starts as what its items have in common, which leaves the residual.

        Args:
            codes: [num_items, levels].
            residual: [num_items, dim], changed in place.
        """
        self.of_item.copy_(torch.from_numpy(codes))
        for level, table in enumerate(self.levels):
            assert isinstance(table, nn.Embedding)
            code = self.of_item[:, level].long()
            sums = torch.zeros_like(table.weight).index_add_(0, code, residual)
            mean = sums / torch.bincount(code, minlength=len(sums)).clamp(min=1)[:, None]
            mean[-1] = 0
            table.weight.copy_(mean)
            residual -= mean[code]


def draw_kept(num_items: int, row_dropout: float) -> Tensor | None:
    """Draw the items that keep their residual rows in a step of the training: float32 [num_items, 1] of 0 and 1.

    Returns:
        None = all of them do. What is kept is not scaled up: a trained item is served with its whole row.
    """
    return (torch.rand(num_items, 1) >= row_dropout).float() if row_dropout else None
