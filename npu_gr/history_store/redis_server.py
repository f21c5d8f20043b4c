"""The server behind the history store on Redis: TLS, its kind, failovers.

    single master    served
    cluster          rejected at the start, because a node has only a part of the users
    Sentinel         rejected at the start: it has no data
    no answer        `ask` fails, and connects again by itself

After a failover the old address may lead to a replica, or to a server that still loads its data. It
answers so to a command that it did not do. Then the connections are closed, so that the name of
the server is looked up again, and the command is repeated, also an append. A command without an
answer is not repeated, since an append may have been done.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from npu_gr.core.errors import StoreFailed, StoreFault
from npu_gr.core.tls import TlsFiles

if TYPE_CHECKING:
    from redis.asyncio import Redis

_SCHEME = "rediss"
_PAUSE_S = 0.05  # between two tries after a failover, as names change in tenths of a second
# how the text begins of an error inside of a script, before Redis 7
_IN_SCRIPTS = ("READONLY", "MASTERDOWN", "LOADING")
_KINDS = {"cluster": "a node of a Redis Cluster", "sentinel": "a Redis Sentinel"}


def tls_options(url: str, tls: TlsFiles | None) -> dict[str, Any]:
    """Return the TLS options of redis-py for a URL; none if it is not `rediss://`.

    The server's certificate and its name are always checked.

    Args:
        url: URL of the server.
        tls: Certificate files; None = the system's authorities, and no client certificate.
    """
    if urlsplit(url).scheme != _SCHEME:
        return {}
    tls = tls or TlsFiles()
    return {
        "ssl_ca_certs": tls.ca,
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }


def is_in_clear(url: str) -> bool:
    """Return whether histories cross a network unencrypted: not over TLS, and not to localhost."""
    parts = urlsplit(url)
    if parts.scheme != "redis":
        return False
    host = parts.hostname or "localhost"
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def tls_trouble(error: BaseException) -> str:
    """Return the TLS reason of a connection error, "" if there is none, without any address."""
    for one in _causes(error):
        if isinstance(one, ssl.SSLError):
            return f" ({one.reason or type(one).__name__})"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, as redis-py wraps those of a connection."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class NotServed(StoreFailed):
    """The server is of a kind that is not served."""


class _NotDone(StoreFailed):
    """The server answered that it did not do the command, because it is not the master now."""


class RedisServer:
    """Sends commands to a server, and follows its name after a failover. Event loop only."""

    def __init__(self, client: Redis, timeout_s: float) -> None:
        """Connect with the first command.

        Args:
            client: Client that repeats no command.
            timeout_s: Seconds for which a command is repeated after a failover.
        """
        self._client = client
        self._timeout_s = timeout_s
        self._is_checked = False

    async def ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Send a command, and return its answer.

        Args:
            command: Function that makes the command; it is called again for each try.

        Raises:
            StoreFailed: no answer, or an error, as far as possible in words without the address.
        """
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            try:
                if not self._is_checked:
                    await self.check()
                return await _answered(command())
            except (_NotDone, NotServed):
                self._is_checked = False
                await self._client.connection_pool.disconnect(inuse_connections=False)
                if time.monotonic() + _PAUSE_S > give_up_at:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def check(self) -> None:
        """Check that the server is a single one.

        Raises:
            NotServed: it is a node of a cluster, or a Sentinel.
            StoreFailed: it does not answer.
        """
        from redis.exceptions import NoPermissionError

        try:
            about = await _answered(self._client.info("server"))
        except StoreFailed as error:
            if not isinstance(error.__cause__, NoPermissionError):
                raise
            about = {}  # its access rules forbid the question
        mode = about.get("redis_mode", about.get("server_mode"))
        if (kind := _KINDS.get(str(mode))) is not None:
            raise NotServed(
                f"it is {kind}, which is not served: name a single master, or a proxy in front of "
                "it that follows failovers"
            )
        self._is_checked = True


def is_away(error: StoreFailed) -> bool:
    """Return whether a server does not answer, but may later, with the same configuration."""
    from redis import exceptions

    wrong = exceptions.AuthenticationError, exceptions.AuthorizationError, ssl.SSLError
    away = exceptions.ConnectionError, exceptions.TimeoutError, OSError
    causes = list(_causes(error.__cause__))
    return (
        not isinstance(error, NotServed)
        and not any(isinstance(one, wrong) for one in causes)
        and any(isinstance(one, away) for one in causes)
    )


async def _answered(answer: Awaitable[Any]) -> Any:
    """Await an answer of Redis, and convert its errors to StoreFailed."""
    from redis.exceptions import (
        AskError,
        AuthenticationError,
        BusyLoadingError,
        ClusterDownError,
        MasterDownError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisError,
        ResponseError,
        TryAgainError,
    )

    elsewhere = (
        AskError,  # MOVED too
        BusyLoadingError,
        ClusterDownError,
        MasterDownError,
        ReadOnlyError,
        TryAgainError,
    )
    try:
        return await answer
    except (RedisError, OSError) as error:
        name = type(error).__name__
        # Show only the server's own answer: other texts may contain the address and its password.
        is_answer = isinstance(error, ResponseError | BusyLoadingError)
        text = f"{name}: {error}" if is_answer else name + tls_trouble(error)
        if any(isinstance(one, AuthenticationError) for one in _causes(error)):
            text = "AuthenticationError"
        if isinstance(error, elsewhere) or (
            is_answer and any(f"-{word} " in str(error) for word in _IN_SCRIPTS)
        ):
            raise _NotDone(f"the history store is not ready: {text}") from error
        full = isinstance(error, OutOfMemoryError) or "OOM" in str(error) or "MISCONF" in str(error)
        fault = StoreFault.DISK_FULL if full else StoreFault.UNAVAILABLE
        raise StoreFailed(f"the history store does not answer: {text}", fault) from error
