"""The HSTU ranker's configuration, as config.json of a checkpoint has it.

Each variant on which public implementations disagree is a field, never guessed from the weights.
The rules E1 to E10, cited below, say which variants keep a cached prefix exact: see
`docs/exactness.md`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from npu_gr.core.feature_schema.factors import MF_SCORE
from npu_gr.core.feature_schema.schema import Feature, Of, check_features
from npu_gr.core.settings import Count


class ItemFeature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A side feature: each item has up to `max_values` of `num_values` values, averaged."""

    name: str
    num_values: Count
    max_values: Count = 1
    # the values' names, which a new item uses; empty = the names are not known
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.values and len(set(self.values)) != self.num_values:
            raise ValueError(
                f"item_features {self.name}: values: needs {self.num_values} names, each once"
            )


class TimeBuckets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Maps a time difference to an entry of a time table, as public code defines it.

    bucket = floor(function(max(seconds, 1) / unit_s) / divisor), within 0 .. count - 1, in fp32.
    """

    function: Literal["log", "sqrt", "linear"]
    count: Annotated[int, msgspec.Meta(ge=2, le=65_536)]
    unit_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    divisor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    # `query_times` only: the times are rounded to float32 before they are subtracted
    of_float32: bool = False


class TimePeriod(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A period of the request's time that the final rows read; 3600 and 24: the hour of the day."""

    unit_s: Count
    num_units: Count


class HSTUConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the scores, except the weights and the settings in `PINNED`."""

    kind: Literal["hstu"] = "hstu"
    num_items: Count
    item_features: tuple[ItemFeature, ...] = ()
    # codebook size of each level of the items' semantic IDs; empty = semantic IDs are not read
    item_codes: tuple[Count, ...] = ()
    # share of item rows dropped in training; 0 = new items get no score
    row_dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    features: tuple[Feature, ...] = ()  # inputs in addition to items, actions and times
    # sum: the user's features are added into one token; each: one token per feature
    user_tokens: Literal["sum", "each"] = "sum"
    # causal: the user's tokens see the tokens before them; full: they see the whole history
    # (the contextual mask of public code)
    context: Literal["causal", "full"] = "causal"
    # kinds of events, e.g. ratings; an event's action is an index into it
    actions: tuple[str, ...]
    tasks: tuple[str, ...]  # one logit each, e.g. click, like
    shown_task: str = ""  # task whose logit has a term of counts, see `shown_term.py`; empty = none
    dim: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    qk_dim: Count = 32  # per head
    v_dim: Count = 32  # per head
    head_dim: Count = 64  # hidden width of the shared MLP before the task logits
    max_history_tokens: Count = 4096
    position_buckets: Annotated[int, msgspec.Meta(ge=2)] = 256
    retrieval: bool = False  # the model has the NEXT row: it retrieves items as well as ranks them

    # SiLU on all four projections (paper) or on U alone (Meta)
    activation: Literal["uvqk", "u"] = "uvqk"
    residual: Literal["add", "concat"] = "add"  # X + Y W (paper) or X + [U, O, Y] W (Meta)
    # norm of the attention output. layer: over all heads; group: per head, weights shared by the
    # heads; head: per head, one weight and bias a head (Meta's group norm)
    norm: Literal["layer", "group", "head"] = "layer"
    norm_eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-6  # of every norm
    # [U, norm(O), Y] instead of [U, O, Y]: Meta's `concat_ua`
    attention_norm_in_concat: bool = False
    alpha: float | None = None  # factor on Q K^T; None = 1 / sqrt(qk_dim)

    # bias of each layer's attention
    relative_bias: Literal["position_time", "position", "none"] = "position_time"
    time_buckets: TimeBuckets | None = None  # None = half octaves of seconds
    # the time of a row of the history as a query: its own, or that of the event after it (Meta's
    # research code; the last event, with the request's time, is then the final row)
    attention_time: Literal["own", "next"] = "own"

    # sum: an event is one token, item + action; interleaved: two tokens, item then action (a
    # candidate is its item alone)
    token: Literal["sum", "interleaved"] = "sum"  # noqa: S105 (no secret)

    # semi-local attention, in every layer: the row at position t reads positions
    # [0, attention_first_tokens) and (t - attention_window_tokens, t]; a candidate's position is
    # that of the token after the history. 0 = full attention
    attention_window_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    attention_first_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0

    # every token also embeds the seconds from it to the request (Meta's DLRM form)
    query_times: TimeBuckets | None = None

    # logits of a final row x, times `head_scale`. mlp: MLP(x); product: MLP(x * the candidate's row
    # of a second table); dot: x . the candidate's item row
    head: Literal["mlp", "product", "dot"] = "mlp"
    # periods of the request's time, mixed into the final row by a linear layer
    head_periods: tuple[TimePeriod, ...] = ()
    head_norm: Literal["layer", "l2", "none"] = "layer"  # of the final row
    head_item_norm: Literal["l2", "none"] = "none"  # of the items' rows in a product
    head_norm_eps: Annotated[float, msgspec.Meta(gt=0)] | None = None  # None = `norm_eps`
    # norm_gate: x * sigmoid(norm(x)); norm_silu: silu(norm(x))
    head_activation: Literal["silu", "relu", "gelu", "norm_gate", "norm_silu"] = "silu"
    head_scale: float = 1.0

    scaling: Literal["constant", "runtime"] = "constant"
    scaling_seqlen: Count = 4096  # the constant scale is 1 / scaling_seqlen
    # learned token positions, in addition to the relative bias
    positions: Literal["none", "start", "reverse"] = "none"

    def __post_init__(self) -> None:
        for field in ("actions", "tasks"):
            names = getattr(self, field)
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{field}: needs at least one name, each once, got {names!r}")
        if self.shown_task and self.shown_task not in self.tasks:
            raise ValueError(f"shown_task: {self.shown_task!r} is none of the tasks")
        if self.time_buckets is not None and self.relative_bias != "position_time":
            raise ValueError("time_buckets: only with relative_bias 'position_time'")
        if self.attention_norm_in_concat and self.residual != "concat":
            raise ValueError("attention_norm_in_concat: only with residual 'concat'")
        if (self.head == "dot") != (self.attention_time == "next"):
            raise ValueError(
                "head: 'dot' and attention_time 'next' go together: the last "
                "behaviour's row answers"
            )
        if self.head == "dot" and (
            len(self.tasks) != 1 or not self.retrieval or self.is_interleaved
        ):
            raise ValueError("head: 'dot' needs one task, retrieval, and token 'sum'")
        if self.is_interleaved and self.max_history_tokens < 2:
            raise ValueError(
                "max_history_tokens: a behaviour of an interleaved model is two tokens"
            )
        if self.retrieval and self.head == "product":
            raise ValueError("retrieval: not with head 'product': NEXT is no candidate")
        if self.features and self.head == "dot":
            raise ValueError("features: not with head 'dot'")
        if self.is_interleaved and self.features_of("event"):
            raise ValueError("features: none of events with token 'interleaved'")
        check_features(self.features)
        if self.max_history_tokens <= self.num_user_tokens:
            raise ValueError(
                f"max_history_tokens: the user's features are {self.num_user_tokens} tokens of them"
            )
        if self.context == "full" and self.relative_bias != "none":
            raise ValueError("context: 'full' only with relative_bias 'none'")
        self._check_window()

    def _check_window(self) -> None:
        """Check that nothing depends on the final length, whose rows have left the window."""
        window = self.attention_window_tokens
        if not window:
            if self.attention_first_tokens:
                raise ValueError("attention_first_tokens: only with attention_window_tokens")
            return
        if self.num_user_tokens > self.attention_first_tokens + window:
            raise ValueError(
                f"attention_window_tokens: the user's features are {self.num_user_tokens} tokens, "
                f"window and first tokens are {window + self.attention_first_tokens}"
            )
        for field, value, rule in (
            ("context", "full", "E4: the user's tokens read rows that the window has left"),
            ("positions", "reverse", "E2: positions counted from the end"),
            ("scaling", "runtime", "E1: a scale by the length of the history"),
            ("attention_time", "next", "E10: a row reads the time of the behaviour after it"),
        ):
            if getattr(self, field) == value:
                raise ValueError(f"{field}: {value!r} not with attention_window_tokens ({rule})")
        if self.shown_task:
            raise ValueError("shown_task: not with attention_window_tokens: it reads every token")
        if self.query_times is not None:
            raise ValueError(
                "query_times: not with attention_window_tokens (E3: it reads the request's time)"
            )

    def features_of(self, of: Of) -> tuple[Feature, ...]:
        """Return the features of users, items, events or crosses, in the checkpoint's order."""
        return tuple(feature for feature in self.features if feature.of == of)

    @property
    def has_factors(self) -> bool:
        """Whether the model holds a matrix factorisation, which a cross feature reads."""
        return any(feature.computed == MF_SCORE for feature in self.features_of("cross"))

    @property
    def num_user_tokens(self) -> int:
        """Number of tokens in front of the history that hold the user's features."""
        own = len(self.features_of("user"))
        return own if self.user_tokens == "each" else min(own, 1)

    @property
    def attention_alpha(self) -> float:
        """The factor on Q K^T."""
        return self.qk_dim**-0.5 if self.alpha is None else self.alpha

    @property
    def has_next(self) -> bool:
        """Whether the next item is predicted by NEXT, an extra row behind the history."""
        return self.retrieval and self.head != "dot"

    @property
    def tokens_per_event(self) -> int:
        """Number of tokens of an event."""
        return 2 if self.is_interleaved else 1

    @property
    def is_interleaved(self) -> bool:
        """Whether an event is two tokens."""
        return self.token == "interleaved"  # noqa: S105

    @property
    def has_plain_layers(self) -> bool:
        """Whether the fused kernels support the layers, apart from the attention's times."""
        return (
            self.norm != "head" and not self.attention_norm_in_concat and self.context == "causal"
        )

    @property
    def has_plain_passes(self) -> bool:
        """Whether the fused kernels support a whole forward pass, except tokens and head."""
        return self.has_plain_layers and self.has_plain_times and self.head != "dot"

    @property
    def has_plain_tokens(self) -> bool:
        """Whether a token is the sum of its item's and its action's vectors, and nothing else."""
        others = self.features or self.is_interleaved or self.query_times is not None
        return not others and self.positions == "none"

    @property
    def has_plain_head(self) -> bool:
        """Whether the logits are a SiLU MLP of the layer norm of a final row."""
        plain = (self.head, self.head_norm, self.head_activation, self.head_scale) == (
            "mlp",
            "layer",
            "silu",
            1.0,
        )
        return plain and not self.head_periods

    @property
    def has_plain_times(self) -> bool:
        """Whether the attention kernels support the model's times."""
        return self.time_buckets is None and self.attention_time == "own"

    @property
    def scores_new_items(self) -> bool:
        """Whether items that were not in training get a score, by their features and codes."""
        return self.row_dropout > 0 and bool(
            self.item_codes or self.item_features or self.features_of("item")
        )


