"""The history store on Redis (6.2 or newer) or Valkey, for fleets: one master, or a cluster.

    npu_gr:{user}:log       CHECKED records, the newest last
    npu_gr:{user}:first     number of older events, which were deleted
    npu_gr:{user}:features  stream of the events' features (see `redis_records.py`); missing if no
                            event ever had any
    npu_gr:{user}:keys      idempotency key -> digest of its events, its answer, and a checksum
    npu_gr:{user}:order     idempotency keys by time
    npu_gr:actions          names of actions by number: a list that only grows at its end
    npu_gr:{user}:events    records without checksums, of an older version: moved to `log` by the
                            first read or append

An append is one script, and so is a read: an append is atomic, and a read sees one state. A merge,
and an append of events that are older than the last one, read all and write only if no other client
has written in between. The events of a user are in time order. Durability is the server's own
(`appendonly yes`); an append is acknowledged when the server has answered, and with
`wait_replicas` when as many replicas have it. `redis_server.py` says which servers are served, and
what is repeated after a failover.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from npu_gr.core.errors import ConfigError, StoreFailed, Unprocessable
from npu_gr.core.history import (
    Events,
    Mode,
    StoreHealth,
    UserKey,
    Write,
    Written,
    count_late,
    in_time_order,
)
from npu_gr.core.secret import SecretUrl
from npu_gr.core.tls import TlsFiles
from npu_gr.history_store import redis_records as scripts
from npu_gr.history_store.checksum import (
    CHECKED,
    Found,
    count_bad,
    damaged,
    pack_checked,
    unpack_checked,
)
from npu_gr.history_store.event_features import check_size
from npu_gr.history_store.redis_client import Servers, is_in_clear, make_servers
from npu_gr.history_store.redis_records import (
    FEATURES,
    RunGroup,
    count_bad_rows,
    pack_entries,
    unpack_groups,
)
from npu_gr.history_store.redis_server import NotServed, RedisServer, is_away
from npu_gr.history_store.store import (
    EVENT,
    HistoryConfig,
    IdempotencyKey,
    Merged,
    StoredHistory,
    checked,
    key_bytes,
    merge,
    unpack,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

_ACTIONS = "npu_gr:actions"
_ITEM_KEY = "npu_gr:item_key"
_ALL = 2**53  # bytes, more than any value has
_NO_KEY = (b"", b"", 0, 0)  # arguments of a script for an append without an idempotency key
_TRY_AGAIN = (scripts.OLD, scripts.LATE)  # results of an append that did nothing yet


class RedisStore:
    """A `HistoryStore` on a server that many instances share."""

    def __init__(self, servers: Servers, config: HistoryConfig) -> None:
        self._servers = servers
        self._server = RedisServer(servers, config.timeout_s, config.wait_replicas)
        self._ask = self._server.ask
        self._config = config
        self._max_events = config.max_events_per_user
        self._append = servers.any_client.register_script(scripts.APPEND)
        self._read = servers.any_client.register_script(scripts.READ)
        self._put = servers.any_client.register_script(scripts.PUT)
        self._move = servers.any_client.register_script(scripts.MOVE)
        self._name = servers.any_client.register_script(scripts.NAME_ACTIONS)
        self.health = StoreHealth()

    @classmethod
    async def connect(cls, config: HistoryConfig, *, may_be_away: bool = False) -> RedisStore:
        """Connect, and check the kind of the server.

        Args:
            config: URL of the server, time limits, sizes.
            may_be_away: Return a store also if the server does not answer now.

        Raises:
            ConfigError: the package is missing, or no server of a kind that is served answers at
                `history_store.url`.
        """
        # for reads, and as many for appends and erasures
        servers = make_servers(config.redis_url, config.timeout_s, 2 * config.max_calls, config.tls)
        if is_in_clear(str(config.redis_url)):
            log.warning("history_store.url: histories cross the network unencrypted; use rediss://")
        store = cls(servers, config)
        try:
            await store._server.check()
        except StoreFailed as error:
            if may_be_away and is_away(error):
                log.error(
                    "history_store.url: no answer from %s: %s; the instance starts without it",
                    config.redis_url,
                    error,
                )
                return store
            await store.close()
            what = "" if isinstance(error, NotServed) else "no answer from "
            raise ConfigError(f"history_store.url: {what}{config.redis_url}: {error}") from None
        return store

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> Written:
        return await self._write(Write(user, events, Mode.APPEND, key))

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        """Do the writes of one user one after the other, and those of several users in parallel."""
        turns: defaultdict[UserKey, list[int]] = defaultdict(list)
        for place, one in enumerate(batch):
            turns[one.user].append(place)
        results: dict[int, Written | StoreFailed | Unprocessable] = {}
        free = asyncio.Semaphore(self._config.max_calls)  # limits the connections of a batch

        async def work(places: list[int]) -> None:
            for place in places:
                async with free:
                    try:
                        results[place] = await self._write(batch[place])
                    except (StoreFailed, Unprocessable) as error:
                        results[place] = error

        await asyncio.gather(*(work(places) for places in turns.values()))
        return checked(results[place] for place in range(len(batch)))

    async def _write(self, one: Write) -> Written:
        check_size(one.events, self._config.max_feature_bytes_per_event)
        match one.mode:
            case Mode.APPEND:
                return await self._append_once(one)
            case Mode.REPLACE:
                events = in_time_order(one.events)[-self._max_events :]
                arguments = _put_arguments(one.user, events, 0, "")
                await self._server.write(self._put, _keys(one.user), arguments)
                late = count_late(one.events.timestamps)
                return Written(len(events), len(events), num_late=late)
            case Mode.MERGE:
                while (written := await self._merge(one)) is None:
                    pass
                return written

    async def _append_once(self, one: Write) -> Written:
        key, events = key_bytes(one.user), in_time_order(one.events)
        data = pack_checked(key, events)
        keyed = _NO_KEY
        if one.key is not None:
            made = IdempotencyKey.make(one.key, events)
            keep_s = max(1, round(self._config.idempotency_s))
            keyed = (made.key, made.events, keep_s, self._config.max_idempotency_keys)
        oldest = int(events.timestamps[0]) if len(events) else 0
        limit = self._max_events * CHECKED.itemsize
        arguments: list[Any] = [data, limit, CHECKED.itemsize, *keyed, oldest]
        for entry in pack_entries(key, events, data):
            arguments += entry
        while (
            done := await self._server.write(self._append, _keys(one.user), arguments)
        ) in _TRY_AGAIN:
            if done == scripts.OLD:
                await self._move_old(one.user)
            elif (written := await self._merge(one, keyed)) is not None:
                return written
        if done == scripts.OTHER:
            raise Unprocessable("idempotency_key: it was used for other events")
        if done == scripts.BAD:
            raise damaged("a checksum is wrong")
        if done == scripts.CUT:
            raise damaged("its bytes are not a whole number of records")
        if done == scripts.STRAY:
            raise damaged("it has features of events that do not exist")
        kept, is_new = done
        if not is_new:
            return Written(int(kept), 0)
        return Written(int(kept), len(events), num_late=count_late(one.events.timestamps))

    async def _merge(self, one: Write, keyed: tuple[Any, ...] = _NO_KEY) -> Written | None:
        """Merge events into a history, or put late ones of an append in their places.

        None = another client wrote meanwhile: nothing was done.
        """
        first, all_stored, state, _ = await self._read_state(one.user, _ALL, "1")
        if one.mode is Mode.APPEND:
            newest = int(all_stored.timestamps.max()) if len(all_stored) else None
            late = count_late(one.events.timestamps, newest)
            events = in_time_order(all_stored + one.events)[-self._max_events :]
            merged = Merged(events, len(one.events), 0, late, is_append=True)
        else:
            merged = merge(all_stored[-self._max_events :], one.events, self._max_events)
        if not merged.changes:
            return Written(len(merged.events), 0)
        # A history that is replaced counts from 0 again.
        given_up = (
            first + len(all_stored) + merged.num_added - len(merged.events)
            if merged.is_append
            else 0
        )
        arguments = _put_arguments(one.user, merged.events, given_up, state, keyed)
        if await self._server.write(self._put, _keys(one.user), arguments) in (
            scripts.CHANGED,
            scripts.OLD,
        ):
            return None
        return Written(len(merged.events), merged.num_added, merged.num_filled, merged.num_late)

    async def read(self, user: UserKey, last: int, all_items: bool = False) -> StoredHistory:
        num_bytes = min(last, self._max_events) * CHECKED.itemsize
        all_bytes = self._max_events * CHECKED.itemsize if all_items else 0
        first, events, _, older = await self._read_state(user, num_bytes, "", all_bytes)
        return StoredHistory(events, first, older.items if all_items else None)

    async def _read_state(
        self, user: UserKey, num_bytes: int, with_state: str, all_bytes: int = 0
    ) -> tuple[int, Events, str, Events]:
        """Read events.

        Returns:
            Index of the first event, the newest events, the hash of the whole state, and older
            events without features.
        """
        keys, key = _keys(user), key_bytes(user)
        arguments: list[int | str] = [num_bytes, CHECKED.itemsize, with_state, all_bytes]
        while (
            answer := await self._ask(keys[0], lambda client: self._read(keys, arguments, client))
        ) == scripts.OLD:
            await self._move_old(user)
        first, data, groups, state, older = answer
        events = unpack_checked(key, data)
        if groups:
            features = unpack_groups(key, [RunGroup(*group) for group in groups], int(first), data)
            events = replace(events, features=features)
        return int(first), events, state.decode(), unpack_checked(key, older)

    async def actions(self) -> tuple[str, ...]:
        return _texts(await self._ask(_ACTIONS, lambda client: client.lrange(_ACTIONS, 0, -1)))

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        raw = [name.encode("utf-8", "surrogatepass") for name in names]
        return _texts(await self._ask(_ACTIONS, lambda client: self._name([_ACTIONS], raw, client)))

    async def item_key(self, mine: str) -> str:
        if mine and not await self.actions():
            await self._ask(_ITEM_KEY, lambda client: client.set(_ITEM_KEY, mine, nx=True))
        return (await self._ask(_ITEM_KEY, lambda client: client.get(_ITEM_KEY)) or b"").decode()

    async def erase(self, user: UserKey) -> bool:
        keys = _keys(user)
        await self._ask(keys[0], lambda client: client.unlink(*keys))
        # There is no local file. The server's own files keep the bytes until it rewrites them.
        return True

    async def close(self) -> None:
        await self._servers.close()

    async def _move_old(self, user: UserKey) -> None:
        """Rewrite the records of an older version with checksums, unless another instance has."""
        keys = _keys(user)
        data = await self._ask(keys[0], lambda client: client.get(keys[-1])) or b""
        if len(data) % EVENT.itemsize:
            raise damaged(f"{len(data)} bytes are not a whole number of records")
        arguments: list[Any] = [pack_checked(key_bytes(user), unpack(data)), len(data)]
        await self._ask(keys[0], lambda client: self._move(keys, arguments, client))


async def num_keys(store: RedisStore, user: UserKey) -> int:
    """Count the Redis keys of a user."""
    keys = _keys(user)
    return int(await store._ask(keys[0], lambda client: client.exists(*keys)))


def _texts(raw: list[bytes]) -> tuple[str, ...]:
    return tuple(name.decode("utf-8", "surrogatepass") for name in raw)


def _keys(user: UserKey) -> list[str]:
    name = base64.urlsafe_b64encode(key_bytes(user)).decode()
    # {name}: all keys of a user are in one hash slot.
    return [
        f"npu_gr:{{{name}}}:{part}"
        for part in ("log", "first", "keys", "order", "features", "events")
    ]


def _put_arguments(
    user: UserKey, events: Events, given_up: int, state: str, keyed: tuple[Any, ...] = _NO_KEY
) -> list[Any]:
    key = key_bytes(user)
    data = pack_checked(key, events)
    arguments: list[Any] = [data, given_up, state, *keyed, len(events)]
    for end, layout, rows in pack_entries(key, events, data):
        arguments += (given_up + end, layout, rows)
    return arguments


_READ_BYTES = 1 << 20  # of one command, so that a long history does not block the server
_CHECK_TIMEOUT_S = 30.0  # for one command of the check
_CHECK_CONNECTIONS = 8
_RUNS = 256  # runs of features of one command


async def check_redis(url: str, tls: TlsFiles | None = None) -> Found:
    """Compare every record with its checksum, while instances may go on writing.

    Args:
        url: URL of the server.
        tls: Certificate files for `rediss://`.

    Raises:
        ConfigError: the package is missing, or no server answers.
    """
    servers = make_servers(SecretUrl(url), _CHECK_TIMEOUT_S, _CHECK_CONNECTIONS, tls)
    from redis.exceptions import RedisError

    found = Found()
    try:
        for client in await servers.clients():
            await _check_server(client, found)
    except (RedisError, OSError, ValueError, StoreFailed) as error:
        raise ConfigError(f"{type(error).__name__}: no answer from Redis") from error
    finally:
        await servers.close()
    return found


async def _check_server(client: Redis, found: Found) -> None:
    """Compare the records of one server, and add what was found."""
    async for name in client.scan_iter("npu_gr:{*}:log", count=1000):
        key = _user_key(name)
        if key is None:
            found.damage.append(f"{name!r} is no key of a history store")
            continue
        found.num_entries += 1
        bad = num = 0
        while data := await client.getrange(name, num, num + _record_bytes(_READ_BYTES) - 1):
            assert isinstance(data, bytes)  # the client decodes nothing
            bad += count_bad(key, data)
            num += len(data)
        bad += await _count_bad_features(client, name, key)
        found.num_events += max(0, num // CHECKED.itemsize - bad)
        if bad:
            found.bad_users.add(key)
        else:
            found.num_users += 1
    async for name in client.scan_iter("npu_gr:{*}:events", count=1000):
        found.num_entries += 1
        found.num_unchecked += 1
        found.num_events += await client.strlen(name) // EVENT.itemsize


async def _count_bad_features(client: Redis, name: bytes, key: bytes) -> int:
    """Read the features of a user piece by piece, each with the records of its events."""
    names = [name.removesuffix(b"log") + part for part in (b"log", b"first", b"features")]
    bad, after = 0, b"0"
    while answer := await client.eval(FEATURES, 3, *names, after, _RUNS, CHECKED.itemsize):
        after, first, records, runs = answer
        groups = [
            RunGroup(layout, end, str(len(rows)).encode(), rows) for end, layout, rows in runs
        ]
        bad += count_bad_rows(key, groups, int(first), records)
    return bad


def _record_bytes(num_bytes: int) -> int:
    """Round down to a whole number of records."""
    return num_bytes // CHECKED.itemsize * CHECKED.itemsize


def _user_key(name: bytes) -> bytes | None:
    try:
        return base64.urlsafe_b64decode(name.split(b"{", 1)[1].split(b"}", 1)[0])
    except (IndexError, binascii.Error):
        return None
