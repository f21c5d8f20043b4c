"""Convert rankers of Alibaba's TorchEasyRec, `DlrmHSTU`.

It is Meta's DLRM form of HSTU, with contextual features in front of the history:

    token of an event   MLP(item row) + MLP(action rows), times sqrt(dim); or the two interleaved
    token of the user   a linear layer of each contextual feature's row, or one of all of them
    positions           from the candidates back, with the seconds to the request; or from the
                        start, without times
    user's tokens       see the whole history (E4), or with `contextual_seq_len: 0` only the tokens
                        before them
    logits              an MLP of the product of a candidate's final row with an MLP of its item

Source: its public code, `DlrmHSTU`, `HSTUTransducer` and their parts; settings are those of its
`pipeline.config`, with the defaults of its protocol buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    stu_layer,
)
from npu_gr.model.convert.torcheasyrec_files import FeatureConfigs, TextMessage, pipeline_of

TRANSDUCER = "_hstu_transducer."
PREPROCESSOR = f"{TRANSDUCER}_input_preprocessor."
WHY_NOT = {
    "ultra_hstu": "windows of attention, truncation between layers (E5) and several channels",
    "hstu_match": "two towers: an item's vector is not the row that it has in a history",
}
HEADS = {
    ("nn.ReLU", False): "relu",
    ("nn.SiLU", False): "silu",
    ("nn.GELU", False): "gelu",
    ("nn.SiLU", True): "norm_silu",
}
KNOWN = {  # fields that are read, or that do not change what is served
    "dlrm_hstu": "hstu fusion_mtl_tower max_seq_len item_embedding_hidden_dim "
    "enable_global_average_loss sequence_timestamp_is_ascending concat_contextual_features",
    "hstu": "stu input_dropout_ratio attn_num_layers positional_encoder input_preprocessor "
    "output_postprocessor name attn_truncation_split_layer attn_truncation_tail_len",
    "stu": "embedding_dim num_heads hidden_dim attention_dim output_dropout_ratio max_attn_len "
    "attn_alpha use_group_norm recompute_normed_x recompute_uvqk recompute_y sort_by_length "
    "contextual_seq_len sla_k1 sla_k2 scaling_seqlen",
    "contextual_preprocessor": "action_encoder action_mlp content_encoder content_mlp",
    "contextual_interleave_preprocessor": "action_encoder enable_interleaving action_mlp "
    "content_encoder content_mlp",
    "positional_encoder": "num_position_buckets num_time_buckets use_time_encoding time_bucket_fn "
    "time_bucket_increments",
    "fusion_mtl_tower": "mlp task_configs",
    "mlp": "hidden_units dropout_ratio activation use_bn bias use_ln",
}


class _Head(NamedTuple):
    """The MLP from a product to the logits."""

    tensors: dict[str, Tensor]
    width: int
    activation: Any
    tasks: tuple[str, ...]


def convert(source: ForeignCheckpoint, names: GivenNames) -> Converted:
    """Convert a checkpoint.

    Raises:
        CheckpointError: Something does not convert; the message lists every problem.
    """
    pipeline = pipeline_of(source.settings)
    model = pipeline.message("model_config")
    if "dlrm_hstu" not in model.fields or model.fields.keys() & WHY_NOT.keys():
        kind = next((kind for kind in model.fields if kind in WHY_NOT), "")
        source.reject(
            f"model_config: only dlrm_hstu converts{f'; {kind}: {WHY_NOT[kind]}' if kind else ''}"
        )
        source.tensors.clear()
        source.finish()
    source.tensors = {
        name.removeprefix("model."): tensor for name, tensor in source.tensors.items()
    }
    dlrm = _known(source, model, "dlrm_hstu")
    hstu = _known(source, dlrm, "hstu")
    stu = _known(source, hstu, "stu")
    for field in ("max_attn_len", "sla_k1", "sla_k2"):
        if stu.one(field, 0):
            source.reject(
                f"{field} = {stu.one(field)}: no window of attention is served, rows see "
                "all before them"
            )
    for field in ("attn_truncation_split_layer", "attn_truncation_tail_len"):
        if hstu.one(field, 0):
            source.reject(
                f"{field} = {hstu.one(field)}: which rows are left depends on where the "
                "sequence ends (E5)"
            )
    dim, heads, v_dim, qk_dim = (
        int(stu.one(key, 1))
        for key in ("embedding_dim", "num_heads", "hidden_dim", "attention_dim")
    )
    configs = FeatureConfigs(source, pipeline)
    items = configs.items()
    tensors: dict[str, Tensor] = {
        "candidate.weight": gated_mlp(source, "_item_embedding_mlp.", items)
    }
    is_interleaved, sets = _tokens(source, hstu.message("input_preprocessor"), items, dim, tensors)
    context, own = _context(
        source, configs, bool(dlrm.one("concat_contextual_features", False)), dim
    )
    tensors |= own
    tokens = 1 if context.get("user_tokens") == "sum" else len(context.get("features", ()))
    full = int(stu.one("contextual_seq_len", -1))
    if full not in (-1, 0, tokens):
        source.reject(
            f"contextual_seq_len = {full}: 0, or all {tokens} of the user's tokens convert"
        )
    num_positions, places = _places(
        source, _known(source, hstu, "positional_encoder"), dim, tensors
    )
    longest = min(num_positions - 1, int(dlrm.one("max_seq_len", num_positions)))
    tensors["position.weight"] = tensors["position.weight"][: longest + 1]
    is_per_head = bool(stu.one("use_group_norm", False))
    for layer in range(num_layers := int(hstu.one("attn_num_layers", 3))):
        at = f"{TRANSDUCER}_stu_module._stu_layers.{layer}."
        tensors |= stu_layer(source, at, f"layers.{layer}.", dim, heads, qk_dim, v_dim, is_per_head)
    head = _head(source, _known(source, dlrm, "fusion_mtl_tower"), dim)
    post = f"{TRANSDUCER}_output_postprocessor."
    periods = clocks(source, post, dim, tensors)
    is_unit = "l2norm_postprocessor" in hstu.message("output_postprocessor").fields
    if not is_unit:
        tensors |= {
            f"norm_head.{key}": source.take(f"{post}_layer_norm.{key}", dim)
            for key in ("weight", "bias")
        }
    source.drop(prefix="_metric_modules.")
    scaling = int(stu.one("scaling_seqlen", -1))
    source.finish()
    config = HSTUConfig(
        num_items=len(items),
        actions=named(source, "actions", names.actions, sets),
        tasks=named(source, "tasks", names.tasks, head.tasks),
        dim=dim,
        num_layers=num_layers,
        num_heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        head_dim=head.width,
        max_history_tokens=max(longest, 1),
        activation="u",
        residual="concat",
        norm="head" if is_per_head else "layer",
        alpha=stu.one("attn_alpha") or None,
        relative_bias="none",
        token="interleaved" if is_interleaved else "sum",
        context="causal" if full == 0 else "full",
        scaling_seqlen=scaling if scaling >= 0 else int(dlrm.one("max_seq_len", 1)),
        head="product",
        head_periods=periods,
        head_norm="l2" if is_unit else "layer",
        head_norm_eps=EPS,
        head_activation=head.activation,
        **context,
        **places,
    )
    tensors |= head.tensors
    source.notes += _notes(config)
    return filled(source, config, tensors, named_items(source, names, len(items), 0))


def _known(source: ForeignCheckpoint, around: TextMessage, name: str) -> TextMessage:
    """Return the message in a field; its unknown fields are rejected."""
    found = around.message(name)
    for field in found.fields.keys() - set(KNOWN[name].split()):
        source.reject(f"{name}.{field}: unknown field; it may change the scores")
    return found


def _tokens(
    source: ForeignCheckpoint,
    preprocessor: TextMessage,
    items: Tensor,
    dim: int,
    tensors: dict[str, Tensor],
) -> tuple[bool, tuple[str, ...]]:
    """Take the item and action rows of the events' tokens.

    Returns:
        Whether items and actions are interleaved, and the actions' names.
    """
    is_plain = "contextual_preprocessor" in preprocessor.fields
    own = _known(
        source,
        preprocessor,
        "contextual_preprocessor" if is_plain else "contextual_interleave_preprocessor",
    )
    if not own.fields:
        source.reject(
            f"input_preprocessor: {', '.join(preprocessor.fields) or 'none'} does not convert"
        )
    is_interleaved = not is_plain and bool(own.one("enable_interleaving", True))
    encoder = next(iter(own.message("content_encoder").fields), "slice_content_encoder")
    if encoder != "slice_content_encoder":
        source.reject(
            f"content_encoder.{encoder}: an item's row in a history is not its row as a candidate"
        )
        source.drop(prefix=f"{PREPROCESSOR}_content_encoder.")
    for mlp in ("content_mlp", "action_mlp"):
        if "parameterized_mlp" in own.message(mlp).fields:
            source.reject(
                f"{mlp}.parameterized_mlp: its weights are the user's, so an item has no "
                "row of its own"
            )
            source.drop(prefix=f"{PREPROCESSOR}_{mlp.removesuffix('_mlp')}_embedding_mlp.")
    scale = dim**0.5
    if "parameterized_mlp" in own.message("content_mlp").fields:
        return is_interleaved, ("0",)
    tensors["item.weight"] = (
        gated_mlp(source, f"{PREPROCESSOR}_content_embedding_mlp._mlp.", items) * scale
    )
    if "action_encoder" not in own.fields:
        tensors["action.weight"] = torch.zeros(2, dim)
        return is_interleaved, ("seen",)
    if "parameterized_mlp" in own.message("action_mlp").fields:
        return is_interleaved, ("0",)
    at = f"{PREPROCESSOR}_action_encoder."
    sets, rows = action_sets(source, at, f"{PREPROCESSOR}_action_embedding_mlp._mlp.", dim)
    if is_interleaved:
        rows[-1] = 0  # a candidate is its item alone
    tensors["action.weight"] = rows * scale
    return is_interleaved, sets


def _context(
    source: ForeignCheckpoint, configs: FeatureConfigs, is_one: bool, dim: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tables and linear layers of the user's tokens: settings, tensors.

    Args:
        source: The checkpoint.
        configs: Configurations of the features.
        is_one: The features' rows are concatenated into one token.
        dim: Width of a token.
    """
    features = configs.contextual()
    at = f"{PREPROCESSOR}_batched_contextual_linear_"
    weights = source.take(f"{at}weights", -1, -1, dim)
    biases = source.take(f"{at}bias", len(weights), 1, dim)[:, 0]
    widths = [one.rows.shape[1] for one in features]
    if is_one and weights.shape[:2] == (1, sum(widths)):
        return folded(features, weights[0].split(widths), biases, dim**0.5)
    if is_one or len(weights) != len(widths) or {weights.shape[1]} != set(widths):
        source.reject(
            f"contextual features of widths {widths}, and linear layers of shape "
            f"{list(weights.shape)}"
        )
        return {}, {}
    return folded(features, weights, biases, dim**0.5)


