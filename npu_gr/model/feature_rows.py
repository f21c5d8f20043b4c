"""Embeddings of features (`FeatureTable`) and of the items' semantic-ID codes (`ItemCodeRows`).

    row = sum of the table's rows (of a multi-valued feature: their mean) + numbers @ W

A row depends on its own values alone, so a cached prefix stays exact.
`core/feature_schema/encode.py` makes the values.

An item's vector is the sum of a row of its own, the residual, and of rows that it shares with other
items:

    e_i = residual_i + mean of the rows of each side feature + rows of the schema's features
          + row of each code

An item that the model was not trained with has no residual row: its vector is the rest of the sum.
Row dropout (`HSTUConfig.row_dropout`) trains the rest to stand alone: every training step leaves
out the residual rows of some items, in histories, among candidates and in the softmax alike.

Serving reads one frozen table: the sums of the trained items, spare rows for new items, and NEXT's
row last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from npu_gr.backend.base import Affine
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.encode import Encoded, FeatureEncoder
from npu_gr.core.feature_schema.schema import Feature

_TORCH = TorchOps()  # differentiable, for training


class FeatureValues(NamedTuple):
    """`Encoded` features of n rows, on the model's device."""

    codes: Tensor  # int32 [..., width] rows of the table
    numbers: Tensor  # float32 [..., num_numbers]

    @classmethod
    def of(cls, encoded: Encoded) -> FeatureValues:
        """Wrap host arrays without a copy, for a model on the host."""
        return cls(torch.from_numpy(encoded.codes), torch.from_numpy(encoded.numbers))


class FeatureTable(nn.Module):
    """Embeds the features of users, items, events or crosses.

    Weights: `codes.weight` [rows, dim] and `numbers.weight` [dim, num_numbers].
    """

    missing_codes: Tensor
    missing_numbers: Tensor

    def __init__(self, features: Sequence[Feature], dim: int) -> None:
        """Make random weights.

        Args:
            features: One or more features with the same `of`.
            dim: Width of a row.
        """
        super().__init__()
        encoder = FeatureEncoder(features)
        self._shared = encoder.shared
        self._padding = encoder.padding
        self._columns = encoder.columns
        self.dim = dim
        if encoder.width:
            self.codes = nn.Embedding(encoder.padding + 1, dim, padding_idx=encoder.padding)
            nn.init.normal_(self.codes.weight[: encoder.padding], std=0.02)
        if encoder.num_numbers:
            self.numbers = nn.Linear(encoder.num_numbers, dim, bias=False)
            nn.init.normal_(self.numbers.weight, std=0.02)
        missing = FeatureValues.of(encoder.encode({}, 1))
        self.register_buffer("missing_codes", missing.codes, persistent=False)
        self.register_buffer("missing_numbers", missing.numbers, persistent=False)

    def missing(self, num_rows: int) -> FeatureValues:
        """Return the values of n rows whose features are all missing."""
        return FeatureValues(
            self.missing_codes.expand(num_rows, -1), self.missing_numbers.expand(num_rows, -1)
        )

    def forward(self, values: FeatureValues, ops: Affine = _TORCH) -> Tensor:
        """Embed values of [...] rows: [..., dim]."""
        x = None
        if values.codes.shape[-1]:
            rows = self.codes(values.codes)
            if self._shared:
                rows = rows * self._shares(values.codes)[..., None]
            x = rows.sum(-2)
        if values.numbers.shape[-1]:
            numbers = ops.affine(values.numbers, self.numbers, 0, self.dim, False)
            x = numbers if x is None else x + numbers
        assert isinstance(x, Tensor)
        return x

    def each(self, values: FeatureValues, ops: Affine = _TORCH) -> Tensor:
        """Embed each feature of n rows by itself: [n, features, dim], in the checkpoint's order."""
        found: list[Tensor] = []
        rows = (
            self.codes(values.codes) * self._shares(values.codes)[..., None]
            if values.codes.shape[-1]
            else None
        )
        for columns in self._columns:
            if isinstance(columns, slice):
                assert rows is not None
                found.append(rows[:, columns].sum(1))
            else:
                own = torch.zeros_like(values.numbers)
                own[:, columns] = values.numbers[:, columns]
                found.append(ops.affine(own, self.numbers, 0, self.dim, False))
        return torch.stack(found, 1)

    def _shares(self, codes: Tensor) -> Tensor:
        """Compute each code's weight in its feature's mean, in the codes' shape; padding: 0."""
        shares = torch.ones(codes.shape, dtype=self.codes.weight.dtype, device=codes.device)
        for first, last in self._shared:
            is_value = codes[..., first:last] != self._padding
            shares[..., first:last] = is_value / is_value.sum(-1, keepdim=True).to(shares.dtype)
        return shares


I32 = npt.NDArray[np.int32]


class NewItems(NamedTuple):
    """Features and codes of n items that a model was not trained with."""

    # per side feature of `item_features`: [n, max_values] value ids, num_values = padding
    features: tuple[I64, ...]
    codes: I32  # [n, levels of `item_codes`]; codebook size of the level = no code
    values: Encoded | None = None  # n rows of the schema's item features; None = there are none

    def take(self, places: I64) -> NewItems:
        """Return some of the items."""
        values = self.values
        return NewItems(
            tuple(column[places] for column in self.features),
            self.codes[places],
            None if values is None else Encoded(values.codes[places], values.numbers[places]),
        )

    @classmethod
    def joined(cls, parts: Sequence[NewItems]) -> NewItems:
        """Join items, at least one part; all or none have `values`."""
        features = zip(*(part.features for part in parts), strict=True)
        values = [part.values for part in parts if part.values is not None]
        return cls(
            tuple(np.concatenate(columns) for columns in features),
            np.concatenate([part.codes for part in parts]),
            Encoded(*(np.concatenate(one) for one in zip(*values, strict=True)))
            if values
            else None,
        )


class ItemCodeRows(nn.Module):
    """The codes of the trained items, and a row for each code of each level."""

    of_item: Tensor  # int32 [num_items, levels]; codebook size of the level = no code

    def __init__(self, num_items: int, code_count: tuple[int, ...], dim: int) -> None:
        """Make random rows; the items have no codes yet."""
        super().__init__()
        self.levels = nn.ModuleList(
            nn.Embedding(count + 1, dim, padding_idx=count) for count in code_count
        )
        for table in self.levels:
            assert isinstance(table, nn.Embedding)
            nn.init.normal_(table.weight, std=0.02)
            with torch.no_grad():
                table.weight[-1] = 0
        self.register_buffer(
            "of_item", torch.tensor(code_count, dtype=torch.int32).repeat(num_items, 1)
        )

    def add(self, x: Tensor, codes: Tensor) -> Tensor:
        """Add the rows of codes, int [..., levels], to x [..., dim]."""
        for level, table in enumerate(self.levels):
            x = x + table(codes[..., level])
        return x

    @torch.no_grad()
    def start(self, codes: I32, residual: Tensor) -> None:
        """Set the items' codes, and start each code's row at the mean of its items' residuals.

        The mean is subtracted from the residuals.

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
    """Draw the items that keep their residual rows in a training step.

    The kept rows are not scaled up, because serving uses every residual row as it is.

    Returns:
        float32 [num_items, 1] of 0 and 1; None = all items keep theirs.
    """
    return (torch.rand(num_items, 1) >= row_dropout).float() if row_dropout else None
