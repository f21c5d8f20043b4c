"""`python -m benchmarks delta`: what a stream of deltas costs the ranks of returning users.

A real server process with the shipped configuration, ranks over HTTP at a share of its capacity,
and a delta of popular items' rows every period. Runs with deltas and without take turns. Two arms:
`exact`, as shipped, and `stale`, with `relay.max_stale_s` of one period. `shadow` has a shadow in
the place of deltas (`benchmarks/delta_shadow.py`); `day` is about what deltas bring
(`benchmarks/delta_day.py`), `fleet` about how soon all instances serve one
(`benchmarks/delta_fleet.py`).

Before anything is timed the scores are compared with the reference model's, and at the end with
those of a process that starts on the weights of the last delta.
"""

from __future__ import annotations

import http.client
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from benchmarks import delta_day, delta_fleet, delta_shadow
from benchmarks.frame import (
    COUNT,
    SEED,
    SET,
    SHIPPED_CONFIG,
    Line,
    compared,
    only,
    option,
    tell,
)
from benchmarks.loadgen import LoadStream, compiled, drive
from benchmarks.servers import (
    FIRST_ID,
    Process,
    Server,
    Traffic,
    ask,
    check,
    instance,
    running,
    write_bodies,
)
from npu_gr.core.arrays import I64
from npu_gr.core.errors import Unavailable
from npu_gr.model.config import HSTUConfig
from npu_gr.model.delta import file_name, make_delta, write_delta
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, read_weights, save
from tests.ports import free_port

ARMS = ("exact", "stale", "shadow", "fleet", "day")
OPTIONS = (
    SHIPPED_CONFIG,
    option("--items", default=200_000, type=click.IntRange(100), help="Items of the ranker."),
    option("--tokens", default=512, type=COUNT, help="Events of a history."),
    option("--users", default=256, type=COUNT, help="Users, whose prefixes fit in HBM."),
    option("--period", default=60.0, help="Seconds between two deltas."),
    option("--deltas", default=2, type=COUNT, help="Deltas of a run."),
    option("--repeats", default=2, type=COUNT, help="Runs with deltas, and without; medians."),
    option("--asked", default=2000, type=COUNT, help="Most events of the day that are asked for."),
    option("--changed", default=0.01, help="Share of the items that a delta changes."),
    option("--load", default=0.7, help="Share of the capacity that is asked."),
    only(ARMS),
    SET,
    SEED,
)
ZIPF = 1.05  # exponent of the items' popularity, in histories and in deltas
CLIENTS = 8  # that measure the capacity
CAPACITY_S = 3.0
CONNECTIONS = 256
BIG_ROWS = 100_000
CACHED, LATENCY, BIG_S, DRIFT = 0.85, 1 / 1.1, 1.0, 1e-5  # targets
CHECKED = 4
DAY = 0.1  # share of the log that is the day


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load."""

    cached: float  # share of the history tokens that were read from cached KV
    p99_ms: float
    good: float  # share of the requests answered within the SLO


class Stream:
    """A checkpoint, and deltas of it whose items are drawn by their popularity."""

    def __init__(self, folder: Path, shape: HSTUConfig, changed: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.newest = self.checkpoint
        self.random = np.random.default_rng(seed)
        self.weights = 1.0 / np.arange(1, shape.num_items + 1) ** ZIPF
        self.weights /= self.weights.sum()
        self.changed = changed
        ids = np.arange(FIRST_ID, FIRST_ID + shape.num_items)
        self.ranker = Checkpoint(model=HSTU(shape).eval(), item_ids=ids, name="untrained")
        save(self.ranker, self.checkpoint)
        self.files: list[bytes] = []

    def next(self, rows: I64) -> None:
        """Change rows of items, and write the delta."""
        number = len(self.files) + 1
        new = self.folder / f"v{number}"
        with torch.no_grad():
            table = self.ranker.model.item.weight
            table[torch.from_numpy(rows)] += (
                0.1 * table.std() * torch.randn(len(rows), table.shape[1])
            )
        save(self.ranker, new)
        path = self.folder / "made" / file_name(number)
        write_delta(make_delta(read_weights(self.newest), read_weights(new), number), path)
        self.files.append(path.read_bytes())
        if self.newest != self.checkpoint:
            shutil.rmtree(self.newest)
        self.newest = new

    def popular(self) -> I64:
        """Draw the rows of one delta, ascending."""
        drawn = self.random.choice(len(self.weights), self.changed, replace=False, p=self.weights)
        return np.sort(drawn)

    def bodies(self, traffic: Traffic, seed: int) -> list[dict[str, Any]]:
        """Make a rank of each user, with popular items in history and candidates."""
        made = traffic.bodies(self.ranker, "", seed)
        for body in made:
            for items in (body["history"]["items"], body["candidates"]):
                items[:] = self.random.choice(
                    self.ranker.item_ids, len(items), p=self.weights
                ).tolist()
        return made


class Asked(NamedTuple):
    """A server, and its requests."""

    server: Server
    admin_port: int
    bodies: Path
    seed: int

    def load(self, seconds: float, rate_per_s: float, seed: int) -> Run:
        """Ask at a rate."""
        stream = LoadStream(
            name="load", mode="poisson", bodies=self.bodies, to_s=seconds,
            connections=CONNECTIONS, rate_per_s=rate_per_s,
        )  # fmt: skip
        before = tokens(self.admin_port)
        report = drive(self.server.port, [stream], seed=seed).stream("load")
        cached, total = (b - a for a, b in zip(before, tokens(self.admin_port), strict=True))
        return Run(cached / max(total, 1.0), report.answered_ms.p99, report.in_time / report.due)

    def capacity_per_s(self) -> float:
        """Measure the answers a second of some clients whose prefixes are cached."""
        stream = LoadStream(
            name="load", mode="closed", bodies=self.bodies, to_s=CAPACITY_S, connections=CLIENTS
        )
        found = drive(self.server.port, [stream], seed=self.seed).stream("load")
        return found.answered / found.span_s


def tokens(port: int) -> tuple[float, float]:
    """Return the history tokens of ranks read from cached KV, and all of them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    names = ("npu_gr_prefix_tokens_total", "npu_gr_history_tokens_total")
    found = [re.search(rf"^{name} (\S+)$", text, re.MULTILINE) for name in names]
    assert all(found), f"no {' or '.join(names)} at /metrics"
    cached, total = (float(one.group(1)) for one in found if one)
    return cached, total


