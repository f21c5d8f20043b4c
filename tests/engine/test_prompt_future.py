"""The waiter of a prompt future resumes within `end`; otherwise it is like an asyncio future."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.engine import device_threads
from npu_gr.engine.device_threads import PromptFuture
from npu_gr.engine.queue import Job, JobResult


async def ended(future: PromptFuture[int], result: int | BaseException) -> list[str]:
    """End a future that a task waits for, as the event loop does.

    Returns what happened, in its order.
    """
    happened = []

    async def wait() -> None:
        try:
            happened.append(f"has {await future}")
        except ValueError as error:
            happened.append(str(error))

    def end() -> None:
        future.end(result)
        happened.append("ended")

    waiter = asyncio.create_task(wait())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(end)
    await waiter
    return happened


@pytest.mark.parametrize(("result", "seen"), [(1, "has 1"), (ValueError("no"), "no")])
async def test_the_waiter_goes_on_before_the_call_returns(
    result: int | BaseException, seen: str
) -> None:
    assert await ended(PromptFuture(), result) == [seen, "ended"]


ACTS = st.lists(
    st.sampled_from(["wait", "watch", "cancel 0", "cancel 1", "cancel", "turn", "result", "error"]),
    max_size=12,
)


async def played(
    acts: list[str], make: Callable[[], asyncio.Future[int]], end: Callable[..., None]
) -> list[Any]:
    """Play acts on a future; returns what became of everybody who waited for it."""
    loop = asyncio.get_running_loop()
    future = make()
    seen: list[Any] = []

    async def wait(number: int) -> None:
        for _ in range(2):  # again after a cancellation, as one that must wait
            try:
                seen.append((number, await future))
            except (ValueError, asyncio.CancelledError) as error:
                seen.append((number, type(error)))

    def act(name: str) -> None:
        if name == "wait":
            tasks.append(loop.create_task(wait(len(tasks))))
        elif name == "watch":
            tasks.append(loop.create_task(asyncio.wait({future}, timeout=5.0)))  # type: ignore[arg-type]
        elif name == "cancel":
            future.cancel()
        elif name.startswith("cancel"):
            for task in tasks[int(name[-1]) :][:1]:
                task.cancel()
        elif not future.done():
            end(future, 1 if name == "result" else ValueError())

    tasks: list[asyncio.Task[None]] = []
    for name in [*acts, "turn", "turn", "result"]:
        if name == "turn":
            await asyncio.sleep(0)
        else:
            loop.call_soon(act, name)
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    if not future.cancelled():
        future.exception()
    return [*sorted(map(str, seen)), future.cancelled()]


def end_plainly(future: asyncio.Future[int], result: int | BaseException) -> None:
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


@given(ACTS)
def test_everybody_sees_what_a_future_of_asyncio_shows(acts: list[str]) -> None:
    plain = asyncio.run(played(acts, lambda: asyncio.Future(), end_plainly))
    assert (
        asyncio.run(played(acts, lambda: PromptFuture(), lambda future, result: future.end(result)))
        == plain
    )


async def test_one_that_ends_the_process_leaves_no_other_job_of_its_pass_without_an_end() -> None:
    loop = asyncio.get_running_loop()
    jobs = [Job(run=list, tag=PromptFuture(loop=loop)) for _ in range(3)]

    def leave(_: Any) -> None:
        raise SystemExit

    jobs[1].tag.add_done_callback(leave)
    with pytest.raises(SystemExit):
        device_threads.finish([(job, JobResult(None, 0.0, 0.0)) for job in jobs])
    assert jobs[0].tag.done()
    await asyncio.sleep(0)
    assert all(job.tag.done() and job.has_ended for job in jobs)
