"""python -m tests.simulate.validation INSTANCES RATE [SECONDS [no-signals]]: real instances against the prediction.

One run: instances (and the router, for several) start, a slow replay fits the profile, a faster one is measured and
then simulated twice: with that profile, and with the noise and the host's times of the measured run in it, which takes
the machine's other users out of the comparison and leaves queueing, hits, batches and the trigger.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch
import yaml

from npu_gr.backend.choose import choose
from npu_gr.kv.layout import KVLayout
from npu_gr.replay.log import LoggedHistory, Record
from npu_gr.replay.options import ReplayOptions
from npu_gr.request import Events, Outcome
from npu_gr.settings import from_table
from npu_gr.simulate.config import DeviceProfile, Lognormal, SimulateConfig, UsersConfig
from npu_gr.simulate.fit import MeasuredRank, asks_of, fit_device, measure
from npu_gr.simulate.fleet import Outcomes, simulate
from npu_gr.simulate.users import visits
from tests.serving import FIRST_ID, write_checkpoint

USERS = UsersConfig(
    num_users=400, zipf=0.7, history_tokens=Lognormal(median=600, sigma=0.5), growth_tokens=8, candidates=100
)
SHAPE = {"dim": 64, "num_layers": 3, "num_heads": 2, "qk_dim": 32, "v_dim": 32, "head_dim": 32}
SECTIONS: dict[str, Any] = {
    "relay": {"t_life_s": 2.0},
    "trigger": {"policy": "always", "min_prefix_tokens": 16},
    "brownout": {"enabled": False},
    "kv": {"hbm_bytes": 25_000_000, "dram_bytes": 100_000_000},
}
MAX_TOKENS = 2048
Measured = tuple[list[MeasuredRank], list[float]]
LEAD_S = 0.05


def log(rate: float, seconds: float, seed: int) -> list[Record]:
    """Ranks whose users, lengths and candidates vary."""
    source = np.random.default_rng(seed)
    records = []
    for visit in visits(USERS, rate, seconds, seed):
        own = np.random.default_rng(visit.user)  # a longer history continues a shorter one
        length = min(visit.num_tokens, MAX_TOKENS)
        rows = own.integers(0, 300, (4096, 2))[:length]
        times = 1_600_000_000 + 1000 * np.arange(length)
        history = Events.make(rows[:, 0] + FIRST_ID, rows[:, 1] % 3, times)
        num_candidates = int(source.choice([20, 100, 250]))
        records.append(
            Record(
                ts=visit.at_s,
                kind="rank",
                user_id=f"u{visit.user}",
                history=LoggedHistory.of(history),
                candidates=(source.integers(0, 300, num_candidates) + FIRST_ID).tolist(),
                timestamp=1_700_000_000,
            )
        )
    return records


@asynccontextmanager
async def process(folder: Path, name: str, command: str, table: dict[str, Any], ready: str) -> AsyncIterator[Path]:
    """One of ours, from its readiness to the block's end; its log."""
    config, output = folder / f"{name}.yaml", folder / f"{name}.log"
    await asyncio.to_thread(config.write_text, yaml.safe_dump(table))
    with await asyncio.to_thread(output.open, "wb") as file:
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "npu_gr", command, "--config", str(config), stdout=file, stderr=file
        )
    try:
        async with aiohttp.ClientSession() as http:
            for _ in range(600):
                try:
                    async with http.get(ready) as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                assert started.returncode is None, output.read_text()
                await asyncio.sleep(0.1)
            else:
                raise AssertionError(f"{name} did not become ready")
        yield output
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@asynccontextmanager
async def fleet(folder: Path, num_instances: int) -> AsyncIterator[tuple[str, float]]:
    """The address to send to, and the measured copy bandwidth."""
    write_checkpoint(folder / "checkpoint", max_history_tokens=MAX_TOKENS, scaling_seqlen=MAX_TOKENS, **SHAPE)
    ports = free_ports(num_instances + 2)
    async with AsyncExitStack() as stack:
        for number in range(num_instances):
            table = {
                "checkpoint": str(folder / "checkpoint"),
                "features": {"kind": "none"},
                "service": {"selfcheck_ratio": 0.0},
                "server": {"port": ports[number], "log_requests": "slow", "drain_grace_s": 0.1},
                **SECTIONS,
            }
            ready = f"http://127.0.0.1:{ports[number]}/readyz"
            output = await stack.enter_async_context(process(folder, f"gr-{number}", "serve", table, ready))
        found = re.search(r"DRAM to HBM ([0-9.]+) GB/s", await asyncio.to_thread(output.read_text))
        assert found, "the service logs its copy bandwidth"
        if num_instances == 1:
            yield f"http://127.0.0.1:{ports[0]}", float(found[1]) * 1e9
            return
        port, admin = ports[-2:]
        instances = [{"name": f"gr-{n}", "host": "127.0.0.1", "port": ports[n]} for n in range(num_instances)]
        table = {"port": port, "admin_port": admin, "drain_grace_s": 0.1, "discovery": {"instances": instances}}
        table["relay"] = SECTIONS["relay"]
        ready = f"http://127.0.0.1:{port}/readyz"
        await stack.enter_async_context(process(folder, "router", "route", table, ready))
        await asyncio.sleep(1.5)  # until its checks have seen them all
        yield f"http://127.0.0.1:{port}", float(found[1]) * 1e9


