"""A router over TLS on both sides: clients in front, instances with mutual TLS behind."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import from_table
from npu_gr.router.config import RouterConfig
from npu_gr.router.hop import Hop
from npu_gr.router.instance import Health
from npu_gr.router.run import listening
from tests.certificates import Authority, Pair
from tests.router.fake import Site, site, table


@asynccontextmanager
async def secured(
    authority: Authority, shows: Pair | None, *names: str, num: int = 2, instance: Pair | None = None, **sections: Any
) -> AsyncIterator[Site]:
    """Instances that need a caller's certificate, a router that shows `shows`, and a client that trusts it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own = instance or authority.issue(*(names or ("127.0.0.1",)))
    context.load_cert_chain(own.certificate, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.ca)
    public = authority.issue("127.0.0.1")
    hop: dict[str, Any] = {"ca": str(authority.ca), **sections.pop("instances_tls", {})}
    if shows is not None:
        hop |= {"certificate": str(shows.certificate), "key": str(shows.key)}
    sections["instances_tls"] = hop
    sections["tls"] = {"certificate": str(public.certificate), "key": str(public.key)}
    async with site(num, instances=context, trusts=authority.client(), **sections) as s:
        yield s


async def test_signals_ranks_and_erasures_reach_instances_that_know_the_router(authority: Authority) -> None:
    async with secured(authority, authority.issue("router")) as s:
        assert s.url.startswith("https")
        assert {one.health for one in s.router.members.instances.values()} == {Health.UP}
        assert (await s.post("signal"))[0] == 202
        status, body, _ = await s.post("rank")
        assert (status, body["hit"]) == (200, True)
        async with s.http.delete(f"{s.url}/v1/users/u", headers={"X-User-Id": "u"}) as answer:
            assert answer.status == 204


async def test_a_large_body_and_answers_in_pieces(authority: Authority) -> None:
    async with secured(authority, authority.issue("router")) as s:
        body = b"x" * 3_000_000
        async with s.http.post(f"{s.url}/v1/rank", data=io.BytesIO(body), headers={"X-User-Id": "u"}) as answer:
            assert (await answer.json())["size"] == len(body)
        async with s.http.get(f"{s.url}/v1/catalog") as answer:
            assert await answer.read() == b"one two three"


async def test_an_instance_refuses_a_router_without_a_certificate(authority: Authority) -> None:
    async with secured(authority, None) as s:
        assert all(one.health is not Health.UP for one in s.router.members.instances.values())
        status, _, _ = await s.post("rank")
        assert status >= 500
        async with s.http.delete(f"{s.url}/v1/users/u", headers={"X-User-Id": "u"}) as answer:
            assert answer.status == 503, "they may have the user"
        assert not any(fake.seen for fake in s.fakes)


async def test_an_instance_with_another_name_is_not_asked(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    shows = authority.issue("router")
    async with secured(authority, shows, "npu-gr.example") as s:
        assert all(one.health is not Health.UP for one in s.router.members.instances.values())
        assert (await s.post("rank"))[0] >= 500
        async with s.http.delete(f"{s.url}/v1/users/u", headers={"X-User-Id": "u"}) as answer:
            assert answer.status == 503
            assert "TLS failed" in await answer.text()
        assert not any(fake.seen for fake in s.fakes)
        await s.until(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
        told = [record for record in caplog.records if "TLS failed" in record.getMessage()]
        assert len(told) == 2, "one line for each instance, not one a check"
    async with secured(authority, shows, "npu-gr.example", instances_tls={"server_name": "npu-gr.example"}) as s:
        assert (await s.post("rank"))[0] == 200


async def test_the_clients_certificate_is_followed(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.core.tls.LOOK_S", 0.01)
    shows = authority.issue("router", days=-1)
    async with secured(authority, shows) as s:
        assert all(one.health is not Health.UP for one in s.router.members.instances.values())
        shows.replace_by(authority.issue("router"))
        await s.until(lambda: all(one.health is Health.UP for one in s.router.members.instances.values()))
        assert (await s.post("rank"))[0] == 200
        expires_at = s.router.metrics.registry.get_sample_value(
            "npu_gr_tls_certificate_expires_at_seconds", {"of": "client"}
        )
        assert expires_at is not None
        assert expires_at > 0


async def test_another_router_takes_over_with_a_context_of_its_own(authority: Authority) -> None:
    async with secured(authority, authority.issue("router")) as s:
        assert (await s.post("rank"))[0] == 200
        config = from_table(
            table(
                s.fakes,
                port=s.port,
                admin_port=int(s.admin.rpartition(":")[2]),
                tls=_as_table(s.router.config.tls),
                instances_tls=_as_table(s.router.config.instances_tls),
            ),
            RouterConfig,
        )
        # it shakes hands while the routers change places
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        await s.until(lambda: len(s.router.connections) == 2)
        async with listening(config, takes_over=True) as (new, _, _):
            await s.router.taken_over.wait()
            await writer.start_tls(s.trusts, server_hostname="127.0.0.1")  # type: ignore[arg-type]
            writer.write(b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\nContent-Length: 2\r\n\r\n{}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            assert (await s.post("rank", Connection="close"))[0] == 200
            assert (await s.post("rank"))[0] == 200
            assert len(new.connections) == 1


async def test_silent_connections_count_and_end(authority: Authority) -> None:
    async with secured(authority, authority.issue("router"), limits={"max_connections": 2}, header_timeout_s=0.3) as s:
        silent = [await asyncio.open_connection("127.0.0.1", s.port) for _ in range(3)]
        async with asyncio.timeout(10):
            assert await silent[2][0].read() == b"", "over the limit"
            assert len(s.router.connections) <= 2
            for reader, _ in silent:
                assert await reader.read() == b""
        for _, writer in silent:
            writer.close()
        await s.until(lambda: len(s.router.connections) == 0)
        assert (await s.post("rank"))[0] == 200


async def test_the_admin_address_speaks_tls_unless_it_is_loopback(authority: Authority) -> None:
    async with secured(authority, authority.issue("router")) as s, s.http.get(f"{s.admin}/healthz") as answer:
        assert answer.status == 200
    async with secured(
        authority, authority.issue("router"), admin_host="0.0.0.0", allow_unauthenticated=True, num=1
    ) as s:
        port = int(s.admin.rpartition(":")[2])
        async with s.http.get(f"https://127.0.0.1:{port}/healthz") as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await s.http.get(f"http://127.0.0.1:{port}/healthz")


def test_the_name_that_a_certificate_must_have() -> None:
    one = {"name": "a", "host": "10.0.0.1", "port": 1}

    def name(discovery: dict[str, Any], **tls: str) -> str:
        config = from_table({"discovery": discovery, "instances_tls": tls}, RouterConfig)
        listed = config.discovery.instances or [from_table(one, type(config_of_one.discovery.instances[0]))]
        return str(Hop(config).options(listed[0])["server_hostname"])

    config_of_one = from_table({"discovery": {"instances": [one]}}, RouterConfig)
    assert name({"instances": [one]}) == "10.0.0.1"
    assert name({"instances": [one]}, server_name="npu-gr") == "npu-gr"
    assert name({"dns": {"host": "npu-gr.prod.svc", "port": 1}}) == "npu-gr.prod.svc"
    assert Hop(config_of_one).options(config_of_one.discovery.instances[0]) == {}


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    config = from_table(table([], discovery={"file": "x"}, instances_tls={"ca": str(tmp_path / "none")}), RouterConfig)
    with pytest.raises(ConfigError, match=r"instances_tls: .*none: No such file"):
        Hop(config)


def _as_table(section: Any) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.__struct_fields__}
