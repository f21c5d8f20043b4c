"""What the device is asked for: prefill a prefix, rank against one, copy between tiers. READ after `service.py`.

Every method submits to the scheduler and awaits; tensors are built and read on the device threads only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.request import F32, I64
from npu_gr.engine.cost import CostModel, fit
from npu_gr.engine.quantile import RunningQuantile
from npu_gr.engine.queue import Demand, Step
from npu_gr.engine.scheduler import Done, Scheduler, Urgency
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import Run
from npu_gr.model.hstu import HSTU, Past, Segment


class Cached(NamedTuple):
    """Pages that hold the first `num_tokens` tokens of a request's history."""

    runs: tuple[Run, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One request's share of a forward pass, in host arrays."""

    tokens: Tokens
    first_token: int  # history before it is left out, unless `cached` covers it
    candidates: I64  # [c] item rows
    candidate_time: int
    cached: Cached | None = None
    keep: tuple[Run, ...] | None = None  # pages that receive the history's keys and values, behind those of `cached`

    @property
    def demand(self) -> Demand:
        """What the pass computes."""
        start = self.cached.num_tokens if self.cached else self.first_token
        return Demand(len(self.tokens) - start, len(self.candidates))


class Scored(NamedTuple):
    """A rank's result."""

    logits: F32  # [c, tasks]
    queue_s: float
    device_s: float


_LITTLE_S = 1e-4
_FAR = float("inf")


def chunks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in parts that end at multiples of `size`."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


class PageJobs:
    """What every engine does with pages: copies between tiers, overwriting."""

    def __init__(self, scheduler: Scheduler, backend: Backend, arena: KVArena) -> None:
        self.scheduler, self.backend, self.arena = scheduler, backend, arena
        self.cost = CostModel(0.0, 0.0, 0.0, 0.0, 0.0)
        self.copy_bytes_per_s = float("inf")
        self.on_copied: Callable[[KVArena, int, Done[None]], None] = lambda _target, _num_bytes, _done: None
        # how long after it came a request should be done; it is given up only at its deadline
        self.objective_s = float("inf")
        self._short_s = RunningQuantile(0.9, _LITTLE_S)

    @property
    def queue_s(self) -> float:
        """How long a request that comes now would wait for the device."""
        return self.scheduler.wait_s(self.objective_s)

    @property
    def residual_s(self) -> float:
        """What `cost` has been short by lately: nine of ten passes were short by less."""
        return self._short_s.value

    def _correct(self, expected_s: float, took_s: float) -> None:
        self._short_s.observe(max(took_s - expected_s, _LITTLE_S))

    async def copy(
        self,
        source: KVArena,
        source_runs: Sequence[Run],
        target: KVArena,
        target_runs: Sequence[Run],
        num_tokens: int,
        deadline_at: float,
        order_at: float | Urgency | None = None,
        *,
        is_sheddable: bool = False,
    ) -> None:
        """Copy a prefix between tiers, bit for bit; returns when the bytes are there."""

        def work() -> Callable[[], None]:
            return self.backend.copy(lambda: target.copy_tokens_from(source, source_runs, target_runs, num_tokens))

        queued = await self.scheduler.call(work, deadline_at, order_at, is_sheddable=is_sheddable, kind="copy")
        began_at = time.monotonic()
        await self.scheduler.finished(queued.value)
        done = Done(None, queued.queue_s, queued.device_s + time.monotonic() - began_at)
        self.on_copied(target, target.layout.bytes(num_tokens), done)

    async def measure_copy(self, dram: KVArena, dram_runs: Sequence[Run], runs: Sequence[Run], num_tokens: int) -> None:
        """Measure the bandwidth from DRAM pages to device pages, best of three."""
        taken_s = list[float]()
        for _ in range(3):
            began_at = time.perf_counter()
            await self.copy(dram, dram_runs, self.arena, runs, num_tokens, float("inf"))
            taken_s.append(time.perf_counter() - began_at)
        self.copy_bytes_per_s = dram.layout.bytes(num_tokens) / min(taken_s)

    def zero(self, arena: KVArena, runs: Sequence[Run]) -> asyncio.Future[Done[None]]:
        """Overwrite pages, ahead of every job that waits: whoever gets them afterwards writes later."""

        def work() -> None:
            arena.zero(runs)
            self.backend.synchronize()  # the next writer may be in another stream

        return self.scheduler.post(work)


class Engine(PageJobs):
    """One ranker and its backend, over a scheduler that other engines may share."""

    def __init__(self, model: HSTU, backend: Backend, scheduler: Scheduler, arena: KVArena) -> None:
        super().__init__(scheduler, backend, arena)
        self.model = model

    async def prefill(
        self, tokens: Tokens, keep: tuple[Run, ...], deadline_at: float, urgency: Urgency, first_token: int = 0
    ) -> int:
        """Encode a history into the pages `keep`, chunk after chunk: a rank waits for the end of one at most.

        Args:
            tokens: the whole history.
            keep: pages for all of it, which hold its first `first_token` tokens already.
            deadline_at: a chunk that has not begun by then is dropped, and what follows.
            urgency: when its rank is expected; if it is cut, the rank goes on from the chunk that runs.
            first_token: where to go on.

        Returns:
            how many tokens the pages hold now.
        """

        def step(start: int, stop: int) -> Step:
            cached = Cached(keep, start) if start else None
            work = Pass(tokens[:stop], 0, np.empty(0, np.int64), 0, cached=cached, keep=keep)
            return Step(lambda: self._run([work]), self.cost.pass_s(stop - start, start, 0))

        parts = list(chunks(first_token, len(tokens), self.scheduler.config.prefill_chunk_tokens))
        steps = [step(start, stop) for start, stop in parts]
        done = await self.scheduler.sequence(steps, deadline_at, urgency, is_sheddable=True, kind="prefill")
        return parts[done.steps - 1][1] if done.steps else first_token

    async def rank(self, work: Pass, deadline_at: float, arrived_at: float | None = None) -> Scored:
        """Score a pass's candidates, of a request that came at `arrived_at` (now by default)."""
        cached = work.cached.num_tokens if work.cached else 0
        expected_s = self.cost.pass_s(work.demand.tokens, cached, work.demand.rows)
        done = await self.scheduler.batch(
            work, self._run, deadline_at, objective_s=self.objective_s, arrived_at=arrived_at, takes_s=expected_s
        )
        if work.cached is None and done.batch_size == 1:
            self._correct(expected_s, done.device_s)
        return Scored(done.value, done.queue_s, done.device_s)

    def _run(self, passes: Sequence[Pass]) -> list[F32]:
        """On a device thread: one forward pass over all; [c, tasks] logits each."""
        logits = self.model(self.backend, [self._segment(p) for p in passes])
        sizes = [len(p.candidates) for p in passes]
        if not sum(sizes):  # a prefill: nothing to fetch, and its pages are read once this returns
            self.backend.synchronize()
        host = torch.cat(logits).to("cpu", torch.float32).numpy()  # the one wait for the device
        return np.split(host, np.cumsum(sizes)[:-1])

    def _segment(self, work: Pass) -> Segment:
        tokens, cached = work.tokens, work.cached
        start = cached.num_tokens if cached else work.first_token
        past = None
        if cached:
            arena, held = self.arena, cached
            past = Past(
                self.backend.upload(tokens.events.timestamps[:start]),
                lambda layer: arena.slabs(layer, held.runs, held.num_tokens),
            )
        return Segment(
            items=self.backend.upload(tokens.rows[start:]),
            actions=self.backend.upload(tokens.events.actions[start:].astype(np.int64)),
            times=self.backend.upload(tokens.events.timestamps[start:]),
            candidates=self.backend.upload(work.candidates),
            candidate_time=work.candidate_time,
            past=past,
            sink=None if work.keep is None else self.arena.sink(work.keep, start),
        )

    async def warm_up(self, tokens: Tokens, lengths: Sequence[int], candidates: Sequence[int]) -> CostModel:
        """Run every shape once cold and once timed; fit and keep the cost model. A live rank waits for one at most.

        Args:
            tokens: a history at least as long as the longest of `lengths`.
            lengths, candidates: the shapes.
        """
        rows, samples = np.zeros(max(candidates), np.int64), []
        for n in lengths:
            for c in candidates:
                work = Pass(tokens, len(tokens) - n, rows[:c], int(tokens.events.timestamps[-1]))
                await self.scheduler.call(lambda work=work: self._run([work]), _FAR)  # type: ignore[misc]
                done = await self.scheduler.call(lambda work=work: self._run([work]), _FAR)  # type: ignore[misc]
                samples.append((n, c, done.device_s))
        self.cost = fit(samples)
        return self.cost