def post(port: int, body: bytes) -> float:
    """Post a delta; return the seconds until it is served.

    Raises:
        Unavailable: It was rejected.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began_at = time.monotonic()
    try:
        headers = {"Content-Type": "application/octet-stream"}
        connection.request("POST", "/v1/models/delta", body, headers)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise Unavailable(f"bench: a delta was answered {response.status}: {text[:200]!r}")
    finally:
        connection.close()
    return time.monotonic() - began_at


@contextmanager
def posting(port: int, files: Sequence[bytes], period_s: float) -> Iterator[None]:
    """Post a delta at the beginning of each period, during the block.

    Raises:
        Unavailable: One was rejected.
    """
    failed: list[Exception] = []

    def work() -> None:
        began_at = time.monotonic()
        try:
            for number, file in enumerate(files):
                time.sleep(max(0.0, began_at + number * period_s - time.monotonic()))
                post(port, file)
        except (OSError, Unavailable) as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failed:
        raise failed[0]


def lines(
    config: Path,
    items: int,
    tokens: int,
    users: int,
    period: float,
    deltas: int,
    repeats: int,
    asked: int,
    changed: float,
    load: float,
    parts: Sequence[str],
    overrides: tuple[str, ...],
    seed: int,
) -> Iterator[Line]:
    """Run the arms one after the other, each on a process of its own.

    Raises:
        AssertionError: Scores are wrong; nothing was timed.
        Unavailable: A process did not start, or rejected a delta.
    """
    if "day" in parts:
        yield from delta_day.lines(DAY, asked)
    parts = [part for part in parts if part != "day"]
    if not parts:
        return
    compiled()
    shape = HSTUConfig(
        num_items=items,
        actions=tuple(map(str, range(5))),
        tasks=("click", "like"),
        num_layers=2,
        max_history_tokens=max(256, tokens),
    )
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stream = Stream(folder, shape, max(1, int(items * changed)), seed)
        bodies = stream.bodies(Traffic(history_tokens=tokens, num_users=users, num_tenants=1), seed)
        file = write_bodies(folder / "bodies", bodies)
        tell("delta", f"{deltas * repeats} deltas of {stream.changed} rows")
        for _ in range(deltas * repeats):
            stream.next(stream.popular())
        stream.next(np.arange(min(BIG_ROWS, items)))
        about = f"{users} users of {tokens}, {changed:.2%} of {items} rows every {period:g} s"
        if "fleet" in parts:
            yield from delta_fleet.lines(stream, config)
        for arm in [part for part in parts if part != "fleet"]:
            admin_port = free_port()
            own = [f"server.admin_port={admin_port}", *overrides]
            if arm == "stale":
                own.append(f"relay.max_stale_s={period}")
            server = instance(f"delta {arm}", stream.checkpoint, folder, own, config)
            if arm == "shadow":
                with running(arm, server) as one:
                    check(one, stream.checkpoint, bodies[:CHECKED])
                    ask(one.port, bodies)
                    there = Asked(one, admin_port, file, seed)
                    size = f"{users} users of {tokens}"
                    run_s = period * deltas
                    yield from delta_shadow.turns(there, stream.newest, size, run_s, repeats, load)
                continue
            yield from measured(
                arm,
                about,
                server,
                admin_port,
                stream,
                file,
                bodies,
                period,
                deltas,
                repeats,
                load,
                seed,
            )
            shutil.rmtree(folder / "checkpoint.deltas")


def measured(
    arm: str,
    about: str,
    process: Process,
    admin_port: int,
    stream: Stream,
    file: Path,
    bodies: list[dict[str, Any]],
    period: float,
    deltas: int,
    repeats: int,
    load: float,
    seed: int,
) -> Iterator[Line]:
    """Measure one arm: runs in turn, then the large delta, then a cold start."""
    left = list(stream.files)
    steady, moving = list[Run](), list[Run]()
    with running(arm, process) as server:
        asked = Asked(server, admin_port, file, seed)
        check(server, stream.checkpoint, bodies[:CHECKED])
        ask(server.port, bodies)  # every prefix is cached
        for turn in range(repeats):
            capacity = asked.capacity_per_s()  # in each turn: other processes may come and go
            tell("delta", f"{arm}: {capacity:.0f} ranks a second; asked are {load:.0%}")
            steady.append(asked.load(period * deltas, load * capacity, seed + turn))
            own, left = left[:deltas], left[deltas:]
            with posting(admin_port, own, period):
                moving.append(asked.load(period * deltas, load * capacity, seed + turn))
            tell("delta", f"{arm}: {steady[-1]} {moving[-1]}")
        took_s = post(admin_port, left[0])
        fresh = [{**body, "user_id": f"new-{body['user_id']}"} for body in bodies[:CHECKED]]
        served = [answer["scores"] for answer in ask(server.port, fresh)]
        after = [answer["scores"] for answer in ask(server.port, fresh)]
    cold = instance("cold", stream.newest, stream.folder)
    with running("cold", cold) as server:
        want = [answer["scores"] for answer in ask(server.port, fresh)]
    drift = max(_drift(served, want), _drift(after, want))

    def of(field: str) -> tuple[float, float]:
        mine, before = ([getattr(run, field) for run in runs] for runs in (moving, steady))
        return median(mine), median(before)

    cached, good, p99 = of("cached"), of("good"), of("p99_ms")
    at = f"{arm}, {about}, {load:.0%} load"
    alone = "without deltas"
    yield compared(
        "delta", f"cached tokens, {at}", 100 * cached[0], "%", alone, 100 * cached[1],
        cached[0] / cached[1], CACHED,
    )  # fmt: skip
    # the runs of a turn are compared, since another turn may have another machine
    turns = [before.p99_ms / mine.p99_ms for mine, before in zip(moving, steady, strict=True)]
    yield compared("delta", f"P99, {at}", p99[0], "ms", alone, p99[1], median(turns), LATENCY)
    yield compared(
        "delta", f"within the SLO, {at}", 100 * good[0], "%", alone, 100 * good[1],
        good[0] / max(good[1], 1e-9),
    )  # fmt: skip
    rows = min(BIG_ROWS, len(stream.weights))
    yield compared(
        "delta", f"{rows} rows, posted and served, {arm}", took_s, "s", "the target", BIG_S,
        BIG_S / took_s, 1.0,
    )  # fmt: skip
    yield compared(
        "delta", f"largest difference from a cold start's scores, {arm}", drift, "", "the target",
        DRIFT, DRIFT / max(drift, 1e-12), 1.0,
    )  # fmt: skip


def _drift(got: list[dict[str, list[float]]], want: list[dict[str, list[float]]]) -> float:
    return max(
        float(np.abs(np.array(one[task]) - np.array(other[task])).max())
        for one, other in zip(got, want, strict=True)
        for task in other
    )
