"""The history store on Redis or Valkey, for fleets: one string of packed events and one index a user.

An append is one script, and so is a read: an append is atomic, and a read sees one state. Durability is the server's
own (`appendonly yes`); an append is acknowledged when the server has answered it. No command is sent twice, because an
append that was not answered in time may have happened.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.core.request import Events, UserKey
from npu_gr.features.base import EVENT, HistoryConfig, StoredHistory, key_bytes, pack, unpack

if TYPE_CHECKING:
    from redis.asyncio import Redis

_MAX_CONNECTIONS = 64  # of one instance; further callers wait for a free one

_APPEND = """
local size, limit = redis.call('APPEND', KEYS[1], ARGV[1]), tonumber(ARGV[2])
if size >= 2 * limit then  -- rewritten once in `limit` bytes: amortised, an append costs what it appends
  redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], size - limit, -1))
  redis.call('INCRBY', KEYS[2], (size - limit) / ARGV[3])
  size = limit
end
return math.min(size, limit) / ARGV[3]
"""
_READ = """
local size, want = redis.call('STRLEN', KEYS[1]), tonumber(ARGV[1])
local from = math.max(0, size - want)
return {tonumber(redis.call('GET', KEYS[2]) or 0) + from / ARGV[2], redis.call('GETRANGE', KEYS[1], from, -1)}
"""


class RedisStore:
    """A `HistoryStore` on a server that many instances share."""

    def __init__(self, client: Redis, max_events: int) -> None:
        self._client = client
        self._max_events = max_events
        self._append = client.register_script(_APPEND)
        self._read = client.register_script(_READ)

    @classmethod
    async def connect(cls, config: HistoryConfig) -> RedisStore:
        """Connect and ping.

        Raises:
            ConfigError: the package is missing, or nobody answers at `features.url`.
        """
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as error:
            raise ConfigError("features.kind: redis needs pip install 'npu_gr[redis]'") from error
        try:
            pool = BlockingConnectionPool.from_url(
                config.url,
                max_connections=_MAX_CONNECTIONS,
                timeout=config.timeout_s,
                socket_timeout=config.timeout_s,
                socket_connect_timeout=config.timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(f"features.url: {error}") from error
        store = cls(Redis.from_pool(pool), config.max_events_per_user)
        try:
            await store._run(store._client.ping())
        except Unavailable as error:
            await store.close()
            raise ConfigError(f"features.url: no answer from Redis: {error.__cause__}") from error
        return store

    async def append(self, user: UserKey, events: Events) -> int:
        limit = self._max_events * EVENT.itemsize
        return int(await self._run(self._append(_keys(user), [pack(events), limit, EVENT.itemsize])))

    async def append_many(self, batch: list[tuple[UserKey, Events]]) -> None:
        limit = self._max_events * EVENT.itemsize
        async with self._client.pipeline(transaction=False) as pipe:
            for user, events in batch:
                await self._append(_keys(user), [pack(events), limit, EVENT.itemsize], client=pipe)
            await self._run(pipe.execute())

    async def read(self, user: UserKey, last: int) -> StoredHistory:
        want = min(last, self._max_events) * EVENT.itemsize
        first, data = await self._run(self._read(_keys(user), [want, EVENT.itemsize]))
        return StoredHistory(unpack(data), int(first))

    async def erase(self, user: UserKey) -> None:
        await self._run(self._client.delete(*_keys(user)))

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, answer: Awaitable[Any]) -> Any:
        from redis.exceptions import RedisError

        try:
            return await answer
        except (RedisError, OSError) as error:
            raise Unavailable(f"the history store does not answer: {type(error).__name__}") from error


def _keys(user: UserKey) -> list[str]:
    name = base64.urlsafe_b64encode(key_bytes(user)).decode()
    return [f"npu_gr:{{{name}}}:events", f"npu_gr:{{{name}}}:first"]  # one hash slot for both
