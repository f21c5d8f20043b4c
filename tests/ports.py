"""Ports for processes that tests start.

A port that the kernel chose (`bind` to 0) can be taken by an outgoing connection before its process
binds it. The ports here lie outside of the kernel's range, and each is given once: a byte of a file
stands for it, which the test process that gave it keeps locked until it ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

LOWEST, HIGHEST = 10_000, 65_535
FEWEST = 1_000  # where the kernel leaves fewer, its own range is used as well
BUS = 10_000  # distance from the port of a Redis Cluster's node to that of its bus
_given: set[int] = set()  # by this process, whose own locks do not stop it


def free_port(also: int = 0) -> int:
    """Return a port that no other process of a test has or gets.

    Args:
        also: distance to a second port that comes with it; 0 = no second port.
    """
    for port in _order():
        if _take(port) and (not also or _take(port + also)):
            return port
    raise AssertionError(f"all of {ours()} are given or in use")


def outside(first: int, last: int) -> range:
    """Ports that no outgoing connection takes, where the kernel gives it one of first to last."""
    below, above = range(LOWEST, first), range(last + 1, HIGHEST + 1)
    longer = max(below, above, key=len)
    return longer if len(longer) >= FEWEST else range(LOWEST, HIGHEST + 1)


@cache
def ours() -> range:
    """Ports of this machine that tests use."""
    first, last = 49_152, 65_535  # of most systems that are no Linux
    with suppress(OSError):
        told = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        first, last = map(int, told.split())
    return outside(first, last)


@cache
def _order() -> Iterator[int]:
    """Each port once, in an order of this process."""
    return iter(random.Random(os.getpid()).sample(ours(), len(ours())))


@cache
def _locks() -> int:
    path = Path(tempfile.gettempdir()) / f"npu_gr-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _take(port: int) -> bool:
    """Lock a port, unless another process has locked it or something is bound to it."""
    if port in _given or port not in ours():
        return False
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        with socket.socket() as one:
            one.bind(("", port))
    except OSError:
        return False
    _given.add(port)
    return True
