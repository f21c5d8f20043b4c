"""How a handler reads its body: with a bound on what that may cost, and in turn with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from npu_gr.server.admission.middleware import BODY
from npu_gr.server.codec import bulk
from npu_gr.server.codec.media import decode, skim
from npu_gr.server.config import ServerConfig
from npu_gr.server.pieces import Pieces

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

    async def read_whole(self, request: web.Request, parse: Callable[[bytes], T], until_at: float = float("inf")) -> T:
        """Read a body that `parse` decodes by itself, in one piece, and bounds before it makes an object of anything.

        Args:
            request: whose body has come.
            parse: what to make of it.
            until_at: as for `read`.

        Raises:
            DeadlineExceeded: others' bodies took the time. What `parse` raises.
        """
        body = request[BODY]
        await self.pieces.turn(until_at)
        with self.pieces:
            return parse(body)

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
        await self.pieces.turn(until_at)
        with self.pieces:
            bulk.check(skim(body, media, cls), len(body), cls, self._config, loose_bytes)
        await self.pieces.turn(until_at)
        with self.pieces:
            decoded = decode(body, media, cls)
        await self.pieces.turn(until_at)
        with self.pieces:
            return parse(decoded)
