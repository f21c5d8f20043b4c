"""The result of a conversion, and what all conversions share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.core.errors import CheckpointError
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.imported.source import ForeignCheckpoint


class GivenNames(NamedTuple):
    """What a checkpoint of another project does not say of itself; empty = numbers, or the project's own words."""

    item_ids: I64 | None = None  # [num_items] external id of each row, each once
    actions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


class Converted(NamedTuple):
    """A ranker in our form."""

    model: HSTU
    item_ids: I64  # [num_items]
    notes: list[str]  # what became of things that a reader of the source would look for


def filled(source: ForeignCheckpoint, config: HSTUConfig, tensors: dict[str, Tensor], item_ids: I64) -> Converted:
    """Make the model.

    Args:
        source: everything of it is taken by now.
        config: the model's.
        tensors: of the model by our names; biases that are absent are zero, norms that are absent change nothing.
        item_ids: external id of each item row.

    Raises:
        CheckpointError: something of the source did not convert.
    """
    source.finish()
    model = HSTU(config)
    state = model.state_dict()
    for name, place in state.items():
        if name in tensors:
            place.copy_(tensors[name])
        else:
            assert "norm" in name or name.endswith(".bias") or name == "action.weight", name
            place.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    assert tensors.keys() <= state.keys(), tensors.keys() - state.keys()
    return Converted(model.eval().requires_grad_(False), item_ids, source.notes)


def named_items(source: ForeignCheckpoint, names: GivenNames, num_items: int, first_id: int) -> I64:
    """Return the given ids of items, or numbers from `first_id` on."""
    if names.item_ids is None:
        source.notes.append(f"items are numbers, {first_id} to {first_id + num_items - 1}")
        return np.arange(first_id, first_id + num_items)
    if len(names.item_ids) != num_items:
        raise CheckpointError(f"item ids: {len(names.item_ids)}, and the checkpoint has {num_items} items")
    return names.item_ids


def named(source: ForeignCheckpoint, what: str, given: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given names, or the default ones; a wrong number is noted."""
    if given and len(given) != len(default):
        source.refuse(f"{what}: {len(given)} names, and the checkpoint has {len(default)}")
        return default
    return given or default


def per_head_to_kind(weight: Tensor, num_heads: int, widths: list[int]) -> Tensor:
    """Bring rows laid out head by head, [H, u | v | q | k], into our order [U | V | Q | K].

    Args:
        weight: [H * sum(widths), ...].
        num_heads: H.
        widths: of U, V, Q and K in one head.
    """
    by_head = weight.view(num_heads, sum(widths), *weight.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in by_head.split(widths, dim=1)])