# Keys that are written only if they differ from the default: older versions reject them.
LATER = (
    *("retrieval", "features", "norm_eps", "attention_norm_in_concat", "alpha", "time_buckets"),
    *(
        "attention_time",
        "token",
        "query_times",
        "head",
        "head_periods",
        "head_norm",
        "head_item_norm",
    ),
    *("head_norm_eps", "head_activation", "head_scale", "item_codes", "row_dropout", "user_tokens"),
    *("attention_window_tokens", "attention_first_tokens", "shown_task"),
)

# Keys of a checkpoint's config.json that have one value: our forward pass computes that variant
# only, because any other value breaks a cached prefix. Key -> the value, and the rule that another
# value breaks.
PINNED: dict[str, tuple[str | int, str]] = {
    "candidate_position": ("shared", "E8: scores would depend on the order of the candidates"),
    "query_time_embedding": ("none", "E3: the query time is not known when the prefix is encoded"),
    "min_full_attention_tokens": (0, "E5: which rows attend fully depends on the final length"),
    "sequence_pooling": ("none", "E6: a mean over the sequence depends on its end"),
    "target_attention": ("causal", "E7: non-causal target attention leaves nothing to reuse"),
}


def write_keys(config: HSTUConfig) -> dict[str, Any]:
    """Return the keys of `model` in config.json, including the pinned ones.

    Defaults that older versions do not know are left out, so that they read new checkpoints.
    """
    keys: dict[str, Any] = msgspec.to_builtins(config)
    defaults = dict(
        zip(HSTUConfig.__struct_fields__[::-1], HSTUConfig.__struct_defaults__[::-1], strict=False)
    )
    for key in LATER:
        if keys[key] == defaults[key]:
            del keys[key]
    for key in ("time_buckets", "query_times"):
        if (buckets := keys.get(key)) and not buckets["of_float32"]:
            del buckets["of_float32"]
    for feature in keys["item_features"]:
        if not feature["values"]:
            del feature["values"]
    return keys | {key: value for key, (value, _) in PINNED.items()}


def take_pinned(keys: dict[str, Any]) -> dict[str, Any]:
    """Check and remove the pinned keys of `model` in config.json; the rest are `HSTUConfig`'s.

    Raises:
        ValueError: A pinned key has another value; the message names the key and the rule.
    """
    for key, (value, rule) in PINNED.items():
        if key in keys and (keys[key] != value or isinstance(keys[key], bool)):
            raise ValueError(
                f"{key}: {keys[key]!r} is not served; only {value!r} keeps a cached "
                f"prefix exact ({rule})"
            )
    return {key: value for key, value in keys.items() if key not in PINNED}


def inexact_fields(config: HSTUConfig) -> list[str]:
    """List the settings with which a cached prefix would change the scores; empty = exact."""
    lines = []
    if config.scaling != "constant":
        rule = (
            "E1: a scale by the runtime length changes every cached value when the sequence grows"
        )
        lines.append(f"model.scaling: {config.scaling!r} with the prefix cache on ({rule})")
    if config.context != "causal":
        rule = (
            "E4: the user's tokens see the whole history, so their keys change with every "
            "behaviour after them"
        )
        lines.append(f"model.context: {config.context!r} with the prefix cache on ({rule})")
    if config.positions == "reverse":
        rule = "E2: positions counted from the end shift when behaviours are appended"
        lines.append(f"model.positions: 'reverse' with the prefix cache on ({rule})")
    if config.query_times is not None:
        rule = "E3: the time of the request is not known when the prefix is encoded"
        lines.append(f"model.query_times with the prefix cache on ({rule})")
    if config.attention_time == "next":
        rule = "E10: the last behaviour's keys change when the time of the one after it is known"
        lines.append(f"model.attention_time: 'next' with the prefix cache on ({rule})")
    return lines
