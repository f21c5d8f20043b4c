"""Convert rankers of NVIDIA's `recsys-examples/examples/hstu`, with interleaved items and actions.

The model has SiLU on U, V, Q and K, one learned position a token counted from the start (candidates
share the next one), embeddings times sqrt(dim), no relative bias, epsilon 1e-5, and an MLP without
a norm on each candidate's row. The fused layer stores its weights transposed, U, V, Q and K in
turn; the native layer (tensor parallel) stores them head by head.

Source: its public code,
`modules/{hstu_processor,position_encoder,fused_hstu_layer,native_hstu_layer,mlp}.py`, settings as
its gin files bind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from npu_gr.model.config import HSTUConfig
from npu_gr.model.convert.source import (
    Converted,
    ForeignCheckpoint,
    GivenNames,
    filled,
    folded,
    named,
    named_items,
    numbered,
    per_head_to_kind,
)

BLOCK = "_hstu_block._attention_layers"
PREPROCESSOR = "_hstu_block._preprocessor"
TABLES = "_embedding_collection._data_parallel_embedding_collection.embeddings."
ITEM_TABLES = ("video_id", "movie_id", "item")  # names in its data sets and benchmarks
ACTION_TABLES = ("action_weights", "action")
UNSET = -1


def convert(source: ForeignCheckpoint, names: GivenNames) -> Converted:
    """Convert a checkpoint.

    Raises:
        CheckpointError: Something does not convert; the message lists every problem.
    """
    source.only("NetworkArgs.is_causal", [True], True)
    source.only("NetworkArgs.target_group_size", [1], 1)
    source.only("RankingArgs.prediction_head_bias", [True], True)
    scaling = int(source.setting("NetworkArgs.scaling_seqlen", UNSET))
    if scaling < 1:
        source.reject(
            "NetworkArgs.scaling_seqlen = -1: attention is divided by the longest sequence of each "
            "batch (rule E1); "
            "pass --set NetworkArgs.scaling_seqlen=N, the number that it was trained with"
        )
    num_layers, heads, dim, width = (
        int(source.setting(f"NetworkArgs.{key}", 1))
        for key in ("num_layers", "num_attention_heads", "hidden_size", "kv_channels")
    )
    items = _table(source, "item", ITEM_TABLES)
    actions = _table(source, "action", ACTION_TABLES)
    context, of_context = _contextual(source, dim)
    source.drop(suffix="._extra_state")
    if int(source.setting("NetworkArgs.item_embedding_dim", UNSET)) > 0:
        items, actions = (
            _mlp(source, f"{PREPROCESSOR}._item_mlp._mlp.", table, dim)
            for table in (items, actions)
        )
        source.drop(prefix=f"{PREPROCESSOR}._item_mlp.")
        source.notes.append("the MLP of items and actions is folded into their rows")
    positions = source.take(
        f"{PREPROCESSOR}._positional_encoder._position_embeddings_weight", -1, dim
    )
    most = 2 * int(source.setting("DatasetArgs.max_history_seqlen", len(positions)))
    longest = min(len(positions) - 1, most + len(context.get("features", ())))
    head = tuple(source.setting("RankingArgs.prediction_head_arch", (1, 1)))
    if len(head) != 2:
        source.reject(
            f"RankingArgs.prediction_head_arch = {list(head)}: only one hidden layer converts"
        )
        head = (1, 1)
    num_tasks = int(source.setting("RankingArgs.num_tasks", 1))
    if num_tasks != head[1]:
        source.reject(
            f"RankingArgs.num_tasks = {num_tasks}: {head[1]} logits are classes of one "
            "task, not tasks"
        )
    scale = dim**0.5
    tensors = {
        "item.weight": items * scale,
        "position.weight": positions[: longest + 1],
        "head.0.weight": source.take("_mlp._mlp.0.weight", head[0], dim),
        "head.0.bias": source.take("_mlp._mlp.0.bias", head[0]),
        "head.2.weight": source.take("_mlp._mlp.2.weight", head[1], head[0]),
        "head.2.bias": source.take("_mlp._mlp.2.bias", head[1]),
    }
    tensors |= of_context
    for layer in range(num_layers):
        tensors |= _layer(source, f"{BLOCK}.{layer}.", f"layers.{layer}.", dim, heads, width)
    source.finish()  # before sizes that follow from what is missing are rejected
    config = HSTUConfig(
        num_items=max(len(items), 1),
        actions=named(
            source,
            "actions",
            names.actions,
            tuple(str(index) for index in range(max(len(actions), 1))),
        ),
        tasks=named(
            source, "tasks", names.tasks, tuple(f"task{index}" for index in range(head[1]))
        ),
        dim=dim,
        num_layers=num_layers,
        num_heads=heads,
        qk_dim=width,
        v_dim=width,
        head_dim=head[0],
        max_history_tokens=max(longest, 1),
        norm_eps=float(source.setting("NetworkArgs.norm_epsilon", 1e-5)),
        relative_bias="none",
        token="interleaved",  # noqa: S106 (no secret)
        scaling_seqlen=max(scaling, 1),
        positions="start",
        head_norm="none",
        head_activation=source.only(
            "RankingArgs.prediction_head_act_type", ["relu", "gelu"], "relu"
        ),
        **context,
    )
    shown = actions.new_zeros(1, actions.shape[-1])  # a candidate is its item alone
    tensors["action.weight"] = torch.cat([actions * scale, shown])
    return filled(source, config, tensors, named_items(source, names, len(items), 0))


def _table(source: ForeignCheckpoint, what: str, names: tuple[str, ...]) -> Tensor:
    """Take the embedding table of items or actions, [rows, width]."""
    found = [name for name in names if f"{TABLES}{name}.weight" in source.tensors]
    if not found:
        source.reject(
            f"no table of {what}s: {TABLES}{{{','.join(names)}}}.weight; dump a dynamic table into "
            "the state dict first"
        )
        return torch.zeros(1, 1)
    return source.take(f"{TABLES}{found[0]}.weight", -1, -1)


def _contextual(source: ForeignCheckpoint, dim: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the remaining tables, of contextual features with a token each: settings, tensors."""
    left = [
        name.removeprefix(TABLES).removesuffix(".weight")
        for name in source.tensors
        if name.startswith(TABLES)
    ]
    if not left:
        return {}, {}
    given = source.setting(
        "BenchmarkDatasetArgs.contextual_feature_names", left if len(left) == 1 else []
    )
    names = list(source.setting("contextual_feature_names", given))
    if sorted(names) != sorted(left):
        source.reject(
            f"contextual features {', '.join(sorted(left))}: pass --set "
            "contextual_feature_names=[..] with their names "
            "in the order of their tokens"
        )
        names = left
    tables = [source.take(f"{TABLES}{name}.weight", -1, -1) for name in names]
    if int(source.setting("NetworkArgs.contextual_embedding_dim", UNSET)) > 0:
        tables = [
            _mlp(source, f"{PREPROCESSOR}._contextual_mlp._mlp.", table, dim) for table in tables
        ]
        source.drop(prefix=f"{PREPROCESSOR}._contextual_mlp.")
    elif any(table.shape[1] != dim for table in tables):
        source.reject(
            f"contextual features: {[table.shape[1] for table in tables]} wide, without an MLP all "
            f"have {dim}"
        )
        return {}, {}
    features = [numbered(source, name, table) for name, table in zip(names, tables, strict=True)]
    settings, tensors = folded(
        features, torch.eye(dim).expand(len(names), -1, -1), torch.zeros(len(names), dim), dim**0.5
    )
    source.notes.append(
        "a contextual feature without a value is a token of zeros; in training it has no token"
    )
    is_causal = bool(source.setting("NetworkArgs.disable_contextual_mask", False))
    if not is_causal:
        source.notes.append(
            "contextual tokens see the whole history (E4): serve without a prefix cache "
            "(relay.enabled: false)"
        )
    return settings | {"context": "causal" if is_causal else "full"}, tensors


