"""`python -m benchmarks fleet`: what a fleet costs: placement, parts of a log, a Redis Cluster.

    placement   10 to 1,000 instances: spread of the users, users who move when an instance joins or
                leaves, CPU time of a choice, memory of the ring
    prepare     a log in parts by user, each prepared and all merged, against one run
    ray         the same log prepared on a local Ray of one and of two workers; skipped without Ray
    ranks       steps a second of each training on one and on two ranks of torch.distributed
    log         memory and speed of a training by its log's events, as arrays and in mapped files
    store       appends to the histories on a Redis Cluster of three, against one Redis

All is measured in CPU time, except on Ray, on ranks and for the store: there other processes share
the machine with us.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import fleet_log, fleet_ranks
from benchmarks.frame import COUNT, SEED, Line, compared, only, option, tell
from benchmarks.prepare import LOG
from npu_gr.core.errors import DataError
from npu_gr.core.history import Events, Mode, UserKey, Write
from npu_gr.core.kinds import Routing
from npu_gr.core.secret import SecretUrl
from npu_gr.dataset import merge, prepare, read_dataset
from npu_gr.dataset.on_ray import prepare_on_ray
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig
from npu_gr.route.config import DiscoveryConfig, InstanceConfig, PairConfig, RouterConfig
from npu_gr.route.picker import EndpointTable
from npu_gr.route.placement import Member, Ring
from tests.history_store.redis_cluster import address, cluster
from tests.history_store.redis_server import redis_path

PARTS = ("placement", "prepare", "ray", "ranks", "log", "store")
OPTIONS = (
    option("--users", "num_users", default=1_000_000, type=COUNT, help="Users who are placed."),
    option("--rows", "num_rows", default=2_000_000, type=COUNT, help="Rows of the log."),
    option("--log-parts", "num_parts", default=4, type=COUNT, help="Parts of the log."),
    option("--events", "num_events", default=200_000, type=COUNT, help="Events to train on."),
    option("--steps", "num_steps", default=12, type=COUNT, help="Steps of a training to time."),
    option("--seconds", default=5.0, help="Seconds of appends."),
    only(PARTS),
    SEED,
)
SIZES = (10, 100, 1000)  # instances
MOVED = 0.8  # target: users who should move / who move; the rest is the ring's own spread
SPREAD = 0.7  # target: fair share / share of the fullest
FLAT = 0.1  # target: CPU time of a choice among the fewest / among this many
OF_A_RUN = 1 / 0.35  # target: CPU time of one run / of the merge
STREAMS = 32  # concurrent appends
EVENTS = 4  # of an append


def lines(
    num_users: int,
    num_rows: int,
    num_parts: int,
    num_events: int,
    num_steps: int,
    seconds: float,
    parts: Sequence[str],
    seed: int,
) -> Iterator[Line]:
    """Yield the lines of each part.

    Raises:
        DataError: The merged parts are not the one run.
        Unavailable: A server does not start, or a rank ends early.
    """
    if "placement" in parts:
        yield from _placed(num_users)
    with TemporaryDirectory() as name:
        if "prepare" in parts:
            yield from _prepared(Path(name), num_rows, num_parts, seed)
        if "ray" in parts:
            yield from _on_ray(Path(name), num_rows, num_parts, seed)
        if "ranks" in parts:
            yield from fleet_ranks.lines(num_events, num_steps, seed)
        if "log" in parts:
            yield from fleet_log.lines(Path(name), num_events, seed)
        if "store" in parts:
            yield from asyncio.run(_stored(Path(name), seconds))


def _placed(num_users: int) -> Iterator[Line]:
    users = [b"user-%d" % number for number in range(num_users)]
    least_us, least_bytes = 0.0, 0
    for size in SIZES:
        members = [Member(f"10.0.{number >> 8}.{number & 255}:8080") for number in range(size)]
        tracemalloc.start()
        ring = Ring(members)
        ring_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        owners = np.array([ring.owner(user) for user in users])
        most = int(np.unique(owners, return_counts=True)[1].max())
        fair = num_users / size
        case = f"{size:,} instances"
        yield compared(
            "fleet", f"{case}: the fullest", most, "users", "fair share", fair, fair / most, SPREAD
        )
        for what, others, ideal in (
            ("one joins", [*members, Member("10.9.9.9:8080")], num_users / (size + 1)),
            ("one leaves", members[1:], num_users / size),
        ):
            changed = Ring(others)
            moved = int(sum(changed.owner(u) != o for u, o in zip(users, owners, strict=True)))
            yield compared(
                "fleet", f"{case}: {what}", moved, "users move", "its share of the users", ideal,
                ideal / max(1, moved), MOVED,
            )  # fmt: skip
        table = asyncio.run(_table(members))
        table.in_flight.update({one.name: 2 for one in members})
        began_at = time.process_time()
        for user in users[:20_000]:
            table.choose(Routing.SIGNAL, user, None)
        chosen_us = (time.process_time() - began_at) / len(users[:20_000]) * 1e6
        least_us, least_bytes = least_us or chosen_us, least_bytes or ring_bytes
        if size > SIZES[0]:
            yield compared(
                "fleet", f"{case}: the picker's choice", chosen_us, "us CPU",
                f"among {SIZES[0]}", least_us, least_us / chosen_us, FLAT,
            )  # fmt: skip
            yield compared(
                "fleet", f"{case}: the ring", ring_bytes / 1e6, "MB", f"of {SIZES[0]}",
                least_bytes / 1e6, least_bytes / ring_bytes,
            )  # fmt: skip


async def _table(members: Sequence[Member]) -> EndpointTable:
    """Make a picker's table whose instances are all ready, with bounded loads."""
    listed = [InstanceConfig(name=one.name, host="10.0.0.1", port=8080) for one in members]
    discovery = DiscoveryConfig(instances=listed)
    table = EndpointTable(RouterConfig(discovery=discovery, relay=PairConfig(load_factor=1.25)))

    async def ready(_listed: object, _timeout_s: float) -> set[str]:
        return {one.name for one in members}

    calls: Any = SimpleNamespace(ready=ready)
    await table.look(calls, listed, dict.fromkeys((one.name for one in members), "10.0.0.1"))
    return table


