"""The half of a connection that answers: it hands whole requests to a handler, and writes what that says."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Any

from aiohttp import web

from npu_gr.core.errors import BadRequest
from npu_gr.server.entrance import answers, straight
from npu_gr.server.entrance.entrance import Entrance
from npu_gr.server.entrance.framing import Head
from npu_gr.server.entrance.listener import State
from npu_gr.server.problem import problem


class Answering(web.RequestHandler):
    """One request at a time, either the straight way or through aiohttp's own loop."""

    __slots__ = ("_answering_since_at", "_entrance", "_serving", "served", "state")

    def __init__(self, manager: web.Server, entrance: Entrance, **kwargs: Any) -> None:
        """Nothing is answered yet.

        Args:
            manager: of aiohttp.
            entrance: what all connections share.
            kwargs: of aiohttp's handler.
        """
        super().__init__(manager, **kwargs)
        self._entrance = entrance
        self.state = State.IDLE
        self.served = 0  # requests that were answered
        self._serving: asyncio.Task[None] | None = None  # of the straight way
        self._answering_since_at: float | None = None

    def end(self, answer: bytes) -> None:
        """Write an answer and close."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """Begin with the next request: the answer was written, or there is none."""
        raise NotImplementedError

    def _serve(self, request: bytes | bytearray, head: Head) -> None:
        """Start the handler of a whole request that needs a place, the straight way if it has one."""
        answer = None if head.is_chunked else self._entrance.straight.get((head.method, head.path))
        if answer is None:
            self._feed(request)
            return
        self.state = State.SERVED
        assert self._request_factory is not None
        try:
            parsed = straight.parse(self, self._parser, self._request_factory, bytes(request), head.num_bytes)
        except BadRequest as error:
            self._entrance.broken(error.status)
            self.end(answers.bad_request(str(error)))
            return
        self._serving = self._loop.create_task(self._answer(answer, parsed))

    def _feed(self, request: bytes | bytearray) -> None:
        """Hand a whole request to aiohttp's loop."""
        self.state = State.SERVED
        before = self._request_count
        super().data_received(bytes(request) if isinstance(request, bytearray) else request)
        if self._request_count != before + 1 and not self._force_close:
            # the two saw different requests in these bytes
            self._entrance.broken(400)
            self.end(answers.bad_request("the request cannot be framed"))

    async def _answer(self, answer: straight.Answer, request: web.Request) -> None:
        """Let a handler answer, and write what it says; whoever hung up cancels this."""
        try:
            response = await answer(request)
            self._answering_since_at = time.monotonic()
            if self.transport is not None:
                self.transport.write(straight.written(request, response))
                if self.writing_paused:
                    await self._drain_helper()
            if straight.closes(request, response):
                self.force_close()
        except ConnectionError:
            pass  # it was lost while its caller read
        except BaseException:  # cancelled, or what no handler may do: the caller must not wait for ever
            self.force_close()
            raise
        finally:
            self._serving = None
            self._answered()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer; then the slot is free, and the next request's turn comes."""
        self._answering_since_at = time.monotonic()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answered()

    def _answered(self) -> None:
        self._answering_since_at = None
        self.served += 1
        if self.state is State.SERVED:
            self._go_on()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp's parser refuses in our words; a caller's nonsense is no stack trace in the log."""
        if status != HTTPStatus.BAD_REQUEST:
            return super().handle_error(request, status, exc, message)
        self._entrance.broken(status)
        detail = "the request cannot be parsed" if message is None else message.partition(":")[0]
        answer = problem(status, BadRequest.title, detail, "")
        answer.headers["Connection"] = "close"
        answer.force_close()
        return answer
