"""An instance over TLS reads and follows its certificate.

It asks for its clients', and tells when it expires.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest

from npu_gr.core.errors import ConfigError
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.metrics.registry import Metrics
from npu_gr.server.config import ServerConfig
from npu_gr.server.routes import build_web_app
from npu_gr.server.run import serve
from tests.certificates import Authority, Pair
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds
from tests.serving import until


class Running:
    """A server in this process."""

    def __init__(self, port: int, admin_port: int, pair: Pair, metrics: Metrics) -> None:
        self.port = port
        self.pair = pair
        self.metrics = metrics
        self.url = f"https://127.0.0.1:{port}"
        self.admin_url = f"https://127.0.0.1:{admin_port}"

    def count(self, name: str, **labels: str) -> float | None:
        self.metrics.refresh()
        return self.metrics.registry.get_sample_value(f"npu_gr_{name}", labels)


@asynccontextmanager
async def serving_tls(
    authority: Authority, client_ca: Path | None = None, **settings: Any
) -> AsyncIterator[Running]:
    pair = authority.issue("127.0.0.1")
    tls = ServerTlsConfig(
        certificate=str(pair.certificate),
        key=str(pair.key),
        client_ca=None if client_ca is None else str(client_ca),
    )
    config = ServerConfig(
        port=0, admin_port=0, drain_grace_s=0.01, shutdown_timeout_s=5.0, tls=tls, **settings
    )
    metrics = metrics_of_all_kinds()
    app = build_web_app(
        FakeService({name: one.answer for name, one in EXAMPLES.items()}), config, metrics
    )
    ports = asyncio.get_running_loop().create_future()

    async def on_drain() -> None:
        pass

    serving = asyncio.create_task(
        serve(app, config, on_drain=on_drain, on_listening=lambda *both: ports.set_result(both))
    )
    try:
        await asyncio.wait((serving, ports), return_when=asyncio.FIRST_COMPLETED)
        port, admin_port = await ports
        yield Running(port, admin_port, pair, metrics)
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await serving


async def status(url: str, tls: ssl.SSLContext, path: str = "/healthz") -> int:
    connector = aiohttp.TCPConnector(ssl=tls, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http, http.get(url + path) as answer:
        return answer.status


async def test_the_new_certificate_is_served_without_a_restart(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.core.tls.LOOK_S", 0.01)
    async with serving_tls(authority) as one:
        assert await status(one.url, authority.client()) == 200
        first = one.count("tls_certificate_expires_at_seconds", of="server")
        assert first is not None
        assert 0 < first - time.time() < 2 * 86_400
        connector = aiohttp.TCPConnector(ssl=authority.client())
        async with aiohttp.ClientSession(connector=connector) as http:
            async with http.get(f"{one.url}/healthz") as answer:
                assert answer.status == 200
            one.pair.replace_by(authority.issue("127.0.0.1", days=9))
            await until(
                lambda: (one.count("tls_certificate_expires_at_seconds", of="server") or 0) > first
            )
            assert await status(one.url, authority.client()) == 200
            async with http.get(f"{one.url}/healthz") as answer:
                assert answer.status == 200, "on the old connection"


async def test_a_request_has_its_slot_and_its_answer(authority: Authority) -> None:
    async with serving_tls(authority) as one:
        connector = aiohttp.TCPConnector(ssl=authority.client())
        session = aiohttp.ClientSession(connector=connector)
        async with (
            session as http,
            http.post(f"{one.url}/v1/rank", json=EXAMPLES["rank"].body) as answer,
        ):
            assert answer.status == 200
            assert "scores" in await answer.json()


async def test_who_has_no_certificate_gets_nothing_where_they_are_asked_for(
    authority: Authority,
) -> None:
    async with serving_tls(authority, authority.ca) as one:
        with pytest.raises((aiohttp.ClientError, OSError)):
            await status(one.url, authority.client())
        assert await status(one.url, authority.client(authority.issue("router"))) == 200


async def test_without_tls_there_is_no_gauge_and_a_wrong_file_is_rejected(tmp_path: Path) -> None:
    metrics = metrics_of_all_kinds()
    build_web_app(FakeService({}), ServerConfig(), metrics)
    assert (
        "npu_gr_tls_certificate_expires_at_seconds{"
        not in generate_latest(metrics.registry).decode()
    )
    missing = ServerTlsConfig(certificate=str(tmp_path / "a.crt"), key=str(tmp_path / "a.key"))
    with pytest.raises(ConfigError, match=r"server\.tls: .*a\.crt: No such file"):
        build_web_app(FakeService({}), ServerConfig(tls=missing), metrics_of_all_kinds())
