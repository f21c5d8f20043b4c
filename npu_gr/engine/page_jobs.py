"""The jobs on pages that every engine has: copies between the tiers, and overwrites.

`RankEngine` and `GenerateEngine` extend `PageJobs`. For the relay both are an `Encoder`
(`relay/encoder.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from npu_gr.backend.base import Backend
from npu_gr.engine.cost import PassCosts
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.queue import JobOrder, JobResult
from npu_gr.engine.scheduler import Scheduler

# A model that is verified and warmed up while another one serves submits some twenty-five jobs, one
# after the other, each due after this time. That is later than the objective of a rank, so waiting
# ranks go first, but soon enough that a reload ends within seconds on a busy device: by aging alone
# (`SchedulerConfig.aging_s`) each job would wait for 2 s.
WARMUP_JOB_S = 0.1
COPY_SAMPLES = 3  # copies timed to measure the bandwidth; the fastest counts


class CachedPrefix(NamedTuple):
    """The pages that hold the KV of the first `num_tokens` tokens of a request's history."""

    runs: tuple[PageRun, ...]
    num_tokens: int
    begins_at: int = 0  # see `PrefixLayout.places`


class PageCopy(NamedTuple):
    """A prefix to copy between two tiers of the same layout."""

    source: KVArena
    source_runs: Sequence[PageRun]  # pages of the prefix, in token order
    target: KVArena
    target_runs: Sequence[PageRun]  # pages that receive it, in token order; at least as many
    num_tokens: int  # length of the prefix; whole pages are copied

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that are copied."""
        return self.target.layout.bytes(self.num_tokens)


def warmup_order() -> JobOrder:
    """Return the place in the queue of a job that verifies or warms up a model."""
    return JobOrder(time.monotonic() + WARMUP_JOB_S, may_compile=True)


def chunks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) at the multiples of `size`.

        start=100, stop=300, size=128:   [100, 128)  [128, 256)  [256, 300)

    Args:
        start, stop: the range; nothing is yielded if it is empty.
        size: Length of a chunk, at least 1.
    """
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


class PageJobs(PassCosts):
    """Copies and overwrites pages as jobs of a scheduler; holds the engine's cost estimates."""

    def __init__(self, scheduler: Scheduler, backend: Backend, arena: KVArena) -> None:
        super().__init__(lambda objective_s: self.scheduler.wait_s(objective_s))
        self.scheduler = scheduler
        self.backend = backend
        self.arena = arena
        self.on_copied: Callable[[KVArena, int, JobResult[None]], None] = (
            lambda _target, _num_bytes, _done: None
        )

    async def copy(
        self,
        pages: PageCopy,
        deadline_at: float,
        order: JobOrder | None = None,
        *,
        preemptible: bool = False,
    ) -> None:
        """Copy a prefix between tiers, bit for bit. Returns when the bytes have arrived.

        Args:
            pages: Pages to copy from and to.
            deadline_at: instant on time.monotonic(); a copy that has not begun by then is dropped.
            order: Place in the queue; None = by the deadline.
            preemptible: True = it waits behind every request, and a full queue may drop it.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.call`.
        """

        def start() -> Callable[[], None]:
            source, source_runs, target, target_runs, num_tokens = pages
            return self.backend.copy(
                lambda: target.copy_tokens_from(source, source_runs, target_runs, num_tokens)
            )

        queued = await self.scheduler.call(
            start, deadline_at, order, preemptible=preemptible, kind="copy"
        )
        began_at = time.monotonic()
        # The device thread goes on while the copy engine works.
        await self.scheduler.finished(queued.value)
        done = JobResult(None, queued.queue_s, queued.device_s + time.monotonic() - began_at)
        self.on_copied(pages.target, pages.num_bytes, done)

    async def measure_copy(
        self, dram: KVArena, dram_runs: Sequence[PageRun], runs: Sequence[PageRun], num_tokens: int
    ) -> None:
        """Measure the bandwidth from DRAM to the device, and store it as `copy_bytes_per_s`.

        Args:
            dram, dram_runs: Otherwise unused pages of the DRAM tier.
            runs: Otherwise unused pages of this engine's arena; they are overwritten.
            num_tokens: Number of tokens to copy.
        """
        pages = PageCopy(dram, dram_runs, self.arena, runs, num_tokens)
        samples_s = list[float]()
        for _ in range(COPY_SAMPLES):
            began_at = time.perf_counter()
            await self.copy(pages, float("inf"), warmup_order())
            samples_s.append(time.perf_counter() - began_at)
        self.copy_bytes_per_s = pages.num_bytes / min(samples_s)

    async def timed(self, run: Callable[[], object]) -> float:
        """Run a pass twice, and return the device seconds of the second run.

        Each run is a job of its own, so a live request waits for one run at most.

        Raises:
            Overloaded, DeviceError, Unavailable: as `Scheduler.call`.
        """
        await self.scheduler.call(run, float("inf"), warmup_order())
        return (await self.scheduler.call(run, float("inf"), warmup_order())).device_s

    def zero(self, arena: KVArena, runs: Sequence[PageRun]) -> asyncio.Future[JobResult[None]]:
        """Overwrite pages with zeros ahead of all waiting jobs, before their next owner writes."""

        def work() -> None:
            arena.zero(runs)
            self.backend.synchronize()  # the next writer may be on another stream

        return self.scheduler.post(work)
