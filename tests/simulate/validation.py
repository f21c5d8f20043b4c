"""python -m tests.simulate.validation: compare one, two and four instances with the prediction.

One traffic plays without a break. Of its slices of `SLICE_S` every other one fits the device's
profile, and what was measured in the ones between is compared with a simulation of the whole
traffic by that profile: whatever the machine does besides is in both. The rate is such that passes
keep the devices together busy for `--busy` of one processor, so that they are the time that counts
and no instance waits for another one's processor. Percentiles are medians over parts of `PART_S`,
P99 is of all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import click
import msgspec
import numpy as np
import torch
import yaml

from npu_gr.backend.choose import choose
from npu_gr.core.history import Events
from npu_gr.core.request import Outcome
from npu_gr.core.settings import from_table
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.replay.log import LoggedHistory, QueryRecord
from npu_gr.replay.plan import ReplayOptions
from npu_gr.route.placement import How
from npu_gr.simulate import clock
from npu_gr.simulate.config import DeviceProfile, Lognormal, SimulateConfig, UsersConfig
from npu_gr.simulate.fit import MeasuredRank, fit_device, measure, requests_of
from npu_gr.simulate.fleet import Fleet
from npu_gr.simulate.instance import RankResult
from npu_gr.simulate.users import TrafficRequest, visits
from tests.ports import free_port
from tests.serving import FIRST_ID, write_checkpoint

USERS = UsersConfig(
    num_users=400,
    zipf=0.7,
    history_tokens=Lognormal(median=800, sigma=0.5),
    growth_tokens=8,
    candidates=100,
)
SHAPE: dict[str, Any] = {
    "dim": 64,
    "num_layers": 6,
    "num_heads": 2,
    "qk_dim": 32,
    "v_dim": 32,
    "head_dim": 32,
}
SECTIONS: dict[str, Any] = {
    "relay": {"t_life_s": 2.0},
    "trigger": {"policy": "always", "min_prefix_tokens": 16},
    "brownout": {"enabled": False},
    "kv_cache": {"hbm_bytes": 70_000_000, "dram_bytes": 280_000_000},
}
MAX_TOKENS = 2048
Measured = tuple[list[MeasuredRank], list[float]]
LEAD_S, SLO_S = 0.05, 0.1
SLICE_S, PART_S = 2.0, 16.0  # a part is long enough for percentiles


def log(rate: float, seconds: float, seed: int, who: str = "u") -> list[QueryRecord]:
    """Ranks whose users, lengths and candidates vary; `who` tells whole populations apart."""
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
            QueryRecord(
                ts=visit.arrived_at,
                kind="rank",
                user_id=f"{who}{visit.user}",
                history=LoggedHistory.of(history),
                candidates=(source.integers(0, 300, num_candidates) + FIRST_ID).tolist(),
                timestamp=1_700_000_000,
            )
        )
    return records


@asynccontextmanager
async def process(
    folder: Path, name: str, command: str, table: dict[str, Any], ready: str
) -> AsyncIterator[Path]:
    """One of ours, from its readiness to the block's end; its log."""
    config, output = folder / f"{name}.yaml", folder / f"{name}.log"
    await asyncio.to_thread(config.write_text, yaml.safe_dump(table))
    with await asyncio.to_thread(output.open, "wb") as file:
        started = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "npu_gr",
            command,
            "--config",
            str(config),
            stdout=file,
            stderr=file,
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


