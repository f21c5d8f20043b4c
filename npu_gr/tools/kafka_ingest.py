"""`npu-gr kafka-ingest`: ingest events from Kafka into the history store, effectively once.

    poll a round ─> write it until the store acknowledges ─> write dead letters ─> commit ─> next

A message that is read again, because its offset was not committed, has the same idempotency key
(topic, partition, offset and time). Therefore it counts once while the store remembers the key: 256
per user for a day (`history_store.max_idempotency_keys`, `idempotency_s`). For this reason a round
has at most `MOST_OF_USER` messages of a user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import prometheus_client

from npu_gr.core.calling import calling_context
from npu_gr.core.errors import ConfigError, NpuGrError, StoreFailed, Unavailable, Unprocessable
from npu_gr.core.file_permissions import open_private
from npu_gr.core.history import Write, Written
from npu_gr.tools.consume_message import Fields, Poison, read_event
from npu_gr.tools.ingest import Target

log = logging.getLogger(__name__)

PASSWORD = "NPU_GR_KAFKA_PASSWORD"  # the variable, not the password  # noqa: S105  # nosec B105
MOST, MOST_OF_USER = 500, 64  # messages per round, and per user in a round
LINGER_MS = 500  # time of a poll
RETRY_FIRST_S, RETRY_MOST_S = 0.2, 10.0
TRIES = 5  # of a write that fails alone; then the message is a dead letter
DRAIN_S = 10.0  # time of the last round after SIGTERM
MOST_AWAY_MS = 3_600_000  # outage of the store after which the group reassigns the partitions


class ConsumeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the messages, and how to read them."""

    brokers: str  # host:port, separated by commas
    topics: tuple[str, ...]
    group: str = "npu_gr"
    security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    fields: Fields = Fields()
    tenant: str = ""  # of every user
    dead_letters: Path  # JSON lines
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None


class _Round(NamedTuple):
    """The messages between two commits."""

    pairs: list[tuple[Any, Write]]  # message and event, not written yet
    dead: list[tuple[Any, str]]  # message and reason
    users: Counter[str]
    offsets: dict[Any, int]  # partition -> the next offset


