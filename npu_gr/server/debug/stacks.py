"""What every thread and every asyncio task does at this moment, as text.

The signal `SIGUSR1` logs it. The signal's handler is one in C (`faulthandler`'s), which writes to a pipe; a thread of
ours waits at the pipe and makes the text. So it also works while the event loop is blocked, and it never kills.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

MOST_DEPTH = 100  # awaits of one task
MOST_NAMES = 5  # of tasks that wait at the same place
_GATHER_S = 0.05  # the handler writes one signal in several pieces


def all_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Write the stacks of all threads, then those of the loop's tasks; equal ones once. From any thread.

    Args:
        loop: whose tasks are shown; None = threads only.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: dict[str, list[str]] = defaultdict(list)
    for ident, frame in sys._current_frames().items():
        threads["".join(traceback.format_stack(frame))].append(names.get(ident, f"not Python's ({ident})"))
    tasks: dict[str, list[str]] = defaultdict(list)
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        tasks[_awaited_by(task)].append(task.get_name())
    return "\n".join([*_listed("thread", threads), *_listed("task", tasks)])


async def own_stacks() -> str:
    """Write the stacks of this process, from the event loop."""
    return await asyncio.to_thread(all_stacks, asyncio.get_running_loop())


def _listed(what: str, by_stack: dict[str, list[str]]) -> Iterator[str]:
    for stack, names in sorted(by_stack.items(), key=lambda pair: (len(pair[1]), pair[1])):
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        plural = "s" if len(names) > 1 else ""
        yield f"{len(names)} {what}{plural}: {', '.join(sorted(names)[:MOST_NAMES])}{more}\n{stack}"


def _awaited_by(task: asyncio.Task[Any]) -> str:
    """Follow a task's awaits down to what it waits for; `Task.print_stack` shows the outermost one only."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(lines) < MOST_DEPTH:
        frame = _first(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            lines.append(f"  waits for {type(awaited).__name__}\n")
            break
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}\n')
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return "".join(lines)


def _first(of: object, *names: str) -> Any:
    return next((value for name in names if (value := getattr(of, name, None)) is not None), None)


@contextmanager
def logged_on_signal(loops: list[asyncio.AbstractEventLoop]) -> Iterator[None]:
    """Log all stacks at every SIGUSR1 while the block runs.

    Args:
        loops: its first one's tasks are shown; it may be empty when the block begins.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # the handler never waits, whoever reads
    thread = threading.Thread(target=_log_when_written, args=(reader, loops), name="stacks", daemon=True)
    thread.start()
    faulthandler.register(signal.SIGUSR1, file=writer, all_threads=False)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a late one must not kill a process that stops
        os.close(writer)
        thread.join()


def _log_when_written(reader: int, loops: list[asyncio.AbstractEventLoop]) -> None:
    while os.read(reader, 65536):
        time.sleep(_GATHER_S)
        os.set_blocking(reader, False)
        try:
            os.read(reader, 65536)
        except BlockingIOError:
            pass  # it was all
        finally:
            os.set_blocking(reader, True)
        log.warning("stacks at SIGUSR1:\n%s", all_stacks(loops[0] if loops else None))
    os.close(reader)
