"""The straight way of a request that the door let in: aiohttp's parser and request, its kind's handler, one write.

    bytes --parse--> web.Request --handler--> web.Response --written--> bytes

aiohttp's serving loop, router and writer are left out: they took an eighth of the event loop's time of a cached rank.
Parser, request and response are aiohttp's own, so a handler cannot tell which way its request came.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE, HttpProcessingError, HttpVersion10
from aiohttp.http_writer import _serialize_headers

from npu_gr.core.errors import BadRequest

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
_NO_CONTENT = 204


def parse(
    connection: web.RequestHandler, parser: Any, make: Callable[..., Any], sent: bytes, head_bytes: int
) -> web.Request:
    """Parse one whole request.

    Args:
        connection: that it came through.
        parser: aiohttp's, of that connection.
        make: aiohttp's factory of requests.
        sent: its bytes, as they were framed.
        head_bytes: of them; the body is what follows, as it is.

    Raises:
        BadRequest: it is no HTTP/1.1, or these bytes are not one request to aiohttp.
    """
    try:
        messages, is_upgraded, _ = parser.feed_data(sent)
    except HttpProcessingError as error:
        raise BadRequest(error.message.partition(":")[0]) from error
    if len(messages) != 1 or is_upgraded:
        raise BadRequest("the request cannot be framed")
    parser.message_consumed()
    message, payload = messages[0]
    request: web.Request = make(
        message, payload, connection, None, None
    )  # no writer, no task: the answer is written here
    if connection._reading_paused:
        payload.read_nowait()  # the parser of a long body waits with its end until somebody reads
    if not payload.is_eof():
        raise BadRequest("the request cannot be framed")
    request._read_bytes = sent[head_bytes:]
    return request


def written(request: web.Request, response: web.StreamResponse) -> bytes:
    """Make the bytes of an answer, whose body is bytes; see `closes` for what it says of the connection."""
    assert isinstance(response, web.Response)
    body = response.body or b""
    assert isinstance(body, bytes)
    version = request.version
    headers = response.headers
    if response.status != _NO_CONTENT:
        headers["Content-Length"] = str(len(body))
    headers["Date"] = rfc822_formatted_time()
    headers["Server"] = SERVER_SOFTWARE
    if closes(request, response):
        if version != HttpVersion10:
            headers["Connection"] = "close"
    elif version == HttpVersion10:
        headers["Connection"] = "keep-alive"
    line = f"HTTP/{version.major}.{version.minor} {response.status} {response.reason}"
    return _serialize_headers(line, headers) + body


def closes(request: web.Request, response: web.StreamResponse) -> bool:
    """Whether the connection ends with the answer: its caller wants that, or the handler does."""
    return not request.keep_alive or response.keep_alive is False
