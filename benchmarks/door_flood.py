"""The part `flood` of `benchmarks door`: a tenant that floods signals, beside one that signals and then ranks.

20 users of tenant V visit a real process of its own again and again: a signal, 50 ms later the rank of the same
history, which is one event longer each time. First alone, then while tenant E signals ever new users over 4 connections
that send again at once, and never ranks. Every prefix is produced (`trigger.policy`: always) and HBM has room for some
of them, so that only the shares of tenants keep V's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.door_client import LoadStream, drive
from benchmarks.door_servers import Server, Traffic, write_bodies
from npu_gr.core.request import Outcome
from npu_gr.model.weights import Checkpoint

OVERRIDES = ("trigger.policy=always", "kv.hbm_bytes=67108864")
VISITORS = 20
LEAD_S = 0.05  # from a signal to its rank
PAUSE_S = 0.5  # of a visitor, in the mean
FLOOD_CONNECTIONS = 4
FLOOD_USERS = 4000
HITS = (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flooded:
    """What V got, and what E asked for."""

    hit_ratio: float  # of V's ranks; one that was refused is no hit
    p99_ms: float  # of V's ranks that were answered
    num_ranks: int
    signals_per_s: float  # of E, answered or refused


def run_flood(
    server: Server, checkpoint: Checkpoint, traffic: Traffic, folder: Path, seconds: float, seed: int
) -> tuple[Flooded, Flooded]:
    """Measure V alone, then beside E.

    Args:
        server: started with `OVERRIDES`; nobody else asks it.
        checkpoint: that it serves.
        traffic: its candidates.
        folder: for the bodies.
        seconds: of each of the two.
        seed: of everything that is drawn.
    """
    longest = checkpoint.model.config.max_history_tokens
    visits = replace(traffic, history_tokens=longest // 2, num_users=VISITORS).bodies(checkpoint, "V", seed)
    crowd = replace(traffic, history_tokens=longest, num_users=FLOOD_USERS).bodies(checkpoint, "E", seed + 1, "flood")
    bodies = write_bodies(
        folder / "flood", [{key: body[key] for key in ("user_id", "tenant", "history")} for body in crowd]
    )
    flood = LoadStream(name="flood", mode="closed", bodies=bodies, to_s=seconds + 1.0, connections=FLOOD_CONNECTIONS)

    async def both() -> tuple[Flooded, Flooded]:
        await _visit(server.port, visits, 1.0, seed)  # cold
        quiet = await _visit(server.port, visits, seconds, seed)
        flooding = asyncio.create_task(asyncio.to_thread(drive, server.port, [flood], seed=seed, path="/v1/signal"))
        await asyncio.sleep(0.5)
        beside = await _visit(server.port, visits, seconds, seed)
        counts = (await flooding).stream("flood")
        return quiet, replace(beside, signals_per_s=counts.due / counts.span_s)

    return asyncio.run(both())


async def _visit(port: int, bodies: Sequence[dict[str, Any]], seconds: float, seed: int) -> Flooded:
    """Let every visitor come for so long."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + seconds
    outcomes: list[str] = []
    latencies_s: list[float] = []

    async def visitor(session: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> None:
        source = random.Random(f"{seed} {number}")  # noqa: S311  (a load, with its seed)
        await asyncio.sleep(PAUSE_S * source.random())
        while loop.time() < ends_at:
            _lengthen(body["history"])
            signal = {key: body[key] for key in ("user_id", "tenant", "history")}
            with suppress(aiohttp.ClientError):
                await _post(session, "signal", signal)
            await asyncio.sleep(LEAD_S)
            began_at = loop.time()
            try:
                status, answer = await _post(session, "rank", body)
            except aiohttp.ClientError:
                outcomes.append("lost")
            else:
                outcomes.append(answer["outcome"] if status == 200 else str(status))
                if status == 200:
                    latencies_s.append(loop.time() - began_at)
            await asyncio.sleep(source.expovariate(1 / PAUSE_S))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:
        await asyncio.gather(*(visitor(session, number, body) for number, body in enumerate(bodies)))
    hits = sum(outcome in HITS for outcome in outcomes)
    p99_ms = float(np.percentile(latencies_s, 99)) * 1e3 if latencies_s else float("inf")
    return Flooded(hit_ratio=hits / len(outcomes), p99_ms=p99_ms, num_ranks=len(outcomes), signals_per_s=0.0)


def _lengthen(history: dict[str, list[int]]) -> None:
    """Add an event: the item of the oldest one again, a minute after the newest."""
    history["items"].append(history["items"][0])
    history["actions"].append(history["actions"][0])
    history["timestamps"].append(history["timestamps"][-1] + 60)


async def _post(session: aiohttp.ClientSession, kind: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    async with session.post(f"/v1/{kind}", data=json.dumps(body), headers=headers) as response:
        return response.status, json.loads(await response.read())
