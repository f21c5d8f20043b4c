"""Non-blocking logging: bounded queues, a writer thread per stream, and a count of dropped lines.

    logger ─> QueuedHandler ─> queue of `MOST_LINES` ─> its thread ─> file descriptor
       └────> RecentLines, for a bundle of facts

A pipe without a reader blocks its writer. Here it blocks only one thread: lines of that stream are
dropped and counted once its queue is full, the other stream continues, and the process can end.

Invariants: logging never waits; lines of a stream keep their order; a line of at most
`ATOMIC_BYTES` is one write, so lines of several processes on one pipe do not mix.

`Trace` is the W3C trace context (level 1) of the current request; its ids are in calls to other
services, exemplars and log lines.
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
MOST_LINES = 4096  # queued per stream, about 4 MB at 1 kB each
NUM_NEWEST = 512  # lines of `newest_lines`
ATOMIC_BYTES = select.PIPE_BUF  # 4096 on Linux
GATHER_S = 0.02  # the writer waits for more lines, to wake up once for many
CLOSE_S = 1.0  # to write the queued lines at the end of the process
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class QueuedHandler(logging.Handler):
    """Writes log lines to a file descriptor in a thread."""

    def __init__(
        self, stream: str, fd: int, *, formats_late: bool = False, most_lines: int = MOST_LINES
    ) -> None:
        """Start the thread.

        Args:
            stream: Name of the descriptor, a metric label.
            fd: Descriptor to write to; never closed.
            formats_late: Whether to format in the thread; only for records with immutable
                arguments.
            most_lines: Capacity of the queue; further lines are dropped.
        """
        super().__init__()
        self.stream = stream
        self.num_dropped = 0  # lines, because the queue was full or writing failed
        self._fd = fd
        self._formats_late = formats_late
        self._most_lines = most_lines
        # a SimpleQueue, whose `put` is reentrant: a destructor may log while its thread is in `put`
        self._queue: queue.SimpleQueue[object | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name=f"log-{stream}", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line, or drop and count it. Never waits."""
        self.put(record if self._formats_late else self._text(record))

    def put(self, line: object) -> None:
        """Queue a line, or drop and count it. Never waits.

        Args:
            line: A text, a record, or an immutable object whose `str`, called in the thread, is the
                line.
        """
        if self._queue.qsize() >= self._most_lines:
            self.num_dropped += 1
        else:
            self._queue.put(line)

    def close(self) -> None:
        """Write the queued lines, for at most `CLOSE_S`; later lines are not written."""
        super().close()
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _text(self, line: object) -> str:
        try:
            return self.format(line) if isinstance(line, logging.LogRecord) else str(line)
        except Exception as error:  # noqa: BLE001  (a formatting error must not fail the caller)
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
                except OSError:  # no reader or a full disk, which only the count can show
                    self.num_dropped += num_lines


def _pieces(lines: Iterator[str]) -> Iterator[tuple[bytes, int]]:
    """Join lines to pieces of at most `ATOMIC_BYTES`, with their number; a longer line is alone."""
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
        except BlockingIOError:  # another process that shares the descriptor made it non-blocking
            select.select([], [fd], [])


def log_line(logger: logging.Logger, level: int, line: object) -> None:
    """Log a line, without the cost of a record if a `QueuedHandler` is the only handler.

    Args:
        logger: Logger of the line.
        level: Level of `logging`.
        line: Immutable object whose `str` is the line.
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
    """Stores the newest lines in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=NUM_NEWEST)

    def emit(self, record: logging.LogRecord) -> None:
        """Store the line."""
        self.lines.append(self.format(record))


class ThrottledLog:
    """Logs a repeated warning at most once per period, with the number of suppressed ones."""

    def __init__(
        self,
        log: logging.Logger,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without warnings.

        Args:
            log: Logger of the warnings.
            period_s: Minimum time between two warnings of a cause.
            clock: Monotonic seconds.
        """
        self._log = log
        self._period_s = period_s
        self._clock = clock
        # cause -> (time of the last warning, suppressed since)
        self._warned: dict[str, tuple[float, int]] = {}

    def warning(self, cause: str, text: str) -> None:
        """Log a warning, or count it.

        Args:
            cause: Key of the rate limit; must have few values.
            text: Message.
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
    """Send all loggers to standard error, unless the root logger has handlers already.

    Args:
        level: Minimum level.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    formatter = logging.Formatter(FORMAT)
    for handler in (QueuedHandler("stderr", sys.stderr.fileno()), RecentLines()):
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(level)
    # skip the look-up of fields that FORMAT lacks, which is slower than an access log line
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.captureWarnings(True)  # else Python writes them, blocking


def close_logs() -> None:
    """Write the queued lines, for at most `CLOSE_S` per stream.

    `logging` calls it at the end of the process.
    """
    for handler in _queued():
        handler.close()


def newest_lines() -> list[str]:
    """Return the newest lines, oldest first; none without `set_up_logs`."""
    return [
        line
        for each in logging.getLogger().handlers
        if isinstance(each, RecentLines)
        for line in each.lines
    ]


def num_lines_dropped() -> dict[str, int]:
    """Return the number of dropped lines by stream."""
    return {"stderr": 0, "stdout": 0} | {one.stream: one.num_dropped for one in _queued()}


def _queued() -> list[QueuedHandler]:
    handlers = [*logging.getLogger().handlers, *logging.getLogger(ACCESS_LOG).handlers]
    return [one for one in handlers if isinstance(one, QueuedHandler)]


_RANDOM = random.Random()  # noqa: S311  (ids; its own state, so other code cannot seed it)


def random_id(num_bits: int) -> str:
    """Make a random id in hex, without a system call."""
    return f"{_RANDOM.getrandbits(num_bits):0{num_bits // 4}x}"


_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class Trace(NamedTuple):
    """The trace context of a request. Ids are lower-case hex."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits; the span of this process
    parent_id: str | None  # 16 digits; the span of the client; None if the trace begins here
    is_sampled: bool

    @property
    def header(self) -> str:
        """The value of the header `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def begin(traceparent: str | None) -> Trace:
    """Begin a span in the client's trace; without a valid header, a new trace."""
    span_id = random_id(64)
    match = _TRACEPARENT.fullmatch(traceparent or "")
    # version 00 has four fields and no more
    if match is None or (match[0].startswith("00") and match[4]):
        return Trace(random_id(128), span_id, None, False)
    return Trace(match[1], span_id, match[2], bool(int(match[3], 16) & 1))


CURRENT: ContextVar[Trace | None] = ContextVar("npu_gr_trace", default=None)


def exemplar() -> dict[str, str] | None:
    """Return the labels that link a histogram bucket to the current request, if there is one."""
    trace = CURRENT.get()
    return None if trace is None else {"trace_id": trace.trace_id}
