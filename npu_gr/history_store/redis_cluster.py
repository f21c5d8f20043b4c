"""The masters of a Redis Cluster, by the slot of a key; a client of redis-py for each.

Not redis-py's own `RedisCluster`: while one of three masters is dead, it closes the connections to
all of them and loads scripts on all, so that 60 of 60 users' appends failed; here those of the dead
master do, 16 of 60 (`tests/history_store/test_redis_cluster.py`).
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from npu_gr.core.errors import StoreFailed

if TYPE_CHECKING:
    from redis.asyncio import Redis

Address = tuple[str, int]  # host, port


class _Slots(NamedTuple):
    """A range of slots."""

    first: int
    last: int
    master: Address


class OneServer:
    """A single master, also the one that Sentinels name."""

    is_cluster = False

    def __init__(self, client: Redis, sentinels: Sequence[Redis] = ()) -> None:
        """Connect with the first command.

        Args:
            client: Client of the master.
            sentinels: Clients of the Sentinels that it asks.
        """
        self.any_client = client
        self._sentinels = sentinels

    async def client_of(self, key: str) -> Redis:
        return self.any_client

    async def clients(self) -> list[Redis]:
        return [self.any_client]

    async def look_again(self) -> None:
        """Close the connections, so that the next one looks the name up again."""
        await self.any_client.connection_pool.disconnect(inuse_connections=False)

    def suspect(self) -> None:
        """Note that a server did not answer."""

    async def close(self) -> None:
        for client in (self.any_client, *self._sentinels):
            await client.aclose()


class Cluster:
    """The masters of a cluster. Event loop only."""

    is_cluster = True

    def __init__(self, start: Sequence[Address], connect: Callable[[str, int], Redis]) -> None:
        """Connect with the first command.

        Args:
            start: Nodes that are asked first for the others.
            connect: Function that makes the client of a node.
        """
        self._connect = connect
        self._start = tuple(start)
        self._nodes = {address: connect(*address) for address in start}
        self._slots: list[_Slots] = []  # sorted
        self._firsts: list[int] = []
        self._is_stale = True
        self._looking: asyncio.Task[None] | None = None
        self.any_client = self._nodes[self._start[0]]

    async def client_of(self, key: str) -> Redis:
        """Return the client of a key's master.

        Raises:
            StoreFailed: no node answers, or no master serves the key.
        """
        from redis.crc import key_slot

        if self._is_stale:
            await self.look_again()
        slot = key_slot(key.encode())
        place = bisect.bisect_right(self._firsts, slot) - 1
        if place < 0 or self._slots[place].last < slot:
            self._is_stale = True
            raise StoreFailed("the history store does not answer: no master serves the user")
        return self._nodes[self._slots[place].master]

    async def clients(self) -> list[Redis]:
        """Return the clients of all masters."""
        await self.look_again()
        return [self._nodes[address] for address in sorted({one.master for one in self._slots})]

    def suspect(self) -> None:
        """Note that a server did not answer: the next command looks for the masters again."""
        self._is_stale = True

    async def look_again(self) -> None:
        """Ask all nodes which masters there are, and take the first answer.

        Calls at the same time share one look.

        Raises:
            StoreFailed: no node answers.
        """
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        # a caller that is cancelled does not end the look of the others
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        asked = [
            asyncio.ensure_future(_masters(address, client))
            for address, client in self._nodes.items()
        ]
        reason = ""
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    left = self._take(await answer)
                except StoreFailed as error:
                    reason = str(error)
                    continue
                for client in left:
                    await client.connection_pool.disconnect(inuse_connections=False)
                return
            raise StoreFailed(f"the history store does not answer: {reason}")
        finally:
            self._looking = None
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _take(self, slots: list[_Slots]) -> list[Redis]:
        """Take the masters, and return the clients of nodes that are none any more."""
        masters = {one.master for one in slots}
        for address in masters - self._nodes.keys():
            self._nodes[address] = self._connect(*address)
        # else each node that a fleet ever had would be asked for ever
        gone = self._nodes.keys() - masters - set(self._start)
        self._slots = slots
        self._firsts = [one.first for one in slots]
        self._is_stale = False
        return [self._nodes.pop(address) for address in gone]

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError, StoreFailed):
                await self._looking
        for client in self._nodes.values():
            await client.aclose()


async def _masters(address: Address, client: Redis) -> list[_Slots]:
    """Ask a node which masters serve which slots.

    Raises:
        StoreFailed: it does not answer, or it is no node of a cluster.
    """
    from redis.exceptions import RedisError, ResponseError

    try:
        answer = await client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
    except (RedisError, OSError) as error:
        # only the server's own answer: other texts may contain the address and its password
        text = f": {error}" if isinstance(error, ResponseError) else ""
        raise StoreFailed(f"{type(error).__name__}{text}") from error
    found = []
    for first, last, master, *_ in answer:
        host = master[0].decode() if master[0] else address[0]  # empty: the node does not know it
        found.append(_Slots(int(first), int(last), (host, int(master[1]))))
    if not found:
        raise StoreFailed("CLUSTER SLOTS: no slot is assigned")
    return sorted(found)
