"""A user is erased wherever they may have been, and the answer says where not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npu_gr.core.errors import Unavailable
from npu_gr.router.answers import Refused
from npu_gr.router.erase import verdict
from tests.router.fake import Site, site


async def erase(s: Site, path: str = "u", **headers: str) -> tuple[int, dict[str, Any]]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with s.http.delete(f"{s.url}/v1/users/{path}", headers=given) as answer:
        return answer.status, await answer.json(content_type=None) if answer.status != 204 else {}


async def test_every_instance_forgets_the_user_also_one_that_they_left() -> None:
    async with site() as s:
        home = s.owner("u")
        await s.post("signal")
        async with s.http.post(f"{s.admin}/instances/{home.name}/drain"):
            pass
        await s.post("signal")
        assert sum("u" in fake.prefixes for fake in s.fakes) == 2
        assert await erase(s) == (204, {})
        assert not any(fake.prefixes for fake in s.fakes)


async def test_the_router_forgets_where_the_user_was() -> None:
    async def knows(s: Site) -> bool:
        async with s.http.post(f"{s.admin}/user", json={"user_id": "u"}) as answer:
            return bool((await answer.json())["places"]["placements"])

    async with site() as s:
        assert not await knows(s)
        await s.post("signal")
        assert await knows(s)
        await erase(s)
        assert not await knows(s)
        async with s.http.post(f"{s.admin}/user", data=b"[", headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400


async def test_it_arrives_as_it_was_asked() -> None:
    async with site() as s:
        assert (await erase(s, "a%2Fb%20%C3%A9?tenant=t%26x", Authorization="Bearer k", X_Request_Id="i"))[0] == 204
        for fake in s.fakes:
            (request,) = fake.seen
            assert request.raw_path == "/v1/users/a%2Fb%20%C3%A9?tenant=t%26x"
            assert (request.headers["Authorization"], request.headers["X-Request-Id"]) == ("Bearer k", "i")
            assert 0 < float(request.headers["X-Request-Timeout-Ms"]) <= 9000


async def test_who_did_not_erase_is_named_and_asking_again_helps() -> None:
    async with site() as s:
        s.fakes[1].status = 500
        status, answer = await erase(s)
        assert status == 503
        assert answer["detail"] == "not erased at i1 (500); ask again"
        s.fakes[1].status = 200
        s.fakes[1].delay_s = 30.0
        status, answer = await erase(s, X_Request_Timeout_Ms="500")
        assert (status, answer["detail"]) == (503, "not erased at i1 (no answer in time); ask again")
        s.fakes[1].delay_s = 0.0
        assert (await erase(s))[0] == 204


async def test_one_that_is_gone_has_no_memory_and_is_named() -> None:
    async with site() as s:
        await s.fakes[2].stop()
        assert await erase(s) == (200, {"erased": ["i0", "i1"], "pending": [], "unreachable": ["i2"]})
        await s.fakes[0].stop()
        await s.fakes[1].stop()
        assert (await erase(s))[0] == 503


async def test_a_refusal_of_all_is_passed_on() -> None:
    async with site() as s:
        for fake in s.fakes:
            fake.status = 401
        assert (await erase(s))[0] == 401


def test_the_verdict() -> None:
    assert verdict({"a": "204"}, False)[0] == 204
    status, answer = verdict({"a": "204", "b": "202"}, False)
    assert status == 202
    told = {"erased": ["a", "b"], "pending": ["b"], "unreachable": []}
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == told
    assert verdict({"a": "202", "b": "unreachable"}, False)[0] == 200
    assert json.loads(verdict({"a": "204", "b": "unreachable"}, True)[1].partition(b"\r\n\r\n")[2])["erased"] == ["a"]
    for said in (
        {"a": "204", "b": "401"},
        {"a": "401", "b": "422"},
        {"a": "unreachable"},
        {"a": "204", "b": "broke off"},
    ):
        with pytest.raises(Unavailable, match="not erased at"):
            verdict(said, False)
    with pytest.raises(Refused) as refused:
        verdict({"a": "422", "b": "unreachable"}, False)
    assert refused.value.status == 422
