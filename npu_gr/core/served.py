"""Descriptions of the served models, catalogue and vectors, and changes of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Self

import msgspec
import numpy as np

from npu_gr.core.arrays import F32, I64
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.feature_schema.values import FeatureValue
from npu_gr.core.history import Events


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItem:
    """An item to add to the catalogue."""

    item_id: int
    name: str = ""  # from which the id was computed; "" for the id itself
    title: str = ""
    sid: tuple[int, ...] = ()  # semantic ID; empty to derive it from the features
    has_made_sid: bool = False  # `sid` was derived from the features
    order: float | None = None
    attributes: dict[str, bool | int | float | str] = field(default_factory=dict)
    # item features of the ranker, by name
    features: dict[str, FeatureValue | list[FeatureValue]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CatalogueChange:
    """Changes that make a new version of the catalogue, in this order."""

    add: tuple[NewItem, ...] = ()
    withdraw: I64 | None = None  # [n] external ids
    restore: I64 | None = None


class ItemChange(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A `CatalogueChange` as files have it."""

    add: tuple[NewItem, ...] = ()
    withdraw: tuple[int, ...] = ()
    restore: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ids = [*self.withdraw, *self.restore, *(new.item_id for new in self.add)]
        codes = [code for new in self.add for code in new.sid]
        if ids and not 0 <= min(ids) <= max(ids) < 2**63:
            raise ValueError("item ids must be from 0 to 2^63 - 1")
        if codes and not 0 <= min(codes) <= max(codes) < 2**31:
            raise ValueError("codes of semantic IDs must be from 0 to 2^31 - 1")

    @classmethod
    def of(cls, change: CatalogueChange) -> Self:
        """Convert a change."""
        ids = [() if one is None else one.tolist() for one in (change.withdraw, change.restore)]
        return cls(add=change.add, withdraw=tuple(ids[0]), restore=tuple(ids[1]))

    def change(self) -> CatalogueChange:
        """Convert it back."""
        return CatalogueChange(
            add=self.add,
            withdraw=np.array(self.withdraw, np.int64),
            restore=np.array(self.restore, np.int64),
        )


class DeltaMark(NamedTuple):
    """The newest delta whose items a catalogue has."""

    folder: str = ""  # of the deltas, which have numbers of their own
    sequence: int = 0


NO_DELTA = DeltaMark()


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorsInfo:
    """The served version of the vectors."""

    version: str
    num_users: int
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None  # version after a rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueInfo:
    """The served version of the semantic-ID catalogue."""

    version: str
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None  # version after a rollback
    # semantic IDs that the change created, by item name
    sids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    durable: bool = False  # whether changes survive a restart
    # new items that the change left out, by name, and why
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWay:
    """An implementation of a ranker's attention that the warm-up tried."""

    name: str
    prefill_ms: float | None = None  # last chunk of the longest history; None if rejected
    rank_ms: float | None = None  # most candidates after that history
    # largest difference from the logits of plain torch ops, in standard deviations
    drift: float | None = None
    rejected: str = ""  # why it is not usable; "" if it is

    @property
    def total_ms(self) -> float:
        """Time for comparing implementations; infinite if rejected."""
        if self.prefill_ms is None or self.rank_ms is None:
            return float("inf")
        return self.prefill_ms + self.rank_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInfo:
    """The delta that a ranker serves."""

    sequence: int  # 0 = the checkpoint itself
    weights: str  # digest of the served weights
    made_at: float  # unix seconds; 0 = no delta


class Refreshed(StrEnum):
    """What became of a prefix that was looked at after a delta; the value of a metric label."""

    EXACT = "exact"  # the delta did not touch it, or it was encoded again before
    ENCODED = "encoded"  # encoded again
    GONE = "gone"  # evicted, or its history is not cached
    NO_ROOM = "no_room"
    FAILED = "failed"  # a later delta touched it, or the device was overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model in service, or one that drains."""

    name: str
    version: str
    tasks: tuple[str, ...]
    actions: tuple[str, ...]
    num_items: int
    max_history_tokens: int
    features: tuple[Feature, ...] = ()  # inputs other than items, actions and times
    device: str
    dtype: str
    # implementation of the hot ops: torch, or the instruction set of the native kernels
    kernels: str = "torch"
    # op -> used implementation, for ops with several
    ops: Mapping[str, str] = field(default_factory=dict)
    # the tried implementations of attention, in order; empty if there was only one
    attention: tuple[AttentionWay, ...] = ()
    # replaced; serves only requests that name its version, for `relay.t_life_s`
    is_draining: bool = False
    delta: DeltaInfo | None = None  # of a ranker


class PrefixPlace(NamedTuple):
    """A cached prefix of a user."""

    model: str
    version: str
    tier: str  # hbm | dram | on_its_way


class KnownUser(NamedTuple):
    """What this instance knows of a user."""

    num_events: int
    events: Events  # the newest ones, oldest first
    prefixes: tuple[PrefixPlace, ...]
    in_vectors: bool  # whether the vectors of match were trained with the user


class LookedUpItems(NamedTuple):
    """Items, best first. n = items."""

    basis: str  # what they rest on
    items: I64  # [n] external ids
    scores: F32  # [n]; NaN = the basis has none


class ShadowInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A ranker that scores next to the served one; figures are means of the newest ranks.

    Differences are from the ranker that served first to the other one.
    """

    state: Literal["none", "scoring", "guarding"]  # guarding = it was promoted, and is watched
    path: str = ""  # its checkpoint
    version: str = ""
    against: str = ""  # version of the other ranker
    share: float = 0.0
    scored: int = 0
    skipped: dict[str, int] = {}  # by reason
    top_overlap: float | None = None  # of the ten best items
    same_first: float | None = None
    correlation: float | None = None
    mean_difference: float | None = None  # in standard deviations of the first's scores
    median_drift: float | None = None  # largest difference within a rank, in the same unit
    answers: str = ""  # folder with both rankers' answers; "" = nothing is recorded
    guarded_for_s: float | None = None  # left of the time for which the guard watches
    rolled_back: str = ""  # why the guard rolled the last promotion back