class EventConsumer:
    """Writes messages until it is stopped. Event loop only."""

    def __init__(self, consumer: Any, target: Target, config: ConsumeConfig) -> None:
        """Prepare the consumer, which must have automatic commits off.

        Raises:
            ConfigError: the model has no actions or lacks a configured feature, or the file of
                dead letters cannot be written.
        """
        self.consumer = consumer  # replaced when the group is joined again
        self._target = target
        self._config = config
        about, there = (
            target.about,
            [one.name for one in target.model.features if one.of == "event"],
        )
        if not target.model.actions:
            raise ConfigError(
                f"{about}: the model has no actions, so no message is an event; serve a ranker"
            )
        if lost := [name for name in config.fields.features if name not in there]:
            known = ", ".join(there) or "none"
            raise ConfigError(
                f"--feature {lost[0]}: not an event feature of {about}; it has {known}"
            )
        try:
            os.close(open_private(config.dead_letters))
        except OSError as error:
            raise ConfigError(f"--dead-letters: {config.dead_letters}: {error.strerror}") from error
        self.registry = prometheus_client.CollectorRegistry()

        def metric(kind: Any, name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
            return kind(f"npu_gr_consume_{name}", text, labels, registry=self.registry)

        text = "Messages by result: written, known (a duplicate), dead (a dead letter)."
        messages = metric(prometheus_client.Counter, "messages", text, ("result",))
        self.counts = {result: messages.labels(result) for result in ("written", "known", "dead")}
        text = "Events that were older than stored ones of their user, and were put in their place."
        self._late = metric(prometheus_client.Counter, "late_events", text)
        self._retries = metric(prometheus_client.Counter, "retries", "Retries of a round.")
        text = "Uncommitted messages of a partition."
        self._lag = metric(prometheus_client.Gauge, "lag_messages", text, ("topic", "partition"))

    async def run(self, stop: asyncio.Event) -> None:
        """Consume until `stop` is set; then finish the round, unless the store is unavailable.

        Raises:
            ConfigError: the service rejects the key.
        """
        while not stop.is_set():
            batches = await self.consumer.getmany(timeout_ms=LINGER_MS, max_records=MOST)
            current = _Round([], [], Counter(), {})
            for partition, messages in batches.items():
                for message in messages:
                    current.offsets[partition] = message.offset + 1
                    if self._is_full_with(message, current):
                        if not await self._finish(current, stop):
                            return
                        current = _Round([], [], Counter(), {})
            if current.offsets and not await self._finish(current, stop):
                return

    def _is_full_with(self, message: Any, current: _Round) -> bool:
        try:
            write = read_event(
                message, self._config.fields, self._target.model, self._config.tenant
            )
        except Poison as poison:
            current.dead.append((message, str(poison)))
            return False
        current.pairs.append((message, write))
        current.users[write.user.user] += 1
        return current.users[write.user.user] >= MOST_OF_USER

    async def _finish(self, current: _Round, stop: asyncio.Event) -> bool:
        """Write a round and commit it; False if stopped before the store acknowledged."""
        pause_s, tries = RETRY_FIRST_S, 0
        while current.pairs or current.dead:
            try:
                if current.pairs:
                    results = await self._write([write for _, write in current.pairs])
                    tries += 1
                    current.pairs[:] = self._sort(current, results, is_last=tries >= TRIES)
                if current.dead and not current.pairs:
                    await asyncio.to_thread(self._bury, current.dead)
                    self.counts["dead"].inc(len(current.dead))
                    current.dead.clear()
            except (Unavailable, OSError) as error:
                log.warning("writing failed, next try in %.1f s: %s", pause_s, error)
            if current.pairs or current.dead:
                self._retries.inc()
                if await _stopped_within(stop, pause_s):
                    return False
                pause_s = min(2 * pause_s, RETRY_MOST_S)
        await self._commit(current.offsets)
        return True

    async def _write(self, writes: list[Write]) -> list[Written | NpuGrError]:
        """Write all; if one invalid event fails the call, write each alone."""
        try:
            return list(await self._target.store.write_many(writes))
        except Unprocessable as error:
            if len(writes) == 1:
                return [error]
            return [one for each in writes for one in await self._write([each])]

    def _sort(
        self, current: _Round, results: list[Any], *, is_last: bool
    ) -> list[tuple[Any, Write]]:
        """Count written messages, add failed ones to the dead letters, return those to retry."""
        again = []
        for pair, result in zip(current.pairs, results, strict=True):
            if isinstance(result, Written):
                self.counts["written" if result.num_added else "known"].inc()
                self._late.inc(result.num_late)
            elif isinstance(result, StoreFailed) and not is_last:
                again.append(pair)
            else:
                current.dead.append((pair[0], str(result)))
        return again

    def _bury(self, letters: list[tuple[Any, str]]) -> None:
        """Append one JSON line per message; after a crash one may be duplicated or truncated.

        The file may be moved at any time; the next dead letter creates a new one.
        """
        with os.fdopen(open_private(self._config.dead_letters, appends=True), "r+b") as file:
            if (
                file.seek(0, os.SEEK_END)
                and file.seek(-1, os.SEEK_END) >= 0
                and file.read(1) != b"\n"
            ):
                file.write(b"\n")
            for message, reason in letters:
                names = ("topic", "partition", "offset", "headers", "key", "value")  # in base64
                line = {name: getattr(message, name) for name in names}
                line |= {"timestamp_ms": message.timestamp, "reason": reason}
                file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        message, reason = letters[0]
        place = f"{message.topic}/{message.partition}/{message.offset}"
        log.warning("%s is a dead letter: %s (first of %d)", place, reason, len(letters))

    async def _commit(self, read: dict[Any, int]) -> None:
        """Commit offsets; if that fails, the messages are read again and count as known."""
        from aiokafka.errors import KafkaError

        mine = self.consumer.assignment()
        offsets = {partition: offset for partition, offset in read.items() if partition in mine}
        try:
            if offsets:
                await self.consumer.commit(offsets)
        except KafkaError as error:
            log.warning(
                "committing offsets failed, so these messages will be read again: %s", error
            )
        mine = self.consumer.assignment()  # may have changed by a rebalance
        for partition, offset in offsets.items():
            if partition in mine and (end := self.consumer.highwater(partition)) is not None:
                self._lag.labels(partition.topic, str(partition.partition)).set(
                    max(0, end - offset)
                )


async def _stopped_within(stop: asyncio.Event, pause_s: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), pause_s)
    return stop.is_set()


