"""An HTTP server with fixed answers: the n-th request gets the n-th answer, in turn."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
ANSWERS = {
    "ok": OK,
    "refuse": b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 30\r\nContent-Length: 0\r\n\r\n",
    "fail": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: "
    b"close\r\n\r\ndown",
    "expired": b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\n\r\n",
    "strange": b"HTTP/1.1 200 OK\r\n\r\n",  # no length: the client cannot know where it ends
}


class Stub:
    """What it does, and what it was asked.

    `drop` closes in the middle of an answer, `hang` never answers.
    """

    def __init__(self, answers: list[str], delay_s: float = 0.0) -> None:
        self.answers = answers
        self.delay_s = delay_s
        self.asked = Counter[str]()
        self.bodies = list[bytes]()
        self.heads = list[bytes]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                does = self.answers[(len(self.bodies) - 1) % len(self.answers)]
                self.asked[does] += 1
                await asyncio.sleep(self.delay_s)
                match does:
                    case "hang":
                        await reader.read()
                        return
                    case "drop":
                        writer.write(OK[:-1])
                        await writer.drain()
                        return
                    case "pieces":
                        for byte in OK:
                            writer.write(bytes([byte]))
                            await asyncio.sleep(0)
                    case _:
                        writer.write(ANSWERS[does])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client closed
        finally:
            writer.close()


@contextmanager
def stub(*answers: str, delay_s: float = 0.0) -> Iterator[tuple[int, Stub]]:
    """Serve in a thread; yields the port and the stub."""
    made = Stub(list(answers), delay_s)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(made.serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield cast(int, server.sockets[0].getsockname()[1]), made
    finally:

        async def close() -> None:
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # transports say goodbye

        asyncio.run_coroutine_threadsafe(close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def main() -> None:
    """Answer everything at once, on a port of its own that it prints."""
    server = await asyncio.start_server(Stub(["ok"]).serve, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
