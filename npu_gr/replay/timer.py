"""A timer that is late by tens of microseconds, on asyncio and on uvloop alike.

Timers of asyncio are late by half a millisecond, and uvloop rounds them to whole milliseconds; Linux's timerfd does
neither. On other systems the loop's own timers have to do, and a warning says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
import time
from typing import Self

log = logging.getLogger(__name__)

_TFD_TIMER_ABSTIME = 1


class Timer:
    """The most precise timer of this platform for the running loop: `async with Timer() as timer`.

    One task at a time may wait for it.
    """

    async def __aenter__(self) -> Self:
        self._fired = asyncio.Event()
        self._fd: int | None = None
        if sys.platform == "linux":
            self._fd = _create()
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        else:
            log.warning("no timerfd on %s: requests will leave up to some milliseconds late", sys.platform)
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)

    async def until(self, wake_at: float) -> None:
        """Sleep until an instant of `time.monotonic()`. An instant that is over still lets the loop turn once."""
        wait_s = wake_at - time.monotonic()
        if wait_s <= 0 or self._fd is None:
            await asyncio.sleep(wait_s)
            return
        self._fired.clear()
        _set(self._fd, wake_at)
        await self._fired.wait()

    def _read(self) -> None:
        assert self._fd is not None
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # the timer was set again after it fired
            return
        self._fired.set()


if sys.version_info >= (3, 13):

    def _create() -> int:
        return os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)

    def _set(fd: int, wake_at: float) -> None:
        os.timerfd_settime(fd, flags=os.TFD_TIMER_ABSTIME, initial=wake_at)

else:

    class _TimeSpec(ctypes.Structure):
        _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]

    class _ITimerSpec(ctypes.Structure):
        _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]

    def _libc() -> ctypes.CDLL:
        return ctypes.CDLL(None, use_errno=True)

    def _create() -> int:
        fd: int = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        return fd

    def _set(fd: int, wake_at: float) -> None:
        sec = int(wake_at)
        spec = _ITimerSpec(_TimeSpec(0, 0), _TimeSpec(sec, int((wake_at - sec) * 1e9)))
        if _libc().timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
