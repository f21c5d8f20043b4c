"""Read events from topics of Kafka into the history store, each once, however often this process dies.

    read a round ─> write it, until the store has acknowledged ─> dead letters ─> commit the offsets ─> read the next

A message that is read again, because its offset was not committed, has the idempotency key that it had: topic,
partition, offset and time. So it counts once as long as the store remembers the key. It remembers 256 of a user for a
day (`features.max_idempotency_keys`, `idempotency_s`), so a round has `MOST_OF_USER` messages of a user at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from npu_gr.core.errors import ConfigError, NpuGrError, StoreFailed, Unavailable, Unprocessable
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import Events, Mode, UserKey, Write, Written
from npu_gr.core.words import cut
from npu_gr.tools.consume.dead_letters import DeadLetters
from npu_gr.tools.consume.message import Event, Fields, Poison, read_event
from npu_gr.tools.consume.metrics import ConsumeMetrics
from npu_gr.tools.ingest import EventModel, ServiceWriter, Target

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer

log = logging.getLogger(__name__)

MOST_OF_USER = 64  # messages of one user in a round
MOST = 500  # messages in a round
LINGER_MS = 500  # to wait for messages
ASK_AGAIN_S = 10.0  # between two looks at the actions of the service
RETRY_FIRST_S, RETRY_MOST_S = 0.2, 10.0
TRIES = 5  # of a user whose write fails while those of others are done; then it is a dead letter


@dataclass(slots=True)
class _Round:
    """Messages between two commits."""

    messages: list[Any]
    writes: list[Write]  # of `messages`, in their order
    dead: list[tuple[Any, str]]
    users: Counter[str]
    offsets: dict[Any, int]  # partition -> the next offset


class EventConsumer:
    """Consumes until it is told to stop. Event loop only."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        target: Target,
        fields: Fields,
        dead_letters: DeadLetters,
        metrics: ConsumeMetrics,
        tenant: str = "",
    ) -> None:
        """Consume nothing yet.

        Args:
            consumer: started, with automatic commits off.
            target: where events go.
            fields: of the messages.
            dead_letters: keeps what is no event.
            metrics: counts.
            tenant: of all users.

        Raises:
            ConfigError: the target has no actions, so nothing could be an event, or lacks a feature that is told.
        """
        if not target.model.actions:
            raise ConfigError(f"{target.about}: its model has no actions, so nothing is an event; serve a ranker")
        self._consumer = consumer
        self._target = target
        self._fields = fields
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._tenant = tenant
        self._actions = {name: place for place, name in enumerate(target.model.actions)}
        self._features = features_of(target.model)
        if lost := [name for name in fields.features if name not in self._features]:
            there = ", ".join(self._features) or "none"
            raise ConfigError(f"--feature {lost[0]}: no feature of events of {target.about}; it has {there}")
        self._asked_at = float("-inf")

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until `stop` is set; then finish the round, unless the store is away.

        Raises:
            ConfigError: the service does not let us in.
        """
        while not stop.is_set():
            batches = await self._consumer.getmany(timeout_ms=LINGER_MS, max_records=MOST)
            current = _empty()
            for partition, messages in batches.items():
                for message in messages:
                    user = await self._take(current, message)
                    current.offsets[partition] = message.offset + 1
                    if current.users[user] >= MOST_OF_USER:
                        if not await self._finish(current, stop):
                            return
                        current = _empty()
            if current.offsets and not await self._finish(current, stop):
                return

    async def _take(self, current: _Round, message: Any) -> str:
        """Add a message to the round; return its user, "" if it has none."""
        try:
            event = self._read(message)
        except Poison as poison:
            if not (str(poison).startswith("event:") and await self._asked_again()):
                current.dead.append((message, str(poison)))
                return ""
            try:
                event = self._read(message)
            except Poison as again:
                current.dead.append((message, str(again)))
                return ""
        plain = Events.make([event.item], [event.action], [event.timestamp])
        events = replace(plain, features=event.features) if event.features else plain
        current.messages.append(message)
        current.writes.append(Write(UserKey(self._tenant, event.user), events, Mode.APPEND, key_of(message)))
        current.users[event.user] += 1
        return event.user

    def _read(self, message: Any) -> Event:
        return read_event(message.value, message.timestamp, self._fields, self._action, self._features)

    def _action(self, name: str | None) -> int:
        if name is None and len(self._actions) == 1:
            return 0
        if name is None:
            raise Poison("event: none, and the model has several: name the field with --event")
        if name not in self._actions:
            known = ", ".join(cut(one) for one in [*self._actions][:20])
            raise Poison(f"event: {cut(name)!r} is none of the model's: {known}")
        return self._actions[name]

    async def _asked_again(self) -> bool:
        """Ask a service whether its model has gained actions, not more often than every `ASK_AGAIN_S`."""
        store = self._target.store
        if not isinstance(store, ServiceWriter) or time.monotonic() - self._asked_at < ASK_AGAIN_S:
            return False
        self._asked_at = time.monotonic()
        try:
            model = await store.model()
        except NpuGrError:  # the write says it, too
            return False
        if not model.actions:
            return False
        self._actions = {name: place for place, name in enumerate(model.actions)}
        self._features = features_of(model)
        return True

    # ---- one round

    async def _finish(self, current: _Round, stop: asyncio.Event) -> bool:
        """Write a round and commit its offsets. False: it was told to stop before the store had acknowledged."""
        pairs = list(zip(current.messages, current.writes, strict=True))
        pause_s = RETRY_FIRST_S
        tries = 0
        while pairs or current.dead:
            try:
                if pairs:
                    results = await self._write([write for _, write in pairs])
                    tries += 1
                    pairs = self._sort(pairs, results, current, is_last=tries >= TRIES)
                if current.dead and not pairs:
                    await self._dead_letters.put(current.dead)
                    self._metrics.messages.labels("dead").inc(len(current.dead))
                    for message, reason in current.dead[:3]:
                        place = f"{message.topic}/{message.partition}/{message.offset}"
                        log.warning("%s is no event: %s (of %d dead letters)", place, reason, len(current.dead))
                    current.dead = []
            except Unavailable as error:
                log.warning("paused, and tried again in %.1f s: %s", pause_s, error)
            if pairs or current.dead:
                self._metrics.retries.inc()
                if await _stopped_within(stop, pause_s):
                    return False
                pause_s = min(2 * pause_s, RETRY_MOST_S)
        await self._commit(current)
        return True

    def _sort(
        self, pairs: list[tuple[Any, Write]], results: Sequence[Written | NpuGrError], current: _Round, *, is_last: bool
    ) -> list[tuple[Any, Write]]:
        """Count what was written, add what cannot be to the dead letters, and return what is to be tried again."""
        failed = []
        for pair, result in zip(pairs, results, strict=True):
            if isinstance(result, Written):
                self._metrics.messages.labels("written" if result.num_added else "known").inc()
            elif isinstance(result, StoreFailed) and not is_last:
                failed.append(pair)
            else:
                current.dead.append((pair[0], str(result)))
        return failed

    async def _write(self, writes: list[Write]) -> list[Written | NpuGrError]:
        """Write, and where the form of one is refused, which fails all of its call, find it by halves."""
        try:
            return list(await self._target.store.write_many(writes))
        except Unprocessable as error:
            if len(writes) == 1:
                return [error]
            half = len(writes) // 2
            return await self._write(writes[:half]) + await self._write(writes[half:])

    async def _commit(self, current: _Round) -> None:
        """Commit. What cannot be is read again by whoever has the partition then, and known."""
        from aiokafka.errors import KafkaError

        mine = self._consumer.assignment()
        offsets = {partition: offset for partition, offset in current.offsets.items() if partition in mine}
        try:
            if offsets:
                await self._consumer.commit(offsets)
        except KafkaError as error:
            log.warning("offsets not committed, so these messages are read again: %s", error)
        mine = self._consumer.assignment()  # another one perhaps, after a rebalance during the commit
        for partition, offset in offsets.items():
            end = self._consumer.highwater(partition) if partition in mine else None
            if end is not None:
                self._metrics.lag.labels(partition.topic, str(partition.partition)).set(max(0, end - offset))


def key_of(message: Any) -> str:
    """The idempotency key of a message, also after a topic was deleted and made anew."""
    text = f"{message.topic}\0{message.partition}\0{message.offset}\0{message.timestamp}"
    return f"kafka-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _empty() -> _Round:
    return _Round([], [], [], Counter(), {})


async def _stopped_within(stop: asyncio.Event, pause_s: float) -> bool:
    try:
        async with asyncio.timeout(pause_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True


def features_of(model: EventModel) -> dict[str, Feature]:
    """Find the features of events by their names."""
    return {one.name: one for one in model.features if one.of == "event"}
