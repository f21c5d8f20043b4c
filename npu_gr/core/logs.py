"""Logging that never waits for its reader: bounded queues, a thread a stream that writes, a count of what is dropped.

    logger ─> QueuedHandler ─> queue of `MOST_LINES` ─> its thread ─> file descriptor
       └────> RecentLines, for a bundle of facts

A pipe that nobody reads blocks whoever writes to it. Here it blocks one thread: the lines of that
stream are dropped and counted once its queue is full, the other stream goes on, and the process can
end.

Invariants: a caller never waits; lines of one stream keep their order; a line of at most
`ATOMIC_BYTES` is one write, so lines of several processes on one pipe do not mix.

`Trace` is the W3C trace context (level 1) of the request in progress: its ids go to callees,
exemplars and log lines.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

ACCESS_LOG = "npu_gr.request"  # the logger whose lines go to standard output
MOST_LINES = 4096  # that wait for the writer of a stream; at 1 kB each some 4 MB
NUM_NEWEST = 512  # lines that `newest_lines` has
ATOMIC_BYTES = select.PIPE_BUF  # 4096 on Linux
GATHER_S = 0.02  # a woken writer waits for more lines: one wake-up for all of them, not one each
CLOSE_S = 1.0  # at the end of the process: to write what is queued
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class QueuedHandler(logging.Handler):
    """Writes log lines to a file descriptor from a thread of its own."""

    def __init__(
        self, stream: str, fd: int, *, formats_late: bool = False, most_lines: int = MOST_LINES
    ) -> None:
        """Start the thread.

        Args:
            stream: names the descriptor, in the metric's label.
            fd: written to, never closed.
            formats_late: format on the thread; only for records whose arguments never change.
            most_lines: that may wait; the newest line is dropped when there are as many.
        """
        super().__init__()
        self.stream = stream
        self.num_dropped = 0  # lines: no room in the queue, or nobody to write them to
        self._fd = fd
        self._formats_late = formats_late
        self._most_lines = most_lines
        # a SimpleQueue, because a destructor may log while the same thread is in `put`: its `put`
        # allows that
        self._queue: queue.SimpleQueue[object | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name=f"log-{stream}", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line, or drop and count it. Never waits."""
        self.put(record if self._formats_late else self._text(record))

    def put(self, line: object) -> None:
        """Queue a line, or drop and count it. Never waits.

        Args:
            line: a text, a record, or anything that never changes and whose `str` is the line, made
                on the thread.
        """
        if self._queue.qsize() >= self._most_lines:
            self.num_dropped += 1
        else:
            self._queue.put(line)

    def close(self) -> None:
        """Write what is queued, for `CLOSE_S` at most; later lines are not written."""
        super().close()
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _text(self, line: object) -> str:
        try:
            return self.format(line) if isinstance(line, logging.LogRecord) else str(line)
        except Exception as error:  # noqa: BLE001  (what cannot be formatted must not fail who logs it)
            name = line.name if isinstance(line, logging.LogRecord) else type(line).__name__
            return f"a line of {name} cannot be formatted: {type(error).__name__}: {error}"

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._queue.get()]
            if waiting[0] is not None:
                time.sleep(GATHER_S)
            while not self._queue.empty() and len(waiting) < self._most_lines:
                waiting.append(self._queue.get())
            is_open = None not in waiting
            lines = (self._text(one) for one in waiting if one is not None)
            for piece, num_lines in _pieces(lines):
                try:
                    _write(self._fd, piece)
                except (
                    OSError
                ):  # the reader is gone, or the disk is full: nobody can be told but by the count
                    self.num_dropped += num_lines


def _pieces(lines: Iterator[str]) -> Iterator[tuple[bytes, int]]:
    """Join lines to pieces of whole lines and at most `ATOMIC_BYTES`, with their counts.

    A longer line is alone.
    """
    piece = b""
    num_lines = 0
    for line in lines:
        data = line.encode(errors="backslashreplace") + b"\n"
        if piece and len(piece) + len(data) > ATOMIC_BYTES:
            yield piece, num_lines
            piece = b""
            num_lines = 0
        piece += data
        num_lines += 1
    if piece:
        yield piece, num_lines


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # somebody who shares the descriptor made it non-blocking
            select.select([], [fd], [])


