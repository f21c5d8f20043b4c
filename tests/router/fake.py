"""Fake instances that do what a test tells them, and a router in front of them, all on one event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from npu_gr.core.settings import from_table
from npu_gr.router.config import RouterConfig
from npu_gr.router.router import Router
from npu_gr.router.run import listening


class Fake:
    """A fake instance: it answers signals and ranks, and remembers the users whose prefix it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.ready_status = 200
        self.status = 200
        self.delay_s = 0.0
        self.is_draining = False  # its 503 says that it has begun nothing
        self.cuts = False  # breaks off instead of answering
        self.prefixes: set[str] = set()
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self.num_checks = 0
        self._runner: web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/readyz", self._ready)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _ready(self, _: web.Request) -> web.Response:
        self.num_checks += 1
        return web.Response(status=self.ready_status)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        body = await request.read()
        self.bodies.append(body)
        user = request.headers.get("X-User-Id", "")
        status, is_signal = self.status, request.path == "/v1/signal"
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.cuts:
            assert request.transport is not None
            request.transport.abort()
        if status != 200:
            return web.Response(status=status, headers={"X-NpuGr-Not-Taken": "1"} if self.is_draining else {})
        if request.method == "DELETE":
            self.prefixes.discard(request.path.removeprefix("/v1/users/"))
            return web.Response(status=204)
        if is_signal:
            self.prefixes.add(user)
        if request.path == "/v1/catalog":
            response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            for part in (b"one ", b"two ", b"three"):
                await response.write(part)
            return response
        answer = {"instance": self.name, "hit": user in self.prefixes, "size": len(body)}
        return web.json_response(answer, status=202 if is_signal else 200)


class Site:
    """Fake instances, the router in front of them, and an HTTP client."""

    def __init__(
        self,
        fakes: list[Fake],
        router: Router,
        port: int,
        admin: str,
        http: aiohttp.ClientSession,
        trusts: ssl.SSLContext | None,
    ) -> None:
        self.fakes = fakes
        self.router = router
        self.port = port
        self.admin = admin
        self.http = http
        self.trusts = trusts
        self.url = f"{'http' if trusts is None else 'https'}://127.0.0.1:{port}"

    async def post(self, path: str, user: str | None = "u", **headers: str) -> tuple[int, dict[str, Any], Any]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if user is not None:
            given["X-User-Id"] = user
        async with self.http.post(f"{self.url}/v1/{path}", data=b'{"a": 1}', headers=given) as answer:
            body = await answer.json(content_type=None) if answer.status < 500 else None
            return answer.status, body or {}, answer.headers

    def owner(self, user: str) -> Fake:
        name = self.router.members.ring.owner(user.encode())
        return next(fake for fake in self.fakes if fake.name == name)

    def user_of(self, fake: Fake, start: int = 0) -> str:
        return next(user for i in range(start, start + 1000) if self.owner(user := f"u{i}") is fake)

    async def until(self, claim: Any, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not claim():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def table(fakes: list[Fake], **sections: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "port": 0,
        "admin_port": 0,
        "discovery": {"instances": [{"name": f.name, "host": "127.0.0.1", "port": f.port} for f in fakes]},
        "health": {"interval_s": 0.05, "timeout_s": 10.0},
        "default_budget_s": 10.0,
        "breaker": {"return_s": 0.3, "open_s": 0.3},
        "shutdown_timeout_s": 1.0,
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section} if isinstance(section, dict) else section
    return settings


@asynccontextmanager
async def site(
    num: int = 3, instances: ssl.SSLContext | None = None, trusts: ssl.SSLContext | None = None, **sections: Any
) -> AsyncIterator[Site]:
    """Fakes behind a router.

    Args:
        num: of fakes.
        instances: what the fakes listen with; None = in clear.
        trusts: of the client of a router with a section `tls`.
        sections: of the router's configuration.
    """
    async with AsyncExitStack() as stack:
        fakes = [Fake(f"i{i}") for i in range(num)]
        for fake in fakes:
            await fake.start(instances)
            stack.push_async_callback(fake.stop)
        config = from_table(table(fakes, **sections), RouterConfig)
        router, port, admin_port = await stack.enter_async_context(listening(config))
        connector = aiohttp.TCPConnector(ssl=trusts or True)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Site(fakes, router, port, f"http://127.0.0.1:{admin_port}", http, trusts)
