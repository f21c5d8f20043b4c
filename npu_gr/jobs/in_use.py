"""A reference count on a version of a model: it is stopped once nobody uses it."""

from __future__ import annotations

import asyncio


class InUse:
    """Count the open `with` blocks. Event loop only."""

    def __init__(self) -> None:
        self._count = 0
        self._freed: asyncio.Event | None = None  # where somebody waits

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count and self._freed is not None:
            self._freed.set()
            self._freed = None

    async def wait_free(self) -> None:
        """Wait until no block is open."""
        while self._count:
            if self._freed is None:
                self._freed = asyncio.Event()
            await self._freed.wait()
