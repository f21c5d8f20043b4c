"""An eager task's first step runs at once; what its coroutine sees and how it ends is as in any other task."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.deadline import Deadline
from npu_gr.core.errors import DeadlineExceeded
from npu_gr.core.kinds import KINDS, RANK
from npu_gr.server.entrance.connection import Connection
from npu_gr.server.entrance.eager import EagerTask
from npu_gr.server.entrance.kernel_socket import KernelSocket
from tests.server.entrance.test_connection import BODY, Site, site
from tests.server.entrance.test_straight import request

MINE: ContextVar[str] = ContextVar("mine", default="nobody's")


def begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[asyncio.Task[None]]:
    """Begin an eager task where no task runs, as a connection does."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[asyncio.Task[None]] = loop.create_future()

    def begin() -> None:
        eager = EagerTask(loop, coroutine)
        eager.begin()
        made.set_result(eager.task)

    loop.call_soon(begin)
    return made


async def test_the_first_step_has_its_task_and_its_context_and_the_next_ones_have_the_same() -> None:
    seen: list[Any] = []

    async def work() -> None:
        MINE.set("a task's")
        seen.append(asyncio.current_task())
        await asyncio.sleep(0.001)
        seen.extend([asyncio.current_task(), MINE.get()])

    task = await begun(work())
    assert seen == [task]
    assert MINE.get() == "nobody's"
    await task
    assert seen == [task, task, "a task's"]


async def test_a_deadline_that_begins_in_the_first_step_ends_it() -> None:
    async def work() -> None:
        async with Deadline(0.01):
            await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded):
        await (await begun(work()))


async def test_one_that_is_not_begun_runs_by_itself() -> None:
    seen = []

    async def work() -> None:
        seen.append(await asyncio.sleep(0, "ran"))

    await EagerTask(asyncio.get_running_loop(), work()).task
    assert seen == ["ran"]


STEPS = st.lists(st.sampled_from(["future", "turn", "sub", "fail", "catch", "cancel me", "let go"]), max_size=5)
ACTS = st.lists(st.sampled_from(["cancel", "turn", "done", "error", "end future"]), max_size=6)


async def played(steps: list[str], acts: list[str], start: Callable[[Coroutine[Any, Any, None]], Any]) -> list[Any]:
    """Run steps in a task while acts happen outside; returns what the steps saw, and how all ended."""
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[str]] = []
    seen: list[str] = []

    async def wait() -> None:
        futures.append(loop.create_future())
        seen.append(await futures[-1])

    async def work() -> str:
        for step in steps:
            if step == "future":
                await wait()
            elif step == "turn":
                await asyncio.sleep(0)
            elif step == "sub":
                await asyncio.wait_for(wait(), 5.0)
            elif step == "fail":
                raise ValueError("failed")
            elif step == "let go":
                return "let go"
            elif step == "cancel me":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            else:
                try:
                    await wait()
                except asyncio.CancelledError:
                    seen.append("cancelled")
        return "done"

    task: asyncio.Task[Any] = start(work())  # type: ignore[arg-type]
    for act in [*acts, *["turn", "done"] * 6]:
        if act == "cancel":
            if futures or task.done():  # else one of the two has not begun
                task.cancel()
        elif act == "turn":
            for _ in range(6):
                await asyncio.sleep(0)
        elif futures and not futures[-1].done():
            if act == "done":
                futures[-1].set_result("done")
            elif act == "error":
                futures[-1].set_exception(OSError("lost"))
            else:
                futures[-1].cancel()
    ended: Any = (await asyncio.gather(task, return_exceptions=True))[0]
    return [*seen, *[future.cancelled() for future in futures], repr(ended), task.cancelled()]


def start_eagerly(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    eager = EagerTask(asyncio.get_running_loop(), coroutine)
    me = asyncio.current_task()
    assert me is not None
    asyncio.tasks._leave_task(me.get_loop(), me)  # as where no task runs
    eager.begin()
    asyncio.tasks._enter_task(me.get_loop(), me)
    return eager.task


@given(STEPS, ACTS)
@example(["future"], ["cancel"])
@example(["catch", "future"], ["cancel", "end future"])
@example(["cancel me"], [])
def test_it_sees_and_ends_as_any_other_task(steps: list[str], acts: list[str]) -> None:
    first, *later = acts or ["turn"]
    acts = [first, "turn", *later]
    plain = asyncio.run(played(steps, ["turn", *acts], asyncio.ensure_future))
    assert asyncio.run(played(steps, ["turn", *acts], start_eagerly)) == plain
    if steps and steps[0] in ("future", "catch"):  # the first act may come before the task's own first step, too
        assert asyncio.run(played(steps, acts, start_eagerly)) == plain


def of_tenant(tenant: str) -> bytes:
    return request("/v1/rank", json.dumps({**json.loads(BODY), "tenant": tenant}).encode())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Of each tenant that was served, whether its handler began while its bytes were read."""
    reads: list[bytes] = []
    began: dict[str, bool] = {}
    read, answer = Connection.data_received, Connection._answer

    def data_received(self: Connection, data: bytes) -> None:
        reads.append(data)
        read(self, data)
        reads.clear()

    async def answered(self: Connection, handler: Any, parsed: Any) -> None:
        began[json.loads(await parsed.read())["tenant"]] = bool(reads)
        await answer(self, handler, parsed)

    monkeypatch.setattr(Connection, "data_received", data_received)
    monkeypatch.setattr(Connection, "_answer", answered)
    return began


async def hold(at: Site, tenant: str, num: int) -> Any:
    """Take places for a tenant."""
    held = contextlib.ExitStack()
    for _ in range(num):
        held.enter_context(await at.service.door.enter(RANK.name, tenant, time.monotonic(), 1.0))
    return held


async def test_whoever_has_less_than_its_share_begins_as_it_is_read_and_nobody_else(steps: dict[str, bool]) -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(of_tenant("hot"))
        assert (await raw.answer())[0] == 200
        assert steps == {"hot": False}  # it is alone
        with await hold(at, "hot", 2):
            for tenant in ("small", "hot"):
                raw.send(of_tenant(tenant))
                assert (await raw.answer())[0] == 200
        assert steps == {"hot": False, "small": True}


@pytest.mark.parametrize("most", [0, 20, 1 << 20])
async def test_its_answer_is_sent_at_once_as_far_as_the_kernel_takes_it(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    send = KernelSocket.send

    def send_some(self: KernelSocket, data: bytes) -> int:
        sent.append(data)
        return send(self, data[:most]) if most else 0

    monkeypatch.setattr(KernelSocket, "send", send_some)
    async with site() as at:
        raw = await at.connect()
        with await hold(at, "hot", 2):
            for tenant in ("small", "hot", "small"):
                raw.send(of_tenant(tenant))
                status, _, body = await raw.answer()
                assert (status, "scores" in json.loads(body)) == (200, True)
    assert len(sent) == 2


async def test_it_overtakes_no_refusal_of_its_own_connection(steps: dict[str, bool]) -> None:
    async with site() as at:
        door = at.service.door
        door.reconfigure(
            AdmissionConfig(max_inflight=4, tenant_weights={"hot": 0.1}), lambda kind: KINDS[kind].objective_s
        )
        door._lanes["rank"].pace.seconds = 1.0  # so nobody who must wait can be in time
        raw = await at.connect()
        with await hold(at, "other", 1), await hold(at, "hot", 1):
            raw.send(of_tenant("hot") + of_tenant("small"))
            assert [(await raw.answer())[0] for _ in range(2)] == [429, 200]
    assert steps == {"small": True}
