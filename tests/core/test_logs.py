"""Logging never waits: a stopped reader loses counted lines; later lines are complete, in order."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from npu_gr.core import logs
from npu_gr.core.logs import ATOMIC_BYTES, QueuedHandler, RecentLines, ThrottledLog, log_line
from npu_gr.core.secret import redacted


@contextmanager
def logger_to(
    fd: int, most_lines: int = 4096, formats_late: bool = False
) -> Iterator[tuple[logging.Logger, QueuedHandler]]:
    log = logging.Logger("tested")
    handler = QueuedHandler("tested", fd, formats_late=formats_late, most_lines=most_lines)
    log.addHandler(handler)
    try:
        yield log, handler
    finally:
        handler.close()


def read_all(fd: int) -> bytes:
    return b"".join(iter(lambda: os.read(fd, 65536), b""))


@pytest.mark.parametrize("formats_late", [False, True])
def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(formats_late: bool) -> None:
    reader, writer = os.pipe()
    total = 6000

    with logger_to(writer, most_lines=1000, formats_late=formats_late) as (log, handler):

        def work() -> None:
            for number in range(total):
                log.warning("%d %s", number, "x" * 400)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert 0 < handler.num_dropped < total
    # the block ended although nobody read; now somebody does
    dropped = handler.num_dropped
    found: list[bytes] = []
    late = threading.Thread(target=lambda: found.append(read_all(reader)))
    late.start()
    handler._thread.join(60)
    os.close(writer)
    late.join(60)
    lines = found[0].splitlines()
    numbers = [int(line.split()[0]) for line in lines]
    assert len(numbers) == total - dropped
    assert numbers == sorted(numbers)
    assert all(line.endswith(b" " + b"x" * 400) for line in lines)


def test_a_line_up_to_4_kb_is_one_write_and_no_write_splits_lines() -> None:
    # each write is one packet
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sizes = [10, 3000, 2000, ATOMIC_BYTES - 1, 1, 5000, 20, *[100] * 100]
    with logger_to(ours.fileno()) as (log, handler):
        for index, size in enumerate(sizes):
            log.warning("%s", chr(97 + index % 26) * size)
    assert handler.num_dropped == 0
    ours.close()
    packets = list(iter(lambda: theirs.recv(1 << 20), b""))
    theirs.close()
    assert all(packet.endswith(b"\n") for packet in packets)
    assert [len(line) for packet in packets for line in packet.splitlines()] == sizes
    assert all(len(packet) <= ATOMIC_BYTES or packet.count(b"\n") == 1 for packet in packets)
    assert len(packets) < 20  # not one write a line


def test_a_reader_that_has_gone_is_counted() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with logger_to(writer) as (log, handler):
        log.warning("to nobody")
        log.warning("to nobody")
    assert handler.num_dropped == 2
    os.close(writer)


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read_all(reader)))
    with logger_to(writer) as (log, handler):
        for _ in range(400):
            log.warning("x" * 999)
        thread.start()
    os.close(writer)
    thread.join(60)
    assert len(found[0]) == 400 * 1000
    assert handler.num_dropped == 0


def test_what_cannot_be_formatted_hurts_nobody() -> None:
    class Bad:
        def __str__(self) -> str:
            raise KeyError("planted")

    reader, writer = os.pipe()
    with logger_to(writer) as (log, _):
        log.warning("%s", Bad())
        log.warning("after it")
    os.close(writer)
    text = read_all(reader).decode()
    assert text.splitlines() == [
        "a line of tested cannot be formatted: KeyError: 'planted'",
        "after it",
    ]


def test_a_destructor_may_log_while_its_thread_logs() -> None:
    """`put` is entered again by the same thread.

    A queue with a lock of Python's would stop here for good.
    """
    reader, writer = os.pipe()
    with logger_to(writer) as (log, handler):

        class Text(str):
            def __str__(self) -> str:
                log.warning("inner")
                return "outer"

        handler.setFormatter(logging.Formatter("%(message)s"))
        log.warning("%s", Text())
    os.close(writer)
    assert read_all(reader).decode().splitlines() == ["inner", "outer"]


def test_the_newest_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = RecentLines()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    log = logging.getLogger("tests.newest")
    for number in range(logs.NUM_NEWEST + 5):
        log.warning("%d", number)
    assert logs.newest_lines() == [str(number) for number in range(5, logs.NUM_NEWEST + 5)]


def test_a_cause_is_told_once_a_period_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    seldom = ThrottledLog(logging.getLogger("tests.seldom"), clock=lambda: now)
    for at in (0.0, 0.1, 0.9, 1.0, 1.5, 2.5):
        now = at
        seldom.warning("disk", "full")
    seldom.warning("redis", "gone")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["full", "full (and 2 more before it)", "full (and 1 more before it)", "gone"]


def test_credentials_are_taken_out() -> None:
    text = '{"url":"redis://me:s3cret@db:6379/0?password=x1&a=b","b":"https://collector/v1","c":"mail@example.org"}'
    want = '{"url":"redis://***@db:6379/0?password=***&a=b","b":"https://collector/v1","c":"mail@example.org"}'
    assert redacted(text) == want
    assert redacted('"redis://:p@ss@db/0"') == '"redis://***@db/0"'


class Line:
    """Its text is made when it is written."""

    def __str__(self) -> str:
        return "made late"


@pytest.mark.parametrize("is_alone", [True, False], ids=["one handler", "two handlers"])
def test_a_line_needs_no_record_where_one_handler_gets_it(is_alone: bool) -> None:
    reader, writer = os.pipe()
    with logger_to(writer, formats_late=True) as (log, _):
        log.propagate = False
        newest = RecentLines()
        if not is_alone:
            log.addHandler(newest)
        made = logging.getLogRecordFactory()
        num_records = 0

        def count(*args: object, **kwargs: object) -> logging.LogRecord:
            nonlocal num_records
            num_records += 1
            return made(*args, **kwargs)

        logging.setLogRecordFactory(count)
        try:
            log_line(log, logging.INFO, Line())
            log.disabled = True
            log_line(log, logging.INFO, Line())
        finally:
            logging.setLogRecordFactory(made)
    os.close(writer)
    assert read_all(reader) == b"made late\n"
    assert num_records == (0 if is_alone else 1)
    assert list(newest.lines) == ([] if is_alone else ["made late"])
