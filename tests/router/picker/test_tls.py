"""Gateways that speak TLS to their picker, as the inference extension's own picker serves it, are answered."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import grpc
import pytest

from tests.certificates import Authority, Pair
from tests.router.picker.asked import asked, choice, headers


def files(pair: Pair) -> dict[str, str]:
    return {"certificate": str(pair.certificate), "key": str(pair.key)}


async def test_the_picker_has_a_certificate_of_its_own_in_front_of_a_router_in_clear(authority: Authority) -> None:
    pair = authority.issue("127.0.0.1")
    trusted = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with asked(trusted, picker={"tls": files(pair)}) as a:
        (one,) = await a.process([headers({"x-user-id": "u"})])
        assert choice(one).startswith(f"127.0.0.1:{a.site.owner('u').port},")
        assert (await a.site.post("rank"))[0] == 200, "the router itself is still asked in clear"
        async with a.site.http.get(f"{a.site.admin}/metrics") as answer:
            assert 'npu_gr_tls_certificate_expires_at_seconds{of="picker"}' in await answer.text()
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        unverified.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection("127.0.0.1", a.port, ssl=unverified)
        about: Any = writer.get_extra_info("ssl_object")
        assert about.selected_alpn_protocol() == "h2"
        writer.close()


async def test_without_its_own_the_picker_has_the_routers_certificate(authority: Authority) -> None:
    pair = authority.issue("127.0.0.1")
    async with asked(
        grpc.ssl_channel_credentials(authority.ca.read_bytes()), tls=files(pair), trusts=authority.client()
    ) as a:
        choice((await a.process([headers({"x-user-id": "u"})]))[0])


@pytest.mark.parametrize("given", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_in_clear_it_says_nothing(authority: Authority, given: bytes) -> None:
    async with asked(picker={"tls": files(authority.issue("127.0.0.1"))}) as a:
        reader, writer = await asyncio.open_connection("127.0.0.1", a.port)
        writer.write(given or b"\0")
        writer.write_eof()
        async with asyncio.timeout(10):
            assert b"\0\0" not in await reader.read(), "no frame"
        writer.close()