def _places(
    source: ForeignCheckpoint, encoder: TextMessage, dim: int, tensors: dict[str, Tensor]
) -> tuple[int, dict[str, Any]]:
    """Take the position and time embeddings: the number of positions, `HSTUConfig` settings."""
    at = f"{TRANSDUCER}_positional_encoder."
    tensors["position.weight"] = source.take(f"{at}_position_embeddings_weight", -1, dim)
    num_positions = len(tensors["position.weight"])
    if not encoder.one("use_time_encoding", False):
        return num_positions, {"positions": "start"}
    times = source.take(
        f"{at}_timestamp_embeddings_weight", int(encoder.one("num_time_buckets", 1)) + 1, dim
    )
    tensors["query_time.weight"] = times
    function = encoder.one("time_bucket_fn", "sqrt")
    if function not in ("sqrt", "log"):
        source.reject(f"time_bucket_fn = {function!r}: only 'sqrt' or 'log' converts")
        function = "sqrt"
    unit_s = float(encoder.one("time_bucket_increments", 60.0))
    buckets = TimeBuckets(
        function=function, count=max(len(times), 2), unit_s=unit_s, of_float32=True
    )
    return num_positions, {"positions": "reverse", "query_times": buckets}


def _head(source: ForeignCheckpoint, tower: TextMessage, dim: int) -> _Head:
    """Take the tower of all tasks; a task's two classes become one logit, their difference."""
    mlp = _known(source, tower, "mlp")
    units, at = mlp.many("hidden_units"), "_multitask_module.tower_mlp.mlp.0.perceptron."
    activation = HEADS.get((mlp.one("activation", "nn.ReLU"), bool(mlp.one("use_ln", False))))
    if (
        len(units) != 1
        or activation is None
        or mlp.one("use_bn", False)
        or not mlp.one("bias", True)
    ):
        source.reject(
            "fusion_mtl_tower.mlp: one hidden layer with a bias and "
            f"{' or '.join(HEADS.values())} converts"
        )
        source.drop(prefix="_multitask_module.")
        return _Head({}, 1, "silu", ("task",))
    hidden = source.take(f"{at}0.weight", int(units[0]), dim)
    tensors = {"head.0.weight": hidden, "head.0.bias": source.take(f"{at}0.bias", len(hidden))}
    if activation == "norm_silu":
        tensors |= {
            f"head.1.{key}": source.take(f"{at}1.{key}", len(hidden)) for key in ("weight", "bias")
        }
    tasks = [
        (str(task.one("task_name")), int(task.one("num_class", 1)))
        for task in tower.messages("task_configs")
    ]
    last = {
        key: source.take(
            f"_multitask_module.linear.{key}", sum(classes for _, classes in tasks), *width
        )
        for key, width in (("weight", [len(hidden)]), ("bias", []))
    }
    for key, tensor in last.items():
        parts = tensor.split([classes for _, classes in tasks]) if tasks else (tensor,)
        tensors[f"head.2.{key}"] = torch.stack(
            [part[1] - part[0] if len(part) == 2 else part[0] for part in parts]
        )
    for name, classes in tasks:
        if classes > 2:
            source.reject(
                f"task {name}: num_class = {classes}: logits of more than two classes are no score"
            )
        elif classes == 2:
            source.notes.append(
                f"task {name}: two classes are one logit, that of the second less that of the first"
            )
    return _Head(tensors, len(hidden), activation, tuple(name for name, _ in tasks))


def _notes(config: HSTUConfig) -> list[str]:
    notes = [
        "an action is the sum of the weights of an event's actions, including those that watch "
        "time sets"
    ]
    if config.context == "full":
        notes.append(
            "the user's tokens see the whole history (E4): serve without a prefix cache "
            "(relay.enabled: false)"
        )
    if config.query_times is not None:
        notes.append(
            "positions count from the candidates back (E2) and tokens embed the time to the "
            "request (E3): serve without a prefix cache (relay.enabled: false)"
        )
    return notes
