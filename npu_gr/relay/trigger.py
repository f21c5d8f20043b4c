"""Whether to pre-infer a prefix: pure arithmetic on metadata. The caller counts the verdict.

Source: RelayGR (arXiv:2601.01712), sequence-aware trigger; the rules here are a first form of `relaygr.md` 2.3.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from npu_gr.request import Verdict


class TriggerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a signal leads to work."""

    min_prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64  # shorter ones are ranked in time without a relay
    max_inflight: Annotated[int, msgspec.Meta(ge=1)] = 8  # pre-infers and reloads running at once


class Headroom(NamedTuple):
    """What is left on this instance."""

    inflight: int  # pre-infers and reloads now running
    available_bytes: int  # of the HBM budget, free or evictable
    needed_bytes: int  # by this prefix


def decide(prefix_tokens: int, headroom: Headroom, config: TriggerConfig) -> Verdict:
    """PREINFER, or the first reason against it: risk, load, footprint, in this order."""
    if prefix_tokens < config.min_prefix_tokens:
        return Verdict.SKIP_NOT_AT_RISK
    if headroom.inflight >= config.max_inflight:
        return Verdict.SKIP_LOAD
    if headroom.needed_bytes > headroom.available_bytes:
        return Verdict.SKIP_FOOTPRINT
    return Verdict.PREINFER


def reload_pays(copy_s: float, compute_s: float, budget_s: float) -> bool:
    """Whether a copy from DRAM beats computing the prefix again, and fits the budget."""
    return copy_s <= compute_s and copy_s <= budget_s