def log_line(logger: logging.Logger, level: int, line: object) -> None:
    """Log a line; where one `QueuedHandler` is all that gets it, without a record, which takes longer than the line.

    Args:
        logger: whose line it is.
        level: of `logging`.
        line: never changes; its `str` is the line.
    """
    if not logger.isEnabledFor(level):
        return
    handlers = logger.handlers
    if (
        len(handlers) == 1
        and type(handlers[0]) is QueuedHandler
        and not logger.propagate
        and not logger.filters
    ):
        handlers[0].put(line)
    else:
        logger.log(level, "%s", line)


class RecentLines(logging.Handler):
    """Keeps the newest lines in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=NUM_NEWEST)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(self.format(record))


class SeldomLog:
    """Warns of a cause that comes with every request once a period, and says how many warnings it left out."""

    def __init__(
        self,
        log: logging.Logger,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Log nothing yet.

        Args:
            log: where the warnings go.
            period_s: between two warnings of one cause.
            clock: seconds that never go back.
        """
        self._log = log
        self._period_s = period_s
        self._clock = clock
        # cause -> when it was logged, left out since
        self._warned: dict[str, tuple[float, int]] = {}

    def warning(self, cause: str, text: str) -> None:
        """Log the text, or count it.

        Args:
            cause: one of few.
            text: its details now.
        """
        now_at = self._clock()
        warned_at, num_skipped = self._warned.get(cause, (float("-inf"), 0))
        if now_at - warned_at < self._period_s:
            self._warned[cause] = (warned_at, num_skipped + 1)
            return
        self._warned[cause] = (now_at, 0)
        more = f" (and {num_skipped} more before it)" if num_skipped else ""
        self._log.warning("%s%s", text, more)


def set_up_logs(level: str) -> None:
    """Send every logger to standard error by a `QueuedHandler`, unless the root logger has handlers already.

    Args:
        level: the least that is logged.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    formatter = logging.Formatter(FORMAT)
    for handler in (QueuedHandler("stderr", sys.stderr.fileno()), RecentLines()):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level)
    # what FORMAT does not show is not looked up: it takes longer than a line of the access log
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.captureWarnings(True)  # else Python writes them itself, and waits


def close_logs() -> None:
    """Write what is queued, each stream for `CLOSE_S` at most.

    At the end of the process `logging` does it itself.
    """
    for handler in _queued():
        handler.close()


def newest_lines() -> list[str]:
    """The newest lines of this process, oldest first; none where `set_up_logs` was not called."""
    return [
        line
        for each in logging.getLogger().handlers
        if isinstance(each, RecentLines)
        for line in each.lines
    ]


def num_lines_dropped() -> dict[str, int]:
    """Count the dropped lines of this process by stream."""
    return {"stderr": 0, "stdout": 0} | {one.stream: one.num_dropped for one in _queued()}


def _queued() -> list[QueuedHandler]:
    handlers = [*logging.getLogger().handlers, *logging.getLogger(ACCESS_LOG).handlers]
    return [one for one in handlers if isinstance(one, QueuedHandler)]


_RANDOM = random.Random()  # noqa: S311  (ids; nobody else seeds it)


def random_id(num_bits: int) -> str:
    """Make an id that no other request has, in hex, without a system call."""
    return f"{_RANDOM.getrandbits(num_bits):0{num_bits // 4}x}"


_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class Trace(NamedTuple):
    """The place of one request in a trace. Ids are lower-case hex."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits; the span of this process
    parent_id: str | None  # 16 digits; the span of the caller; None = the trace begins here
    is_sampled: bool

    @property
    def header(self) -> str:
        """The value of the header `traceparent`, for callees and for the answer."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def begin(traceparent: str | None) -> Trace:
    """Begin a span in the trace of the caller.

    Without a valid header begin a new trace, as the standard asks.
    """
    span_id = random_id(64)
    match = _TRACEPARENT.fullmatch(traceparent or "")
    # version 00 has four fields and no more
    if match is None or (match[0].startswith("00") and match[4]):
        return Trace(random_id(128), span_id, None, False)
    return Trace(match[1], span_id, match[2], bool(int(match[3], 16) & 1))


CURRENT: ContextVar[Trace | None] = ContextVar("npu_gr_trace", default=None)


def exemplar() -> dict[str, str] | None:
    """The labels that link a histogram bucket to the request in progress; None outside of a request."""
    trace = CURRENT.get()
    return None if trace is None else {"trace_id": trace.trace_id}
