"""A sleeper that is late by tens of microseconds, on asyncio and on uvloop alike.

Loop timers are late by half a millisecond, and uvloop rounds them to whole ones; Linux's timerfd is not. Off Linux the
loop's own timers have to do, and a warning says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

# Sleeps until an instant of time.monotonic(), yields to the loop at least once; one sleeper at a time.
Until = Callable[[float], Awaitable[None]]

_TFD_TIMER_ABSTIME = 1


@contextmanager
def open_timer() -> Iterator[Until]:
    """The best sleeper of this platform, for the running loop; closed with the block."""
    if sys.platform != "linux":
        log.warning("no timerfd on %s: requests will leave up to some milliseconds late", sys.platform)
        yield _loop_until
        return
    loop, fired = asyncio.get_running_loop(), asyncio.Event()
    fd = _create()

    def read() -> None:
        try:
            os.read(fd, 8)
        except BlockingIOError:  # set again since it fired
            return
        fired.set()

    async def until(at_s: float) -> None:
        if at_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        fired.clear()
        _set(fd, at_s)
        await fired.wait()

    loop.add_reader(fd, read)
    try:
        yield until
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _loop_until(at_s: float) -> None:
    await asyncio.sleep(at_s - time.monotonic())  # a time that is over only yields


if sys.version_info >= (3, 13):

    def _create() -> int:
        return os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)

    def _set(fd: int, at_s: float) -> None:
        os.timerfd_settime(fd, flags=os.TFD_TIMER_ABSTIME, initial=at_s)

else:

    class _TimeSpec(ctypes.Structure):
        _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]  # ctypes' own form

    class _ITimerSpec(ctypes.Structure):
        _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]

    def _libc() -> ctypes.CDLL:
        return ctypes.CDLL(None, use_errno=True)

    def _create() -> int:
        fd: int = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        return fd

    def _set(fd: int, at_s: float) -> None:
        sec = int(at_s)
        spec = _ITimerSpec(_TimeSpec(0, 0), _TimeSpec(sec, int((at_s - sec) * 1e9)))
        if _libc().timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
