"""`npu-gr consume` as a process: connect, consume until SIGTERM, leave the group."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from npu_gr.core.calling import calling_context
from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.service.config import Config
from npu_gr.tools.consume.consumer import RETRY_FIRST_S, RETRY_MOST_S, EventConsumer
from npu_gr.tools.consume.dead_letters import DeadLetterFile, DeadLetters, DeadLetterTopic
from npu_gr.tools.consume.message import Fields
from npu_gr.tools.consume.metrics import ConsumeMetrics
from npu_gr.tools.ingest import Target, open_target

log = logging.getLogger(__name__)

PASSWORD = "NPU_GR_KAFKA_PASSWORD"  # the variable, not the password  # noqa: S105  # nosec B105
DRAIN_S = 10.0  # that a round may take after SIGTERM
PATIENCE_S = 5.0  # of one call; a round is tried again for ever
MOST_AWAY_MS = 3_600_000  # that the store may be away before the group takes the partitions from us

Security = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]


class KafkaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages come from."""

    brokers: str  # host:port, separated by commas
    topics: tuple[str, ...]
    group: str
    security: Security = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    dead_letters: Path | None = None  # a file
    dead_letter_topic: str | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None


async def consume(
    kafka: KafkaConfig, fields: Fields, tenant: str, config: Config | None, url: str | None, api_key: str | None
) -> dict[str, int]:
    """Consume until SIGTERM or SIGINT.

    Args:
        kafka: where messages come from.
        fields: of the messages.
        tenant: of all users.
        config, url, api_key: where the events go; see `open_target`.

    Returns:
        Messages by what became of them.

    Raises:
        ConfigError: something cannot be used, or the brokers or the service do not let us in.
    """
    try:
        from aiokafka import AIOKafkaConsumer
        from aiokafka.errors import KafkaError
    except ImportError as error:
        raise ConfigError("consume needs pip install 'npu_gr[kafka]'") from error
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = ConsumeMetrics()
    if kafka.metrics_port is not None:
        metrics.serve(kafka.metrics_host, kafka.metrics_port)
    try:
        async with AsyncExitStack() as stack:
            target = await _patiently(stack, config, url, api_key, stop)
            if target is not None:
                consumer = AIOKafkaConsumer(
                    *kafka.topics,
                    group_id=kafka.group,
                    enable_auto_commit=False,
                    auto_offset_reset="earliest",
                    isolation_level="read_committed",
                    max_poll_interval_ms=MOST_AWAY_MS,
                    **_connection(kafka),
                )
                stack.push_async_callback(consumer.stop)
                await consumer.start()
                letters = await stack.enter_async_context(_dead_letters(kafka))
                log.info("consuming %s as %s into %s", ", ".join(kafka.topics), kafka.group, target.about)
                events = EventConsumer(consumer, target, fields, letters, metrics, tenant)
                await _until_stopped(events, stop)
    except KafkaError as error:
        raise ConfigError(f"kafka: {kafka.brokers}: {type(error).__name__}: {error}") from error
    return {result: int(metrics.messages.labels(result)._value.get()) for result in ("written", "known", "dead")}


async def _until_stopped(events: EventConsumer, stop: asyncio.Event) -> None:
    """Run; after `stop` let the round that is being written end in time."""
    running = asyncio.ensure_future(events.run(stop))
    told = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((running, told), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((running,), timeout=DRAIN_S)
        if running.done():
            running.result()
        else:
            log.warning("not drained within %.0f s: what was not committed is read again, and counts once", DRAIN_S)
    finally:
        for task in (running, told):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def _patiently(
    stack: AsyncExitStack, config: Config | None, url: str | None, api_key: str | None, stop: asyncio.Event
) -> Target | None:
    """Open the target; a service that is not there yet is waited for. None: it was told to stop before."""
    pause_s = RETRY_FIRST_S
    while not stop.is_set():
        try:
            return await stack.enter_async_context(open_target(config, url, api_key, PATIENCE_S))
        except Unavailable as error:
            log.warning("tried again in %.1f s: %s", pause_s, error)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await stop.wait()
        pause_s = min(2 * pause_s, RETRY_MOST_S)
    return None


@asynccontextmanager
async def _dead_letters(kafka: KafkaConfig) -> AsyncIterator[DeadLetters]:
    if kafka.dead_letter_topic is None:
        assert kafka.dead_letters is not None
        yield DeadLetterFile(kafka.dead_letters)
        return
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(acks="all", **_connection(kafka))
    await producer.start()
    try:
        yield DeadLetterTopic(producer, kafka.dead_letter_topic)
    finally:
        await producer.stop()


def _connection(kafka: KafkaConfig) -> dict[str, Any]:
    """Options of every connection to the brokers."""
    options: dict[str, Any] = {"bootstrap_servers": kafka.brokers, "security_protocol": kafka.security}
    if kafka.security.endswith("SSL"):
        options["ssl_context"] = calling_context()
    if kafka.security.startswith("SASL"):
        password = os.environ.get(PASSWORD)
        if not (kafka.sasl_username and password):
            raise ConfigError(f"--sasl-username and the variable {PASSWORD}: {kafka.security} needs both")
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": password,
        }
    return options