async def consume(
    config: ConsumeConfig, opened: Callable[[], AbstractAsyncContextManager[Target]]
) -> dict[str, int]:
    """Consume until SIGTERM or SIGINT, and finish the current round.

    Args:
        config: Source of the messages.
        opened: Opens the destination; retried while a service is unavailable.

    Returns:
        Number of messages by result.

    Raises:
        ConfigError: the configuration cannot be used, or the brokers or the service reject us.
    """
    try:
        from aiokafka import AIOKafkaConsumer, errors
    except ImportError as error:
        raise ConfigError("consume needs pip install 'npu_gr[kafka]'") from error
    rejections = (
        errors.AuthenticationFailedError,
        errors.GroupAuthorizationFailedError,
        errors.InvalidTopicError,
        errors.TopicAuthorizationFailedError,
        errors.UnsupportedSaslMechanismError,
        errors.UnsupportedVersionError,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    options: dict[str, Any] = {
        "bootstrap_servers": config.brokers,
        "security_protocol": config.security,
    }
    if config.security.endswith("SSL"):
        options["ssl_context"] = calling_context()
    if config.security.startswith("SASL"):
        password = os.environ.get(PASSWORD)
        if not (config.sasl_username and password):
            raise ConfigError(
                f"{config.security} needs both --sasl-username and the variable {PASSWORD}"
            )
        options |= {"sasl_mechanism": config.sasl_mechanism, "sasl_plain_password": password}
        options["sasl_plain_username"] = config.sasl_username
    async with AsyncExitStack() as stack:
        pause_s, target = RETRY_FIRST_S, None
        while target is None:
            try:
                target = await stack.enter_async_context(opened())
            except Unavailable as error:
                log.warning(
                    "opening the destination failed, next try in %.1f s: %s", pause_s, error
                )
                if await _stopped_within(stop, pause_s):
                    return dict.fromkeys(("written", "known", "dead"), 0)
                pause_s = min(2 * pause_s, RETRY_MOST_S)

        def joined() -> AIOKafkaConsumer:
            return AIOKafkaConsumer(
                *config.topics,
                group_id=config.group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
                max_poll_interval_ms=MOST_AWAY_MS,
                **options,
            )

        events = EventConsumer(joined(), target, config)
        try:
            if config.metrics_port is not None:
                prometheus_client.start_http_server(
                    config.metrics_port, config.metrics_host, events.registry
                )
        except OSError as error:
            where = f"{config.metrics_host}:{config.metrics_port}"
            raise ConfigError(f"--metrics-port: {where}: {error.strerror}") from error
        has_begun = False
        while True:
            try:
                await events.consumer.start()
                names = ", ".join(config.topics)
                log.info("consuming %s as %s into %s", names, config.group, target.about)
                has_begun = True
                await _until_stopped(events, stop)
                break
            except errors.KafkaError as error:
                what = f"{config.brokers}: {type(error).__name__}: {error}"
                is_away = isinstance(error, errors.KafkaConnectionError) and not has_begun
                if is_away or isinstance(error, rejections):
                    raise ConfigError(f"kafka: {what}") from error
                # a rebalance that failed, or a broker that went: neither ends the work
                log.warning("kafka: %s; joining the group again in %.1f s", what, pause_s)
            finally:
                await events.consumer.stop()
            if await _stopped_within(stop, pause_s):
                break
            pause_s = min(2 * pause_s, RETRY_MOST_S)
            events.consumer = joined()
    return {result: int(count._value.get()) for result, count in events.counts.items()}


async def _until_stopped(events: EventConsumer, stop: asyncio.Event) -> None:
    running, stopping = asyncio.create_task(events.run(stop)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait_for(running, DRAIN_S)
    except TimeoutError:
        log.warning(
            "not drained within %.0f s; uncommitted messages will be read again, and count once",
            DRAIN_S,
        )
    finally:
        stopping.cancel()
        running.cancel()
