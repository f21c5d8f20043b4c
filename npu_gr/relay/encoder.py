"""The interfaces that the relay works with: a history (`Prefix`) and an engine (`Encoder`).

The relay knows prefixes and pages, but no model: `RankEngine`, `GenerateEngine` and the simulator's
`Device` all implement `Encoder`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from npu_gr.engine.cost import CostModel
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import PageCopy
from npu_gr.engine.queue import JobOrder, JobResult


class Prefix(Protocol):
    """A history as one model reads it."""

    def earlier(self, since_at: float) -> Sequence[Prefix]:
        """Return this history as weights read it that were served since an instant, newest first.

        A prefix of theirs is stale: a delta has changed what it read.
        """
        ...

    @property
    def is_divisible(self) -> bool:
        """Whether the KV of the first tokens does not depend on later ones, so is useful alone."""
        ...

    def __len__(self) -> int:
        """Count the tokens."""
        ...

    def fingerprint(self, num_tokens: int) -> str:
        """Identify the KV of the first `num_tokens` tokens.

        Two fingerprints are equal only if everything that the KV depends on is equal.
        """
        ...


P = TypeVar("P", bound=Prefix)
P_in = TypeVar("P_in", bound=Prefix, contravariant=True)


class DeviceEstimates(Protocol):
    """What an `Encoder` predicts about its device."""

    @property
    def cost(self) -> CostModel:
        """Model that predicts the seconds of a pass."""
        ...

    @property
    def queue_s(self) -> float:
        """Seconds that a request arriving now would wait for the device."""
        ...

    @property
    def objective_s(self) -> float:
        """SLO objective of a request, in seconds from its arrival; sets its place in the queue."""
        ...


class Encoder(DeviceEstimates, Protocol[P_in]):
    """An engine that encodes prefixes into pages."""

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth from DRAM to HBM, in bytes a second."""
        ...

    @property
    def residual_s(self) -> float:
        """P90 of (actual - predicted) seconds of recent full passes."""
        ...

    async def prefill(
        self,
        tokens: P_in,
        keep: tuple[PageRun, ...],
        deadline_at: float,
        order: JobOrder,
        first_token: int = 0,
    ) -> int:
        """Encode a prefix into pages.

        Args:
            tokens: the whole prefix.
            keep: Pages for the whole prefix; they hold its first `first_token` tokens already.
            deadline_at: instant of the clock; what has not begun by then is dropped.
            order: Place of the work in the queue. If it is cancelled at a step, the prefill ends
                with the chunk that runs.
            first_token: First token to encode.

        Returns:
            Number of tokens that the pages hold now: all of them, unless `order` was cancelled at a
            step. All or none of a prefix that is not divisible.
        """
        ...

    async def copy(
        self,
        pages: PageCopy,
        deadline_at: float,
        order: JobOrder | None = None,
        *,
        preemptible: bool = False,
    ) -> None:
        """Copy a prefix between tiers, as `PageJobs.copy` does."""
        ...

    def zero(self, arena: KVArena, runs: Sequence[PageRun]) -> asyncio.Future[JobResult[None]]:
        """Overwrite pages with zeros, ahead of every job that waits."""
        ...
