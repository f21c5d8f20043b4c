"""The open connections of clients: counted, limited, and closed when they take too long."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Sweepable(Protocol):
    """One open connection of a client."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, not even the beginning of one."""
        ...

    def sweep(self, now_at: float) -> None:
        """End what takes too long."""
        ...

    def end(self) -> None:
        """Close after what was written."""
        ...


class Connections:
    """All open connections of one router."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._open: set[Sweepable] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Sweepable) -> bool:
        """Count one more connection. False: it is over the limit, and is to be closed."""
        self._open.add(connection)
        return len(self._open) <= self._max_open

    def remove(self, connection: Sweepable) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)

    def sweep(self, now_at: float) -> None:
        """End what takes too long on each connection."""
        for connection in list(self._open):
            connection.sweep(now_at)

    async def close(self, timeout_s: float) -> None:
        """Wait until no connection has a request, but at most `timeout_s`; then close all of them."""
        try:
            async with asyncio.timeout(timeout_s):
                while not all(connection.is_idle for connection in self._open):  # noqa: ASYNC110  (once, at the end)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        for connection in list(self._open):
            connection.end()
        await asyncio.sleep(0)  # so that the transports close before the loop does
