"""Meta's DLRMv3 (`DlrmHSTU`), the ranker of MLPerf's recommender: a token is MLPs of item and actions, and positions.

SiLU on U alone, no relative bias, positions counted from the candidates back, the seconds to the request embedded in
every token, [U, O, Y] before the output matrix, and an MLP of the product of a candidate's final row with an MLP of its
item. MLPs of one item, or of one set of actions, are folded into tables: a row each.

Source: its public code, `modules/{dlrm_hstu,stu,preprocessors,action_encoder,positional_encoder,postprocessors}.py`;
settings are the fields of its `DlrmHSTUConfig`, with the defaults of its configurations. Its GPU kernel clamps time
buckets at the table's end, which is what is served.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from npu_gr.model.config import HSTUConfig, TimeBuckets, TimePeriod
from npu_gr.model.imported.converted import Converted, GivenNames, filled, named, named_items
from npu_gr.model.imported.source import ForeignCheckpoint

TRANSDUCER = "_hstu_transducer."
PREPROCESSOR = f"{TRANSDUCER}_input_preprocessor."
TABLES = "_embedding_collection.embeddings."
ITEM_TABLES = ("movie_id", "video_id", "item_id", "post_id")
MAX_ACTION_BITS = 8  # sets of actions are rows of a table, 2^8
EPS = 1e-5  # of its norms outside the layers


def convert(source: ForeignCheckpoint, names: GivenNames) -> Converted:
    """Convert a checkpoint.

    Raises:
        CheckpointError: something does not convert; everything that does not is named.
    """
    scaling = int(source.setting("scaling_seqlen", 0))
    if scaling < 1:
        source.refuse(
            "attention is divided by the longest sequence of each batch (rule E1): pass --set scaling_seqlen=N, the "
            "number that it was trained with"
        )
    if f"{PREPROCESSOR}_batched_contextual_linear_weights" in source.tensors:
        source.refuse("contextual features: each has a token of its own in front of the history")
        source.drop(prefix=f"{PREPROCESSOR}_batched_contextual_linear_")
    table = next((f"{TABLES}{name}.weight" for name in ITEM_TABLES if f"{TABLES}{name}.weight" in source.tensors), "")
    items = source.take(table or f"{TABLES}movie_id.weight", -1, -1)
    content = _mlp(source, f"{PREPROCESSOR}_content_embedding_mlp.", items)
    candidates = _mlp(source, "_item_embedding_mlp.", items)
    if source.tensors.get(f"{PREPROCESSOR}_additional_embedding_mlp.0.weight", torch.ones(1)).numel() == 0:
        source.drop(prefix=f"{PREPROCESSOR}_additional_embedding_mlp.")  # of no feature
    dim = content.shape[1]
    sets, actions = _actions(source, dim)
    positions = source.take(f"{TRANSDUCER}_positional_encoder._position_embeddings_weight", -1, dim)
    times = source.take(f"{TRANSDUCER}_positional_encoder._timestamp_embeddings_weight", -1, dim)
    stu = f"{TRANSDUCER}_stu_module._stu_layers."
    num_layers = len({name.split(".")[3] for name in source.tensors if name.startswith(stu)})
    if not num_layers:
        source.refuse(f"missing tensor {stu}0._uvqk_weight")
    heads, v_dim, qk_dim = (
        int(source.setting(key, default))
        for key, default in (("hstu_num_heads", 4), ("hstu_attn_linear_dim", 128), ("hstu_attn_qk_dim", 128))
    )
    is_per_head = bool(source.setting("hstu_group_norm", False))
    head = "_multitask_module._prediction_module."
    hidden = source.take(f"{head}0.weight", -1, dim)
    last = source.take(f"{head}2.weight", -1, len(hidden))
    post = f"{TRANSDUCER}_output_postprocessor."
    scale = dim**0.5
    tensors = {
        "item.weight": content * scale,
        "action.weight": actions * scale,
        "candidate.weight": candidates,
        "position.weight": positions,
        "query_time.weight": times,
        "norm_head.weight": source.take(f"{post}_layer_norm.weight", dim),
        "norm_head.bias": source.take(f"{post}_layer_norm.bias", dim),
        "head.0.weight": hidden,
        "head.0.bias": source.take(f"{head}0.bias", len(hidden)),
        "head.1.weight": source.take(f"{head}1.weight", len(hidden)),
        "head.1.bias": source.take(f"{head}1.bias", len(hidden)),
        "head.2.weight": last,
        "head.2.bias": source.take(f"{head}2.bias", len(last)),
    }
    periods = _clocks(source, post, dim, tensors)
    for layer in range(num_layers):
        tensors |= _layer(source, f"{stu}{layer}.", f"layers.{layer}.", dim, heads, qk_dim, v_dim, is_per_head)
    source.finish()  # before sizes that follow from what is missing are refused
    config = HSTUConfig(
        num_items=max(len(items), 1),
        actions=named(source, "actions", names.actions, sets),
        tasks=named(source, "tasks", names.tasks, tuple(f"task{index}" for index in range(max(len(last), 1)))),
        dim=dim,
        num_layers=max(num_layers, 1),
        num_heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        head_dim=max(len(hidden), 1),
        max_history_tokens=max(len(positions) - 1, 1),
        activation="u",
        residual="concat",
        norm="head" if is_per_head else "layer",
        relative_bias="none",
        scaling_seqlen=max(scaling, 1),
        positions="reverse",
        query_times=TimeBuckets(function="sqrt", count=max(len(times), 2), unit_s=60.0),
        head="product",
        head_periods=periods,
        head_norm_eps=EPS,
        head_activation="norm_gate",
    )
    source.notes += [
        "positions count from the candidates back and tokens embed the time to the request: served without a prefix "
        "cache (relay.enabled: false)",
        "an action is the sum of the weights of what was done, as the logs have it",
    ]
    return filled(source, config, tensors, named_items(source, names, len(items), 0))


def _mlp(source: ForeignCheckpoint, at: str, rows: Tensor) -> Tensor:
    """Take an MLP of two linear layers, a norm gate between and a norm behind, and give its results for rows."""
    first = source.take(f"{at}0.weight", -1, rows.shape[1])
    x = linear(rows, first, source.take(f"{at}0.bias", len(first)))
    gate = source.take(f"{at}1.weight", len(first)), source.take(f"{at}1.bias", len(first))
    x = x * layer_norm(x, x.shape[-1:], *gate, EPS).sigmoid()
    second = source.take(f"{at}2.weight", -1, len(first))
    x = linear(x, second, source.take(f"{at}2.bias", len(second)))
    norm = source.take(f"{at}3.weight", len(second)), source.take(f"{at}3.bias", len(second))
    return layer_norm(x, x.shape[-1:], *norm, EPS)


def _actions(source: ForeignCheckpoint, dim: int) -> tuple[tuple[str, ...], Tensor]:
    """Name every set of actions by the sum of its weights, and compute its row; the last row is a candidate's."""
    at = f"{PREPROCESSOR}_action_encoder."
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
    return names, _mlp(source, f"{PREPROCESSOR}_action_embedding_mlp.", rows)


def _clocks(source: ForeignCheckpoint, at: str, dim: int, tensors: dict[str, Tensor]) -> tuple[TimePeriod, ...]:
    """Take the clocks of the last rows, if there are any."""
    if f"{at}_period_units" not in source.tensors:
        return ()
    units = source.take(f"{at}_period_units", 1, -1).flatten().tolist()
    counts = source.take(f"{at}_units_per_period", 1, len(units)).flatten().tolist()
    tensors["clock.linear.weight"] = source.take(f"{at}_time_feature_combiner.weight", dim, dim + 2 * len(units))
    tensors["clock.linear.bias"] = source.take(f"{at}_time_feature_combiner.bias", dim)
    return tuple(TimePeriod(unit_s=int(u), num_units=int(n)) for u, n in zip(units, counts, strict=True))


def _layer(
    source: ForeignCheckpoint, theirs: str, ours: str, dim: int, heads: int, qk_dim: int, v_dim: int, is_per_head: bool
) -> dict[str, Tensor]:
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
