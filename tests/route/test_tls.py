"""A router over TLS on both sides: clients in front, instances with mutual TLS behind."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from tests.certificates import Authority, Pair
from tests.route.fake import Site, site, until


def listening(authority: Authority, *names: str) -> ssl.SSLContext:
    """What instances listen with: they need a caller's certificate."""
    own = authority.issue(*names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.ca)
    return context


def sections(
    authority: Authority, public: Pair, shows: Pair | None, name: str = "npu-gr"
) -> dict[str, Any]:
    hop = {"ca": str(authority.ca), "server_name": name}
    if shows is not None:
        hop |= {"certificate": str(shows.certificate), "key": str(shows.key)}
    return {
        "instances_tls": hop,
        "tls": {"certificate": str(public.certificate), "key": str(public.key)},
    }


async def test_signals_ranks_and_erasures_reach_instances_that_know_the_router(
    authority: Authority,
) -> None:
    given = sections(authority, authority.issue("127.0.0.1"), authority.issue("router"))
    async with site(2, listening(authority, "npu-gr"), authority.client(), **given) as s:
        await s.until_up(*s.fakes)
        home = await s.home("u")
        status, body, _ = await s.post("rank")
        assert (status, body["instance"], body["hit"]) == (200, home.name, True)
        async with s.http.delete(f"{s.url}/v1/users/u") as answer:
            assert answer.status == 204


async def test_an_instance_with_another_name_or_that_does_not_know_the_router_gets_nothing(
    authority: Authority,
) -> None:
    public = authority.issue("127.0.0.1")
    for name, shows in (("npu-gr", authority.issue("router")), ("other", None)):
        given = sections(authority, public, shows)
        async with site(
            1, listening(authority, "other" if shows else "npu-gr"), authority.client(), **given
        ) as s:

            async def is_down(s: Site = s) -> bool:
                return (await s.statuses())["i0"].startswith("DOWN")

            await until(is_down)
            assert (await s.post("rank"))[0] == 503, name
            assert not s.fakes[0].seen


async def test_a_new_certificate_is_in_force_without_a_restart(authority: Authority) -> None:
    public, renewed = authority.issue("127.0.0.1"), authority.issue("127.0.0.1", "renewed.example")
    given = sections(authority, public, authority.issue("router"))
    async with site(1, listening(authority, "npu-gr"), authority.client(), **given) as s:
        await s.until_up(*s.fakes)
        public.replace_by(renewed)
        await s.route.look()

        async def is_new() -> bool:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", s.table["port"], ssl=authority.client()
            )
            shown = writer.get_extra_info("peercert")
            writer.close()
            return ("DNS", "renewed.example") in set(shown["subjectAltName"])

        await until(is_new)
        assert (await s.post("rank"))[0] == 200