@asynccontextmanager
async def fleet(folder: Path, num_instances: int) -> AsyncIterator[tuple[str, float]]:
    """The address to send to, and the measured copy bandwidth."""
    write_checkpoint(
        folder / "checkpoint", max_history_tokens=MAX_TOKENS, scaling_seqlen=MAX_TOKENS, **SHAPE
    )
    ports = [free_port() for _ in range(num_instances + 2)]
    async with AsyncExitStack() as stack:
        output = folder
        for number in range(num_instances):
            table = {
                "checkpoint": str(folder / "checkpoint"),
                "history_store": {"kind": "none"},
                "service": {"selfcheck_ratio": 0.0},
                "admission": {"enabled": False},  # nothing is rejected, here and there
                "slo": {"rank_s": SLO_S},
                "server": {
                    "port": ports[number],
                    "admin_port": 0,
                    "log_requests": "slow",
                    "drain_grace_s": 0.1,
                },
                **SECTIONS,
            }
            ready = f"http://127.0.0.1:{ports[number]}/readyz"
            output = await stack.enter_async_context(
                process(folder, f"gr-{number}", "serve", table, ready)
            )
        found = re.search(r"DRAM to HBM ([0-9.]+) GB/s", await asyncio.to_thread(output.read_text))
        assert found, "the service logs its copy bandwidth"
        if num_instances == 1:
            yield f"http://127.0.0.1:{ports[0]}", float(found[1]) * 1e9
            return
        port, admin = ports[-2:]
        instances = [
            {"name": f"gr-{n}", "host": "127.0.0.1", "port": ports[n]} for n in range(num_instances)
        ]
        table = {
            "port": port,
            "admin_port": admin,
            "drain_grace_s": 0.1,
            "discovery": {"instances": instances},
        }
        table["relay"] = SECTIONS["relay"]
        ready = f"http://127.0.0.1:{port}/readyz"
        await stack.enter_async_context(process(folder, "router", "route", table, ready))
        await asyncio.sleep(1.5)  # until its checks have seen them all
        yield f"http://127.0.0.1:{port}", float(found[1]) * 1e9


class RecordingFleet(Fleet):
    """Keeps every answered rank."""

    def __init__(self, config: SimulateConfig, profile: DeviceProfile) -> None:
        super().__init__(config, profile)
        self.ranks: list[AnsweredRank] = []

    def _count(self, request: TrafficRequest, ranked: RankResult, how: How) -> None:
        super()._count(request, ranked, how)
        if ranked.outcome is not None:
            self.ranks.append(AnsweredRank(request.due_at, ranked.latency_s, ranked.outcome))


class AnsweredRank(NamedTuple):
    """A rank that was answered, really or in the simulation."""

    due_at: float
    latency_s: float
    outcome: str


def predict(
    profile: DeviceProfile, records: list[QueryRecord], options: ReplayOptions, instances: int
) -> list[AnsweredRank]:
    table = {
        "device": "-",
        "instances": instances,
        "duration_s": records[-1].ts + 10,
        "warmup_s": options.warmup_s,
        "slo_s": SLO_S,
        "admission": {"enabled": False},
        **SECTIONS,
    }

    async def work() -> list[AnsweredRank]:
        fleet = RecordingFleet(from_table(table, SimulateConfig), profile)
        await fleet.run(requests_of(records, options))
        return fleet.ranks

    return clock.run(work())


def is_checked(due_at: float) -> bool:
    """Its slice is compared; the others fit the profile."""
    return int(due_at / SLICE_S) % 2 == 1


def summary(ranks: list[AnsweredRank], *, of_checked: bool = True) -> dict[str, float]:
    """Of the slices that are compared, or of those that fit the profile."""
    checked = [rank for rank in ranks if is_checked(rank.due_at) is of_checked]
    parts: defaultdict[int, list[float]] = defaultdict(list)
    for rank in checked:
        parts[int(rank.due_at / PART_S)].append(rank.latency_s)
    latencies_s = np.array([rank.latency_s for rank in checked])
    outcomes = Counter(rank.outcome for rank in checked)

    def ratio(*names: Outcome) -> float:
        return sum(outcomes[name] for name in names) / outcomes.total()

    return {
        "mean ms": float(latencies_s.mean()) * 1e3,
        "P50 ms": float(np.median([np.quantile(one, 0.5) for one in parts.values()])) * 1e3,
        "P90 ms": float(np.median([np.quantile(one, 0.9) for one in parts.values()])) * 1e3,
        "P99 ms": float(np.quantile(latencies_s, 0.99)) * 1e3,
        "within SLO": float((latencies_s <= SLO_S).mean()),
        "HBM hits": ratio(Outcome.HBM_HIT, Outcome.JOINED),
        "DRAM hits": ratio(Outcome.DRAM_HIT),
        "misses": ratio(Outcome.MISS_FULL, Outcome.DEGRADED),
    }


