"""A reference count on a version of a model: it is stopped once nobody uses it."""

from __future__ import annotations

import asyncio


class InUse:
    """Count the open `with` blocks. Event loop only."""

    def __init__(self) -> None:
        self._count = 0
        self._is_free = asyncio.Event()
        self._is_free.set()

    def __enter__(self) -> None:
        self._count += 1
        self._is_free.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._is_free.set()

    async def wait_free(self) -> None:
        """Wait until no block is open."""
        await self._is_free.wait()
