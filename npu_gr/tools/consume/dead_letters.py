"""Where messages go that are no events: lines of a file, or another topic. One may be there twice after a crash."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Protocol

import msgspec

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.core.private import open_private


class DeadLetters(Protocol):
    """Keeps messages durably."""

    async def put(self, letters: list[tuple[Any, str]]) -> None:
        """Keep messages with the reason of each. Raises Unavailable where that cannot be done now."""
        ...


class DeadLetterFile:
    """Appends JSON lines: topic, partition, offset, timestamp_ms, reason, and headers, key and value in base64.

    A crash may leave half a line. Others may move the file away at any time; the next letter begins a new one.
    """

    def __init__(self, path: Path) -> None:
        """Check that the file can be written.

        Raises:
            ConfigError: it cannot.
        """
        self._path = path
        try:
            os.close(open_private(path))
        except OSError as error:
            raise ConfigError(f"--dead-letters: {path}: {error.strerror}") from error

    async def put(self, letters: list[tuple[Any, str]]) -> None:
        try:
            await asyncio.to_thread(self._write, letters)
        except OSError as error:
            raise Unavailable(f"--dead-letters: {self._path}: {error.strerror}") from error

    def _write(self, letters: list[tuple[Any, str]]) -> None:
        with os.fdopen(open_private(self._path, appends=True), "r+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            for message, reason in letters:
                line = {
                    "topic": message.topic,
                    "partition": message.partition,
                    "offset": message.offset,
                    "timestamp_ms": message.timestamp,
                    "reason": reason,
                    "headers": message.headers,
                    "key": message.key,
                    "value": message.value,
                }
                file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())


class DeadLetterTopic:
    """Produces each message as it came, with the reason and its place in headers; of a too large one only these."""

    def __init__(self, producer: Any, topic: str) -> None:
        self._producer = producer
        self._topic = topic

    async def put(self, letters: list[tuple[Any, str]]) -> None:
        from aiokafka.errors import KafkaError, MessageSizeTooLargeError

        try:
            for message, reason in letters:
                value = b"" if message.value is None and message.key is None else message.value  # which none may be
                try:
                    await self._send(value, message.key, [*message.headers, *_about(message, reason)])
                except MessageSizeTooLargeError:
                    await self._send(b"", None, _about(message, f"{reason} (too large for this topic)"))
        except KafkaError as error:
            raise Unavailable(f"--dead-letter-topic: {self._topic}: {error}") from error

    async def _send(self, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes | None]]) -> None:
        await self._producer.send_and_wait(self._topic, value, key=key, headers=headers)


def _about(message: Any, reason: str) -> list[tuple[str, bytes | None]]:
    place = f"{message.topic}/{message.partition}/{message.offset}"
    return [("reason", reason.encode()), ("from", place.encode())]
