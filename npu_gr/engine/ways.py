"""Tries the implementations ("ways") of device work, and picks the fastest that computes the same.

A way is rejected if its results differ from those of plain torch ops, or if it fails: a kernel may
want more shared memory or registers than the device has. `attention.py` tries the attention of a
ranker, `beam_ways.py` the ops of a generator.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from npu_gr.core.errors import DeviceError

# The reference for all other ways; `npu-gr doctor` compares it with the definition.
PLAIN = "torch"
# Largest difference of results, in standard deviations of the results.
DRIFT = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
SAMPLES = 3  # timed runs of each pass; the fastest counts
MEASURE_S = 1.0  # no further sample of a pass after this time
WORTH = 0.95  # a later way must take less than this part of the best time

# runs a pass, and returns its device seconds
Timed = Callable[[], Awaitable[float]]


class HasTotal(Protocol):
    """A way's result."""

    @property
    def total_ms(self) -> float:
        """Time of all passes; infinite if rejected."""
        ...


T = TypeVar("T", bound=HasTotal)


class Checked(NamedTuple):
    """How a way's results compare with those of plain torch ops."""

    drift: float  # largest difference, in standard deviations
    rejected: str = ""  # why the way must not be used; "" = it may be


class Tried(NamedTuple):
    """The result of a way."""

    name: str
    passes_ms: tuple[float, ...] = ()  # of each timed pass; empty if rejected
    drift: float | None = None
    rejected: str = ""

    @property
    def total_ms(self) -> float:
        """Time for comparing ways; infinite if rejected."""
        return sum(self.passes_ms) if self.passes_ms else float("inf")


async def try_way(
    name: str, check: Callable[[], Awaitable[Checked]], passes: Sequence[Timed]
) -> Tried:
    """Check a way, then time its passes.

    Raises:
        DeviceError: plain torch ops fail.
    """
    try:
        drift, rejected = await check()
        if rejected:
            return Tried(name, drift=drift, rejected=rejected)
        return Tried(name, tuple([await _fastest_ms(timed) for timed in passes]), drift)
    except DeviceError as error:
        if name == PLAIN:
            raise
        return Tried(name, rejected=str(error))


def fastest(tried: Sequence[T]) -> T:
    """Return the fastest way; a later one must win by more than measurements vary (`WORTH`)."""
    best = tried[0]
    for way in tried[1:]:
        if way.total_ms < best.total_ms * WORTH:
            best = way
    return best


async def _fastest_ms(timed: Timed) -> float:
    began_at = time.monotonic()
    fastest_s = float("inf")
    for _ in range(SAMPLES):
        fastest_s = min(fastest_s, await timed())
        if time.monotonic() - began_at > MEASURE_S:
            break
    return fastest_s * 1e3
