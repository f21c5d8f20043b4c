"""All stacks are there: of threads, and of tasks down to what they wait for.

Equal ones stand once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time

import pytest

from npu_gr.server.debug.stacks import all_stacks, logged_on_signal


async def inner(event: asyncio.Event) -> None:
    await event.wait()


async def outer(event: asyncio.Event) -> None:
    await inner(event)


def waits_in_a_thread(event: threading.Event) -> None:
    event.wait()


async def test_threads_and_tasks_are_shown() -> None:
    event = asyncio.Event()
    stop = threading.Event()
    thread = threading.Thread(target=waits_in_a_thread, args=(stop,), name="a-thread")
    thread.start()
    tasks = [asyncio.create_task(outer(event), name=f"waiter-{index}") for index in range(7)]
    await asyncio.sleep(0)
    text = await asyncio.to_thread(all_stacks, asyncio.get_running_loop())
    event.set()
    stop.set()
    await asyncio.gather(*tasks)
    thread.join()
    assert "1 thread: a-thread\n" in text
    assert "in waits_in_a_thread" in text
    found = text.partition(
        "7 tasks: waiter-0, waiter-1, waiter-2, waiter-3, waiter-4 and 2 more\n"
    )[2].splitlines()
    assert found[0].endswith("in outer")
    assert found[1].endswith("in inner")
    assert found[2].endswith("in Event.wait")
    assert found[3] == "  waits for FutureIter" or found[3].startswith("  waits for ")


def test_the_signal_is_answered_while_the_loop_is_blocked(caplog: pytest.LogCaptureFixture) -> None:
    """The stacks are logged before the main thread returns to its loop, and nothing dies."""
    with caplog.at_level(logging.WARNING, "npu_gr.server.debug.stacks"), logged_on_signal([]):
        for times in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR1)
            ends_at = time.monotonic() + 60
            while len(caplog.records) < times and time.monotonic() < ends_at:
                time.sleep(0.01)
            assert len(caplog.records) == times
    assert "test_the_signal_is_answered_while_the_loop_is_blocked" in caplog.text
    os.kill(os.getpid(), signal.SIGUSR1)  # after the block it is ignored
