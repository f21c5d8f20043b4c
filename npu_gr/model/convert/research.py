"""Convert two models of Meta's generative-recommenders.

`generative_recommenders/research` is the HSTU of the paper's public experiments, a next-item model.

Its history is items with a learned position each; attention has alpha 1, one position and one
log-time bias for all heads, and rows query with the time of the item after them. The logits are the
last row, L2-normalised, times every item's embedding, over the temperature.

Source: arXiv:2402.17152 section 4.1.1 and its public code, `research/modeling/sequential`; settings
as its gin files bind them, defaults as its functions have them.

DLRMv3 (`DlrmHSTU`) is the ranker of MLPerf's recommender; a token is the sum of MLPs of its item
and actions, and a position.

It has SiLU on U alone, no relative bias, positions counted from the candidates back, the seconds to
the request embedded in every token, [U, O, Y] before the output matrix, and an MLP of the product
of a candidate's final row with an MLP of its item. MLPs of one item, or of one set of actions, are
folded into tables, one row each.

Source: its public code,
`modules/{dlrm_hstu,stu,preprocessors,action_encoder,positional_encoder,postprocessors}.py`;
settings are the fields of its `DlrmHSTUConfig`, with the defaults of its configurations. Its GPU
kernel clamps time buckets at the table's end, which is what is served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_gr.model.config import HSTUConfig, TimeBuckets
from npu_gr.model.convert.source import (
    EPS,
    Converted,
    ForeignCheckpoint,
    GivenNames,
    action_sets,
    clocks,
    filled,
    folded,
    gated_mlp,
    named,
    named_items,
    numbered,
    stu_layer,
)

ENCODER = "_hstu._attention_layers"
ITEMS = "_embedding_module._item_emb.weight"
POSITIONS = "_input_features_preproc._pos_emb.weight"
LOG10_2 = 0.301  # divisor of the natural logarithm of seconds, as the code has it


def convert_research(source: ForeignCheckpoint, names: GivenNames) -> Converted:
    """Convert a checkpoint of `research`.

    Raises:
        CheckpointError: Something does not convert; the message lists every problem.
    """
    source.only("train_fn.main_module", ["HSTU"], "HSTU")
    source.only("train_fn.embedding_module_type", ["local"], "local")
    source.only("train_fn.interaction_module_type", ["DotProduct"], "DotProduct")
    source.only("hstu_encoder.linear_config", ["uvqk"], "uvqk")
    source.only("hstu_encoder.normalization", ["rel_bias", "hstu_rel_bias"], "rel_bias")
    source.only("hstu_encoder.linear_activation", ["silu"], "silu")
    source.only("hstu_encoder.enable_relative_attention_bias", [True], True)
    concat = bool(source.setting("hstu_encoder.concat_ua", False))
    heads = int(source.setting("hstu_encoder.num_heads", 1))
    qk_dim, v_dim = (int(source.setting(f"hstu_encoder.{key}", 64)) for key in ("dqk", "dv"))
    num_layers = int(source.setting("hstu_encoder.num_blocks", 2))
    source.drop(suffix="_attn_mask")
    items = source.take(ITEMS, -1, -1)[1:]  # row 0 is padding
    num_items, dim = items.shape
    positions = source.take(POSITIONS, -1, dim)
    longest = len(positions) - int(source.setting("train_fn.gr_output_length", 10)) - 1
    if longest < 1:
        source.reject(f"train_fn.gr_output_length: leaves no history in {len(positions)} positions")
    scale = dim**0.5
    tensors = {"item.weight": items * scale, "position.weight": positions[: max(longest, 1) + 1]}
    num_times = 0
    for layer in range(num_layers):
        theirs, ours = f"{ENCODER}.{layer}.", f"layers.{layer}."
        times = source.take(theirs + "_rel_attn_bias._ts_w", num_times or -1)
        num_times = num_times or len(times)
        distances = source.take(theirs + "_rel_attn_bias._pos_w", 2 * len(positions) - 1)
        tensors |= {
            ours + "uvqk.weight": source.take(
                theirs + "_uvqk", dim, 2 * heads * (v_dim + qk_dim)
            ).T,
            ours + "out.weight": source.take(
                theirs + "_o.weight", dim, heads * v_dim * (3 if concat else 1)
            ),
            ours + "out.bias": source.take(theirs + "_o.bias", dim),
            ours + "position_bias": distances[: len(positions)].flip(0).expand(heads, -1),
            ours + "time_bias": times.expand(heads, -1),
        }
    is_unit = bool(source.setting("train_fn.item_l2_norm", False))
    user_norm = source.only("train_fn.user_embedding_norm", ["l2_norm", "layer_norm"], "l2_norm")
    temperature = float(source.setting("train_fn.temperature", 0.05))
    source.finish()  # before sizes that follow from what is missing are rejected
    config = HSTUConfig(
        num_items=max(num_items, 1),
        actions=named(source, "actions", names.actions, ("seen",)),
        tasks=named(source, "tasks", names.tasks, ("next",)),
        dim=dim,
        num_layers=num_layers,
        num_heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        max_history_tokens=max(longest, 1),
        position_buckets=max(len(positions), 2),
        retrieval=True,
        residual="concat" if concat else "add",
        attention_norm_in_concat=concat,
        alpha=1.0,
        time_buckets=TimeBuckets(function="log", count=max(num_times, 2), divisor=LOG10_2),
        attention_time="next",
        scaling_seqlen=len(positions),
        positions="start",
        head="dot",
        head_norm="l2" if user_norm == "l2_norm" else "layer",
        head_item_norm="l2" if is_unit else "none",
        head_scale=1 / temperature if is_unit else 1 / (temperature * scale),
    )
    source.notes += [
        "logits are products over the temperature; ratings are not read (nor by the public code)",
        "rows query with the next item's time: serve without a prefix cache (relay.enabled: false)",
    ]
    tensors["action.weight"] = torch.zeros(2, dim)
    return filled(source, config, tensors, named_items(source, names, num_items, 1))


TRANSDUCER = "_hstu_transducer."
PREPROCESSOR = f"{TRANSDUCER}_input_preprocessor."
TABLES = "_embedding_collection.embeddings."
ITEM_TABLES = ("movie_id", "video_id", "item_id", "post_id")


def convert_dlrm_v3(source: ForeignCheckpoint, names: GivenNames) -> Converted:
    """Convert a checkpoint of DLRMv3.

    Raises:
        CheckpointError: Something does not convert; the message lists every problem.
    """
    scaling = int(source.setting("scaling_seqlen", 0))
    if scaling < 1:
        source.reject(
            "attention is divided by the longest sequence of each batch (rule E1): pass --set "
            "scaling_seqlen=N, the "
            "number that it was trained with"
        )
    table = next(
        (
            f"{TABLES}{name}.weight"
            for name in ITEM_TABLES
            if f"{TABLES}{name}.weight" in source.tensors
        ),
        "",
    )
    items = source.take(table or f"{TABLES}movie_id.weight", -1, -1)
    content = gated_mlp(source, f"{PREPROCESSOR}_content_embedding_mlp.", items)
    candidates = gated_mlp(source, "_item_embedding_mlp.", items)
    if (
        source.tensors.get(
            f"{PREPROCESSOR}_additional_embedding_mlp.0.weight", torch.ones(1)
        ).numel()
        == 0
    ):
        source.drop(prefix=f"{PREPROCESSOR}_additional_embedding_mlp.")  # of no feature
    dim = content.shape[1]
    sets, actions = action_sets(
        source, f"{PREPROCESSOR}_action_encoder.", f"{PREPROCESSOR}_action_embedding_mlp.", dim
    )
    features, own = _contextual(source, dim)
    positions = source.take(f"{TRANSDUCER}_positional_encoder._position_embeddings_weight", -1, dim)
    times = source.take(f"{TRANSDUCER}_positional_encoder._timestamp_embeddings_weight", -1, dim)
    stu = f"{TRANSDUCER}_stu_module._stu_layers."
    num_layers = len({name.split(".")[3] for name in source.tensors if name.startswith(stu)})
    if not num_layers:
        source.reject(f"missing tensor {stu}0._uvqk_weight")
    heads, v_dim, qk_dim = (
        int(source.setting(key, default))
        for key, default in (
            ("hstu_num_heads", 4),
            ("hstu_attn_linear_dim", 128),
            ("hstu_attn_qk_dim", 128),
        )
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
    tensors |= own
    periods = clocks(source, post, dim, tensors)
    for layer in range(num_layers):
        tensors |= stu_layer(
            source, f"{stu}{layer}.", f"layers.{layer}.", dim, heads, qk_dim, v_dim, is_per_head
        )
    source.finish()  # before sizes that follow from what is missing are rejected
    config = HSTUConfig(
        num_items=max(len(items), 1),
        actions=named(source, "actions", names.actions, sets),
        tasks=named(
            source,
            "tasks",
            names.tasks,
            tuple(f"task{index}" for index in range(max(len(last), 1))),
        ),
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
        **features,
    )
    source.notes += [
        "positions count from the candidates back and tokens embed the time to the request: serve "
        "without a prefix cache (relay.enabled: false)",
        "an action is the sum of the weights of an event's actions, as in the logs",
    ]
    return filled(source, config, tensors, named_items(source, names, len(items), 0))


def _contextual(source: ForeignCheckpoint, dim: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the contextual features, if any: settings, tensors. Their tokens are causal."""
    at = f"{PREPROCESSOR}_batched_contextual_linear_"
    if f"{at}weights" not in source.tensors:
        return {}, {}
    lengths = dict(source.setting("contextual_feature_to_max_length", {}))
    weights = source.take(f"{at}weights", -1, -1, dim)
    biases = source.take(f"{at}bias", len(weights), dim)
    if len(lengths) != len(weights) or set(lengths.values()) != {1}:
        source.reject(
            f"contextual features: the checkpoint has {len(weights)} tokens of them and no names; "
            "pass --set "
            "contextual_feature_to_max_length=\"{'user_id': 1, ..}\" as trained, a token each"
        )
        return {}, {}
    if any(source.setting("contextual_feature_to_min_uih_length", {}).values()):
        source.reject(
            "contextual_feature_to_min_uih_length: whether a feature counts depends on the number "
            "of candidates (E8); "
            "without it they always count"
        )
    tables = [source.take(f"{TABLES}{name}.weight", -1, weights.shape[1]) for name in lengths]
    features = [numbered(source, name, table) for name, table in zip(lengths, tables, strict=True)]
    return folded(features, weights, biases, dim**0.5)
