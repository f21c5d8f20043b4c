"""What Meta's DLRM form of HSTU and what descends from it have in common: their layers, and MLPs that become rows.

Source: the public code of generative-recommenders, `modules/{stu,preprocessors,action_encoder,postprocessors}.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from npu_gr.model.config import TimePeriod
from npu_gr.model.imported.source import ForeignCheckpoint

MAX_ACTION_BITS = 8  # sets of actions are rows of a table, 2^8
EPS = 1e-5  # of norms outside the layers


def gated_mlp(source: ForeignCheckpoint, at: str, rows: Tensor) -> Tensor:
    """Take an MLP of two linear layers, a norm gate between and a norm behind, and give its results for rows."""
    first = source.take(f"{at}0.weight", -1, rows.shape[1])
    x = linear(rows, first, source.take(f"{at}0.bias", len(first)))
    gate = source.take(f"{at}1.weight", len(first)), source.take(f"{at}1.bias", len(first))
    x = x * layer_norm(x, x.shape[-1:], *gate, EPS).sigmoid()
    second = source.take(f"{at}2.weight", -1, len(first))
    x = linear(x, second, source.take(f"{at}2.bias", len(second)))
    norm = source.take(f"{at}3.weight", len(second)), source.take(f"{at}3.bias", len(second))
    return layer_norm(x, x.shape[-1:], *norm, EPS)


def action_sets(source: ForeignCheckpoint, at: str, mlp: str, dim: int) -> tuple[tuple[str, ...], Tensor]:
    """Name every set of actions by the sum of its weights, and compute its row; the last row is a candidate's.

    Args:
        source: has them.
        at: of the encoder.
        mlp: of the MLP behind it.
        dim: of a row.
    """
    weights = source.tensors.pop(f"{at}_combined_action_weights", torch.tensor([], dtype=torch.int64)).tolist()
    bits = len(weights)
    if not bits:
        source.refuse("no action encoder: events of one kind only do not convert")
        return ("0",), torch.zeros(2, dim)
    if bits > MAX_ACTION_BITS or len({w.bit_count() for w in weights}) != 1 or len(set(weights)) != bits:
        source.refuse(f"action_weights = {weights}: up to {MAX_ACTION_BITS} powers of two convert")
        return ("0",), torch.zeros(2, dim)
    table = source.take(f"{at}_action_embedding_table", bits, -1)
    shown = source.take(f"{at}_target_action_embedding_table", 1, table.numel())
    masks = (torch.arange(2**bits)[:, None] >> torch.arange(bits)) & 1  # [sets, bits]
    rows = torch.cat([(masks[:, :, None] * table).flatten(1), shown])
    names = tuple(str(sum(w for w, on in zip(weights, mask, strict=True) if on)) for mask in masks.tolist())
    return names, gated_mlp(source, mlp, rows)


def clocks(source: ForeignCheckpoint, at: str, dim: int, tensors: dict[str, Tensor]) -> tuple[TimePeriod, ...]:
    """Take the clocks of the last rows, if there are any."""
    if f"{at}_period_units" not in source.tensors:
        return ()
    units = source.take(f"{at}_period_units", 1, -1).flatten().tolist()
    counts = source.take(f"{at}_units_per_period", 1, len(units)).flatten().tolist()
    tensors["clock.linear.weight"] = source.take(f"{at}_time_feature_combiner.weight", dim, dim + 2 * len(units))
    tensors["clock.linear.bias"] = source.take(f"{at}_time_feature_combiner.bias", dim)
    return tuple(TimePeriod(unit_s=int(u), num_units=int(n)) for u, n in zip(units, counts, strict=True))


def stu_layer(
    source: ForeignCheckpoint, theirs: str, ours: str, dim: int, heads: int, qk_dim: int, v_dim: int, is_per_head: bool
) -> dict[str, Tensor]:
    """Take the tensors of one layer."""
    rows = 2 * heads * (v_dim + qk_dim)
    norm = heads if is_per_head else heads * v_dim
    return {
        ours + "uvqk.weight": source.take(f"{theirs}_uvqk_weight", dim, rows).T,
        ours + "uvqk.bias": source.take(f"{theirs}_uvqk_beta", rows),
        ours + "norm_in.weight": source.take(f"{theirs}_input_norm_weight", dim),
        ours + "norm_in.bias": source.take(f"{theirs}_input_norm_bias", dim),
        ours + "out.weight": source.take(f"{theirs}_output_weight", 3 * heads * v_dim, dim).T,
        ours + "norm_attention.weight": source.take(f"{theirs}_output_norm_weight", norm),
        ours + "norm_attention.bias": source.take(f"{theirs}_output_norm_bias", norm),
    }
