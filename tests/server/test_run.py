"""At SIGTERM a server becomes unready, then refuses connections, then ends.

Requests in flight are answered.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import aiohttp
import pytest

from npu_gr.server import run
from npu_gr.server.config import ServerConfig
from npu_gr.server.routes import build_web_app
from npu_gr.server.run import serve
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds


async def test_a_request_in_flight_outlives_the_listener() -> None:
    came = asyncio.Event()
    go = asyncio.Event()
    drained = asyncio.Event()
    ports = asyncio.get_running_loop().create_future()

    def on_listening(port: int, admin_port: int) -> None:
        ports.set_result((port, admin_port))

    async def on_drain() -> None:
        drained.set()

    class Held(FakeService):
        async def reload_models(self) -> list[Any]:
            came.set()
            await go.wait()
            return self.models()

    service = Held({name: example.answer for name, example in EXAMPLES.items()})
    config = ServerConfig(port=0, admin_port=0, drain_grace_s=0.05, shutdown_timeout_s=60.0)
    app = build_web_app(service, config, metrics_of_all_kinds())
    serving = asyncio.create_task(serve(app, config, on_drain=on_drain, on_listening=on_listening))
    port, admin_port = await ports
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        asked = asyncio.create_task(http.post(f"http://127.0.0.1:{admin_port}/v1/models/reload"))
        await came.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await drained.wait()
        while await listens(port) or await listens(admin_port):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not asked.done()
        go.set()
        async with await asked as answer:
            assert answer.status == 200
            assert (await answer.json())["models"]
        await serving


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_it_ends_by_itself_once_something_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look alone may come right after a standstill of the whole process."""
    monkeypatch.setattr(run, "LOOK_S", 0.01)
    looks = iter(["device_0 hangs", "", "device_0 hangs", "device_0 hangs still", "later"])
    drained: list[str] = []

    async def on_drain() -> None:
        drained.append("drained")

    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    config = ServerConfig(port=0, admin_port=0, drain_grace_s=0.0, shutdown_timeout_s=1.0)
    app = build_web_app(service, config, metrics_of_all_kinds())
    dead = await serve(app, config, on_drain=on_drain, why_dead=lambda: next(looks))
    assert dead == "device_0 hangs still"
    assert drained == ["drained"]
    assert [*looks] == ["later"]
