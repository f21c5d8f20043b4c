"""What the benches of the router and of its picker have in common: an instance that answers at once, and a client."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import numpy as np

INSTANCE = """
import asyncio, sys, uvloop
class Answers(asyncio.Protocol):
    def connection_made(self, transport): self.transport, self.left, self.head = transport, 0, b""
    def data_received(self, data):
        if not self.left:
            self.head += data
            at = self.head.find(b"\\r\\n\\r\\n")
            if at < 0: return
            low = self.head[:at].lower()
            length = int(low.partition(b"content-length:")[2].partition(b"\\r\\n")[0] or 0)
            self.left = length - (len(self.head) - at - 4) or -1
            self.head = b""
            if self.left > 0: return
        else:
            self.left -= len(data)
            if self.left: return
        self.left = 0
        self.transport.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
async def main():
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
uvloop.run(main())
"""


class BenchConnection(asyncio.Protocol):
    """A kept-alive connection to the instance, to the router or to Envoy."""

    def __init__(self) -> None:
        self._done: asyncio.Future[bytes] | None = None
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Complete the request once its whole answer is there."""
        self._answer += data
        if self._done is not None and self._answer.endswith(b"\r\n\r\nok"):
            self._done.set_result(self._answer)
            self._done = None
            self._answer = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request that waits for its answer."""
        if self._done is not None:
            self._done.set_exception(ConnectionResetError("closed in the middle"))

    async def send(self, request: bytes) -> bytes:
        """Send one request and wait for its whole answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


def start(name: str, command: list[str], folder: Path, stack: ExitStack) -> subprocess.Popen[bytes]:
    """Start a process, which ends with the stack; what it says is in `folder/name.log`."""
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def request_of(seed: int, size: int) -> bytes:
    """Make a rank with a body of so many bytes."""
    body = np.random.default_rng(seed).integers(32, 127, size, dtype=np.uint8).tobytes()
    head = b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def connect(port: int, request: bytes) -> BenchConnection:
    """Connect and check the first answer; wait until somebody listens and the router knows that the instance is up."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, connection = await asyncio.get_running_loop().create_connection(BenchConnection, "127.0.0.1", port)
                async with asyncio.timeout(1):
                    answer = await connection.send(request)
                assert answer.startswith(b"HTTP/1.1 200 "), answer
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
            else:
                return connection


def cpu_s(pid: int) -> float:
    """Read the processor time of a process, all of its threads, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