def _written(log: Path, num_rows: int, num_parts: int, seed: int) -> Path:
    import duckdb

    if log.exists():
        return log
    log.mkdir()
    tell("fleet", f"writes {num_rows:,} rows in {num_parts} parts")
    with duckdb.connect() as con:
        con.execute(f"CREATE TABLE log AS {LOG.format(rows=num_rows, seed=seed)}")
        for number in range(num_parts):
            con.execute(
                f"COPY (FROM log WHERE hash(user_id) % {num_parts} = {number}) TO "
                f"'{log}/{number:04}.parquet' (FORMAT PARQUET)"
            )
    return log


def _on_ray(folder: Path, num_rows: int, num_parts: int, seed: int) -> Iterator[Line]:
    """Prepare a log on local clusters of one and of two workers; rows a second of wall time."""
    if find_spec("ray") is None:
        tell("fleet", "no line of Ray: pip install 'npu_gr[ray]'")
        return
    import ray

    log = _written(folder / "log", num_rows, num_parts, seed)
    part_bytes = -(-sum(path.stat().st_size for path in log.iterdir()) // num_parts)
    began_at = time.perf_counter()
    prepare(log, folder / "one-run")
    one_run_s = time.perf_counter() - began_at
    took_s: list[float] = []
    for num_workers in (1, 2):
        tell("fleet", f"prepares on Ray, workers: {num_workers}")
        ray.init(num_cpus=num_workers, include_dashboard=False, log_to_driver=False)
        began_at = time.perf_counter()
        prepare_on_ray(str(log), folder / f"ray-{num_workers}", part_bytes=part_bytes)
        took_s.append(time.perf_counter() - began_at)
        ray.shutdown()
    case = f"{num_rows:,} rows in {num_parts} parts on Ray"
    yield compared(
        "fleet", f"{case}: one worker", num_rows / took_s[0], "rows/s",
        "one run", num_rows / one_run_s, one_run_s / took_s[0],
    )  # fmt: skip
    yield compared(
        "fleet", f"{case}: two workers", num_rows / took_s[1], "rows/s",
        "one worker", num_rows / took_s[0], took_s[0] / took_s[1],
    )  # fmt: skip


def _prepared(folder: Path, num_rows: int, num_parts: int, seed: int) -> Iterator[Line]:
    log = _written(folder / "log", num_rows, num_parts, seed)
    began_at = time.process_time()
    whole = prepare(log, folder / "whole").dataset
    one_run_s = time.process_time() - began_at
    tell("fleet", "prepares the parts")
    parts = [folder / "parts" / path.stem for path in sorted(log.iterdir())]
    slowest_s = 0.0
    for one, part in zip(sorted(log.iterdir()), parts, strict=True):
        began_at = time.process_time()
        prepare(one, part)
        slowest_s = max(slowest_s, time.process_time() - began_at)
    began_at = time.process_time()
    merge(parts, folder / "merged")
    merge_s = time.process_time() - began_at
    merged = read_dataset(folder / "merged")
    same = (merged.manifest["item_key"], merged.manifest["users"], merged.manifest["actions"])
    if same != (whole.manifest["item_key"], whole.manifest["users"], whole.manifest["actions"]):
        raise DataError("bench fleet: the merged parts are not the one run")
    case = f"{num_rows:,} rows in {num_parts} parts"
    yield compared(
        "fleet", f"{case}: merge", merge_s, "CPU s", "one run", one_run_s, one_run_s / merge_s,
        OF_A_RUN,
    )  # fmt: skip
    longest_s = slowest_s + merge_s
    yield compared(
        "fleet", f"{case}: on {num_parts} machines", num_rows / longest_s, "rows/CPU s",
        "one run", num_rows / one_run_s, one_run_s / longest_s,
    )  # fmt: skip


async def _stored(folder: Path, seconds: float) -> list[Line]:
    (folder / "one").mkdir()
    (folder / "cluster").mkdir()
    with (
        redis_path(folder / "one") as socket,
        cluster(folder / "cluster") as nodes,
    ):
        urls = {"of one Redis": f"unix://{socket}", "ours": address(nodes)}
        rates = {name: await _appends(url, seconds) for name, url in urls.items()}
    return [
        compared(
            "fleet", f"a Redis Cluster of 3, {STREAMS} at once", rates["ours"], "appends/s",
            "one Redis", rates["of one Redis"], rates["ours"] / rates["of one Redis"],
        )
    ]  # fmt: skip


async def _appends(url: str, seconds: float) -> float:
    """Return the appends a second, each of another user."""
    store = await open_store(HistoryConfig(kind="redis", url=SecretUrl(url), timeout_s=5.0))
    assert store is not None
    numbers = iter(range(10**9))
    ends_at = time.perf_counter() + seconds

    async def stream() -> int:
        done = 0
        while time.perf_counter() < ends_at:
            user = UserKey("", f"u{next(numbers) % 10_000}")
            at = int(time.time())
            items = np.arange(EVENTS) + next(numbers)
            events = Events.make(items, np.zeros(EVENTS, np.int64), np.full(EVENTS, at))
            await store.write_many([Write(user, events, Mode.APPEND)])
            done += 1
        return done

    try:
        began_at = time.perf_counter()
        total = sum(await asyncio.gather(*(stream() for _ in range(STREAMS))))
        return total / (time.perf_counter() - began_at)
    finally:
        await store.close()
