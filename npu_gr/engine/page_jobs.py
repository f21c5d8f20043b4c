"""What every engine does with pages of prefix KV: copy them between the tiers, and overwrite them.

`RankEngine` and `GenerateEngine` extend `PageJobs`. The relay sees either of them as an `Encoder`
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

# A model that is proven and warmed up beside a serving one submits one job after the other, each to
# be done by then: later than the objective of a rank, so the ranks that wait go first; soon enough
# that a reload ends within seconds on a busy device. By its aging alone (`SchedulerConfig.aging_s`)
# each of some twenty-five jobs would wait for 2 s.
PROOF_S = 0.1
COPY_SAMPLES = 3  # copies timed to measure the bandwidth; the fastest counts


class CachedPrefix(NamedTuple):
    """The pages that hold the KV of the first `num_tokens` tokens of a request's history."""

    runs: tuple[PageRun, ...]
    num_tokens: int


class PageCopy(NamedTuple):
    """A prefix to copy between two tiers of the same layout."""

    source: KVArena
    source_runs: Sequence[PageRun]  # where it lies, in token order
    target: KVArena
    target_runs: Sequence[PageRun]  # that receive it; at least as many pages
    num_tokens: int  # of the prefix; whole pages are copied

    @property
    def num_bytes(self) -> int:
        """The keys and values of its tokens."""
        return self.target.layout.bytes(self.num_tokens)


def warmup_order() -> JobOrder:
    """The place in the queue of a job that proves or warms up a model."""
    return JobOrder(time.monotonic() + PROOF_S)


def chunks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) at the multiples of `size`.

        start=100, stop=300, size=128:   [100, 128)  [128, 256)  [256, 300)

    Args:
        start, stop: the range; nothing is yielded where it is empty.
        size: at least 1.
    """
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


class PageJobs(PassCosts):
    """Copies and overwrites pages as jobs of a scheduler, and knows how long the engine's own passes take."""

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
            pages: what to copy, and where to.
            deadline_at: instant on time.monotonic(); a copy that has not begun by then is dropped.
            order: its place in the queue; None = by its deadline.
            preemptible: it waits behind every request, and a full queue may drop it.

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
        # the copy engine works while the device thread goes on
        await self.scheduler.finished(queued.value)
        done = JobResult(None, queued.queue_s, queued.device_s + time.monotonic() - began_at)
        self.on_copied(pages.target, pages.num_bytes, done)

    async def measure_copy(
        self, dram: KVArena, dram_runs: Sequence[PageRun], runs: Sequence[PageRun], num_tokens: int
    ) -> None:
        """Measure the bandwidth from DRAM to the device, and keep it as `copy_bytes_per_s`.

        Args:
            dram, dram_runs: pages of the DRAM tier that nobody else uses.
            runs: pages of this engine's arena that nobody else uses; they are overwritten.
            num_tokens: how much to copy.
        """
        pages = PageCopy(dram, dram_runs, self.arena, runs, num_tokens)
        samples_s = list[float]()
        for _ in range(COPY_SAMPLES):
            began_at = time.perf_counter()
            await self.copy(pages, float("inf"), warmup_order())
            samples_s.append(time.perf_counter() - began_at)
        self.copy_bytes_per_s = pages.num_bytes / min(samples_s)

    async def timed(self, run: Callable[[], object]) -> float:
        """Run a pass twice as a warm-up, and return the device seconds of the second time.

        Both are jobs of their own, so a live request waits for one run at most.

        Raises:
            Overloaded, DeviceError, Unavailable: as `Scheduler.call`.
        """
        await self.scheduler.call(run, float("inf"), warmup_order())
        return (await self.scheduler.call(run, float("inf"), warmup_order())).device_s

    def zero(self, arena: KVArena, runs: Sequence[PageRun]) -> asyncio.Future[JobResult[None]]:
        """Overwrite pages before every job that waits, so that their next owner writes after this."""

        def work() -> None:
            arena.zero(runs)
            self.backend.synchronize()  # the next writer may be in another stream

        return self.scheduler.post(work)
