"""The client's HTTP channel: connections, API key, retries, deadlines.

    retries     every call is idempotent (reads, erasures, events with their idempotency key), so
                all calls may be retried
    limits      `max_attempts` per call, all within its `timeout_s`; no wait that would exceed it
    back-off    Retry-After, or else a random time whose upper bound doubles per attempt
    budget      over the client's life, one retry per five calls

aiohttp pools the connections; cancelling a call closes the connection in use.
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

MAX_ANSWER_BYTES = 67_108_864  # a longer answer is BadAnswer
BACK_OFF_S = 0.05  # upper bound of the first wait
IDLE_S = 30.0  # idle connections are closed after it, before the service closes them
# Long-term ratio of retries to calls, so that retries do not keep an overloaded service overloaded.
RETRIES_PER_CALL = 0.2
RETRIES_AT_ONCE = 10.0  # burst of retries
# Statuses after which a call is retried; 503 is also the status of Unreachable.
AGAIN = frozenset({408, 429, 502, 503})


class ApiKey:
    """The API key to send: a text, or the content of a file."""

    def __init__(self, text: str | None, file: Path | None) -> None:
        """Read the key.

        Raises:
            ConfigError: The file cannot be read, the text is not a key, or both are given.
        """
        if text is not None and file is not None:
            raise ConfigError("api_key, api_key_file: set one of them, not both")
        self._file = file
        self.text = (
            None
            if text is None and file is None
            else self._checked(self._read() if text is None else text)
        )

    def differs_from(self, rejected: str | None) -> bool:
        """Read the file again, and return whether it has another key than the rejected one."""
        try:
            self.text = self._checked(self._read())
        except ConfigError:
            return False
        return self.text != rejected

    @property
    def is_of_file(self) -> bool:
        """Whether the key comes from a file, and so may change."""
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
                f"{'api_key' if self._file is None else f'api_key_file: {self._file}'}: "
                "is not a key: one line of printable ASCII"
            )
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeCall:
    """An idempotent request, which may be sent several times."""

    method: str = "POST"
    path: str  # path and query, percent-encoded
    body: bytes | None = None  # msgpack
    accept: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    again: frozenset[int] = AGAIN  # statuses after which it is retried


class Reply(NamedTuple):
    """A successful answer."""

    status: int
    media: str
    body: bytes


class Channel:
    """The connections to one base URL. Belongs to one event loop, from `open` to `close`."""

    def __init__(
        self,
        base_url: str,
        key: ApiKey,
        tls: ClientTlsConfig,
        max_connections: int,
        max_attempts: int,
    ) -> None:
        """Check the arguments; `open` makes the connection pool.

        Args:
            base_url: URL with http or https, a host, and optionally a path, e.g. of a gateway.
            key: API key that every call sends.
            tls: Certificates for https; changed files are read again.
            max_connections: Largest number of connections; further calls wait for one.
            max_attempts: Largest number of attempts per call.

        Raises:
            ConfigError: The URL is invalid, a number is below 1, or a file cannot be used.
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
                raise ConfigError(f"{name}: {number} is below 1")
        self.url = base_url.rstrip("/")
        self._key = key
        self._max_connections = max_connections
        self._max_attempts = max_attempts
        self._tls = ClientTls(tls, "tls") if url.scheme == "https" else None
        self._retries = RETRIES_AT_ONCE  # retries left in the budget
        self._stack = AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the connection pool, and watch the TLS files; calls open the connections."""
        connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=IDLE_S)
        self._http = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=None, sock_read=None, sock_connect=None
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # the service does not compress; protects against zip bombs
                headers={"Accept-Encoding": "identity", "User-Agent": "npu_gr"},
            )
        )
        await self._stack.enter_async_context(following(self._tls))

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        self._http = None
        await self._stack.aclose()

    async def send(self, call: SafeCall, timeout_s: float) -> Reply:
        """Send a call, with retries, and return its successful answer.

        Args:
            call: The request.
            timeout_s: Time limit of all attempts together.

        Raises:
            NpuGrError: The last error that the service answered.
            Unreachable: The last attempt got no answer.
            BadAnswer: The answer is not one of an npu_gr service.
            DeadlineExceeded: The time limit passed, here or at the service.
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
                    # random, so that clients rejected together do not retry together (S311)
                    spread_s = random.uniform(0, BACK_OFF_S * 2 ** (attempt - 1))  # noqa: S311
                    wait_s = max(failure.retry_after_s or 0.0, spread_s)
                    if loop.time() + wait_s >= until_at:
                        raise failure
                    if failure.status in call.again:  # an attempt with a new key is no retry
                        self._retries -= 1
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            before = "" if failure is None else f"; the last error: {failure}"
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
            raise RuntimeError("the client is not open; use it within `async with`")
        if left_s <= 0:
            raise TimeoutError
        try:
            async with self._http.request(
                call.method,
                URL(self.url + call.path, encoded=True),
                data=call.body,
                headers={**headers, TIMEOUT_MS: f"{left_s * 1e3:.3f}"},
                allow_redirects=False,  # the key must not be sent to another host
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
                f"{self.url}{call.path}: the answer was {status}, a redirect to "
                f"{cut(answered.get('Location', ''))!r}, which the client does not follow"
            )
        raise from_answer(status, answered, body)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise BadAnswer(
                f"{response.url.path}: the answer is over the limit of {MAX_ANSWER_BYTES} bytes"
            )
    return bytes(body)


# ---- errors: the same classes as those of a service within this process

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
_FIELDS = (  # the forms in which messages of the service name a field
    re.compile(r"unknown field ([^;\s]+)"),
    re.compile(r"Object missing required field `([^`]+)`"),
    re.compile(r"([A-Za-z_](?:[\w.-]|\[[^\]]*\])*): "),
)


class _Problem(msgspec.Struct, frozen=True):
    """The used fields of problem details (RFC 9457)."""

    title: str
    detail: str
    request_id: str | None = None


def from_answer(status: int, headers: Mapping[str, str], body: bytes) -> NpuGrError:
    """Make the exception of an error response.

    Args:
        status: HTTP status, not 2xx.
        headers: Headers of the response; names in any case.
        body: Problem details, or any text of a proxy.
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
    """Return the wait in seconds of Retry-After-Ms, or of Retry-After (seconds or a date)."""
    try:
        if _MILLISECONDS.fullmatch(text := headers.get(RETRY_AFTER_MS, "")):
            return float(text) * 1e-3
        text = headers.get("Retry-After", "")
        if re.fullmatch(r"\d{1,9}", text):
            return float(text)
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0  # malformed: as if it were absent


def _field(detail: str) -> str | None:
    for pattern in _FIELDS:
        if found := pattern.match(detail):
            return found[1]
    return None
