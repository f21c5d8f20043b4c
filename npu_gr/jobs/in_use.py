"""Who uses a version of a model: it goes when nobody does."""

from __future__ import annotations

import asyncio


class Use:
    """A block `with use:` is one use. Event loop only."""

    def __init__(self) -> None:
        self._count = 0
        self._is_over = asyncio.Event()
        self._is_over.set()

    def __enter__(self) -> None:
        self._count += 1
        self._is_over.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._is_over.set()

    async def over(self) -> None:
        """Wait until nobody is in a block."""
        await self._is_over.wait()
