"""`npu-gr fleet` reaches every instance, or says which it did not reach."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from npu_gr.core.errors import Unavailable
from npu_gr.core.settings import from_table
from npu_gr.route import fan_out
from npu_gr.route.config import RouterConfig
from npu_gr.route.fan_out import Answered, Change, combined_answer
from npu_gr.route.process import routing
from tests.history_store.redis_server import redis_path
from tests.route.fake import Fake, table_of
from tests.server.test_deltas_over_http import Stream, post, rows_of, served
from tests.serving import serving

DELETE = Change("DELETE", "/v1/users/u", {})
RELOAD = Change("POST", "/v1/catalog/reload", {})


async def ran(folder: Path, fakes: list[Fake], *arguments: str) -> tuple[int, str]:
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(table_of(fakes)))
    command = ("-m", "npu_gr", "fleet", *arguments, "--config", str(path), "--api-key", "k" * 32)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_a_command_reaches_every_instance(tmp_path: Path) -> None:
    fakes = [Fake("i0"), Fake("i1")]
    for fake in fakes:
        await fake.start()
    (tmp_path / "items.json").write_bytes(b'{"items": []}')
    try:
        for arguments, method, path, body in (
            (
                ("erase", "a/b.c", "--tenant", "t 1"),
                "DELETE",
                "/v1/users/a%2Fb%2Ec?tenant=t+1",
                b"",
            ),
            (
                ("items", str(tmp_path / "items.json")),
                "POST",
                "/v1/catalog/items",
                b'{"items": []}',
            ),
            (("reload", "models"), "POST", "/v1/models/reload", b""),
            (("rollback", "match"), "POST", "/v1/match/rollback", b""),
            (("rollback", "models"), "POST", "/v1/models/rollback", b""),
        ):
            code, output = await ran(tmp_path, fakes, *arguments)
            assert code == 0, output
            for fake in fakes:
                seen = fake.seen[-1]
                assert (seen.method, seen.raw_path, fake.bodies[-1]) == (method, path, body)
                assert seen.headers["Authorization"] == f"Bearer {'k' * 32}"
    finally:
        for fake in fakes:
            await fake.stop()


async def test_who_has_not_done_it_is_named_after_some_tries(tmp_path: Path) -> None:
    fakes = [Fake("i0"), Fake("i1"), Fake("i2")]
    for fake in fakes[:2]:
        await fake.start()
    fakes[1].status = 500
    try:
        code, output = await ran(tmp_path, fakes, "reload", "catalog")
        assert code == 1
        assert "not done at i1, i2; repeat the command" in output
        assert [fake.asked("/v1/catalog/reload") for fake in fakes] == [1, fan_out.TRIES, 0]
    finally:
        for fake in fakes:
            await fake.stop()


async def test_a_reload_may_take_longer_than_a_request(tmp_path: Path) -> None:
    """A model takes a minute to load, and a client that gives up cancels the reload."""
    fake = Fake("i0")
    fake.delay_s = 1.0
    await fake.start()
    try:
        quick = ("--set", "max_budget_s=0.6")
        code, output = await ran(tmp_path, [fake], "reload", "models", *quick)
        assert code == 0, output
        assert fake.asked("/v1/models/reload") == 1
        code, output = await ran(tmp_path, [fake], "erase", "u", *quick)
        assert code == 1
        assert "no answer within 0.2 s" in output
    finally:
        await fake.stop()


async def test_a_rollback_that_may_have_been_done_is_not_repeated(tmp_path: Path) -> None:
    """A second one would undo the first."""
    fakes = [Fake("i0"), Fake("i1")]
    for fake in fakes:
        await fake.start()
    fakes[1].status = 500
    try:
        code, output = await ran(tmp_path, fakes, "rollback", "models")
        assert code == 1
        assert "not done at i1; call those instances themselves" in output
        assert [fake.asked("/v1/models/rollback") for fake in fakes] == [1, 1]
    finally:
        for fake in fakes:
            await fake.stop()


@pytest.mark.parametrize("log", ["own", "folder", "stream"])
async def test_a_delta_is_taken_by_every_instance(log: str, tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    one, two, three = [await stream.next(rows_of("item.weight", row)) for row in (1, 2, 3)]
    clients = []
    async with AsyncExitStack() as stack:
        shared: dict[str, str] = {}
        if log == "stream":
            shared = {"deltas_stream": f"unix://{stack.enter_context(redis_path(tmp_path))}"}
        for name in ("i0", "i1", "i2"):
            folder = tmp_path / ("all" if log == "folder" else name)
            sections: dict[str, Any] = {
                "models": {"deltas_from": str(folder), **shared},
                "history_store": {"path": str(tmp_path / f"{name}.db")},
            }
            client, _ = await stack.enter_async_context(
                serving(tmp_path, watched=False, **sections)
            )
            clients.append(client)
        fakes = [Fake(f"i{n}") for n in range(3)]
        for fake, client in zip(fakes, clients, strict=True):
            fake.port = client.port or 0
        table = table_of(fakes)
        await stack.enter_async_context(routing(lambda: from_table(table, RouterConfig)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{table['admin_port']}/v1/models/delta"
        headers = {"Content-Type": "application/octet-stream"}
        await post(clients[1], one)  # and the router brings the others to it
        for number, file in ((1, one), (2, two), (2, two)):
            async with http.post(url, data=file.read_bytes(), headers=headers) as answer:
                found = await answer.json()
                assert answer.status == 200, found
            numbers = {name: body["models"][0]["delta"]["sequence"] for name, body in found.items()}
            assert numbers == dict.fromkeys(("i0", "i1", "i2"), number)
            assert [await served(client) for client in clients] == [number] * 3
        torn = three.read_bytes()[:-5]
        async with http.post(url, data=torn, headers=headers) as answer:
            assert answer.status == 422
            assert "is torn, or no delta" in (await answer.json())["detail"]


@pytest.mark.parametrize(
    ("change", "answers", "status", "body"),
    [
        (DELETE, {"a": (204, ""), "b": (204, "")}, 204, None),
        (
            DELETE,
            {"a": (204, ""), "b": (202, '{"pending":["x"],"where":{"x":"until then"}}')},
            202,
            b'{"erased":["a","b"],"pending":["b"],"unreachable":[],"where":{"x":"until then"}}',
        ),
        (
            DELETE,
            {"a": (204, ""), "b": (0, fan_out.UNREACHABLE)},
            200,
            b'{"erased":["a"],"pending":[],"unreachable":["b"],"where":{}}',
        ),
        (
            RELOAD,
            {"a": (200, '{"version":1}'), "b": (200, "no JSON")},
            200,
            b'{"a":{"version":1},"b":"no JSON"}',
        ),
        (DELETE, {"a": (403, ""), "b": (403, "")}, 403, None),
    ],
)
def test_the_verdict(
    change: Change, answers: dict[str, tuple[int, str]], status: int, body: bytes | None
) -> None:
    response = combined_answer(change, {name: Answered(*one) for name, one in answers.items()})
    assert isinstance(response, web.Response)
    assert response.status == status
    if body is not None:
        assert response.body == body


@pytest.mark.parametrize(
    ("change", "answers", "named"),
    [
        (DELETE, {"a": (204, ""), "b": (500, "")}, r"b \(500\)"),
        (DELETE, {"a": (204, ""), "b": (0, "no answer in time")}, r"b \(no answer in time\)"),
        (DELETE, {"a": (0, fan_out.UNREACHABLE)}, r"a \(unreachable\)"),
        (DELETE, {"a": (204, ""), "b": (403, "")}, r"b \(403\)"),
        (
            RELOAD,
            {"a": (200, ""), "b": (0, fan_out.UNREACHABLE)},
            r"b \(unreachable\)",
        ),
        (DELETE, {}, "any instance"),
    ],
)
def test_not_done(change: Change, answers: dict[str, tuple[int, str]], named: str) -> None:
    with pytest.raises(Unavailable, match=f"not done at {named}"):
        combined_answer(change, {name: Answered(*one) for name, one in answers.items()})
