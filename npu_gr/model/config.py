"""The HSTU ranker's configuration: what a checkpoint says about itself, and which settings keep a prefix exact.

Variants that public code disagrees on are fields, never guessed from weights (`relaygr.md` 2.7 and 3.1).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]


class ItemFeature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side feature of items: each item has up to `max_values` of `num_values` values; they are averaged."""

    name: str
    num_values: Positive
    max_values: Positive = 1


class HSTUConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the numbers, apart from the weights."""

    kind: Literal["hstu"] = "hstu"
    num_items: Positive
    item_features: tuple[ItemFeature, ...] = ()
    actions: tuple[str, ...]  # what a behaviour can be, e.g. ratings; an event's action is an index into it
    tasks: tuple[str, ...]  # one logit each, e.g. click, like
    dim: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 2
    qk_dim: Positive = 32  # per head
    v_dim: Positive = 32  # per head
    head_dim: Positive = 64  # hidden width of the shared MLP before the task logits
    max_history_tokens: Positive = 4096
    position_buckets: Annotated[int, msgspec.Meta(ge=2)] = 256

    activation: Literal["uvqk", "u"] = "uvqk"  # SiLU on all four projections (paper) or on U alone (Meta)
    residual: Literal["add", "concat"] = "add"  # X + Y W (paper) or X + [U, O, Y] W (Meta)
    norm: Literal["layer", "group"] = "layer"  # of the attention output: over all heads, or each head by itself

    scaling: Literal["constant", "runtime"] = "constant"
    scaling_seqlen: Positive = 4096  # the constant scale is 1 / scaling_seqlen
    positions: Literal["none", "start", "reverse"] = "none"  # learned token positions beside the relative bias
    candidate_position: Literal["shared", "list"] = "shared"
    context: Literal["causal", "bidirectional"] = "causal"
    query_time_embedding: Literal["none", "token"] = "none"
    min_full_attention_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    sequence_pooling: Literal["none", "mean"] = "none"
    target_attention: Literal["causal", "full"] = "causal"

    def __post_init__(self) -> None:
        for field in ("actions", "tasks"):
            names = getattr(self, field)
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{field}: needs at least one name, each once, got {names!r}")
        implemented = {
            "candidate_position": "shared",
            "context": "causal",
            "query_time_embedding": "none",
            "min_full_attention_tokens": 0,
            "sequence_pooling": "none",
            "target_attention": "causal",
        }
        for field, value in implemented.items():
            if getattr(self, field) != value:
                raise ValueError(
                    f"{field}: {getattr(self, field)!r} is not served; only {value!r} keeps a cached prefix exact "
                    f"({BREAKERS[field]})"
                )


# Field -> what it breaks when it leaves its exact value; the rules E1-E8 of `relaygr.md` 3.1.
BREAKERS = {
    "scaling": "E1: a scale by the runtime length changes every cached value when the sequence grows",
    "positions": "E2: positions counted from the end shift when behaviours are appended",
    "query_time_embedding": "E3: the query time is not known when the prefix is encoded",
    "context": "E4: context rows that see the whole history depend on later behaviours",
    "min_full_attention_tokens": "E5: which rows attend fully depends on the final length",
    "sequence_pooling": "E6: a mean over the sequence depends on its end",
    "target_attention": "E7: non-causal target attention leaves nothing to reuse",
    "candidate_position": "E8: scores would depend on the order of the candidates",
}


def inexact_fields(config: HSTUConfig) -> list[str]:
    """One line for each setting with which a cached prefix would change the scores; empty = exact."""
    lines = []
    if config.scaling != "constant":
        lines.append(f"model.scaling: {config.scaling!r} with the prefix cache on ({BREAKERS['scaling']})")
    if config.positions == "reverse":
        lines.append(f"model.positions: 'reverse' with the prefix cache on ({BREAKERS['positions']})")
    return lines
