"""A service that answers what a test says, byte by byte, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HISTORY = {
    "fingerprint": "f" * 32,
    "num_tokens": 1,
    "cut_tokens": 0,
    "unknown_items": 0,
    "source": "request",
    "fault": "",
    "sorted_events": 0,
}
RANKED = {
    "request_id": "r",
    "model_version": "v",
    "outcome": "hbm_hit",
    "reason": "",
    "scores": {"click": [0.5, None]},
    "top": None,
    "prefix_tokens": 1,
    "unknown_candidates": 1,
    "history": HISTORY,
    "stages_s": {},
}
SIGNALLED = {
    "request_id": "r",
    "model_version": "v",
    "verdict": "preinfer",
    "resident_for_s": 10.0,
    "history": HISTORY,
    "generate_verdict": None,
}


class Asked(NamedTuple):
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    connection: int  # from 0, in the order in which they were opened


class Answer(NamedTuple):
    """What is sent, and whether the connection is closed after it."""

    sent: bytes
    closes: bool = False
    after_s: float = 0.0


HANG = Answer(b"", after_s=60.0)


def answer(
    body: object, status: int = 200, media: str = "application/json", **headers: str
) -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Said", f"Content-Type: {media}", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return Answer("\r\n".join(lines).encode() + b"\r\n\r\n" + content)


def problem(status: int, detail: str, title: str = "a title", **headers: str) -> Answer:
    body = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
        "request_id": "of-the-service",
    }
    return answer(body, status, "application/problem+json", **headers)


@dataclass
class Scripted:
    """Plays its answers in turn; the last one again and again."""

    answers: Sequence[Answer]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    num_left: int = 0  # callers who hung up before their answer

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().rstrip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {
                    name.lower(): value for name, value in (line.split(": ", 1) for line in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                said = self.answers[min(len(self.asked), len(self.answers) - 1)]
                self.asked.append(Asked(method, path, headers, body, number))
                if said.after_s:
                    left = asyncio.ensure_future(reader.read())
                    done, _ = await asyncio.wait([left], timeout=said.after_s)
                    if done:
                        self.num_left += 1
                        return
                    left.cancel()
                    await asyncio.wait([left])
                writer.write(said.sent)
                await writer.drain()
                if said.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*answers: Answer, port: int = 0, **tls: Any) -> AsyncIterator[Scripted]:
    one = Scripted(answers)
    tasks: set[asyncio.Task[None]] = set()
    numbers = iter(range(10_000))

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(one.serve(reader, writer, next(numbers)))
        tasks.add(task)

    server = await asyncio.start_server(accept, "127.0.0.1", port, **tls)
    one.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