def _mlp(source: ForeignCheckpoint, at: str, table: Tensor, dim: int) -> Tensor:
    """Pass each row of a table through the token MLP.

    The MLP's tensors are not consumed, because items and actions share it.
    """
    parts = [
        source.tensors.get(f"{at}{name}") for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    ]
    if any(part is None for part in parts) or parts[0].shape[1] != table.shape[1]:  # type: ignore[union-attr]
        source.reject(f"{at}0.weight and .2.weight: not an MLP from {table.shape[1]} to {dim}")
        return table.new_zeros(len(table), dim)
    first, first_bias, second, second_bias = (part.float() for part in parts if part is not None)
    return linear(relu(linear(table, first, first_bias)), second, second_bias)


def _layer(
    source: ForeignCheckpoint, theirs: str, ours: str, dim: int, heads: int, width: int
) -> dict[str, Tensor]:
    """Take the tensors of one layer, fused or native."""
    rows = 4 * heads * width
    if f"{theirs}_linear_uvqk.weight" in source.tensors:  # native: [out, in], head by head
        uvqk = per_head_to_kind(
            source.take(f"{theirs}_linear_uvqk.weight", rows, dim), heads, [width] * 4
        )
        bias = per_head_to_kind(source.take(f"{theirs}_linear_uvqk.bias", rows), heads, [width] * 4)
        out = source.take(f"{theirs}_linear_proj.weight", dim, heads * width)
        norm = f"{theirs}_output_ln_dropout_mul."
    else:
        uvqk = source.take(f"{theirs}_linear_uvqk_weight", dim, rows).T
        bias = source.take(f"{theirs}_linear_uvqk_bias", rows)
        out = source.take(f"{theirs}_linear_proj_weight", heads * width, dim).T
        norm = f"{theirs}_output_layernorm_"
    return {
        ours + "uvqk.weight": uvqk,
        ours + "uvqk.bias": bias,
        ours + "out.weight": out,
        ours + "norm_in.weight": source.take(f"{theirs}_input_layernorm_weight", dim),
        ours + "norm_in.bias": source.take(f"{theirs}_input_layernorm_bias", dim),
        ours + "norm_attention.weight": source.take(f"{norm}weight", heads * width),
        ours + "norm_attention.bias": source.take(f"{norm}bias", heads * width),
    }
