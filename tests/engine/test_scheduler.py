"""Every job ends once, in deadline order, and a cancelled job costs no device time."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from npu_gr.core.errors import DeadlineExceeded, DeviceError, Overloaded, StaleEntry, Unavailable
from npu_gr.core.health import COMPILE_S, DEAD_S, LEAST_S, UNKNOWN_S, Health, compiles
from npu_gr.engine import device_threads
from npu_gr.engine.device_threads import SWITCH_S, pass_limit_s
from npu_gr.engine.page_jobs import warmup_order
from npu_gr.engine.queue import Demand, Job, JobOrder, JobStep, SchedulerConfig
from npu_gr.engine.scheduler import Scheduler, alone
from tests.serving import until

FAR = float("inf")


@dataclass(frozen=True)
class Work:
    name: str
    tokens: int = 1

    @property
    def demand(self) -> Demand:
        return Demand(self.tokens)


class Device:
    """Notes what it is asked to run; fails on works named 'bad'."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def run(self, works: Sequence[Any]) -> list[str]:
        self.batches.append([work.name for work in works])
        if any(work.name == "bad" for work in works):
            raise RuntimeError("planted")
        return [work.name.upper() for work in works]


@asynccontextmanager
async def running(**config: int) -> AsyncIterator[tuple[Scheduler, Device]]:
    device = Device()
    scheduler = Scheduler(SchedulerConfig(**config))
    scheduler.start()
    try:
        yield scheduler, device
    finally:
        await scheduler.stop()


@asynccontextmanager
async def held(scheduler: Scheduler) -> AsyncIterator[None]:
    """The device thread is busy for the whole block."""
    busy, go = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        go.wait(10)

    task = asyncio.create_task(scheduler.call(hold, FAR))
    await asyncio.to_thread(busy.wait, 10)
    try:
        yield
    finally:
        go.set()
        await task


async def submitted(scheduler: Scheduler, count: int) -> None:
    while scheduler.depth < count:  # noqa: ASYNC110  (a state, not an event)
        await asyncio.sleep(0)


async def test_a_device_thread_asks_a_busy_loop_for_the_interpreter_soon() -> None:
    sys.setswitchinterval(0.005)
    async with running():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)


async def test_deadline_order_and_batches() -> None:
    async with running(max_batch_requests=2, aging_s=99) as (scheduler, device):
        async with held(scheduler):
            due = time.monotonic() + 60
            tasks = [
                asyncio.create_task(scheduler.batch(Work(name), device.run, due + order))
                for order, name in ((3, "d"), (1, "b"), (0, "a"), (2, "c"), (4, "e"))
            ]
            await submitted(scheduler, 5)
        results = [await task for task in tasks]
    assert device.batches == [["a", "b"], ["c", "d"], ["e"]]
    assert [done.value for done in results] == ["D", "B", "A", "C", "E"]
    assert all(done.queue_s > 0 and done.device_s >= 0 for done in results)


async def test_what_is_submitted_in_one_turn_of_the_event_loop_shares_a_pass() -> None:
    async with running(max_batch_requests=4, aging_s=99) as (scheduler, device):
        await until(lambda: bool(scheduler._streams._idle))  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(scheduler.batch(Work("a"), device.run, FAR))]
        # a long turn: a thread that is woken now would run "a" alone
        loop.call_soon(time.sleep, 0.02)
        tasks += [loop.create_task(scheduler.batch(Work(name), device.run, FAR)) for name in "bc"]
        await asyncio.gather(*tasks)
        assert device.batches == [["a", "b", "c"]]


async def test_rows_bound_a_batch_and_a_call_stands_alone() -> None:
    async with running(max_batch_requests=8, max_batch_tokens=10, aging_s=99) as (
        scheduler,
        device,
    ):
        async with held(scheduler):
            due = time.monotonic() + 60
            tasks = [
                asyncio.create_task(scheduler.batch(Work(n, 6), device.run, due + i))
                for i, n in enumerate("ab")
            ]
            tasks.append(
                asyncio.create_task(
                    scheduler.call(lambda: device.batches.append(["call"]), due + 1.5)
                )
            )
            tasks += [
                asyncio.create_task(scheduler.batch(Work(n, 20), device.run, due + 2 + i))
                for i, n in enumerate("cd")
            ]
            await submitted(scheduler, 5)
        await asyncio.gather(*tasks)
    assert device.batches == [["a"], ["b"], ["call"], ["c"], ["d"]]


