"""The servers behind the history store on Redis: their kind, failovers, acknowledged replicas.

    redis://            a single master; a node of a cluster or a Sentinel is rejected at the start
    redis-sentinel://   the master that the Sentinels name
    redis-cluster://    each user's master; MOVED is a failover, too. While a slot is on its way
                        from one master to another, its users' commands are repeated until it is
                        there, or fail
    no answer           `ask` fails, and connects again by itself

After a failover the old address may lead to a replica, or to a server that still loads its data. It
answers so to a command that it did not do. Then the connections are closed, so that the name of
the server is looked up again, and the command is repeated, also an append. A command without an
answer is not repeated, since an append may have been done.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from npu_gr.core.errors import StoreFailed, StoreFault
from npu_gr.history_store.redis_client import Servers

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript

_OF_TIMEOUT = 0.8  # of the time limit: how long the replicas are waited for
_PAUSE_S = 0.05  # between two tries after a failover, as names change in tenths of a second
# how the text begins of an error inside of a script, before Redis 7
_IN_SCRIPTS = ("READONLY", "MASTERDOWN", "LOADING")
# what it is, and the URL to write
_KINDS = {
    "cluster": "a node of a Redis Cluster: write redis-cluster://HOST,HOST",
    "sentinel": "a Redis Sentinel: write redis-sentinel://HOST,HOST/0#MASTER",
}


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
    """Sends commands to the server of a key, and follows failovers. Event loop only."""

    def __init__(self, servers: Servers, timeout_s: float, wait_replicas: int = 0) -> None:
        """Connect with the first command.

        Args:
            servers: Clients that repeat no command.
            timeout_s: Seconds for which a command is repeated after a failover.
            wait_replicas: Number of replicas that must have a write before it is acknowledged.
        """
        self._servers = servers
        self._timeout_s = timeout_s
        self._wait_replicas = wait_replicas
        self._is_checked = servers.is_cluster

    async def ask(self, key: str, command: Callable[[Redis], Awaitable[Any]]) -> Any:
        """Send a command, and return its answer.

        Args:
            key: A key of the command.
            command: Function that makes the command; it is called again for each try.

        Raises:
            StoreFailed: no answer, or an error, as far as possible in words without the address.
        """
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            try:
                if not self._is_checked:
                    await self.check()
                return await _answered(command(await self._servers.client_of(key)))
            except (_NotDone, NotServed):
                self._is_checked = self._servers.is_cluster
                await self._servers.look_again()
                if time.monotonic() + _PAUSE_S > give_up_at:
                    raise
            except StoreFailed:
                self._servers.suspect()
                raise
            await asyncio.sleep(_PAUSE_S)

    async def write(self, script: AsyncScript, keys: list[str], arguments: list[Any]) -> Any:
        """Run a script that writes, and return its answer.

        Args:
            script: The script.
            keys: Its keys, all of one user.
            arguments: Its arguments.

        Raises:
            StoreFailed: as `ask`; or fewer replicas than configured have acknowledged the write,
                which is done on the master: the caller's repeat finds its idempotency key.
        """
        if not self._wait_replicas:
            return await self.ask(keys[0], lambda client: script(keys, arguments, client))
        answer, acknowledged = await self.ask(
            keys[0], lambda client: self._write_and_wait(client, script, keys, arguments)
        )
        if int(acknowledged) < self._wait_replicas:
            raise StoreFailed(
                f"{acknowledged} of {self._wait_replicas} replicas have the events "
                "(history_store.wait_replicas)"
            )
        return answer

    async def _write_and_wait(
        self, client: Redis, script: AsyncScript, keys: list[str], arguments: list[Any]
    ) -> list[Any]:
        # over one connection, since WAIT is about the server that has the write
        pipe = client.pipeline(transaction=False)
        pipe.execute_command("EVAL", script.script, len(keys), *keys, *arguments)
        pipe.wait(self._wait_replicas, max(1, round(self._timeout_s * 1e3 * _OF_TIMEOUT)))
        # the pipeline's own exception would contain the events
        answers = await pipe.execute(raise_on_error=False)
        for one in answers:
            if isinstance(one, Exception):
                raise one
        return list(answers)

    async def check(self) -> None:
        """Check that the server answers, and that a single one is a single one.

        Raises:
            NotServed: it is a node of a cluster, or a Sentinel.
            StoreFailed: it does not answer.
        """
        from redis.exceptions import NoPermissionError

        if self._servers.is_cluster:
            await self._servers.look_again()
            return
        try:
            about = await _answered(self._servers.any_client.info("server"))
        except StoreFailed as error:
            if not isinstance(error.__cause__, NoPermissionError):
                raise
            about = {}  # its access rules forbid the question
        mode = about.get("redis_mode", about.get("server_mode"))
        if (kind := _KINDS.get(str(mode))) is not None:
            raise NotServed(f"it is {kind}, or name a single master")
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
    from redis.asyncio.sentinel import MasterNotFoundError
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
        SlotNotCoveredError,
        TryAgainError,
    )

    elsewhere = (
        AskError,  # MOVED too
        BusyLoadingError,
        ClusterDownError,
        MasterDownError,
        MasterNotFoundError,
        ReadOnlyError,
        SlotNotCoveredError,
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
        # a client of Sentinels raises ReadOnlyError as the context of another one
        if any(isinstance(one, elsewhere) for one in _causes(error)) or (
            is_answer and any(f"-{word} " in str(error) for word in _IN_SCRIPTS)
        ):
            raise _NotDone(f"the history store is not ready: {text}") from error
        full = isinstance(error, OutOfMemoryError) or "OOM" in str(error) or "MISCONF" in str(error)
        fault = StoreFault.DISK_FULL if full else StoreFault.UNAVAILABLE
        raise StoreFailed(f"the history store does not answer: {text}", fault) from error
