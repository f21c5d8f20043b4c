"""`npu-gr bench overload`: what an instance answers in time under far more load than it sustains.

The instance is that of `npu_gr/service/app.py` without HTTP, with a random ranker. Arrivals are Poisson, in the same
process: each is a signal of a new user and, `LEAD_S` later, the user's rank, with a deadline of `PATIENCE` objectives.
Rates go up to 5 times the sustained rate. Refusals are made by the same process, so they cost what they cost.

    sustained     the highest rate of the sweep at which 99 of 100 are answered within the objective
    goodput       answers within the objective, a second
    baseline      the same service without admission: no adaptive limit, no brown-out, no bound on what is in flight

Source of the targets: goodput under overload over its peak, as in overload control of interactive services.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_gr.backend.choose import BackendName
from npu_gr.bench.line import Line
from npu_gr.bench.rank import config as model_config
from npu_gr.core.errors import NpuGrError
from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.core.request import Events, HistoryRef, RankRequest, SignalRequest, UserKey
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, save
from npu_gr.service.app import instance
from npu_gr.service.config import Config, from_table
from npu_gr.service.service import Service

NUM_CANDIDATES = 100
LEAD_S = 0.05  # from signal to rank
OBJECTIVE = 5.0  # of an idle full inference
PATIENCE = 2.0  # objectives
LIGHT = (0.4, 0.55, 0.7, 0.85)  # of full inferences a second: the sweep that finds the sustained rate
HEAVY = (1.5, 2.0, 3.0, 5.0)  # of the sustained rate
WARM_UP = 0.25  # of a run, not counted
GOODPUT = 0.9  # target, of the peak
P99 = 1.0  # target, of the objective


class Load(NamedTuple):
    """What became of the ranks at one rate."""

    offered_per_s: float
    goodput_per_s: float
    attained: float  # share of the ranks that were answered within the objective
    refused: float  # share of the ranks that were refused at once
    p99_s: float  # of the admitted ranks; inf if more than 1 of 100 got no answer


def lines(backend: BackendName, num_tokens: int, num_layers: int, seconds: float, seed: int) -> Iterator[Line]:
    """The sweep, then goodput and latency at up to 5 times the sustained rate.

    Args:
        backend: as in a configuration.
        num_tokens: of a history.
        num_layers: of the ranker.
        seconds: of arrivals at each rate.
        seed: of arrivals and histories.
    """
    with TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        shape = model_config(num_layers)
        model = HSTU(shape).eval()
        save(Checkpoint(model=model, item_ids=np.arange(shape.num_items), name="random"), Path(folder))
        yield from asyncio.run(_lines(folder, backend, num_tokens, num_layers, seconds, seed))


async def _lines(
    folder: str, backend: BackendName, num_tokens: int, num_layers: int, seconds: float, seed: int
) -> list[Line]:
    idle_s = await _idle_s(folder, backend, num_tokens)
    objective_s = OBJECTIVE * idle_s
    case = f"L={num_tokens} M={NUM_CANDIDATES} layers={num_layers} slo={objective_s * 1e3:.0f} ms"

    async def run(rate: float, protects: bool) -> Load:
        async with instance(_config(folder, backend, objective_s, protects)) as (_, service):
            return await drive(service, num_tokens, rate, seconds, objective_s, seed)

    light = [await run(share / idle_s, True) for share in LIGHT]
    sustained = max((load.offered_per_s for load in light if load.attained >= 0.99), default=light[0].offered_per_s)
    if light[0].attained < 0.99:
        case = f"{case} (none sustained: the lowest asked stands for it)"
    heavy = [await run(multiple * sustained, True) for multiple in HEAVY]
    bare = await run(HEAVY[-1] * sustained, False)
    peak = max(load.goodput_per_s for load in light + heavy)
    found = [_line(_describe(case, load, sustained), load, peak, None) for load in light + heavy[:-1]]
    found.append(_line(_describe(case, heavy[-1], sustained), heavy[-1], peak, GOODPUT))
    found.append(
        Line(
            bench="overload",
            case=f"{case} {HEAVY[-1]:g}x: P99 of the admitted",
            ours=heavy[-1].p99_s * 1e3,
            unit="ms",
            baseline="the objective",
            baseline_value=objective_s * 1e3,
            ratio=objective_s / heavy[-1].p99_s,
            target=P99,
            ok=heavy[-1].p99_s <= objective_s,
        )
    )
    found.append(_line(_describe(case, bare, sustained) + ", without admission", bare, peak, None))
    return found


async def drive(
    service: Service, num_tokens: int, rate_per_s: float, seconds: float, objective_s: float, seed: int
) -> Load:
    """Send signals and ranks, open loop.

    Args:
        service: under load.
        num_tokens: of a history.
        rate_per_s: of arrivals.
        seconds: of arrivals.
        objective_s: an answer within it is in time.
        seed: of arrivals and histories.
    """
    random = np.random.default_rng(seed)
    count = max(20, round(rate_per_s * seconds))
    arrivals = np.cumsum(random.exponential(1.0 / rate_per_s, count))
    items = random.integers(0, 10_000, (count, num_tokens))
    times = 1_600_000_000 + np.cumsum(random.integers(1, 100_000, num_tokens))
    candidates = random.integers(0, 10_000, NUM_CANDIDATES)
    latency_s = np.full(count, np.inf)  # from the due time; inf = no answer
    is_refused = np.zeros(count, bool)
    began_at = time.monotonic()

    async def one(number: int, arrives_at: float) -> None:
        user = UserKey("bench", str(number))
        budget_s = PATIENCE * objective_s
        history = HistoryRef(events=Events.make(items[number], np.zeros(num_tokens), times))
        await asyncio.sleep(arrives_at - time.monotonic())
        signal = SignalRequest(user=user, history=history, num_candidates=NUM_CANDIDATES)
        with suppress(NpuGrError):  # a refused signal is an optimisation lost, no more
            await service.serve(SIGNAL, signal, budget_s)
        due_at = arrives_at + LEAD_S
        await asyncio.sleep(due_at - time.monotonic())
        sent_at = time.monotonic()
        try:
            await service.serve(RANK, RankRequest(user=user, candidates=candidates, history=history), budget_s)
            latency_s[number] = time.monotonic() - due_at
        except NpuGrError:
            is_refused[number] = time.monotonic() - sent_at < 0.1 * objective_s

    results = await asyncio.gather(
        *(one(n, began_at + float(at)) for n, at in enumerate(arrivals)), return_exceptions=True
    )
    if unexpected := [error for error in results if error is not None]:
        raise unexpected[0]
    counted = arrivals >= WARM_UP * seconds
    latency_s = latency_s[counted]
    is_refused = is_refused[counted]
    good = latency_s <= objective_s
    admitted = latency_s[~is_refused]
    span_s = float(arrivals[-1]) - WARM_UP * seconds
    return Load(
        len(good) / span_s,
        float(good.sum()) / span_s,
        float(good.mean()),
        float(is_refused.mean()),
        float(np.quantile(admitted, 0.99, method="inverted_cdf")) if len(admitted) else float("inf"),
    )


async def _idle_s(folder: str, backend: BackendName, num_tokens: int) -> float:
    """Seconds of a full inference on an idle instance, end to end: the median."""
    async with instance(_config(folder, backend, 60.0, True, enabled=False)) as (_, service):
        taken = []
        random = np.random.default_rng(0)
        for number in range(16):
            history = HistoryRef(
                events=Events.make(random.integers(0, 10_000, num_tokens), np.zeros(num_tokens), range(num_tokens))
            )
            request = RankRequest(
                user=UserKey("idle", str(number)), candidates=np.arange(NUM_CANDIDATES), history=history
            )
            began_at = time.perf_counter()
            await service.serve(RANK, request, 60.0)
            taken.append(time.perf_counter() - began_at)
    return float(np.median(taken[4:]))


def _config(folder: str, backend: BackendName, objective_s: float, protects: bool, *, enabled: bool = True) -> Config:
    table: dict[str, Any] = {
        "checkpoint": folder,
        "backend": backend,
        "features": {"kind": "none"},
        "slo": {"rank_s": objective_s},
        "relay": {"enabled": enabled},
    }
    if not protects:
        table["service"] = {"adaptive": False, "max_inflight": 1_000_000}
        table["scheduler"] = {"max_queue": 1_000_000}
        table["brownout"] = {"enabled": False}
    return from_table(table)


def _describe(case: str, load: Load, sustained: float) -> str:
    return (
        f"{case} {load.offered_per_s / sustained:.1f}x of the sustained {sustained:.1f}/s: "
        f"{load.attained:.1%} in time, {load.refused:.0%} refused"
    )


def _line(case: str, load: Load, peak: float, target: float | None) -> Line:
    ratio = load.goodput_per_s / peak
    return Line(
        bench="overload",
        case=case,
        ours=load.goodput_per_s,
        unit="in time/s",
        baseline="peak",
        baseline_value=peak,
        ratio=ratio,
        target=target,
        ok=None if target is None else ratio >= target,
    )
