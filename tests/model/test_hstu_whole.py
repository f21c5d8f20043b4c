"""Somebody has decided on every setting of a ranker whether kernels of whole layers compute it."""

from __future__ import annotations

import msgspec

from npu_gr.model.config import HSTUConfig

# of no layer, or told by `HstuPassCall` and `HstuLayerCall`
TOLD = {
    *(
        "kind",
        "num_items",
        "item_features",
        "features",
        "item_codes",
        "row_dropout",
        "actions",
        "tasks",
        "dim",
    ),
    *(
        "num_layers",
        "num_heads",
        "qk_dim",
        "v_dim",
        "head_dim",
        "max_history_tokens",
        "position_buckets",
        "retrieval",
    ),
    *(
        "activation",
        "residual",
        "norm",
        "relative_bias",
        "scaling",
        "scaling_seqlen",
        "positions",
        "user_tokens",
    ),
}
# with another value than the default a ranker's layers, or its head, go op by op
LEFT_TO_OTHERS = {
    *(
        "norm_eps",
        "attention_norm_in_concat",
        "alpha",
        "time_buckets",
        "attention_time",
        "token",
        "query_times",
    ),
    *(
        "head",
        "head_periods",
        "head_norm",
        "head_item_norm",
        "head_norm_eps",
        "head_activation",
        "head_scale",
    ),
    "context",
}


def test_a_new_setting_is_decided_on() -> None:
    """Is it told? Then it is TOLD.

    Else `fused_layers` and `HstuShape` must leave its rankers to others.
    """
    assert {field.name for field in msgspec.structs.fields(HSTUConfig)} <= TOLD | LEFT_TO_OTHERS
