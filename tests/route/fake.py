"""Fake instances that a test commands, behind the real HAProxy as `npu-gr route` runs it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from npu_gr.core.settings import from_table
from npu_gr.route.config import RouterConfig
from npu_gr.route.process import Proxy, Route, routing
from tests.ports import free_port


class Fake:
    """A fake instance: it answers signals and ranks, and remembers whose prefix it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.ready_status = 200
        self.status = 200
        self.delay_s = 0.0
        self.cuts = False  # breaks off instead of answering
        self.prefixes: set[str] = set()
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.agent = "ready"  # what it tells HAProxy's agent-check
        self.agent_port = 0
        self.num_inside = 0
        self.most_inside = 0
        self._runner: web.AppRunner | None = None
        self._agent: asyncio.Server | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/readyz", self._ready)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls).start()

    async def tell(self) -> None:
        """Answer HAProxy's agent-check, as an instance with `server.agent_port` does."""

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(f"{self.agent}\n".encode())
            await writer.drain()
            writer.close()

        self._agent = await asyncio.start_server(answer, "127.0.0.1", 0)
        self.agent_port = self._agent.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def asked(self, path: str = "/v1/rank") -> int:
        return sum(request.path == path for request in self.seen)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=self.ready_status)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            body = await request.read()
            self.bodies.append(body)
            await asyncio.sleep(self.delay_s)
        finally:
            self.num_inside -= 1
        if self.cuts:
            assert request.transport is not None
            request.transport.abort()
        headers = {"X-NpuGr-Instance": "a-liar", "X-NpuGr-Placement": "a-liar"}
        if self.status != 200:
            return web.Response(status=self.status, headers=headers)
        user = request.headers.get("X-User-Id", "")
        if request.method == "DELETE":
            self.prefixes.discard(request.path.removeprefix("/v1/users/"))
            return web.Response(status=204)
        is_signal = request.path == "/v1/signal"
        if is_signal:
            self.prefixes.add(user)
        answer = {"instance": self.name, "hit": user in self.prefixes, "size": len(body)}
        return web.json_response(answer, status=202 if is_signal else 200, headers=headers)


class Site:
    """Fake instances, the router in front of them, and an HTTP client."""

    def __init__(
        self, fakes: list[Fake], table: dict[str, Any], trusts: ssl.SSLContext | None
    ) -> None:
        self.fakes = fakes
        self.table = table
        self.trusts = trusts
        scheme = "http" if trusts is None else "https"
        self.url = f"{scheme}://127.0.0.1:{table['port']}"
        self.admin = f"http://127.0.0.1:{table['admin_port']}"
        self.http: aiohttp.ClientSession
        self.route: Route
        self.proxy: Proxy

    def read(self) -> RouterConfig:
        return from_table(self.table, RouterConfig)

    async def post(
        self, path: str, user: str | None = "u", **headers: str
    ) -> tuple[int, dict[str, Any], Any]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if user is not None:
            given["X-User-Id"] = user
        async with self.http.post(
            f"{self.url}/v1/{path}", data=b'{"a": 1}', headers=given
        ) as answer:
            body = await answer.json(content_type=None) if answer.status < 500 else None
            return answer.status, body or {}, answer.headers

    async def home(self, user: str) -> Fake:
        """The instance that a signal of the user goes to."""
        status, body, _ = await self.post("signal", user)
        assert status == 202, status
        return next(fake for fake in self.fakes if fake.name == body["instance"])

    async def user_of(self, fake: Fake) -> str:
        for i in range(200):
            if await self.home(f"u{i}") is fake:
                return f"u{i}"
        raise AssertionError(f"nobody lives at {fake.name}")

    def rows(self) -> list[dict[str, Any]]:
        return [row(fake) for fake in self.fakes]

    async def statuses(self, proxy: str = "users", column: str = "status") -> dict[str, str]:
        """A column of HAProxy's statistics by instance; `status` is UP, DOWN or DRAIN, and more."""
        lines = (await self.proxy.command("show stat")).splitlines()
        names = lines[0].lstrip("# ").split(",")
        rows = [dict(zip(names, line.split(","), strict=False)) for line in lines[1:] if line]
        servers = [
            one
            for one in rows
            if one["pxname"] == proxy and one["svname"] not in ("BACKEND", "FRONTEND")
        ]
        return {one["svname"]: one[column] for one in servers}

    async def until_up(self, *fakes: Fake) -> None:
        async def are_up() -> bool:
            statuses = await self.statuses()
            return all(statuses.get(fake.name, "").startswith("UP") for fake in fakes)

        await until(are_up)


def row(fake: Fake) -> dict[str, Any]:
    own = {"name": fake.name, "host": "127.0.0.1", "port": fake.port, "admin_port": fake.port}
    return own | {"agent_port": fake.agent_port}


async def until(claim: Callable[[], Any], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await claim():  # noqa: ASYNC110  (HAProxy has no event for it)
            await asyncio.sleep(0.02)


def table_of(fakes: list[Fake], **sections: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "port": free_port(),
        "admin_port": free_port(),
        "objective_s": 1.0,  # patient: the machine may be busy
        "discovery": {"instances": [row(fake) for fake in fakes], "period_s": 0.1},
        "health": {"interval_s": 0.1, "timeout_s": 5.0, "slow_start_s": 0.0},
        "shutdown_timeout_s": 1.0,
    }
    for name, section in sections.items():
        settings[name] = (
            {**settings.get(name, {}), **section} if isinstance(section, dict) else section
        )
    return settings


@asynccontextmanager
async def site(
    num: int = 3,
    instances: ssl.SSLContext | None = None,
    trusts: ssl.SSLContext | None = None,
    has_agent: bool = False,
    **sections: Any,
) -> AsyncIterator[Site]:
    """Fakes behind a router.

    Args:
        num: of fakes.
        instances: what the fakes listen with; None = in clear.
        trusts: of the client of a router with a section `tls`.
        has_agent: the fakes tell HAProxy how much they take.
        sections: of the router's configuration.
    """
    async with AsyncExitStack() as stack:
        fakes = [Fake(f"i{i}") for i in range(num)]
        for fake in fakes:
            stack.push_async_callback(fake.stop)
            await fake.start(instances)
            if has_agent:
                await fake.tell()
        s = Site(fakes, table_of(fakes, **sections), trusts)
        s.route, s.proxy = await stack.enter_async_context(routing(s.read))
        connector = aiohttp.TCPConnector(ssl=trusts or True, limit=0)
        s.http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield s