def predict(profile: DeviceProfile, records: list[Record], options: ReplayOptions, instances: int) -> Outcomes:
    table = {
        "device": "-",
        "instances": instances,
        "duration_s": records[-1].ts + 10,
        "warmup_s": options.warmup_s,
        "slo_s": 0.05,
        **SECTIONS,
    }
    return simulate(from_table(table, SimulateConfig), profile, iter(asks_of(records, options)))


def summary(outcomes: Counter[str], latencies_s: np.ndarray[Any, Any], slo_s: float) -> dict[str, float]:
    assert len(latencies_s), f"nothing was answered: {dict(outcomes)}"
    total = max(outcomes.total(), 1)
    return {
        "P50 ms": float(np.quantile(latencies_s, 0.5)) * 1e3,
        "P90 ms": float(np.quantile(latencies_s, 0.9)) * 1e3,
        "P99 ms": float(np.quantile(latencies_s, 0.99)) * 1e3,
        "within SLO": float((latencies_s <= slo_s).mean()),
        "HBM hits": (outcomes[Outcome.HBM_HIT] + outcomes[Outcome.JOINED]) / total,
        "DRAM hits": outcomes[Outcome.DRAM_HIT] / total,
        "misses": (outcomes[Outcome.MISS_FULL] + outcomes[Outcome.DEGRADED]) / total,
    }


def validate(num_instances: int, rate: float, seconds: float, *, signals: bool = True) -> dict[str, Any]:
    """Measured and predicted figures, and the errors; without signals hits come from users who return."""
    layout = KVLayout(
        num_layers=SHAPE["num_layers"],
        num_heads=SHAPE["num_heads"],
        qk_dim=SHAPE["qk_dim"],
        v_dim=SHAPE["v_dim"],
        arrangement=choose("cpu").arrangement(torch.float32, 64),
    )
    about: dict[str, Any] = {"kv_token_bytes": layout.token_bytes, "max_history_tokens": MAX_TOKENS}
    records = log(rate, seconds, 2)
    lead_s = LEAD_S if signals else None
    fast = ReplayOptions(base_url="http://there", signal_lead_s=lead_s, warmup_s=5.0, timeout_s=2.0)

    async def work(folder: Path) -> tuple[float, Measured, Measured]:
        async with fleet(folder, num_instances) as (url, copy_bytes_per_s):
            cold = ReplayOptions(base_url=url, warmup_s=2.0, timeout_s=2.0)
            slow = msgspec.structs.replace(cold, signal_lead_s=LEAD_S)
            calm, _ = await measure(log(6.0 * num_instances, 22.0, 1), cold)  # without signals: misses too
            _, signals_s = await measure(log(6.0 * num_instances, 8.0, 3), slow)
            await asyncio.sleep(2.5)  # past t_life
            return (
                copy_bytes_per_s,
                (calm, signals_s),
                await measure(records, msgspec.structs.replace(fast, base_url=url)),
            )

    with tempfile.TemporaryDirectory() as name:
        about["copy_bytes_per_s"], calm, (real, real_signals_s) = asyncio.run(work(Path(name)))
    before = fit_device(*calm, **about)
    within = fit_device(real, real_signals_s, **about)
    within = msgspec.structs.replace(before, late_s=within.late_s, rank_host_s=within.rank_host_s)
    found: dict[str, Any] = {
        "instances": num_instances,
        "rate": rate,
        "signals": signals,
        "ranks": len(real),
        "profile": {name: getattr(before, name) for name in ("a0_s", "a1_s", "a2_s", "b0_s", "b1_s", "signal_host_s")},
        "late ms, mean": (float(np.mean(before.late_s)) * 1e3, float(np.mean(within.late_s)) * 1e3),
        "host ms, mean": (float(np.mean(before.rank_host_s)) * 1e3, float(np.mean(within.rank_host_s)) * 1e3),
        "load average": os.getloadavg()[0],
        "measured": _measured(real),
    }
    for name, profile in (("fitted before", before), ("fitted within", within)):
        told = predict(profile, records, fast, num_instances)
        predicted = summary(told.outcomes, np.frombuffer(told.latencies_s), 0.05)
        found[name] = predicted
        found[f"{name}, error"] = {
            key: round(value - found["measured"][key], 3)
            if key in ("within SLO", "HBM hits", "DRAM hits", "misses")
            else f"{value / found['measured'][key] - 1:+.1%}"
            for key, value in predicted.items()
        }
        found[f"{name}, device busy"] = round(told.busy_ratio, 3)
    return found


def _measured(ranks: list[MeasuredRank]) -> dict[str, float]:
    outcomes = Counter(rank.outcome for rank in ranks)
    return summary(outcomes, np.array([rank.total_s for rank in ranks]), 0.05)


if __name__ == "__main__":
    logging.getLogger("npu_gr.relay").setLevel(logging.ERROR)
    instances, rate = int(sys.argv[1]), float(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 45.0
    sys.stdout.write(json.dumps(validate(instances, rate, seconds, signals=len(sys.argv) <= 4), indent=1) + "\n")
