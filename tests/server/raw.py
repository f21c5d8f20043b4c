"""A fake service behind the listener of a real instance, and connections of bytes to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from npu_gr.metrics.registry import Metrics
from npu_gr.server.run import PIPELINE
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, serving_fake

BODY = json.dumps(EXAMPLES["rank"].body).encode()
RANK = b"POST /v1/rank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = RANK + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


class Raw:
    """A connection of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value
                for name, _, value in (line.partition(": ") for line in head[1:] if line)
            }
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(10):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


class Site:
    """A fake service behind a real listener."""

    def __init__(self, client: Any, service: FakeService, metrics: Metrics) -> None:
        self.client = client
        self.service = service
        self.metrics = metrics
        self.admission = client.server.app[PIPELINE]._admission
        self.raws: list[Raw] = []

    async def connect(self, from_host: str = "127.0.0.1") -> Raw:
        """Connect from an address of this machine."""
        streams = await asyncio.open_connection(
            "127.0.0.1", self.client.port, local_addr=(from_host, 0)
        )
        self.raws.append(Raw(*streams))
        return self.raws[-1]

    def count(self, name: str, **labels: str) -> float | None:
        self.metrics.refresh()
        return self.metrics.registry.get_sample_value(f"npu_gr_{name}", labels)


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    async with serving_fake(service, **settings) as (client, metrics):
        at = Site(client, service, metrics)
        try:
            yield at
        finally:
            for raw in at.raws:
                raw.writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await raw.writer.wait_closed()
