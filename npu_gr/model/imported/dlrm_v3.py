"""Meta's DLRMv3 (`DlrmHSTU`), the ranker of MLPerf's recommender: a token is MLPs of item and actions, and positions.

SiLU on U alone, no relative bias, positions counted from the candidates back, the seconds to the request embedded in
every token, [U, O, Y] before the output matrix, and an MLP of the product of a candidate's final row with an MLP of its
item. MLPs of one item, or of one set of actions, are folded into tables: a row each.

Source: its public code, `modules/{dlrm_hstu,stu,preprocessors,action_encoder,positional_encoder,postprocessors}.py`;
settings are the fields of its `DlrmHSTUConfig`, with the defaults of its configurations. Its GPU kernel clamps time
buckets at the table's end, which is what is served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_gr.model.config import HSTUConfig, TimeBuckets
from npu_gr.model.imported.contextual import folded, numbered
from npu_gr.model.imported.converted import Converted, GivenNames, filled, named, named_items
from npu_gr.model.imported.source import ForeignCheckpoint
from npu_gr.model.imported.stu import EPS, action_sets, clocks, gated_mlp, stu_layer

TRANSDUCER = "_hstu_transducer."
PREPROCESSOR = f"{TRANSDUCER}_input_preprocessor."
TABLES = "_embedding_collection.embeddings."
ITEM_TABLES = ("movie_id", "video_id", "item_id", "post_id")


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
    table = next((f"{TABLES}{name}.weight" for name in ITEM_TABLES if f"{TABLES}{name}.weight" in source.tensors), "")
    items = source.take(table or f"{TABLES}movie_id.weight", -1, -1)
    content = gated_mlp(source, f"{PREPROCESSOR}_content_embedding_mlp.", items)
    candidates = gated_mlp(source, "_item_embedding_mlp.", items)
    if source.tensors.get(f"{PREPROCESSOR}_additional_embedding_mlp.0.weight", torch.ones(1)).numel() == 0:
        source.drop(prefix=f"{PREPROCESSOR}_additional_embedding_mlp.")  # of no feature
    dim = content.shape[1]
    sets, actions = action_sets(source, f"{PREPROCESSOR}_action_encoder.", f"{PREPROCESSOR}_action_embedding_mlp.", dim)
    features, own = _contextual(source, dim)
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
    tensors |= own
    periods = clocks(source, post, dim, tensors)
    for layer in range(num_layers):
        tensors |= stu_layer(source, f"{stu}{layer}.", f"layers.{layer}.", dim, heads, qk_dim, v_dim, is_per_head)
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
        **features,
    )
    source.notes += [
        "positions count from the candidates back and tokens embed the time to the request: served without a prefix "
        "cache (relay.enabled: false)",
        "an action is the sum of the weights of what was done, as the logs have it",
    ]
    return filled(source, config, tensors, named_items(source, names, len(items), 0))


def _contextual(source: ForeignCheckpoint, dim: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the contextual features, if there are any: settings, and tensors. Their tokens are causal here."""
    at = f"{PREPROCESSOR}_batched_contextual_linear_"
    if f"{at}weights" not in source.tensors:
        return {}, {}
    lengths = dict(source.setting("contextual_feature_to_max_length", {}))
    weights = source.take(f"{at}weights", -1, -1, dim)
    biases = source.take(f"{at}bias", len(weights), dim)
    if len(lengths) != len(weights) or set(lengths.values()) != {1}:
        source.refuse(
            f"contextual features: the checkpoint has {len(weights)} tokens of them and no names; pass --set "
            "contextual_feature_to_max_length=\"{'user_id': 1, ..}\" as trained, a token each"
        )
        return {}, {}
    if any(source.setting("contextual_feature_to_min_uih_length", {}).values()):
        source.refuse(
            "contextual_feature_to_min_uih_length: whether a feature counts depends on the number of candidates (E8); "
            "without it they always count"
        )
    tables = [source.take(f"{TABLES}{name}.weight", -1, weights.shape[1]) for name in lengths]
    features = [numbered(source, name, table) for name, table in zip(lengths, tables, strict=True)]
    return folded(features, weights, biases, dim**0.5)