async def test_a_run_has_its_own_limit_and_never_mixes_two_objects() -> None:
    """As matches do: up to 64 share a pass, and a pass searches the vectors of one version."""
    old, new, passes = Device(), Device(), list[tuple[str, int]]()
    async with running(max_batch_requests=1, aging_s=99) as (scheduler, device):
        scheduler.on_batch = lambda kind, requests, _rows: passes.append((kind, requests))
        async with held(scheduler):
            arrived_at = time.monotonic()
            tasks = [
                asyncio.create_task(
                    scheduler.batch(
                        Work(f"{n}"),
                        (old, new)[n % 2].run,
                        FAR,
                        objective_s=1.0 + n,
                        arrived_at=arrived_at,
                        max_requests=3,
                        kind="match",
                    )
                )
                for n in range(8)
            ]
            tasks.append(
                asyncio.create_task(scheduler.batch(Work("rank"), device.run, FAR, objective_s=0.1))
            )
            await submitted(scheduler, 9)
        done = [await task for task in tasks]
    assert old.batches == [["0", "2", "4"], ["6"]]
    assert new.batches == [["1", "3", "5"], ["7"]]
    assert passes == [("rank", 1), ("match", 3), ("match", 3), ("match", 1), ("match", 1)]
    assert [each.batch_size for each in done] == [3] * 6 + [1] * 3


async def test_a_place_in_the_queue_counts_from_the_arrival_of_the_request() -> None:
    async with running(max_batch_requests=1, aging_s=99) as (scheduler, device):
        async with held(scheduler):
            now_at = time.monotonic()
            young = scheduler.batch(
                Work("young"), device.run, FAR, objective_s=1.0, arrived_at=now_at
            )
            old = scheduler.batch(
                Work("old"), device.run, FAR, objective_s=1.0, arrived_at=now_at - 0.5
            )
            # the old one comes later: it read a history
            tasks = [asyncio.create_task(each) for each in (young, old)]
            await submitted(scheduler, 2)
        await asyncio.gather(*tasks)
    assert device.batches == [["old"], ["young"]]


async def test_order_may_differ_from_the_deadline() -> None:
    async with running() as (scheduler, device):
        async with held(scheduler):
            now = time.monotonic()
            late = asyncio.create_task(
                scheduler.call(lambda: device.batches.append(["late"]), now + 9)
            )
            first = asyncio.create_task(
                scheduler.call(lambda: device.batches.append(["first"]), now + 99, JobOrder(now))
            )
            await submitted(scheduler, 2)
        await asyncio.gather(late, first)
    assert device.batches == [["first"], ["late"]]


async def test_an_expired_or_cancelled_job_costs_nothing() -> None:
    async with running() as (scheduler, device):
        async with held(scheduler):
            expired = asyncio.create_task(
                scheduler.batch(Work("expired"), device.run, time.monotonic())
            )
            cancelled = asyncio.create_task(scheduler.batch(Work("cancelled"), device.run, FAR))
            kept = asyncio.create_task(scheduler.batch(Work("kept"), device.run, FAR))
            await submitted(scheduler, 3)
            cancelled.cancel()
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded):
            await expired
        assert (await kept).value == "KEPT"
    assert cancelled.cancelled()
    assert device.batches == [["kept"]]


async def test_a_job_that_ends_in_the_turn_of_its_cancellation_is_not_waited_for() -> None:
    """The future is cancelled at once, its submitter goes on a turn later.

    The end of the job may come between.
    """
    async with running() as (scheduler, device):
        for _ in range(50):
            job = asyncio.create_task(scheduler.batch(Work("x"), device.run, FAR))
            await asyncio.sleep(0)
            time.sleep(0.002)  # the end of the job waits for the loop  # noqa: ASYNC251
            job.cancel()
            async with asyncio.timeout(10):
                await asyncio.wait({job})


