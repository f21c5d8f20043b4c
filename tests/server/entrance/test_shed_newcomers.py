"""Connections that the native shedder accepts: refused there, and their owner's as soon as they may be."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_gr.server.entrance import shed_library
from npu_gr.server.entrance.shed_library import UP_BYTES, UP_RETRIES, UP_SILENT
from tests.server.entrance.bare_shedder import (
    ANSWER,
    MOST_STRANGERS,
    MOST_UNKNOWN,
    STRANGERS_PER_S,
    UNKNOWN_PER_S,
    Bare,
)
from tests.server.entrance.test_connection import WHOLE

pytestmark = pytest.mark.skipif(shed_library.load() is None, reason="the shedder was not built: Linux, a C++ compiler")


class Door:
    """A listening socket whose connections the shedder accepts."""

    def __init__(self, bare: Bare, most_newcomers: int = 1000) -> None:
        self.bare = bare
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.setblocking(False)
        self.callers: list[socket.socket] = []
        bare.turn(most_newcomers=most_newcomers)
        self.number = bare.library.npu_gr_shed_accept(bare.at, self.listening.fileno(), False)
        assert self.number == 1

    def call(self, sent: bytes = b"") -> socket.socket:
        """Connect, and send."""
        caller = socket.create_connection(self.listening.getsockname())
        caller.settimeout(5)
        caller.sendall(sent)
        self.callers.append(caller)
        return caller

    def up(self, why: int, data: bytes = b"") -> socket.socket:
        """Take one that goes up, which is ours then."""
        ((descriptor, found, text),) = self.bare.take(1)
        assert (found, text) == (why, data)
        assert self.bare.ups[0].came_to == self.number
        return socket.socket(fileno=descriptor)

    @property
    def num_newcomers(self) -> int:
        """Of the shedder."""
        return int(self.bare.library.npu_gr_shed_newcomers(self.bare.at))


@pytest.fixture
def door(bare: Bare) -> Iterator[Door]:
    made = Door(bare)
    yield made
    bare.library.npu_gr_shed_accept_no_more(bare.at, made.number)
    made.listening.close()
    for caller in made.callers:
        caller.close()


def test_a_newcomer_is_refused_and_goes_up_when_there_is_room(bare: Bare, door: Door) -> None:
    bare.refuse(WHOLE)
    caller = door.call(WHOLE)
    for _ in range(3):
        assert caller.recv(4096) == ANSWER
        caller.sendall(WHOLE)
    assert caller.recv(4096) == ANSWER
    assert bare.take() == []
    assert bare.refused == 4
    assert door.num_newcomers == 1
    bare.refuse(WHOLE, quota=1)
    caller.sendall(WHOLE)
    with door.up(UP_BYTES, WHOLE) as ours:
        assert door.num_newcomers == 0
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        caller.sendall(WHOLE)  # it is not read here any more
        ours.settimeout(5)
        assert ours.recv(4096) == WHOLE
        ours.sendall(b"ours")
        assert caller.recv(4096) == b"ours"


def test_a_newcomer_whose_request_is_not_like_the_pattern_goes_up(bare: Bare, door: Door) -> None:
    bare.refuse(WHOLE)
    door.call(WHOLE[:10])
    door.up(UP_BYTES, WHOLE[:10]).close()
    other = WHOLE.replace(b"/v1/rank", b"/v1/other")
    began_at = time.monotonic()
    door.call(other)
    door.up(UP_BYTES, other).close()
    assert began_at <= bare.ups[0].came_at <= time.monotonic()


def test_a_silent_newcomer_goes_up_and_one_that_was_refused_too_when_it_is_silent(bare: Bare, door: Door) -> None:
    bare.refuse(WHOLE)
    silent, refused = door.call(), door.call(WHOLE)
    assert refused.recv(4096) == ANSWER
    began_at = time.monotonic()
    found = bare.take(2)
    assert 0.9 <= time.monotonic() - began_at <= 2.5
    assert [(why, data) for _, why, data in found] == [(UP_SILENT, b"")] * 2
    for number, (descriptor, *_) in enumerate(found):
        ours = socket.socket(fileno=descriptor)
        ours.sendall(b"%d" % number)
        ours.close()
    assert {silent.recv(1), refused.recv(1)} == {b"0", b"1"}


def test_a_newcomer_whose_caller_hangs_up_is_closed_and_its_request_counted(bare: Bare, door: Door) -> None:
    bare.refuse(WHOLE)
    door.call().close()
    bare.library.npu_gr_shed_accept_no_more(bare.at, door.number)
    for _ in range(20):
        door.call(WHOLE).close()
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    bare.library.npu_gr_shed_accept(bare.at, door.listening.fileno(), False)
    ends_at = time.monotonic() + 5
    while bare.abandoned < 20 and time.monotonic() < ends_at:
        assert bare.take() == []
        time.sleep(1e-3)
    assert (bare.abandoned, bare.refused, door.num_newcomers) == (20, 0, 0)
    time.sleep(0.02)
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_open


def test_a_newcomer_that_retries_at_once_goes_up(bare: Bare, door: Door) -> None:
    bare.refuse(WHOLE, most_at_once_s=0.05)
    caller = door.call()
    began_at = time.monotonic()
    while not (found := bare.take()) and time.monotonic() < began_at + 5:
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
        time.sleep(0.002)
    assert [why for _, why, _ in found] == [UP_RETRIES]
    socket.socket(fileno=found[0][0]).close()


def test_strangers_go_up_a_few_a_second_and_the_others_wait_in_their_order(bare: Bare, door: Door) -> None:
    """Each costs the owner a quarter of a rank: a flood of them must not take what is left for ranks."""
    bare.refuse(WHOLE)
    texts = [b"%03d nonsense" % number for number in range(200)]
    for text in texts:
        door.call(text)
    refused = door.call(WHOLE)
    assert refused.recv(4096) == ANSWER  # it waits for none of them
    began_at = time.monotonic()
    found: list[tuple[int, int, bytes]] = []
    while len(found) < len(texts) and time.monotonic() < began_at + 10:
        took = bare.take()
        assert len(took) <= MOST_STRANGERS
        found += took
        bare.turn()
        time.sleep(1e-3)
    took_s = time.monotonic() - began_at
    assert [text for _, _, text in found] == texts
    assert len(texts) - 2 * MOST_STRANGERS <= STRANGERS_PER_S * took_s
    refused.sendall(WHOLE)
    assert refused.recv(4096) == ANSWER
    for descriptor, *_ in found:
        os.close(descriptor)


def test_strangers_who_wait_are_taken_as_fast_as_the_owner_looks_when_nobody_is_refused(bare: Bare, door: Door) -> None:
    bare.refuse(WHOLE)
    texts = [b"%03d nonsense" % number for number in range(100)]
    callers = [door.call(text) for text in texts]
    ends_at = time.monotonic() + 5
    while door.num_newcomers < len(texts) - MOST_STRANGERS and time.monotonic() < ends_at:
        time.sleep(1e-3)
    callers[50].close()  # one that waits
    bare.patterns[0].number = 0
    bare.turn()
    found: list[tuple[int, int, bytes]] = []
    while len(found) < len(texts) - 1:
        assert select.select([bare.library.npu_gr_shed_done(bare.at)], [], [], 5)[0], "nobody told the owner"
        found += bare.take()
        bare.turn()
    assert [text for _, _, text in found] == texts[:50] + texts[51:]
    assert door.num_newcomers == 0
    for descriptor, *_ in found:
        os.close(descriptor)


@pytest.mark.parametrize("first", [b"", WHOLE], ids=["silent", "like a refused one"])
def test_newcomers_of_which_nothing_is_known_are_accepted_slowly(bare: Bare, door: Door, first: bytes) -> None:
    """Who connects as fast as it can, and asks nothing, would take the core that serves those who ask."""
    num = MOST_UNKNOWN + 1600
    least_s = (num - MOST_UNKNOWN) / UNKNOWN_PER_S
    bare.library.npu_gr_shed_accept_no_more(bare.at, door.number)
    door.listening.listen(4096)
    callers = [door.call(first) for _ in range(num)]  # they wait in the kernel
    bare.refuse(WHOLE)
    bare.turn(most_newcomers=10_000)
    bare.library.npu_gr_shed_accept(bare.at, door.listening.fileno(), False)
    began_at = time.monotonic()
    while door.num_newcomers < num and time.monotonic() < began_at + 5:
        time.sleep(1e-3)
    took_s = time.monotonic() - began_at
    assert door.num_newcomers == num
    if first:
        assert took_s < least_s
        assert all(caller.recv(4096) == ANSWER for caller in callers)
    else:
        assert took_s >= least_s


def test_where_there_is_no_room_for_newcomers_they_go_up_at_once(bare: Bare) -> None:
    door = Door(bare, most_newcomers=2)
    bare.patterns[0].number = 0
    callers = [door.call() for _ in range(2)]
    ends_at = time.monotonic() + 5
    while door.num_newcomers < 2 and time.monotonic() < ends_at:
        time.sleep(1e-3)
    assert bare.take() == []
    callers.append(door.call())
    began_at = time.monotonic()
    door.up(UP_SILENT).close()
    assert time.monotonic() - began_at < 0.5
    assert door.num_newcomers == 2
    for caller in (*callers, door.listening):
        caller.close()


def test_nobody_is_accepted_any_more_and_what_nobody_took_is_closed_with_it() -> None:
    bare = Bare()
    door = Door(bare)
    up = door.call(b"nonsense")
    silent = door.call()
    ends_at = time.monotonic() + 5
    while door.num_newcomers != 1 and time.monotonic() < ends_at:
        time.sleep(1e-3)
    time.sleep(0.02)
    bare.library.npu_gr_shed_accept_no_more(bare.at, door.number)
    waits = door.call(WHOLE)
    time.sleep(0.05)
    accepted, _ = door.listening.accept()
    assert accepted.getpeername() == waits.getsockname()
    time.sleep(0.05)
    bare.library.npu_gr_shed_free(bare.at)
    for caller in (silent, up):
        with contextlib.suppress(ConnectionResetError):  # it was closed with bytes that nobody has read
            assert caller.recv(1) == b""
    for one in (accepted, door.listening, silent, up, waits):
        one.close()


def test_without_a_descriptor_it_waits_and_then_accepts(bare: Bare, door: Door) -> None:
    bare.refuse(WHOLE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.socket()
    caller.settimeout(5)
    try:
        # the lowest free number is above the limit, so nothing can be opened
        os.close(lowest := os.dup(caller.fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        caller.connect(door.listening.getsockname())
        caller.sendall(WHOLE)
        began_s = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - began_s < 0.15  # it does not spin
        assert door.num_newcomers == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caller.recv(4096) == ANSWER
    caller.close()
