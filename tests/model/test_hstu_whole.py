"""For every setting of a ranker it is decided whether fused kernels support it."""

from __future__ import annotations

import msgspec

from npu_gr.model.config import HSTUConfig

# not of a layer, or a field of `HstuPassCall` or `HstuLayerCall`
SUPPORTED = {
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
    "shown_task",  # added to the logits by `RankEngine`, whatever computed them
}
# a value other than the default makes a ranker's layers, or its head, run op by op
UNSUPPORTED = {
    *(
        "attention_window_tokens",
        "attention_first_tokens",
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
    """List a new setting in SUPPORTED if the calls contain it.

    Otherwise `fused_layers` and `HstuShape` must reject a ranker with it.
    """
    assert {field.name for field in msgspec.structs.fields(HSTUConfig)} <= SUPPORTED | UNSUPPORTED