async def test_a_full_queue_rejects() -> None:
    async with running(max_queue=2) as (scheduler, device), held(scheduler):
        waiting = [
            asyncio.create_task(scheduler.batch(Work("x"), device.run, FAR)) for _ in range(2)
        ]
        await submitted(scheduler, 2)
        with pytest.raises(Overloaded, match=r"2 jobs wait .* limit is 2"):
            await scheduler.batch(Work("y"), device.run, FAR)
        for task in waiting:
            task.cancel()


async def test_one_bad_job_is_one_error() -> None:
    async with running() as (scheduler, device):
        async with held(scheduler):
            names = ("good", "bad", "fine")
            tasks = [
                asyncio.create_task(scheduler.batch(Work(n), device.run, 1e9 + i))
                for i, n in enumerate(names)
            ]
            await submitted(scheduler, 3)
        with pytest.raises(DeviceError, match="RuntimeError"):
            await tasks[1]
        assert [(await tasks[0]).value, (await tasks[2]).value] == ["GOOD", "FINE"]
        assert device.batches == [["good", "bad", "fine"], ["good"], ["bad"], ["fine"]]
        for _ in range(3):
            with pytest.raises(DeviceError):
                await scheduler.batch(Work("bad"), device.run, FAR)
        assert scheduler.failures_in_a_row == 3
        await scheduler.batch(Work("good"), device.run, FAR)
        assert scheduler.failures_in_a_row == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("NPU out of memory")])
async def test_a_job_without_memory_runs_again_once_after_a_release(error: Exception) -> None:
    """Whoever released enough goes on; who did not is told which pools to shrink."""
    calls, released = list[int](), list[int]()
    has_room = False

    def run(works: Sequence[Any]) -> list[str]:
        calls.append(len(works))
        if len(released) == 1 and has_room:
            return ["done"] * len(works)
        raise error

    scheduler = Scheduler(SchedulerConfig(), release=lambda: released.append(1))
    scheduler.start()
    try:
        with pytest.raises(DeviceError, match=r"lower kv_cache\.hbm_bytes, generate\.hbm_bytes"):
            await scheduler.batch(Work("a"), run, FAR)
        assert (calls, len(released), scheduler.failures_in_a_row) == ([1, 1], 1, 1)
        released.clear()
        has_room = True
        assert (await scheduler.batch(Work("a"), run, FAR)).value == "done"
        assert (len(released), scheduler.failures_in_a_row) == (1, 0)
    finally:
        await scheduler.stop()


async def test_a_pass_that_forgets_a_result_is_one_error_a_job() -> None:
    def forgetful(works: Sequence[Any]) -> list[str]:
        return [work.name for work in works if work.name != "forgotten"]

    async with running() as (scheduler, device):
        async with held(scheduler):
            names = ("good", "forgotten", "fine")
            tasks = [
                asyncio.create_task(scheduler.batch(Work(n), forgetful, 1e9 + i))
                for i, n in enumerate(names)
            ]
            await submitted(scheduler, 3)
        with pytest.raises(DeviceError):
            await tasks[1]
        assert [(await tasks[0]).value, (await tasks[2]).value] == ["good", "fine"]
        assert (await scheduler.batch(Work("next"), device.run, FAR)).value == "NEXT"


async def test_a_device_thread_outlives_a_failing_callback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def watch(kind: str, took_s: float) -> None:
        raise RuntimeError("planted")

    async with running() as (scheduler, device):
        scheduler.on_worked = watch
        for name in ("a", "b"):
            assert (await scheduler.batch(Work(name), device.run, FAR)).value == name.upper()
    assert "planted" in caplog.text


async def test_our_own_errors_pass_through() -> None:
    def stale() -> None:
        raise StaleEntry("planted")

    async with running() as (scheduler, _):
        with pytest.raises(StaleEntry):
            await scheduler.call(stale, FAR)
        assert scheduler.failures_in_a_row == 0


async def test_stopping_ends_what_waits() -> None:
    device = Device()
    scheduler = Scheduler(SchedulerConfig())
    scheduler.start()
    async with held(scheduler):
        waiting = asyncio.create_task(scheduler.batch(Work("never"), device.run, FAR))
        await submitted(scheduler, 1)
        stopping = asyncio.create_task(scheduler.stop())
        await asyncio.sleep(0)
    await stopping
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await scheduler.batch(Work("late"), device.run, FAR)
    assert device.batches == []


