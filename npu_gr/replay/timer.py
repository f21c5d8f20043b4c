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
from typing import Self

log = logging.getLogger(__name__)

_TFD_TIMER_ABSTIME = 1


class Timer:
    """The best sleeper of this platform for the running loop: `async with Timer() as timer`; one sleeper at a time."""

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

    async def until(self, at_s: float) -> None:
        """Sleep until an instant of `time.monotonic()`; one that is over still lets the loop turn once."""
        wait_s = at_s - time.monotonic()
        if wait_s <= 0 or self._fd is None:
            await asyncio.sleep(wait_s)
            return
        self._fired.clear()
        _set(self._fd, at_s)
        await self._fired.wait()

    def _read(self) -> None:
        assert self._fd is not None
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set again since it fired
            return
        self._fired.set()


if sys.version_info >= (3, 13):

    def _create() -> int:
        return os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)

    def _set(fd: int, at_s: float) -> None:
        os.timerfd_settime(fd, flags=os.TFD_TIMER_ABSTIME, initial=at_s)

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

    def _set(fd: int, at_s: float) -> None:
        sec = int(at_s)
        spec = _ITimerSpec(_TimeSpec(0, 0), _TimeSpec(sec, int((at_s - sec) * 1e9)))
        if _libc().timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
