"""Loads that the machine can bear are borne: bursts, clients that retry at once, a hot tenant, a pause, a stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from benchmarks.loadgen import BIN_S, LoadStream, Pause, StreamCounts
from benchmarks.servers import ADMISSION_OFF
from tests.chaos.open_loop import LOST, Answers, Ask, OpenLoop, send
from tests.chaos.rig import (
    Bodies,
    Instance,
    Scale,
    answered_per_s,
    check_failures,
    drive_all,
    each_scale,
    reference,
    running,
    three_attempts,
)

OBJECTIVE_S = 0.05
PAUSE_S = 0.11
WELL_AGAIN_S = 0.25  # after a pause
STALLED_AT_S = 1.0
MOST_STRANGERS = 400  # connections that are held open at once
STANDSTILL_S = 1.5  # longer than the client's patience
NEW_PER_S = 20.0  # callers who connect anew
NEW_WAIT_S = 2.0  # a second in the kernel's queue, and the budget
STALL_S = 0.3  # at four times the capacity it fills all connections
WELL_AGAIN_UNDER_LOAD_S = 2.5  # while the load lasts: what has come meanwhile is refused first
ABLE_PER_S = 400.0  # with fewer, the objective is nearly over when those who are inside have left
CLOSES_S = 5.0  # connections that are paused while their callers hang up
GROWTH_BYTES = 200_000_000  # of the resident memory over all loads: pages of prefixes, and what the allocator keeps


@pytest.fixture(scope="module")
def instance(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """One for the loads of this file, each of which measures its own reference; it leaks nothing over all of them."""
    with started(Instance(tmp_path_factory.mktemp("instance"), checkpoint)) as made:
        before = (made.num_descriptors, made.resident_bytes)
        yield made
        ends_at = time.monotonic() + CLOSES_S
        while made.num_descriptors > before[0] + 20 and time.monotonic() < ends_at:
            time.sleep(0.1)
        assert made.num_descriptors <= before[0] + 20, "connections of clients that are gone are still open"
        assert made.resident_bytes <= before[1] + GROWTH_BYTES


@pytest.fixture(scope="module")
def open_instance(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """The same without admission control, to compare with."""
    with started(Instance(tmp_path_factory.mktemp("open"), checkpoint, *ADMISSION_OFF)) as made:
        yield made


@contextmanager
def started(made: Instance) -> Iterator[Instance]:
    try:
        made.launch()
        asyncio.run(made.ready())
        yield made
    finally:
        made.end()


@each_scale
@pytest.mark.parametrize("size", [8, 16, 24])
@three_attempts
async def test_bursts_at_a_quarter_of_the_load_lose_no_more_than_without_admission(
    size: int, scale: Scale, bodies: Bodies, instance: Instance, open_instance: Instance
) -> None:
    """Where a burst fits into the objective, nothing is lost either way."""
    most_per_s = answered_per_s(await reference(instance, bodies))
    if size > 0.6 * OBJECTIVE_S * most_per_s:
        pytest.skip(f"{most_per_s:.0f} ranks a second: {size} at once do not fit into the objective here")
    load = LoadStream(
        name="bursts",
        mode="bursts",
        bodies=bodies.path,
        to_s=scale.load_s,
        connections=2 * size,
        burst_size=size,
        every_s=4 * size / most_per_s,
    )
    without = (await drive_all(open_instance, [load])).stream("bursts")
    counts = (await drive_all(instance, [load])).stream("bursts")
    assert counts.due >= size
    assert counts.timeouts + counts.errors + counts.other == 0
    assert counts.lost <= without.lost + scale.most_failed * counts.due, (counts.due, counts.lost, without.lost)


@each_scale
@pytest.mark.parametrize("num_clients", [16, 64])
@three_attempts
async def test_clients_that_retry_at_once_cost_no_goodput(
    num_clients: int, scale: Scale, bodies: Bodies, instance: Instance
) -> None:
    before_per_s = (await reference(instance, bodies)).good_per_s
    load = LoadStream(name="load", mode="closed", bodies=bodies.path, to_s=scale.load_s + 1.0, connections=num_clients)
    counts = (await drive_all(instance, [load])).stream("load")
    after_per_s = (await reference(instance, bodies)).good_per_s
    quiet_per_s = (before_per_s + after_per_s) / 2
    assert not counts.errors
    assert counts.good_per_s >= scale.least_ratio * quiet_per_s
    third = len(counts.bins) // 3
    good = [sum(each[0] for each in part) for part in (counts.bins[:third], counts.bins[-third:])]
    assert good[1] >= 0.6 * scale.least_ratio * good[0], "goodput falls while the load lasts"
    assert after_per_s >= 0.6 * before_per_s


@each_scale
@three_attempts
async def test_a_small_tenant_beside_a_hot_one_is_not_refused(
    scale: Scale, checkpoint: Path, instance: Instance, tmp_path: Path
) -> None:
    hot = Bodies.make(checkpoint, tmp_path / "hot", tenant="hot", prefix="h")
    few = Bodies.make(checkpoint, tmp_path / "small", tenant="small", prefix="s")
    alone = LoadStream(
        name="alone", mode="poisson", bodies=few.path, to_s=scale.load_s, connections=16, rate_per_s=20.0
    )
    crowd = LoadStream(name="hot", mode="closed", bodies=hot.path, to_s=scale.load_s + 0.5, connections=16)
    per_s = answered_per_s(await reference(instance, hot))
    if per_s < ABLE_PER_S:
        pytest.skip(f"{per_s:.0f} ranks a second: the few that are inside take most of the objective here")
    quiet = (await drive_all(instance, [alone])).stream("alone")
    report = await drive_all(instance, [crowd, alone.moved("small", 0.5, 0.5 + scale.load_s)])
    small = report.stream("small")
    check_failures(quiet, scale)
    check_failures(small, scale)
    assert small.answered_ms.p90 <= max(2 * quiet.answered_ms.p90, OBJECTIVE_S * 1e3)
    assert report.stream("hot").in_time > 0


@each_scale
@three_attempts
async def test_a_pause_is_forgotten_within_a_quarter_of_a_second(
    scale: Scale, bodies: Bodies, instance: Instance
) -> None:
    most_per_s = answered_per_s(await reference(instance, bodies))
    at_s = 0.5
    load = LoadStream(
        name="load",
        mode="poisson",
        bodies=bodies.path,
        to_s=at_s + PAUSE_S + WELL_AGAIN_S + scale.load_s,
        connections=128,
        rate_per_s=most_per_s / 4,
    )
    pause = Pause(pid=instance.pid, at_s=at_s, for_s=PAUSE_S)
    counts = (await drive_all(instance, [load], pause=pause)).stream("load")
    well_from = int((at_s + PAUSE_S + WELL_AGAIN_S) / BIN_S) + 1
    refused = [each[2] for each in counts.bins]
    rest = counts.bins[well_from:]
    due = sum(sum(each) for each in rest)
    assert sum(refused[well_from:]) <= scale.most_failed * due, refused
    assert sum(sum(each[3:]) for each in counts.bins) == 0, "lost"
    assert sum(each[0] for each in rest) >= 0.9 * due


async def stopped_under_load(
    instance: Instance, bodies: Bodies, scale: Scale, connections: int, times: float, for_s: float
) -> tuple[StreamCounts, int]:
    """Stop an instance within a load of so many times what it can do; returns what became of it, and its last bins.

    When those begin, `WELL_AGAIN_UNDER_LOAD_S` after the stop, as much is answered in time as before, or nearly.
    """
    per_s = times * answered_per_s(await reference(instance, bodies))
    seconds = STALLED_AT_S + for_s + WELL_AGAIN_UNDER_LOAD_S + scale.load_s
    load = LoadStream(
        name="load", mode="poisson", bodies=bodies.path, to_s=seconds, connections=connections, rate_per_s=per_s
    )
    pause = Pause(pid=instance.pid, at_s=STALLED_AT_S, for_s=for_s)
    counts = (await drive_all(instance, [load], pause=pause)).stream("load")
    good = [each[0] for each in counts.bins]
    before_per_s = sum(good[: round(STALLED_AT_S / BIN_S)]) / STALLED_AT_S
    num_last = round(scale.load_s / BIN_S)
    well_from = round(seconds / BIN_S) - num_last
    assert sum(good[well_from : well_from + num_last]) / scale.load_s >= 0.4 * before_per_s, good
    return counts, well_from


@each_scale
@three_attempts
async def test_an_open_loop_whose_connections_are_all_in_use_after_a_pause_is_served_again(
    scale: Scale, bodies: Bodies, instance: Instance
) -> None:
    """Each of them sends its next request at once, as a client that retries does; to pause them would age them all."""
    counts, well_from = await stopped_under_load(instance, bodies, scale, connections=256, times=4, for_s=STALL_S)
    well_to = well_from + round(scale.load_s / BIN_S)
    assert not sum(each[4] for each in counts.bins[well_from:well_to]), "given up"


@each_scale
@three_attempts
async def test_callers_who_all_gave_up_in_a_standstill_and_connect_anew_are_served_again(
    scale: Scale, bodies: Bodies, instance: Instance
) -> None:
    """To accept them costs more than to refuse them: who accepts in Python never comes back from this."""
    counts, well_from = await stopped_under_load(instance, bodies, scale, connections=512, times=10, for_s=STANDSTILL_S)
    assert sum(each[4] for each in counts.bins[:well_from]) > 512, "nobody gave up: this is no such standstill"


@contextmanager
def strangers(port: int) -> Iterator[list[int]]:
    """Connect as fast as one thread can; send nothing, a piece, nonsense, or requests whose answers nobody reads."""
    count = [0]
    is_over = threading.Event()
    sent = (
        b"",
        b"POST /v1/rank HTTP/1.1\r\nContent-Le",
        b"\x16\x03\x01\x00",
        b"GET /v1/none HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
    )

    def call() -> None:
        held: list[socket.socket] = []
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                held[-1].sendall(sent[count[0] % len(sent)])
            count[0] += 1
            if len(held) > MOST_STRANGERS:
                for one in held[: MOST_STRANGERS // 2]:
                    one.close()
                del held[: MOST_STRANGERS // 2]
        for one in held:
            one.close()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        is_over.set()
        thread.join()


@each_scale
@three_attempts
async def test_a_flood_of_connections_leaves_most_of_what_an_overload_leaves(
    scale: Scale, bodies: Bodies, instance: Instance
) -> None:
    """To accept a stranger costs a quarter of a rank, so few of them are let near the event loop.

    Callers who connect anew wait among them, and are answered: what they wait for is the kernel's queue.
    """
    most_per_s = answered_per_s(await reference(instance, bodies))
    load = LoadStream(
        name="load", mode="poisson", bodies=bodies.path, to_s=scale.load_s, connections=256, rate_per_s=6 * most_per_s
    )
    before = (await drive_all(instance, [load])).stream("load")
    callers = OpenLoop(
        instance.url, lambda number: Ask(body=bodies.ranks[number % len(bodies.ranks)]), NEW_PER_S, connects_anew=True
    )
    with strangers(instance.port) as count:
        async with callers.running():
            from_at = time.monotonic()
            beside = (await drive_all(instance, [load])).stream("load")
            new = await callers.between(from_at, time.monotonic())
    assert count[0] > 100 * scale.load_s, "this is no flood"
    assert beside.good_per_s >= 0.35 * before.good_per_s, (beside.good_per_s, before.good_per_s, count)
    assert not beside.timeouts
    new.check(scale.most_failed, 429, 504)
    assert new.quantile_s(0.9) <= NEW_WAIT_S, new.statuses


@each_scale
@three_attempts
async def test_a_stop_under_load_loses_nothing(scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path) -> None:
    """Every request that was sent before the listener closed is answered; the process ends with 0."""
    samples = []
    async with running(Instance(tmp_path, checkpoint)) as instance, aiohttp.ClientSession() as http:
        stopped_at = float("inf")

        async def ask(number: int) -> None:
            while True:
                sample = await send(http, instance.url, Ask(body=bodies.ranks[number % len(bodies.ranks)]))
                samples.append(sample)
                if sample.status == LOST and sample.due_at > stopped_at:
                    assert "ConnectionRefused" in str(sample.body), sample
                    return
                await asyncio.sleep(0.1)

        asking = [asyncio.create_task(ask(number)) for number in range(8)]
        await asyncio.sleep(scale.load_s / 2)
        stopped_at = time.monotonic()
        instance.signal(signal.SIGTERM)
        assert await instance.ended(within_s=20) == 0
        took_s = time.monotonic() - stopped_at
        await asyncio.gather(*asking)
    answers = Answers(sample for sample in samples if sample.status != LOST)
    answers.check(scale.most_failed, 429)
    assert len(samples) - len(answers) <= len(asking)  # each client noticed once that nobody listens any more
    assert any(sample.due_at > stopped_at for sample in answers.samples), "it did not serve while it drained"
    assert took_s < 10.0
