"""A native shedder without a door, and a connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.server.entrance.bare_shedder import Bare


@pytest.fixture
def bare() -> Iterator[Bare]:
    made = Bare()
    yield made
    made.library.npu_gr_shed_free(made.at)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A caller and its connection."""
    caller, ours = socket.socketpair()
    caller.settimeout(5)
    yield caller, ours
    caller.close()
    ours.close()
