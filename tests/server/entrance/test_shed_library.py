"""The native shedder alone: its keys are equal as to the door; nothing is lost, overwritten, raced or over a quota."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import BadRequest
from npu_gr.server.entrance import framing, kernel_socket, pacing, shed_library
from npu_gr.server.entrance.framing import HEAD_END, granted_s, parse_head, tenant_of
from npu_gr.server.entrance.shed_library import MOST_PATTERNS, UP_BYTES, UP_CLOSED, UP_RETRIES, UP_UNSENT
from npu_gr.server.entrance.shedding import MAX_KEY_BYTES
from tests.server.entrance.bare_shedder import ANSWER, MOST_STRANGERS, STRANGERS_PER_S, Bare
from tests.server.entrance.test_connection import BODY, WHOLE

pytestmark = pytest.mark.skipif(shed_library.load() is None, reason="the shedder was not built: Linux, a C++ compiler")

TENANT = json.loads(BODY).get("tenant", "").encode()


@pytest.fixture(scope="module")
def keys() -> Iterator[Bare]:
    """A shedder that is asked for keys alone."""
    made = Bare()
    yield made
    made.library.npu_gr_shed_free(made.at)


# ---- keys

LINES = st.sampled_from(
    [
        b"Host: x",
        b"host:y",
        b"Authorization: Bearer a",
        b"AUTHORIZATION:Bearer b",
        b"X-Request-Timeout-Ms: 20",
        b"x-request-timeout-ms: 30",
        b"grpc-timeout: 20m",
        b"Connection: keep-alive",
        b"Connection: close",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"traceparent: 00-1-2-3",
        b" folded",
        b"no colon",
        b"spaced : name",
        b"bare\nline: feed",
        b"Content-Length: 3",
        b"X-Content-Length: 7",
    ]
)
FIRST = st.sampled_from(
    [
        b"POST /v1/rank HTTP/1.1",
        b"POST /v1/rank?a=b HTTP/1.1",
        b"POST /v1/rank HTTP/1.0",
        b"GET /v1/rank HTTP/1.1",
        b"x",
    ]
)
BODIES = st.sampled_from(
    [
        b"",
        b"{}",
        b'{"tenant": "a"}',
        b'{"x": "tenant", "tenant" :\n"a"}',
        b'{"tenant": "b"}',
        b'{"tenant": "a\\"b"}',
        b'{"tenant": ""}',
        b"\x81\xa6tenant\xa1a",
        b"\x81\xa6tenant\xd9\x01a",
        b"\x81\xa6tenant",
        b'{"tenant": "a"}' + b" " * 5000,
        b"{" + b" " * 5000 + b'"tenant":"a"}',
        b"{" + b" " * 2500 + b'"tenant":"a"' + b" " * 2500 + b"}",
        b'{"tenant": "' + b"t" * 256 + b'"}',
        b'{"tenant": "' + b"t" * 257 + b'"}',
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    body = draw(BODIES)
    lines = [draw(FIRST), *draw(st.lists(LINES, max_size=4))]
    if draw(st.integers(0, 7)):
        lines.insert(
            1 + draw(st.integers(0, len(lines) - 1)),
            b"Content-Length: %d" % (len(body) + draw(st.sampled_from([0, 0, 0, 1]))),
        )
    return b"\r\n".join(lines) + HEAD_END + body + draw(st.sampled_from([b"", b"", b"", b"G"]))


def decided_by(request: bytes) -> tuple[Any, ...]:
    """What the door decides by; fails where it is not one whole request that may be refused at once."""
    end = request.index(HEAD_END) + len(HEAD_END)
    head = parse_head(request, end)
    assert not head.is_chunked
    assert not head.waits_for_continue
    assert not head.closes
    assert head.num_bytes + head.body_bytes == len(request)
    return head.method, head.path, head.authorization, granted_s(head, 1.0, 5.0), tenant_of(request, end)


@given(requests(), requests())
def test_requests_of_one_key_are_one_to_the_door(keys: Bare, one: bytes, other: bytes) -> None:
    key = keys.key(one)
    if key is None:
        return
    try:
        seen = decided_by(one)
    except BadRequest:  # the door answers it with a 400, and learns no such key
        assert one.lower().count(b"authorization:") > 1
        return
    if key == keys.key(other):
        assert decided_by(other) == seen


def test_a_plain_request_has_a_key_without_what_the_door_does_not_read(keys: Bare) -> None:
    other = WHOLE.replace(b"Host: x", b"traceparent: 00-1-2-3\r\nHost: y")
    assert keys.key(WHOLE) == b"POST /v1/rank HTTP/1.1\0" + TENANT
    assert keys.key(other) == keys.key(WHOLE)
    assert keys.key(WHOLE[:-1]) is None
    assert keys.key(WHOLE + b"P") is None
    assert keys.key(WHOLE.replace(b"Host: x", b"Authorization: Bearer " + b"k" * MAX_KEY_BYTES)) is None


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        ("shedder.h", "RETRY_S", pacing.RETRY_S),
        ("shedder.h", "LATE", pacing.LATE),
        ("shedder.h", "MOST_STRANGERS", MOST_STRANGERS),
        ("shedder.h", "STRANGERS_PER_S", STRANGERS_PER_S),
        ("shedder.h", "JIFFY_S", kernel_socket._JIFFY_S),
        ("request_key.h", "MAX_DIGITS", framing.MAX_DIGITS),
        ("request_key.h", "SEARCHED_BYTES", framing._SEARCHED_BYTES),
        ("request_key.h", "MAX_KEY_BYTES", MAX_KEY_BYTES),
        ("shed_call.h", "NPU_GR_SHED_ABI", shed_library.ABI),
        ("shed_call.h", "MOST_PATTERNS", MOST_PATTERNS),
    ],
)
def test_numbers_that_stand_on_both_sides_are_the_same(source: str, name: str, value: float) -> None:
    text = (Path(__file__).parents[3] / "ops/door" / source).read_text()
    assert [float(found) for found in re.findall(rf"\b{name}(?: =)? ([0-9.]+)", text)] == [value]


# ---- the shedder alone


def test_it_refuses_what_is_like_the_pattern_and_hands_up_what_is_not(
    bare: Bare, pair: tuple[socket.socket, socket.socket]
) -> None:
    caller, ours = pair
    lent_as = bare.lend(ours)
    bare.refuse(WHOLE)
    for _ in range(3):
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
    caller.sendall(WHOLE.replace(b"/v1/rank", b"/v1/other"))
    assert bare.take(1) == [(ours.fileno(), UP_BYTES, WHOLE.replace(b"/v1/rank", b"/v1/other"))]
    caller.sendall(WHOLE)  # nobody reads it until the one before is answered
    time.sleep(0.02)
    assert bare.take() == []
    assert bare.refused == 3
    bare.refuse(WHOLE, quota=1)
    bare.library.npu_gr_shed_resume(bare.at, ours.fileno(), lent_as)
    assert bare.take(1) == [(ours.fileno(), UP_BYTES, WHOLE)]
    bare.library.npu_gr_shed_resume(bare.at, ours.fileno(), lent_as)
    caller.sendall(WHOLE)  # the quota is used up
    assert caller.recv(4096) == ANSWER


def test_what_was_not_taken_yet_counts_against_the_next_quota(bare: Bare) -> None:
    pairs = [socket.socketpair() for _ in range(6)]
    bare.refuse(WHOLE, quota=2)
    for caller, ours in pairs:
        caller.setblocking(False)
        bare.lend(ours)
        caller.sendall(WHOLE)
    for _ in range(3):  # those that were not let up were refused, and ask again
        for caller, _ours in pairs:
            with contextlib.suppress(BlockingIOError):
                caller.recv(4096)
                caller.sendall(WHOLE)
        time.sleep(0.01)
        bare.refuse(WHOLE, quota=2)
    assert len(bare.take(2)) == 2
    bare.refuse(WHOLE, quota=1)
    for caller, _ours in pairs:
        with contextlib.suppress(BlockingIOError):
            caller.recv(4096)
            caller.sendall(WHOLE)
    assert len(bare.take(1)) == 1
    for caller, ours in pairs:
        caller.close()
        ours.close()


def test_a_stopped_connection_is_read_no_more(bare: Bare, pair: tuple[socket.socket, socket.socket]) -> None:
    caller, ours = pair
    lent_as = bare.lend(ours)
    bare.refuse(WHOLE)
    caller.sendall(WHOLE)
    assert caller.recv(4096) == ANSWER
    bare.library.npu_gr_shed_stop(bare.at, ours.fileno(), lent_as)
    caller.sendall(WHOLE)
    time.sleep(0.02)
    assert ours.recv(4096) == WHOLE
    bare.library.npu_gr_shed_resume(bare.at, ours.fileno(), lent_as)  # means nothing any more
    caller.sendall(WHOLE)
    time.sleep(0.02)
    assert ours.recv(4096) == WHOLE
    assert bare.take() == []


@pytest.mark.parametrize("most_ups", [20, 512])
def test_what_goes_up_where_its_owner_does_not_look_waits_for_room(most_ups: int) -> None:
    """Nothing is lost and nothing is overwritten, in rings that are far too small."""
    bare = Bare(most_ups=most_ups, room_bytes=1024)
    pairs = [socket.socketpair() for _ in range(64)]
    numbers = {ours.fileno(): bare.lend(ours) for _, ours in pairs}
    for round_ in range(3):
        texts = {}
        for n, (caller, ours) in enumerate(pairs):
            texts[ours.fileno()] = b"%d %d " % (round_, n) + b"x" * (900 - n)
            caller.sendall(texts[ours.fileno()])
        time.sleep(0.02)
        found = []
        for _ in range(100):
            num = bare.library.npu_gr_shed_take(bare.at, bare.ups, bare.counts)
            time.sleep(0.002)  # it reads on
            found += [
                (up.fd, up.why, bytes(bare.buffer[up.offset : up.offset + up.num_bytes])) for up in bare.ups[:num]
            ]
        assert sorted(found) == sorted((fd, UP_BYTES, text) for fd, text in texts.items())
        for fd, number in numbers.items():
            bare.library.npu_gr_shed_resume(bare.at, fd, number)
    bare.library.npu_gr_shed_free(bare.at)
    for caller, ours in pairs:
        caller.close()
        ours.close()


def test_a_pattern_that_makes_room_for_another_is_counted_until_then(
    bare: Bare, pair: tuple[socket.socket, socket.socket]
) -> None:
    caller, ours = pair
    bare.lend(ours)
    bare.refuse(WHOLE)
    caller.sendall(WHOLE)
    assert caller.recv(4096) == ANSWER
    bare.patterns[0].number = 0
    bare.turn()
    assert bare.refused == 1
    caller.sendall(WHOLE)
    assert bare.take(1) == [(ours.fileno(), UP_BYTES, WHOLE)]


def test_a_caller_that_hangs_up_is_handed_back(bare: Bare) -> None:
    bare.refuse(WHOLE)
    for sent in (b"", WHOLE):
        caller, ours = socket.socketpair()
        caller.sendall(sent)
        caller.close()
        bare.lend(ours)
        assert bare.take(1) == [(ours.fileno(), UP_CLOSED, b"")]
        assert bare.refused == 0
        ours.close()


def test_a_caller_that_hangs_up_while_its_request_is_up_is_handed_back(bare: Bare) -> None:
    caller, ours = socket.socketpair()
    lent_as = bare.lend(ours)
    caller.sendall(WHOLE)
    assert bare.take(1) == [(ours.fileno(), UP_BYTES, WHOLE)]
    caller.close()
    assert bare.take(1) == [(ours.fileno(), UP_CLOSED, b"")]
    bare.library.npu_gr_shed_resume(bare.at, ours.fileno(), lent_as)
    time.sleep(0.02)
    assert bare.take() == []
    ours.close()


def test_what_finds_no_room_in_the_socket_goes_up(bare: Bare) -> None:
    caller, ours = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    ours.setblocking(False)
    filled = 0
    while True:
        try:
            filled += ours.send(b"x" * 100)
        except BlockingIOError:
            break
    bare.refuse(WHOLE)
    caller.sendall(WHOLE)
    bare.lend(ours)
    assert bare.take(1) == [(ours.fileno(), UP_UNSENT, ANSWER)]
    assert len(caller.recv(1 << 20)) <= filled
    caller.close()
    ours.close()


@pytest.mark.parametrize("is_proxy", [False, True])
def test_a_caller_that_retries_at_once_goes_back_but_a_proxy_does_not(
    bare: Bare, pair: tuple[socket.socket, socket.socket], is_proxy: bool
) -> None:
    caller, ours = pair
    bare.refuse(WHOLE, most_at_once_s=0.1)
    bare.lend(ours, float("inf") if is_proxy else time.monotonic())
    for _ in range(20):
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
        time.sleep(0.02)  # so none of them came at once
    assert bare.take() == []
    began_at = time.monotonic()
    ups: list[tuple[int, int, bytes]] = []
    for number in itertools.count():
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
        time.sleep(0.012 if number % 20 == 19 else 0.002)  # late at times; else the thread is done with it
        ups = bare.take()
        if ups or time.monotonic() > began_at + (0.5 if is_proxy else 5.0):
            break
    if is_proxy:
        assert ups == []
    else:
        assert ups == [(ours.fileno(), UP_RETRIES, b"")]
        assert time.monotonic() - began_at > 0.08


def test_it_says_when_a_connection_was_answered_and_since_when_it_retries(
    bare: Bare, pair: tuple[socket.socket, socket.socket]
) -> None:
    caller, ours = pair
    bare.refuse(WHOLE)
    began_at = time.monotonic()
    bare.lend(ours, began_at - 0.05)
    answered_at, since_at = ctypes.c_double(), ctypes.c_double()

    def ask() -> float:
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
        asked_at = time.monotonic()
        time.sleep(0.005)  # the thread is done with it
        bare.library.npu_gr_shed_times(bare.at, ours.fileno(), ctypes.byref(answered_at), ctypes.byref(since_at))
        return asked_at

    while ask() - began_at > 0.009:  # a machine that is busy: once more
        bare.library.npu_gr_shed_stop(bare.at, ours.fileno(), bare.lent_as)
        began_at = time.monotonic()
        bare.lend(ours, began_at - 0.05)
    assert since_at.value == began_at - 0.05
    time.sleep(0.05)
    asked_at = ask()
    assert since_at.value >= began_at + 0.05
    assert since_at.value <= answered_at.value <= asked_at + 5


def test_a_descriptor_that_was_closed_and_used_again_is_another_connections(bare: Bare) -> None:
    caller, ours = socket.socketpair()
    number = ours.fileno()
    lent_as = bare.lend(ours)
    ours.close()
    caller.close()
    caller, ours = socket.socketpair()
    assert number in (caller.fileno(), ours.fileno())
    caller.sendall(WHOLE)
    ours.sendall(WHOLE)
    bare.refuse(WHOLE)
    time.sleep(0.02)
    assert bare.take() == []
    again, other = (caller, ours) if caller.fileno() == number else (ours, caller)
    assert again.recv(4096) == other.recv(4096) == WHOLE
    assert bare.lend(again) != lent_as
    bare.library.npu_gr_shed_stop(bare.at, number, lent_as)  # of the one before: the new one stays lent
    other.settimeout(5)
    other.sendall(WHOLE)
    assert other.recv(4096) == ANSWER
    caller.close()
    ours.close()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_nothing_is_raced_lost_or_let_up_beyond_its_quota(tmp_path: Path) -> None:
    """`race/main.cpp` is an owner that lends, stops and closes at any time, beside callers, under ThreadSanitizer."""
    source = Path(__file__).parent / "race/main.cpp"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-fsanitize=thread", "-pthread"]
    built = subprocess.run(["g++", *flags, source, "-o", tmp_path / "race"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    done = subprocess.run([tmp_path / "race", "1", "20000"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert "\nnewcomers: " in done.stdout
