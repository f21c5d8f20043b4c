"""Refusals of one turn of the event loop, written together when the turn ends.

A caller that sleeps is woken by each answer that comes alone, and to wake it costs the writer more than all else that a
refusal takes. Those that are written in a row find it awake.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Answered(Protocol):
    """A connection that an answer is for."""

    transport: asyncio.Transport | None


class Refusals:
    """Answers that are not written yet. Event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing waits."""
        self._loop = loop
        self._unwritten: list[tuple[Answered, bytes]] = []

    def add(self, connection: Answered, answer: bytes) -> None:
        """Write an answer when this turn of the loop ends, before whatever is begun from now on."""
        if not self._unwritten:
            self._loop.call_soon(self.write)
        self._unwritten.append((connection, answer))

    def write(self) -> None:
        """Write all that wait, in their order; whoever writes another answer in the same turn calls this first."""
        unwritten, self._unwritten = self._unwritten, []
        for connection, answer in unwritten:
            if connection.transport is not None:
                connection.transport.write(answer)