class Chunks:
    """Steps that note their number.

    Each waits until the test lets it go on, where it is asked to.
    """

    def __init__(self, count: int, stop_in: int = -1) -> None:
        self.ran: list[int] = []
        self.reached, self.go = threading.Event(), threading.Event()
        self.steps = [JobStep(lambda n=n: self.run(n, stop_in), 0.01) for n in range(count)]

    def run(self, number: int, stop_in: int) -> int:
        self.ran.append(number)
        if number == stop_in:
            self.reached.set()
            self.go.wait(10)
        if number == 7:
            raise RuntimeError("planted")
        return number


@pytest.mark.parametrize("streams", [1, 3])
async def test_a_sequence_runs_in_order(streams: int) -> None:
    async with running(streams=streams) as (scheduler, _), asyncio.TaskGroup() as tasks:
        many = [Chunks(5) for _ in range(8)]
        done = [
            tasks.create_task(scheduler.sequence(each.steps, FAR, JobOrder(FAR))) for each in many
        ]
    assert [each.ran for each in many] == [[0, 1, 2, 3, 4]] * 8
    assert {task.result().value for task in done} == {4}


async def test_what_is_more_urgent_comes_between_the_steps_of_a_sequence() -> None:
    async with running() as (scheduler, _):
        slow = Chunks(5, stop_in=1)
        sequence = asyncio.create_task(
            scheduler.sequence(slow.steps, FAR, JobOrder(time.monotonic() + 9))
        )
        await asyncio.to_thread(slow.reached.wait, 10)
        urgent = asyncio.create_task(scheduler.call(lambda: list(slow.ran), FAR, JobOrder(0.0)))
        await submitted(scheduler, 1)
        slow.go.set()
        assert (await urgent).value == [0, 1]
        assert (await sequence).value == 4


async def test_a_sequence_ends_with_the_step_it_is_at() -> None:
    async with running() as (scheduler, _):
        cancelled = Chunks(5, stop_in=1)
        task = asyncio.create_task(scheduler.sequence(cancelled.steps, FAR, JobOrder(FAR)))
        await asyncio.to_thread(cancelled.reached.wait, 10)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()  # S3: the step still runs
        cancelled.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        failing = Chunks(9)
        with pytest.raises(DeviceError):
            await scheduler.sequence(failing.steps, FAR, JobOrder(FAR))
        late = Chunks(5, stop_in=2)
        task = asyncio.create_task(
            scheduler.sequence(late.steps, time.monotonic() + 0.2, JobOrder(FAR))
        )
        await asyncio.sleep(0.3)
        late.go.set()
        with pytest.raises(DeadlineExceeded):
            await task
        stopped = Chunks(5, stop_in=3)
        task = asyncio.create_task(scheduler.sequence(stopped.steps, FAR, JobOrder(FAR)))
        await asyncio.to_thread(stopped.reached.wait, 10)
        stopping = asyncio.create_task(scheduler.stop())
        await asyncio.sleep(0.01)
        stopped.go.set()
        await stopping
        with pytest.raises(Unavailable):
            await task
        assert scheduler.depth == 0
    assert [each.ran for each in (cancelled, failing, late, stopped)] == [
        [0, 1],
        [*range(8)],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]


async def test_a_sequence_that_is_cut_ends_with_the_step_it_is_at() -> None:
    async with running() as (scheduler, _):
        slow, urgency = Chunks(5, stop_in=1), JobOrder(FAR)
        task = asyncio.create_task(scheduler.sequence(slow.steps, FAR, urgency))
        await asyncio.to_thread(slow.reached.wait, 10)
        waiting, unneeded = Chunks(5), JobOrder(FAR)
        behind = asyncio.create_task(scheduler.sequence(waiting.steps, FAR, unneeded))
        await submitted(scheduler, 1)
        unneeded.cancel_at_step()
        assert (await behind).steps == 0  # at once: it does not wait for what runs
        assert scheduler.depth == 0
        urgency.cancel_at_step()
        await asyncio.sleep(0.01)
        assert not task.done()
        slow.go.set()
        done = await task
        assert (done.steps, done.value) == (2, 1)
        never = await scheduler.sequence(waiting.steps, FAR, unneeded)  # cut before it came
        assert never.steps == 0
        whole = await scheduler.sequence(waiting.steps, FAR, JobOrder(FAR))
        assert (whole.steps, whole.value) == (5, 4)
    assert (slow.ran, waiting.ran) == ([0, 1], [0, 1, 2, 3, 4])


