"""What an instance serves: its models, its catalogue and its vectors, and changes of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.schema import Feature


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewItem:
    """An item to add to the catalogue."""

    item_id: int
    name: str = ""  # that the id was made of; "" = the id itself
    title: str = ""
    sid: tuple[int, ...] = ()  # none = one is made of its features
    order: float | None = None
    attributes: dict[str, bool | int | float | str] = field(default_factory=dict)
    # by name, what the ranker knows of the item beside its codes
    features: dict[str, str | int | float | list[str | int | float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CatalogueChange:
    """Changes that make a new version of the catalogue; applied in this order."""

    add: tuple[NewItem, ...] = ()
    withdraw: I64 | None = None  # [n] external ids
    restore: I64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsInfo:
    """The version of the vectors that is served."""

    version: str
    num_users: int
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None  # what a rollback would serve


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueInfo:
    """The version of the semantic-ID catalogue that is served."""

    version: str
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None  # what a rollback would serve
    # that the change made, by the item's name
    sids: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWay:
    """A way of computing a ranker's attention that the warm-up tried."""

    name: str
    prefill_ms: float | None = None  # the last chunk of the longest history; None = rejected
    rank_ms: float | None = None  # the most candidates behind it
    # largest difference of a logit from plain torch ops', in the logits' deviations
    drift: float | None = None
    rejected: str = ""  # why it is not used; "" = it could be

    @property
    def total_ms(self) -> float:
        """What the ways are compared by; infinite where it is rejected."""
        if self.prefill_ms is None or self.rank_ms is None:
            return float("inf")
        return self.prefill_ms + self.rank_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model in service, or one that drains."""

    name: str
    version: str
    tasks: tuple[str, ...]
    actions: tuple[str, ...]
    num_items: int
    max_history_tokens: int
    features: tuple[Feature, ...] = ()  # that it reads beside items, actions and times
    device: str
    dtype: str
    # what runs the hot ops: torch, or the instruction set of the native kernels
    kernels: str = "torch"
    # an op that has more than one implementation -> the one used
    ops: Mapping[str, str] = field(default_factory=dict)
    # what was tried for it, in order; () = there was one way, not measured
    attention: tuple[AttentionWay, ...] = ()
    # replaced: only requests that name its version get it, for `relay.t_life_s`
    is_draining: bool = False
