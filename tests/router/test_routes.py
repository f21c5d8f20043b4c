"""Every kind of request in the table is routed as its entry says, and so is a kind that is added later."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from npu_gr.core.kinds import KINDS, Kind, Routing
from npu_gr.router.routes import METHODS, Handling, route_of
from tests.router.fake import site

HANDLINGS = {
    Routing.SIGNAL: Handling.SIGNAL,
    Routing.FOLLOW: Handling.FOLLOW,
    Routing.ONCE: Handling.ONCE,
    Routing.BY_LOAD: Handling.BY_LOAD,
    Routing.EVERYWHERE: Handling.EVERYWHERE,
}


def target(kind: Kind[Any, Any]) -> str:
    """A path of the kind. The value of its parameter has a slash in it."""
    return re.sub(r"\{\w+\}", "u/1", kind.path)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
async def test_every_kind_is_routed_as_the_table_says(kind: Kind[Any, Any]) -> None:
    assert route_of(kind.method.encode(), target(kind).encode()).handling is HANDLINGS[kind.routing]
    assert kind.method.encode() in METHODS
    other = "GET" if kind.method == "POST" else "POST"
    assert route_of(other.encode(), target(kind).encode()).handling is Handling.UNKNOWN
    async with site(2) as s:
        async with s.http.request(kind.method, s.url + target(kind), headers={"X-User-Id": "u"}) as answer:
            assert answer.status < 300
        seen = [fake.name for fake in s.fakes if fake.seen]
        if kind.routing is Routing.BY_LOAD:
            assert len(seen) == 1
        else:
            assert seen == (["i0", "i1"] if kind.routing is Routing.EVERYWHERE else [s.owner("u").name])
        async with s.http.get(f"{s.admin}/metrics") as answer:
            text = await answer.text()
        label = HANDLINGS[kind.routing].value
        assert re.search(rf'npu_gr_router_requests_total{{kind="{label}",status="\d+"}} 1\.0', text)


def test_the_label_values_are_those_that_dashboards_know() -> None:
    assert {handling.value for handling in Handling} == {"signal", "rank", "user", "erase", "any", "own", "none"}


@pytest.mark.parametrize(
    ("method", "path", "handling"),
    [
        (b"GET", b"/v1/models", Handling.BY_LOAD),
        (b"GET", b"/v1/catalog", Handling.BY_LOAD),
        (b"GET", b"/openapi.json", Handling.BY_LOAD),
        (b"GET", b"/v2", Handling.BY_LOAD),
        (b"GET", b"/v2/health/live", Handling.OWN),
        (b"POST", b"/v2/health/live", Handling.UNKNOWN),
        (b"GET", b"/healthz", Handling.OWN),
        (b"GET", b"/readyz", Handling.OWN),
        (b"GET", b"/readyz/", Handling.UNKNOWN),
        (b"DELETE", b"/v1/users/", Handling.EVERYWHERE),
        (b"DELETE", b"/v1/users", Handling.UNKNOWN),
        (b"POST", b"/v1/rank/", Handling.UNKNOWN),
        (b"GET", b"/metrics", Handling.UNKNOWN),
    ],
)
def test_other_paths(method: bytes, path: bytes, handling: Handling) -> None:
    assert route_of(method, path).handling is handling


_PRETENDED = """
import asyncio
from dataclasses import replace
from npu_gr.core.kinds import RANK, Routing, register

for routing in Routing:
    path = f"/v1/pretended/{routing}"
    register(replace(RANK, name=f"pretended-{routing}", method="PATCH", path=path, routing=routing))
register(replace(RANK, name="pretended", path="/v1/pretended/{user_id}/of"))

from npu_gr.router.routes import route_of
from tests.router.fake import site

async def main():
    async with site() as s:
        await s.post("signal", "someone")
        _, answer, _ = await s.post("pretended/someone/of", "someone")
        print("hit", answer["hit"])
        async with s.http.patch(s.url + "/v1/pretended/once", headers={"X-User-Id": "someone"}) as answer:
            print("patch", answer.status)

for routing in Routing:
    print(routing, route_of(b"PATCH", b"/v1/pretended/" + routing.encode()).handling)
asyncio.run(main())
"""


def test_a_kind_that_is_added_to_the_table_is_routed_by_its_routing() -> None:
    done = subprocess.run([sys.executable, "-c", _PRETENDED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = dict(line.split() for line in done.stdout.splitlines())
    assert told == {**{str(one): str(HANDLINGS[one]) for one in Routing}, "hit": "True", "patch": "200"}
