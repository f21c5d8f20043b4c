"""Ports of tests: no two processes of tests have the same one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from tests import ports
from tests.ports import BUS, free_port, ours, outside


def in_a_child(work: Callable[[], int]) -> int:
    """What a function returns in a forked process, which waits for the end of this one's read."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.write(writes, str(work()).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        found = int(told.read())
    os.waitpid(child, 0)
    return found


def test_a_port_is_given_once() -> None:
    mine = [free_port() for _ in range(300)]
    assert len(set(mine)) == len(mine)
    assert all(port in ours() for port in mine)


def test_another_process_gets_another_port() -> None:
    before = ports._order()
    mine = [free_port(), free_port()]

    def tries_the_same() -> int:
        ports._given.clear()
        return sum(ports._take(port) for port in mine)

    assert in_a_child(tries_the_same) == 0
    assert in_a_child(lambda: int(ports._take(next(before)))) == 1


def test_a_port_in_use_is_not_given() -> None:
    port = free_port()
    ports._given.discard(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not ports._take(port)
    assert ports._take(port)


def test_a_second_port_comes_with_the_first() -> None:
    for _ in range(50):
        port = free_port(also=BUS)
        assert port + BUS in ours()
        assert not ports._take(port + BUS)


def test_the_range_of_the_kernel_is_left_out() -> None:
    assert outside(32_768, 60_999) == range(10_000, 32_768)
    assert outside(5_000, 50_000) == range(50_001, 65_536)
    assert outside(1_024, 65_000) == range(10_000, 65_536)  # it leaves too few
