"""Calls of one service over HTTP: connections, the API key, attempts and their deadline.

    again       what is safe to send twice, and every call of ours is: reads; erasures; events, by their idempotency key
    in all      at most `max_attempts`, and within the call's own `timeout_s`; nothing is begun that could not end in it
    back-off    what Retry-After says, or else a random time that doubles; over the client, one retry in five calls

aiohttp does the rest: pooled connections that are kept open, and cancellation that closes the one
in use.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
from yarl import URL

from npu_gr.core.calling import calling_headers
from npu_gr.core.errors import (
    BadAnswer,
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    NotFound,
    NpuGrError,
    Overloaded,
    RequestError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownPrefix,
    Unprocessable,
    Unreachable,
    UnsupportedMedia,
)
from npu_gr.core.text_format import cut
from npu_gr.core.tls import ClientTls, ClientTlsConfig, following
from npu_gr.server.http import REQUEST_ID, RETRY_AFTER_MS, TIMEOUT_MS
from npu_gr.server.schemas.media import JSON

MAX_ANSWER_BYTES = 67_108_864  # longer ones are no service's of ours
BACK_OFF_S = 0.05  # the first wait is at most this long
IDLE_S = 30.0  # connections are closed after it; a service waits longer
RETRIES_PER_CALL = 0.2  # in the long run, so that callers do not keep down what is overloaded
RETRIES_AT_ONCE = 10.0
# statuses after which the same call may be answered; 503: Unreachable, too
AGAIN = frozenset({408, 429, 502, 503})


class ApiKey:
    """The key that calls show: a text, or the content of a file."""

    def __init__(self, text: str | None, file: Path | None) -> None:
        """Read the key.

        Raises:
            ConfigError: the file cannot be read, or what is given is no key, or both are given.
        """
        if text is not None and file is not None:
            raise ConfigError("api_key, api_key_file: give one of them")
        self._file = file
        self.text = (
            None
            if text is None and file is None
            else self._checked(self._read() if text is None else text)
        )

    def differs_from(self, rejected: str | None) -> bool:
        """Read the file again.

        Returns whether it has another key than the rejected one; an unreadable file has none.
        """
        try:
            self.text = self._checked(self._read())
        except ConfigError:
            return False
        return self.text != rejected

    @property
    def is_of_file(self) -> bool:
        """Whether it may change."""
        return self._file is not None

    def _read(self) -> str:
        assert self._file is not None
        try:
            return self._file.read_text(errors="replace").strip()
        except OSError as error:
            raise ConfigError(f"api_key_file: {self._file}: {error.strerror}") from error

    def _checked(self, text: str) -> str:
        if not (text and text.isascii() and text.isprintable()):
            raise ConfigError(
                f"{'api_key' if self._file is None else f'api_key_file: {self._file}'}: holds "
                "no key"
            )
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeCall:
    """One request, which is sent once or more often."""

    method: str = "POST"
    path: str  # with its query, encoded
    body: bytes | None = None  # msgpack
    accept: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    again: frozenset[int] = AGAIN  # statuses after which it is sent again


class Reply(NamedTuple):
    """A good answer."""

    status: int
    media: str
    body: bytes


class Channel:
    """The connections to one address. Belongs to one event loop, from `open` to `close`."""

    def __init__(
        self,
        base_url: str,
        key: ApiKey,
        tls: ClientTlsConfig,
        max_connections: int,
        max_attempts: int,
    ) -> None:
        """Connect to nobody yet.

        Args:
            base_url: http or https, a host, and perhaps a path that a gateway wants.
            key: shown by every call.
            tls: for https; its files are followed.
            max_connections: at once; calls over it wait within their deadline.
            max_attempts: of a call.

        Raises:
            ConfigError: the address is none, a number is below 1, or a file cannot be used.
        """
        try:
            url = URL(base_url)
        except ValueError as error:
            raise ConfigError(f"base_url: {error}") from error
        if (
            url.scheme not in ("http", "https")
            or not url.host
            or url.query_string
            or url.user is not None
        ):
            raise ConfigError(
                "base_url: expected http://host:port or https://host, without a user or a query"
            )
        for name, number in (("max_connections", max_connections), ("max_attempts", max_attempts)):
            if number < 1:
                raise ConfigError(f"{name}: {number}: at least 1")
        self.url = base_url.rstrip("/")
        self._key = key
        self._max_connections = max_connections
        self._max_attempts = max_attempts
        self._tls = ClientTls(tls, "tls") if url.scheme == "https" else None
        self._retries = RETRIES_AT_ONCE  # left
        self._stack = AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Begin to follow the files of TLS; connections are made by calls."""
        connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=IDLE_S)
        self._http = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=None, sock_read=None, sock_connect=None
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # nothing of ours is compressed, and a bomb stays small
                headers={"Accept-Encoding": "identity", "User-Agent": "npu_gr"},
            )
        )
        await self._stack.enter_async_context(following(self._tls))

    async def close(self) -> None:
        """Close every connection. Calls in flight fail."""
        self._http = None
        await self._stack.aclose()

    async def send(self, call: SafeCall, timeout_s: float) -> Reply:
        """Send a call until it is answered, or not again.

        Args:
            call: safe to send twice.
            timeout_s: for all of it.

        Raises:
            NpuGrError: what the service answered last. Unreachable: nobody answered. BadAnswer:
                somebody else did.
            DeadlineExceeded: the time is over, here or at the service.
        """
        loop = asyncio.get_running_loop()
        until_at = loop.time() + timeout_s
        headers = {REQUEST_ID: uuid.uuid4().hex, "Accept": call.accept, **call.headers}
        self._retries = min(RETRIES_AT_ONCE, self._retries + RETRIES_PER_CALL)
        failure: NpuGrError | None = None
        attempt = 0
        try:
            async with asyncio.timeout_at(until_at):
                while True:
                    attempt += 1
                    key = self._key.text
                    try:
                        return await self._attempt(
                            call, {**headers, **calling_headers(key)}, until_at - loop.time()
                        )
                    except NpuGrError as error:
                        failure = error
                    if not await self._is_worth_another(call, failure, attempt, key):
                        raise failure
                    # S311: spread, so that callers who were rejected together do not come back
                    # together
                    spread_s = random.uniform(0, BACK_OFF_S * 2 ** (attempt - 1))  # noqa: S311
                    wait_s = max(failure.retry_after_s or 0.0, spread_s)
                    if loop.time() + wait_s >= until_at:
                        raise failure
                    if failure.status in call.again:  # a key that was read anew is no retry
                        self._retries -= 1
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            before = "" if failure is None else f"; before that: {failure}"
            raise DeadlineExceeded(
                f"{self.url}{call.path}: no answer within {timeout_s:g} s{before}"
            ) from failure

    async def _is_worth_another(
        self, call: SafeCall, failure: NpuGrError, attempt: int, key: str | None
    ) -> bool:
        if isinstance(failure, Unauthorized):
            return self._key.is_of_file and await asyncio.to_thread(self._key.differs_from, key)
        return failure.status in call.again and attempt < self._max_attempts and self._retries >= 1

    async def _attempt(self, call: SafeCall, headers: dict[str, str], left_s: float) -> Reply:
        if self._http is None:
            raise RuntimeError("the client is not open: use it within `async with`")
        if left_s <= 0:
            raise TimeoutError
        try:
            async with self._http.request(
                call.method,
                URL(self.url + call.path, encoded=True),
                data=call.body,
                headers={**headers, TIMEOUT_MS: f"{left_s * 1e3:.3f}"},
                allow_redirects=False,  # a key is for this address
                ssl=True if self._tls is None else self._tls.context,
                server_hostname=None if self._tls is None else self._tls.server_name,
            ) as response:
                body = await _read(response)
                status, media = response.status, response.content_type
                answered = response.headers
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Unreachable(f"{self.url}: {str(error) or type(error).__name__}") from error
        except aiohttp.ClientError as error:
            raise BadAnswer(
                f"{self.url}{call.path}: {str(error) or type(error).__name__}"
            ) from error
        if 200 <= status < 300:
            return Reply(status, media, body)
        if status < 400:
            raise BadAnswer(
                f"{self.url}{call.path}: the answer was {status}, to "
                f"{cut(answered.get('Location', ''))!r}"
            )
        raise from_answer(status, answered, body)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise BadAnswer(f"{response.url.path}: over {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


# ---- what went wrong, as one tree of errors for a service in this process and one far away

_BY_STATUS: dict[int, type[NpuGrError]] = {
    one.status: one
    for one in (
        BadRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        UnknownPrefix,
        TooLarge,
        UnsupportedMedia,
        Unprocessable,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
    )
}
_MILLISECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?")
_FIELDS = (  # as our messages name one
    re.compile(r"unknown field ([^;\s]+)"),
    re.compile(r"Object missing required field `([^`]+)`"),
    re.compile(r"([A-Za-z_](?:[\w.-]|\[[^\]]*\])*): "),
)


class _Problem(msgspec.Struct, frozen=True):
    """The parts of RFC 9457 problem details that we read."""

    title: str
    detail: str
    request_id: str | None = None


def from_answer(status: int, headers: Mapping[str, str], body: bytes) -> NpuGrError:
    """Make the error that an answer tells of.

    Args:
        status: of HTTP, not 2xx.
        headers: by any spelling of their names.
        body: problem details, or whatever a proxy writes.
    """
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = cut(" ".join(body.decode(errors="replace").split()), 200)
        problem = _Problem(title="", detail=f"the answer was {status}: {text}")
    cls = _BY_STATUS.get(status)
    if cls is None:
        cls = RequestError if status < 500 else Unavailable if status == 502 else NpuGrError
    error = cls(problem.detail)
    error.retry_after_s = _retry_after_s(headers)
    error.status = status
    error.title = problem.title or cls.title
    error.field = _field(problem.detail)
    error.request_id = problem.request_id
    return error


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return how long the service asks to wait: milliseconds where it says them, or seconds, or until a date."""
    try:
        if _MILLISECONDS.fullmatch(text := headers.get(RETRY_AFTER_MS, "")):
            return float(text) * 1e-3
        text = headers.get("Retry-After", "")
        if re.fullmatch(r"\d{1,9}", text):
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0  # unreadable, as if it were not there


def _field(detail: str) -> str | None:
    for pattern in _FIELDS:
        if found := pattern.match(detail):
            return found[1]
    return None
