"""A ranker's pass on the CPU: one native call against the same kernels called segment by segment.

The shape is the demo's: 60 tokens of prefix, 100 candidates. Everything runs on one thread, in turn
with its baseline, and is measured in the thread's CPU time; the logits are compared first. A second
line has the time with the interpreter lock, for which the event loop waits: all except the native
call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch

from benchmarks.frame import Line, compared, timed_in_turn
from benchmarks.rank import layout
from npu_gr.backend.calls import FusedForwardCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.config import HSTUConfig
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU

TIMES_SEGMENTS = 2.0  # target: speed relative to segment by segment
TOLERANCE = 1e-5  # relative to the largest logit
BATCHES = (1, 4)
TOKENS = 60
CANDIDATES = 100
ITEMS = 1682
UNIT = "ms CPU a rank"
SHOWN_AT = 1_700_000_000
NOTHING: I64 = np.empty(0, np.int64)


class SegmentWise(CPUBackend):
    """The CPU kernels without `fused_forward`."""

    def fused_forward(self, call: FusedForwardCall) -> None:
        """Return None, so that every pass uses the other ops."""
        return


class _Clocked(CPUBackend):
    """The CPU backend; it records the CPU seconds of each native call."""

    def __init__(self, isa: str) -> None:
        super().__init__(isa=isa)
        self.in_call_s = list[float]()
        run = self._pass.run

        def clocked(native: object) -> None:
            began_s = time.thread_time()
            run(native)
            self.in_call_s.append(time.thread_time() - began_s)

        self._pass.run = clocked


def lines(isa: str, seed: int, budget_s: float) -> Iterator[Line]:
    """Measure all cases.

    Args:
        isa: Instruction set; "" = the best of this CPU.
        seed: Random seed of the weights and requests.
        budget_s: Approximate seconds of a case.

    Raises:
        ConfigError: The passes differ.
    """
    torch.manual_seed(seed)
    actions = ("1", "2", "3", "4", "5")
    model = HSTU(
        HSTUConfig(
            num_items=ITEMS, actions=actions, tasks=("click", "like"), max_history_tokens=256
        )
    ).eval()
    model.items.freeze()
    fused, by_segments = _Clocked(isa), SegmentWise(isa=isa)
    engines = [_engine(model, backend) for backend in (fused, by_segments)]
    works = [_cached(engines, np.random.default_rng(seed + i), i) for i in range(max(BATCHES))]
    cold = RankPass(works[0].tokens, 0, works[0].candidates, SHOWN_AT)
    for case, batch in (
        *((f"pass: cached, batch of {n}", works[:n]) for n in BATCHES),
        ("pass: full inference", [cold]),
    ):
        ours, theirs = ([*engine.forward(batch)] for engine in engines)
        for got, want in zip(ours, theirs, strict=True):
            if np.abs(got - want).max() > TOLERANCE * np.abs(want).max():
                raise ConfigError(
                    f"bench kernels: {case}: the two passes differ by "
                    f"{np.abs(got - want).max():.2g}"
                )
        fused.in_call_s.clear()
        both: list[Callable[[], object]] = [partial(engine.forward, batch) for engine in engines]
        taken, baseline = timed_in_turn(both, budget_s, clock=time.thread_time)
        per = 1e3 / len(batch)
        a, b, in_call = (median(seconds) * per for seconds in (taken, baseline, fused.in_call_s))
        yield compared("kernels", case, a, UNIT, "by segments", b, b / a, TIMES_SEGMENTS)
        with_lock = a - in_call
        yield compared(
            "kernels", f"{case}: with the lock", with_lock, UNIT, "the pass", a, a / with_lock
        )


def _engine(model: HSTU, backend: CPUBackend) -> RankEngine:
    arena = KVArena(
        layout(model.config, backend), max(BATCHES), backend.device, pack=backend.pack_kv
    )
    return RankEngine(model, backend, Scheduler(SchedulerConfig()), arena)


def _cached(engines: list[RankEngine], random: np.random.Generator, page: int) -> RankPass:
    """Encode a history into a page of each engine, and return a rank on it."""
    rows = random.integers(0, ITEMS, TOKENS)
    times = SHOWN_AT - np.cumsum(random.integers(1, 100_000, TOKENS))[::-1]
    events = Events(rows, random.integers(0, 5, TOKENS).astype(np.int16), times)
    tokens = Tokens(events, rows, HistoryReport(fingerprint="", num_tokens=TOKENS))
    runs = (PageRun(page, 1),)
    for engine in engines:
        engine.forward([RankPass(tokens, 0, NOTHING, 0, keep=runs)])
    return RankPass(
        tokens,
        0,
        random.integers(0, ITEMS, CANDIDATES),
        SHOWN_AT,
        cached=CachedPrefix(runs, TOKENS),
    )
