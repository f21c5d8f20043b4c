"""Decides which of the existing prefixes of a history a rank uses, and how. Pure: no clock, no task.

    the prefix is                       the rank                                     outcome
    resident in HBM                     leases it                  UseResident       hbm_hit
    being prefilled, nobody waits       encodes the rest itself    AdoptPrefill      joined | miss_full not_begun
    on its way into HBM otherwise       waits, if time remains     JoinProducer      joined | miss_full join_timeout
    in DRAM, and a copy is faster       reloads it and waits       ReloadCopy        dram_hit | miss_full reload_*
    nowhere                             computes everything        ComputeAll        miss_full | degraded

Of several prefixes in one place the longest usable one counts. A prefix is usable if it is the beginning of the
history: same user, model version and layout, and the same fingerprint of that many tokens. See `docs/relay.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import msgspec

from npu_gr.core.request import Reason
from npu_gr.engine.kv.dram_store import DramEntry
from npu_gr.engine.kv.prefix_pool import PrefixEntry
from npu_gr.engine.kv.tier import TierEntry
from npu_gr.relay.encoder import Prefix
from npu_gr.relay.producer import Producer

E = TypeVar("E", bound=TierEntry)


class UseResident(msgspec.Struct, frozen=True):
    """Lease a resident prefix."""

    entry: PrefixEntry


class AdoptPrefill(msgspec.Struct, frozen=True):
    """Stop a prefill of the whole history, and encode the rest in the rank's own pass."""

    producer: Producer


class JoinProducer(msgspec.Struct, frozen=True):
    """Wait for a producer."""

    producer: Producer


class ReloadCopy(msgspec.Struct, frozen=True):
    """Start a reload, and wait for it."""

    copy: DramEntry


class ComputeAll(msgspec.Struct, frozen=True):
    """Use nothing, for this reason."""

    reason: Reason


Decision = UseResident | AdoptPrefill | JoinProducer | ReloadCopy | ComputeAll


class Existing(NamedTuple):
    """The longest usable prefix of a history in each place, looked up in this order until one is found."""

    resident: PrefixEntry | None = None
    producer: Producer | None = None
    copy: DramEntry | None = None  # in DRAM
    copy_pays: bool = False  # reloading it is faster than computing it, and in time
    why_missing: Reason = Reason.NO_SIGNAL  # if none is found


def is_usable(entry: TierEntry, tokens: Prefix) -> bool:
    """Return whether an entry holds the beginning of a history, given that user, version and layout agree."""
    return 0 < entry.num_tokens <= len(tokens) and tokens.fingerprint(entry.num_tokens) == entry.key.fingerprint


def longest(entries: Iterable[E], tokens: Prefix) -> E | None:
    """Return the longest usable entry."""
    found: E | None = None
    for entry in entries:
        if (found is None or entry.num_tokens > found.num_tokens) and is_usable(entry, tokens):
            found = entry
    return found


def longest_producer(producers: Iterable[Producer], tokens: Prefix) -> Producer | None:
    """Return the producer of the longest usable prefix. A producer whose user was erased will publish nothing."""
    usable = (each for each in producers if not each.entry.is_erased and is_usable(each.entry, tokens))
    return max(usable, key=lambda each: each.entry.num_tokens, default=None)


def choose(existing: Existing, num_tokens: int, max_joiners: int) -> Decision:
    """Decide what a rank uses.

    Args:
        existing: the prefixes of its history.
        num_tokens: length of the history.
        max_joiners: the most ranks that may wait for one producer.
    """
    if existing.resident is not None:
        return UseResident(existing.resident)
    producer = existing.producer
    if producer is not None:
        if producer.joiners >= max_joiners:
            return ComputeAll(Reason.REJECTED_LOAD)
        if producer.is_adoptable and producer.entry.num_tokens == num_tokens:
            return AdoptPrefill(producer)
        return JoinProducer(producer)
    if existing.copy is None:
        return ComputeAll(existing.why_missing)
    return ReloadCopy(existing.copy) if existing.copy_pays else ComputeAll(Reason.RELOAD_SLOWER)