async def test_a_pass_is_late_after_ten_times_its_estimate() -> None:
    def job(estimate_s: float, **more: Any) -> Job:
        return Job(run=list, estimate_s=estimate_s, **more)

    assert pass_limit_s([job(0.001), job(0.002)]) == LEAST_S
    assert pass_limit_s([job(1.0), job(2.0)]) == pytest.approx(30.0)
    assert pass_limit_s([job(1.0), job(0.0)]) == UNKNOWN_S, "the time of one is not known"
    assert pass_limit_s([job(0.001, may_compile=True)]) == UNKNOWN_S
    health = Health()
    async with running() as (scheduler, device):
        for name, worker in scheduler.workers.items():
            health.add(name, worker, is_vital=True)
        assert set(health.ages_s()) == {"device_0", "copies"}
        async with held(scheduler):
            await asyncio.sleep(0.01)
            assert health.ages_s()["device_0"] > 0
        await scheduler.batch(Work("a"), device.run, time.monotonic() + 60)
        assert health.ages_s()["device_0"] == 0


async def test_first_runs_have_the_limit_of_a_compiler() -> None:
    limits: list[tuple[float, float]] = []
    async with running() as (scheduler, _):
        (worker,) = scheduler._streams.workers

        def note(works: Sequence[Any] = (None,)) -> list[Any]:
            limits.extend((work.limit_s, work.dead_s) for work in worker.works())
            return list(works)

        await scheduler.call(note, FAR, warmup_order())
        await scheduler.batch(Work("self-test"), note, FAR, estimate_s=0.001)
        await scheduler.batch(Work("request"), note, time.monotonic() + 60, estimate_s=0.001)

        def compiles_then_notes(works: Sequence[Any]) -> list[Any]:
            compiles()  # what a kernel that is not compiled yet, and a new graph, call
            return note(works)

        for run in (compiles_then_notes, note):
            await scheduler.batch(Work("request"), run, time.monotonic() + 60, estimate_s=0.001)
    first, usual = (UNKNOWN_S, COMPILE_S), (LEAST_S, DEAD_S)
    assert limits == [first, first, usual, first, usual]


async def test_a_stop_does_not_wait_for_a_pass_that_does_not_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_threads, "STOP_S", 0.05)
    go, busy = threading.Event(), threading.Event()

    def hang() -> None:
        busy.set()
        go.wait(60)

    scheduler = Scheduler(SchedulerConfig())
    scheduler.start()
    waits = asyncio.create_task(scheduler.call(hang, FAR))
    cancelled = asyncio.create_task(scheduler.call(hang, FAR))
    await asyncio.to_thread(busy.wait, 10)
    waits.cancel()
    await asyncio.sleep(0.01)
    assert not waits.done(), "the device uses its pages"
    await scheduler.stop()
    results = await asyncio.gather(waits, cancelled, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], Unavailable)
    go.set()  # the thread ends, and what it delivers then changes nothing
    for thread in scheduler._streams._threads:  # type: ignore[attr-defined]
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
    await asyncio.sleep(0)


async def test_alone_means_that_no_pass_runs_on_any_stream() -> None:
    async with running(streams=3) as (scheduler, _):
        begun = [threading.Event() for _ in range(2)]
        ran = threading.Event()
        beside: list[bool] = []

        def long_pass(number: int) -> None:
            begun[number].set()
            beside.append(ran.wait(0.2))

        passes = [asyncio.create_task(scheduler.call(partial(long_pass, n), FAR)) for n in (0, 1)]
        for one in begun:
            await asyncio.to_thread(one.wait, 10)
        await asyncio.gather(*passes, alone(scheduler, ran.set, lambda: None))
        assert beside == [False, False]
        assert ran.is_set()

        def fails() -> None:
            raise ValueError("planted")

        with pytest.raises(DeviceError):
            await alone(scheduler, fails, lambda: None)
        assert await alone(scheduler, lambda: 7, lambda: None) == 7
