"""What the device is asked for: prefill a prefix, rank against one, copy between tiers. READ after `service.py`.

Every method submits to the scheduler and awaits; tensors are built and read on the device thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.catalog.tokens import Tokens
from npu_gr.engine.cost import CostModel, fit
from npu_gr.engine.scheduler import Done, Scheduler, SchedulerConfig
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import Run
from npu_gr.model.hstu import HSTU, Past, Segment, Sink
from npu_gr.request import F32, I64


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
    keep: tuple[Run, ...] | None = None  # pages that receive the history's keys and values

    @property
    def num_rows(self) -> int:
        """Rows that the pass computes."""
        start = self.cached.num_tokens if self.cached else self.first_token
        return len(self.tokens) - start + len(self.candidates)


class Scored(NamedTuple):
    """A rank's result."""

    logits: F32  # [c, tasks]
    queue_s: float
    device_s: float


class PageJobs:
    """What every engine does with pages: copies between tiers, overwriting."""

    def __init__(self, scheduler: Scheduler, backend: Backend) -> None:
        self.scheduler, self.backend = scheduler, backend
        self.cost = CostModel(0.0, 0.0, 0.0, 0.0, 0.0)
        self.copy_bytes_per_s = float("inf")

    async def copy(
        self,
        source: KVArena,
        source_runs: Sequence[Run],
        target: KVArena,
        target_runs: Sequence[Run],
        num_tokens: int,
        deadline_s: float,
        order_s: float | None = None,
    ) -> None:
        """Copy a prefix between tiers, bit for bit; returns when the bytes are there."""

        def work() -> None:
            target.copy_tokens_from(source, source_runs, target_runs, num_tokens)
            self.backend.synchronize()

        await self.scheduler.call(work, deadline_s, order_s)

    def zero(self, arena: KVArena, runs: Sequence[Run]) -> asyncio.Future[Done[None]]:
        """Overwrite pages, ahead of every job that waits: whoever gets them afterwards writes later."""
        return self.scheduler.post(lambda: arena.zero(runs))


class Engine(PageJobs):
    """The ranker, its backend and the device thread."""

    def __init__(self, model: HSTU, backend: Backend, config: SchedulerConfig, arena: KVArena) -> None:
        super().__init__(Scheduler(config, self._run), backend)
        self.model, self.arena = model, arena

    async def prefill(self, tokens: Tokens, keep: tuple[Run, ...], deadline_s: float, order_s: float) -> None:
        """Encode the whole history into the pages `keep`, alone in its pass: a rank never waits for its end."""
        work = Pass(tokens, 0, np.empty(0, np.int64), 0, keep=keep)

        def run() -> None:
            self._run([work])

        await self.scheduler.call(run, deadline_s, order_s)

    async def rank(self, work: Pass, deadline_s: float) -> Scored:
        """Score a pass's candidates."""
        done = await self.scheduler.batch(work, deadline_s)
        return Scored(done.value, done.queue_s, done.device_s)

    def _run(self, passes: Sequence[Pass]) -> list[F32]:
        """On the device thread: one forward pass over all; [c, tasks] logits each."""
        logits = self.model(self.backend, [self._segment(p) for p in passes])
        sizes = [len(p.candidates) for p in passes]
        host = torch.cat(logits).to("cpu", torch.float32).numpy()  # the one wait for the device
        return np.split(host, np.cumsum(sizes)[:-1])

    def _segment(self, work: Pass) -> Segment:
        tokens, cached = work.tokens, work.cached
        start = cached.num_tokens if cached else work.first_token
        past = None
        if cached:
            arena, held = self.arena, cached
            past = Past(
                self._tensor(tokens.events.timestamps[:start]),
                lambda layer: arena.slabs(layer, held.runs, held.num_tokens),
            )
        return Segment(
            items=self._tensor(tokens.rows[start:]),
            actions=self._tensor(tokens.events.actions[start:].astype(np.int64)),
            times=self._tensor(tokens.events.timestamps[start:]),
            candidates=self._tensor(work.candidates),
            candidate_time=work.candidate_time,
            past=past,
            sink=None if work.keep is None else self._sink(work.keep, start),
        )

    def _sink(self, runs: tuple[Run, ...], start: int) -> Sink:
        def write(layer: int, k: Tensor, v: Tensor) -> None:
            self.arena.write(layer, runs, start, k, v)

        return write

    def _tensor(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        return torch.tensor(array, device=self.backend.device)  # a copy: the array may be a view of a read-only body

    async def warm_up(self, tokens: Tokens, lengths: Sequence[int], candidates: Sequence[int]) -> CostModel:
        """Run every shape once cold and once timed; fit and keep the cost model.

        Args:
            tokens: a history at least as long as the longest of `lengths`.
            lengths, candidates: the shapes.
        """
        rows = np.zeros(max(candidates), np.int64)

        def measure() -> list[tuple[int, int, float]]:
            samples = []
            for n in lengths:
                for c in candidates:
                    work = Pass(tokens, len(tokens) - n, rows[:c], int(tokens.events.timestamps[-1]))
                    self._run([work])
                    began_s = time.perf_counter()
                    self._run([work])
                    samples.append((n, c, time.perf_counter() - began_s))
            return samples

        done = await self.scheduler.call(measure, float("inf"))
        self.cost = fit(done.value)
        return self.cost
