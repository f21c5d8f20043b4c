"""Ids of requests and traces: random, and no secret."""

from __future__ import annotations

import random

_RANDOM = random.Random()  # noqa: S311  (ids; nobody else seeds it)


def random_id(num_bits: int) -> str:
    """Make an id that no other request has, in hex, without a system call."""
    return f"{_RANDOM.getrandbits(num_bits):0{num_bits // 4}x}"
