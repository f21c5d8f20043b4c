"""Meta's `generative_recommenders/research`: the HSTU of the paper's public experiments, a next-item model.

A history is items with a learned position each; attention has alpha 1, one position and one log-time bias for all
heads, and rows ask with the time of the item after them. The last row, divided by its length, times every item's
embedding, over the temperature, are the logits.

Source: arXiv:2402.17152 section 4.1.1 and its public code, `research/modeling/sequential`; settings as its gin files
bind them, defaults as its functions have them.
"""

from __future__ import annotations

import torch

from npu_gr.model.config import HSTUConfig, TimeBuckets
from npu_gr.model.imported.converted import Converted, GivenNames, filled, named, named_items
from npu_gr.model.imported.source import ForeignCheckpoint

ENCODER = "_hstu._attention_layers"
ITEMS = "_embedding_module._item_emb.weight"
POSITIONS = "_input_features_preproc._pos_emb.weight"
LOG10_2 = 0.301  # divisor of the natural logarithm of seconds, as the code has it


def convert(source: ForeignCheckpoint, names: GivenNames) -> Converted:
    """Convert a checkpoint.

    Raises:
        CheckpointError: something does not convert; everything that does not is named.
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
        source.refuse(f"train_fn.gr_output_length: leaves no history in {len(positions)} positions")
    scale = dim**0.5
    tensors = {"item.weight": items * scale, "position.weight": positions[: max(longest, 1) + 1]}
    num_times = 0
    for layer in range(num_layers):
        theirs, ours = f"{ENCODER}.{layer}.", f"layers.{layer}."
        times = source.take(theirs + "_rel_attn_bias._ts_w", num_times or -1)
        num_times = num_times or len(times)
        distances = source.take(theirs + "_rel_attn_bias._pos_w", 2 * len(positions) - 1)
        tensors |= {
            ours + "uvqk.weight": source.take(theirs + "_uvqk", dim, 2 * heads * (v_dim + qk_dim)).T,
            ours + "out.weight": source.take(theirs + "_o.weight", dim, heads * v_dim * (3 if concat else 1)),
            ours + "out.bias": source.take(theirs + "_o.bias", dim),
            ours + "position_bias": distances[: len(positions)].flip(0).expand(heads, -1),
            ours + "time_bias": times.expand(heads, -1),
        }
    is_unit = bool(source.setting("train_fn.item_l2_norm", False))
    user_norm = source.only("train_fn.user_embedding_norm", ["l2_norm", "layer_norm"], "l2_norm")
    temperature = float(source.setting("train_fn.temperature", 0.05))
    source.finish()  # before sizes that follow from what is missing are refused
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
        "logits are products over the temperature; ratings are not read, the code does not either",
        "rows ask with the next item's time: served without a prefix cache (relay.enabled: false)",
    ]
    tensors["action.weight"] = torch.zeros(2, dim)
    return filled(source, config, tensors, named_items(source, names, num_items, 1))
