"""The HSTU ranker's configuration: what a checkpoint says about itself, and which settings keep a prefix exact.

A variant on which public implementations disagree is a field, never guessed from the weights. The rules E1 to E8, cited
below, say which variants keep a cached prefix exact: `docs/exactness.md`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from npu_gr.core.settings import Count
from npu_gr.feature_schema.schema import Feature, Of, check_features


class ItemFeature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side feature of items: each item has up to `max_values` of `num_values` values; they are averaged."""

    name: str
    num_values: Count
    max_values: Count = 1
    values: tuple[str, ...] = ()  # their names, by which a new item says its own; none = they were not kept

    def __post_init__(self) -> None:
        if self.values and len(set(self.values)) != self.num_values:
            raise ValueError(f"item_features {self.name}: values: needs {self.num_values} names, each once")


class HSTUConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the numbers, apart from the weights and the settings of `PINNED`."""

    kind: Literal["hstu"] = "hstu"
    num_items: Count
    item_features: tuple[ItemFeature, ...] = ()
    item_codes: tuple[Count, ...] = ()  # number of codes of each level of the items' semantic IDs; none = not read
    row_dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0  # of the training; 0 = no score for a new item
    features: tuple[Feature, ...] = ()  # what it reads beside items, actions and times
    actions: tuple[str, ...]  # what a behaviour can be, e.g. ratings; an event's action is an index into it
    tasks: tuple[str, ...]  # one logit each, e.g. click, like
    dim: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    qk_dim: Count = 32  # per head
    v_dim: Count = 32  # per head
    head_dim: Count = 64  # hidden width of the shared MLP before the task logits
    max_history_tokens: Count = 4096
    position_buckets: Annotated[int, msgspec.Meta(ge=2)] = 256
    retrieval: bool = False  # the model has the NEXT row, and finds items beside ranking them

    activation: Literal["uvqk", "u"] = "uvqk"  # SiLU on all four projections (paper) or on U alone (Meta)
    residual: Literal["add", "concat"] = "add"  # X + Y W (paper) or X + [U, O, Y] W (Meta)
    norm: Literal["layer", "group"] = "layer"  # of the attention output: over all heads, or each head by itself

    relative_bias: Literal["position_time", "none"] = "position_time"  # of each layer's attention

    scaling: Literal["constant", "runtime"] = "constant"
    scaling_seqlen: Count = 4096  # the constant scale is 1 / scaling_seqlen
    positions: Literal["none", "start", "reverse"] = "none"  # learned token positions beside the relative bias

    def __post_init__(self) -> None:
        for field in ("actions", "tasks"):
            names = getattr(self, field)
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{field}: needs at least one name, each once, got {names!r}")
        check_features(self.features)

    def features_of(self, of: Of) -> tuple[Feature, ...]:
        """The features of one `of`, in the order of the checkpoint."""
        return tuple(feature for feature in self.features if feature.of == of)

    @property
    def scores_new_items(self) -> bool:
        """Whether an item that was not in the training gets a score: by its features and codes."""
        return self.row_dropout > 0 and bool(self.item_codes or self.item_features or self.features_of("item"))


# Keys of a checkpoint's config.json that have one value: our forward pass computes that variant only, because any other
# value breaks a cached prefix. Key -> the value, and the rule that another value breaks.
PINNED: dict[str, tuple[str | int, str]] = {
    "candidate_position": ("shared", "E8: scores would depend on the order of the candidates"),
    "context": ("causal", "E4: context rows that see the whole history depend on later behaviours"),
    "query_time_embedding": ("none", "E3: the query time is not known when the prefix is encoded"),
    "min_full_attention_tokens": (0, "E5: which rows attend fully depends on the final length"),
    "sequence_pooling": ("none", "E6: a mean over the sequence depends on its end"),
    "target_attention": ("causal", "E7: non-causal target attention leaves nothing to reuse"),
}


def write_keys(config: HSTUConfig) -> dict[str, Any]:
    """The keys of `model` in config.json, the pinned ones included, so that older versions read new checkpoints."""
    keys: dict[str, Any] = msgspec.to_builtins(config)
    if not config.retrieval:
        del keys["retrieval"]  # 0.11 and older know no such key
    for key in ("item_codes", "row_dropout"):
        if not keys[key]:
            del keys[key]
    for feature in keys["item_features"]:
        if not feature["values"]:
            del feature["values"]
    if not config.features:
        del keys["features"]  # nor 0.12 this one
    return keys | {key: value for key, (value, _) in PINNED.items()}


def take_pinned(keys: dict[str, Any]) -> dict[str, Any]:
    """Check and remove the pinned keys of `model` in config.json; what is left are `HSTUConfig`'s.

    Raises:
        ValueError: a pinned key has another value; the message names the key and the rule.
    """
    for key, (value, rule) in PINNED.items():
        if key in keys and (keys[key] != value or isinstance(keys[key], bool)):
            raise ValueError(f"{key}: {keys[key]!r} is not served; only {value!r} keeps a cached prefix exact ({rule})")
    return {key: value for key, value in keys.items() if key not in PINNED}


def inexact_fields(config: HSTUConfig) -> list[str]:
    """Name each setting with which a cached prefix would change the scores, a line each; empty = exact."""
    lines = []
    if config.scaling != "constant":
        rule = "E1: a scale by the runtime length changes every cached value when the sequence grows"
        lines.append(f"model.scaling: {config.scaling!r} with the prefix cache on ({rule})")
    if config.positions == "reverse":
        rule = "E2: positions counted from the end shift when behaviours are appended"
        lines.append(f"model.positions: 'reverse' with the prefix cache on ({rule})")
    return lines