class Comparison(NamedTuple):
    """One fleet's figures."""

    instances: int
    rate: float
    busy_ratio: float  # of a device, in the mean
    ranks: int  # that were compared
    measured: dict[str, float]
    predicted: dict[str, float]
    fitted: dict[str, float]  # measured in the slices that fit: what differs between equals

    def errors(self, name: str) -> tuple[float, float]:
        """Relative errors of the prediction and of the fit to the other slices.

        Errors of ratios below 0.1 are relative to 0.1.
        """
        real = self.measured[name]
        predicted, other = (
            (of[name] - real) / max(real, 0.1) for of in (self.predicted, self.fitted)
        )
        return predicted, other


def validate(
    num_instances: int, seconds: float, *, busy: float = 0.4, signals: bool = False
) -> Comparison:
    """Measured and predicted figures; without signals hits come from users who return."""
    layout = KVLayout(
        num_layers=SHAPE["num_layers"],
        num_heads=SHAPE["num_heads"],
        qk_dim=SHAPE["qk_dim"],
        v_dim=SHAPE["v_dim"],
        arrangement=choose("cpu").arrangement(torch.float32, 64),
    )

    async def work(folder: Path) -> tuple[float, float, list[QueryRecord], ReplayOptions, Measured]:
        async with fleet(folder, num_instances) as (url, copy_bytes_per_s):
            options = ReplayOptions(base_url=url, warmup_s=2.0, timeout_s=4.0)
            first, _ = await measure(log(4.0, 10.0, 1, "other"), options)
            rate = min(busy, 0.25 * num_instances) / float(
                np.mean([rank.device_s for rank in first])
            )
            records = log(rate, seconds, 2)
            lead_s = LEAD_S if signals else None
            options = msgspec.structs.replace(options, warmup_s=4.0, signal_lead_s=lead_s)
            await asyncio.sleep(2 * SECTIONS["relay"]["t_life_s"])
            return rate, copy_bytes_per_s, records, options, await measure(records, options)

    with tempfile.TemporaryDirectory() as name:
        rate, copy_bytes_per_s, records, options, (real, signals_s) = asyncio.run(work(Path(name)))
    profile = fit_device(
        [rank for rank in real if not is_checked(rank.due_at)],
        signals_s,
        kv_token_bytes=layout.token_bytes,
        copy_bytes_per_s=copy_bytes_per_s,
        max_history_tokens=MAX_TOKENS,
    )
    seen = [AnsweredRank(rank.due_at, rank.total_s, rank.outcome) for rank in real]
    return Comparison(
        instances=num_instances,
        rate=rate,
        busy_ratio=sum(rank.device_s for rank in real) / seconds / num_instances,
        ranks=sum(is_checked(rank.due_at) for rank in real),
        measured=summary(seen),
        predicted=summary(predict(profile, records, options, num_instances)),
        fitted=summary(seen, of_checked=False),
    )


def table(found: Comparison) -> str:
    """For people."""
    lines = [
        f"{found.instances} instances, {found.rate:.1f} ranks/s, devices busy "
        f"{found.busy_ratio:.0%}, "
        f"{found.ranks} ranks compared, load average {os.getloadavg()[0]:.1f}"
    ]
    for name, real in found.measured.items():
        predicted, other = found.errors(name)
        lines.append(
            f"  {name:<12}{real:>10.3f}{found.predicted[name]:>10.3f}{predicted:>+9.1%}"
            f"   other slices {other:>+7.1%}"
        )
    return "\n".join(lines)


@click.command()
@click.option("--instances", multiple=True, type=int, default=(1, 2, 4), show_default=True)
@click.option(
    "--seconds", default=130.0, show_default=True, help="Of traffic, for each number of instances."
)
@click.option("--busy", default=0.4, show_default=True, help="Processors that passes shall use.")
@click.option("--signals", is_flag=True, help="Prefill: then nearly every rank hits.")
def main(instances: tuple[int, ...], seconds: float, busy: float, signals: bool) -> None:
    """Real instances against the prediction: measured, predicted, error."""
    for number in instances:
        click.echo(table(validate(number, seconds, busy=busy, signals=signals)))


if __name__ == "__main__":
    logging.getLogger("npu_gr.relay").setLevel(logging.ERROR)
    main()
