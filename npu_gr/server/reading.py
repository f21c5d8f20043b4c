"""How a handler reads its body: with a bound on what that may cost, and in turn with others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from npu_gr.core.errors import DeadlineExceeded
from npu_gr.server.admission.middleware import BODY
from npu_gr.server.codec import bulk
from npu_gr.server.codec.media import decode, skim
from npu_gr.server.config import ServerConfig

B = TypeVar("B")
T = TypeVar("T")


class Reader:
    """Reads the bodies of one instance. Event loop only."""

    def __init__(self, config: ServerConfig) -> None:
        """Nothing is read yet.

        Args:
            config: bounds the columns.
        """
        self._config = config
        self.pieces = Pieces()

    async def in_turn(self, parse: Callable[[], T], until_at: float = float("inf")) -> T:
        """Read what `parse` decodes by itself, in one piece, and bounds before it makes an object of anything.

        Args:
            parse: what to do.
            until_at: as for `read`.

        Raises:
            DeadlineExceeded: others' bodies took the time. What `parse` raises.
        """
        await self.pieces.turn(until_at)
        with self.pieces:
            return parse()

    async def read(
        self,
        request: web.Request,
        cls: type[B],
        parse: Callable[[B], T],
        *,
        loose_bytes: int = bulk.LOOSE_BYTES,
        until_at: float = float("inf"),
    ) -> T:
        """Decode and parse a body.

        Args:
            request: whose body has come.
            cls: the Struct to read.
            parse: what to make of it; as cheap as decoding. Of a long body it is a piece of its own.
            loose_bytes: of the body beside its columns.
            until_at: instant of `time.monotonic` at which the caller gives up.

        Raises:
            UnsupportedMedia, BadRequest, Unprocessable, TooLarge: as `decode`, `bulk.check` and `parse` do.
            DeadlineExceeded: others' bodies took the time.
        """
        body = request[BODY]
        media = request.content_type
        if len(body) <= loose_bytes:
            await self.pieces.turn(until_at)
            with self.pieces:
                return parse(decode(body, media, cls))
        await self.in_turn(
            lambda: bulk.check(skim(body, media, cls), len(body), cls, self._config, loose_bytes), until_at
        )
        decoded = await self.in_turn(lambda: decode(body, media, cls), until_at)
        return await self.in_turn(lambda: parse(decoded), until_at)


SHARE = 0.5  # of the loop's time
BURST_S = 0.01


class Pieces:
    """`await pieces.turn(...)`, then `with pieces:` around the piece, without waiting for anything in between."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Nothing was done yet.

        Args:
            clock: seconds that never go back.
            worked: seconds that this thread has worked; a core that others use is not the caller's doing.
            sleep: by that clock.
        """
        self._clock = clock
        self._worked = worked
        self._sleep = sleep
        self._lock = asyncio.Lock()  # first come, first served
        self._paid_at = float("-inf")  # when what the pieces took is made up for
        self._began_s = 0.0

    async def turn(self, until_at: float = float("inf")) -> None:
        """Wait for the turn; cancelled waiters leave nothing behind.

        Args:
            until_at: instant of the clock.

        Raises:
            DeadlineExceeded: the turn did not come until then.
        """
        if not self._lock.locked() and self._wait_s() <= 0:
            return
        left_s = until_at - self._clock()
        try:
            async with asyncio.timeout(left_s if left_s < float("inf") else None), self._lock:
                while (wait_s := self._wait_s()) > 0:
                    await self._sleep(wait_s)
        except TimeoutError:
            raise DeadlineExceeded("the time budget ran out while longer bodies were read") from None

    def _wait_s(self) -> float:
        return self._paid_at - BURST_S - self._clock()

    def __enter__(self) -> None:
        self._began_s = self._worked()

    def __exit__(self, *_: object) -> None:
        took_s = self._worked() - self._began_s
        self._paid_at = max(self._paid_at, self._clock() - took_s) + took_s / SHARE
