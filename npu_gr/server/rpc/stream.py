"""A stream of messages, each of which has an answer: several are under way at once, answered in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

MOST = 32  # messages of a stream under way: the caller waits for the oldest before another one is read


async def answered(context: Any, answer: Callable[[Any, bytes], Awaitable[bytes]]) -> None:
    """Read messages until the caller has sent the last one, and write their answers.

    Args:
        context: gRPC's.
        answer: makes the answer of a message; it raises nothing but a cancellation.
    """
    under_way: deque[asyncio.Task[bytes]] = deque()
    reading: asyncio.Task[Any] | None = None
    is_over = False
    try:
        while under_way or not is_over:
            if reading is None and not is_over and len(under_way) < MOST:
                reading = asyncio.ensure_future(context.read())
            waited = [one for one in (reading, under_way[0] if under_way else None) if one is not None]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done():
                body = reading.result()
                reading = None
                if isinstance(body, bytes):
                    under_way.append(asyncio.ensure_future(answer(context, body)))
                else:  # `grpc.aio.EOF`
                    is_over = True
            while under_way and under_way[0].done():
                await context.write(under_way.popleft().result())
    finally:
        left = [*under_way, *([] if reading is None else [reading])]
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
