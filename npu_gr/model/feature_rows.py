"""The features of one `of` as rows of the model's width: `FeatureTable`.

    row = sum of the table's rows (a multi-valued feature: their mean) + numbers @ W

A row depends on its own values alone, so a cached prefix stays exact. `core/feature_schema/encode.py` makes the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from npu_gr.backend.base import Affine
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.feature_schema.encode import Encoded, FeatureEncoder
from npu_gr.core.feature_schema.schema import Feature

_TORCH = TorchOps()  # differentiable, for training


class FeatureValues(NamedTuple):
    """`Encoded` on the model's device: n rows."""

    codes: Tensor  # int32 [..., width] rows of the table
    numbers: Tensor  # float32 [..., num_numbers]

    @classmethod
    def of(cls, encoded: Encoded) -> FeatureValues:
        """Wrap host arrays, for a model on the host."""
        return cls(torch.from_numpy(encoded.codes), torch.from_numpy(encoded.numbers))


class FeatureTable(nn.Module):
    """Weights of the features of one `of`: `codes.weight` [rows, dim] and `numbers.weight` [dim, num_numbers]."""

    missing_codes: Tensor
    missing_numbers: Tensor

    def __init__(self, features: Sequence[Feature], dim: int) -> None:
        """Make random weights.

        Args:
            features: all of one `of`, at least one.
            dim: of a row.
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
        """Return the values of n rows of which nothing is known."""
        return FeatureValues(self.missing_codes.expand(num_rows, -1), self.missing_numbers.expand(num_rows, -1))

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
        """Embed values of n rows feature by feature: [n, features, dim], in the order of the checkpoint."""
        found: list[Tensor] = []
        rows = self.codes(values.codes) * self._shares(values.codes)[..., None] if values.codes.shape[-1] else None
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
        """The share of each code in its feature's mean, of the codes' shape; 0 of padding."""
        shares = torch.ones(codes.shape, dtype=self.codes.weight.dtype, device=codes.device)
        for first, last in self._shared:
            is_value = codes[..., first:last] != self._padding
            shares[..., first:last] = is_value / is_value.sum(-1, keepdim=True).to(shares.dtype)
        return shares
