"""`python -m benchmarks metrics`: the cost of metrics, tracing and logging of a rank.

It compares the CPU time of metrics, trace context and access log for one rank with the CPU time of
the rank's pass on a cached history. A request takes more than its pass, so the real share is
smaller. The counts are checked before anything is timed.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.frame import SEED, Line, timed, timed_for, timed_in_turn
from benchmarks.rank import CachedRank, config
from npu_gr.backend.choose import choose
from npu_gr.core.history import HistoryReport, UserKey
from npu_gr.core.kinds import RANK
from npu_gr.core.logs import CURRENT, begin
from npu_gr.core.request import Outcome, RankAnswer, Reason
from npu_gr.metrics.registry import Metrics
from npu_gr.model.hstu import HSTU
from npu_gr.server.access_log import AccessLog, ServerCall
from npu_gr.server.access_log import log as request_log
from npu_gr.server.config import ServerConfig
from npu_gr.service.config import SLOConfig

OPTIONS = (SEED, timed_for(2.0))
SHARE = 0.01  # largest share of a rank's CPU time
# layers, width, candidates: of the demo, and of `benchmarks rank`
SHAPES = ((2, 64, 100), (8, 256, 100))
REPEATS = 200

ANSWER = RankAnswer(
    model_version="v",
    outcome=Outcome.HBM_HIT,
    reason=Reason.NONE,
    scores={"click": np.zeros(100, np.float32), "like": np.zeros(100, np.float32)},
    top=None,
    history=HistoryReport(fingerprint="f" * 32, num_tokens=256),
    prefix_tokens=256,
    stages_s={"history": 4e-4, "lease": 5e-5, "queue": 5e-5, "device": 2e-3},
)


def lines(seed: int, seconds: float) -> Iterator[Line]:
    """Yield two lines for each shape: metrics alone; metrics, trace context and log line."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, SLOConfig().objectives())
    access_log = AccessLog(ServerConfig())
    user = UserKey("", "u")

    def count() -> None:
        metrics.requests.in_flight.inc()
        metrics.rank.history_read(ANSWER.history)
        metrics.engine.batch_done("rank", 1, 100)
        metrics.engine.worked("rank", 2e-3)
        metrics.relay.first_used(0.05)
        metrics.rank.answered(ANSWER)
        metrics.requests.answered(RANK, ANSWER, 3e-3)
        metrics.requests.in_flight.dec()
        metrics.requests.done(RANK.name, RANK.path, 200, 3e-3, ANSWER.stages_s)

    def count_and_log() -> None:
        trace = begin(None)
        CURRENT.set(trace)
        count()
        now_at = time.monotonic()
        call = ServerCall(
            method="POST",
            route="/v1/rank",
            headers={},
            request_id="r" * 32,
            trace=trace,
            span=None,
            arrived_at=now_at,
            body_at=now_at,
            kind=RANK,
            user=user,
            answer=ANSWER,
        )
        access_log.write(call, 200, 3e-3)

    with _logged_to_memory():
        CURRENT.set(begin(None))
        count()
        counted = registry.get_sample_value(
            "npu_gr_slo_requests_total", {"kind": "rank", "result": "good"}
        )
        assert counted == 1, counted
        for layers, width, candidates in SHAPES:
            torch.manual_seed(seed)
            model = HSTU(config(layers, width)).eval()
            model.items.freeze()
            rank = CachedRank(model, choose("cpu"), 256, candidates)
            for name, work in (("counts", count), ("counts, trace, log line", count_and_log)):
                functions: list[Callable[[], object]] = [
                    partial(rank.run, rank.hit),
                    partial(_repeated, work),
                ]
                ranked, added = timed_in_turn(functions, seconds, clock=time.process_time)
                each = [took_s / REPEATS for took_s in added]
                case = f"{name}; rank of {candidates}, layers={layers} d={width}"
                target = 1 / SHARE if work is count else None
                yield timed(
                    "metrics",
                    case,
                    each,
                    "the rank's own pass, cached",
                    ranked,
                    target,
                    unit="us CPU",
                )


def _repeated(work: Callable[[], None]) -> None:
    """Run it `REPEATS` times, because one run is too short for the clock."""
    for _ in range(REPEATS):
        work()


@contextmanager
def _logged_to_memory() -> Iterator[None]:
    """Format and write log lines into memory."""
    handler = logging.StreamHandler(io.StringIO())
    level = request_log.level
    request_log.propagate = False
    request_log.addHandler(handler)
    request_log.setLevel(logging.INFO)
    try:
        yield
    finally:
        request_log.removeHandler(handler)
        request_log.setLevel(level)
        request_log.propagate = True
