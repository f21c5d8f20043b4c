"""A rollback serves the models of before the last reload: at once, or again from their files."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from npu_gr.cli.fleet import ROLLBACKS
from npu_gr.core.errors import Unavailable
from npu_gr.core.history import UserKey
from npu_gr.core.memory import HostMemory
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.replay.remote import call_rollback
from npu_gr.vector_search.vectors import save
from tests.server.test_generate_over_http import generate
from tests.service.test_reload import File, Traffic, gone, history
from tests.service.test_reload_actions import write_ranker
from tests.service.test_reload_generator import Generators
from tests.serving import encoded, make_config, serving
from tests.vector_search.vectors import make_vectors

Client = TestClient[Any, Any]
QUICK = {"relay": {"t_life_s": 0.3}}  # the old version ends soon
SLOW = {"relay": {"t_life_s": 60.0}}  # it drains for the whole test


async def change(client: Client, what: str, status: int = 200) -> dict[str, Any]:
    async with client.post(f"/v1/models/{what}") as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


async def served(client: Client) -> list[tuple[str, bool]]:
    models = (await (await client.get("/v1/models")).json())["models"]
    return [(model["version"], model["is_draining"]) for model in models]


async def test_while_it_drains_the_old_version_is_back_at_once(tmp_path: Path) -> None:
    file = File(tmp_path)
    new, old = file.add("new", 2), file.add("old", 1)
    file.use("old", **SLOW)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1, new: 2})
        ranking = service.versions.ranker()
        body = {"user_id": "u1", "history": history(traffic.requests[1])}
        await traffic.post("/v1/signal", body)
        await encoded(ranking.relay)
        file.use("new", **SLOW)
        await change(client, "reload")
        assert (await traffic.rank(0))["model_version"] == new
        stop = asyncio.Event()
        load = [asyncio.create_task(traffic.until(stop, 1000 * n)) for n in range(1, 4)]
        await change(client, "rollback")
        assert await served(client) == [(old, False), (new, True)]
        assert service.versions.ranker() is ranking  # nothing was loaded
        # the prefix that it had encoded is valid still, by the version in its key
        answer = await traffic.rank(1)
        assert (answer["model_version"], answer["outcome"]) == (old, "hbm_hit")
        assert (await traffic.rank(7, new))["model_version"] == new  # the other one drains
        await change(client, "rollback")  # undone
        assert await served(client) == [(new, False), (old, True)]
        await change(client, "rollback")
        stop.set()
        await asyncio.gather(*load)
        # the setting of the file is served again by a reload, once nothing drains
        assert "still drains" in (await change(client, "reload", 503))["detail"]


async def test_the_command_names_what_serves_then(tmp_path: Path) -> None:
    file = File(tmp_path)
    new, old = file.add("new", 2), file.add("old", 1)
    file.use("old", **SLOW)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, _):
        url = str(client.make_url(""))
        with pytest.raises(Unavailable, match=r"answered 422: .*rollback"):
            await call_rollback(url, None, ROLLBACKS["models"])
        file.use("new", **SLOW)
        await change(client, "reload")
        assert list((await call_rollback(url, None, ROLLBACKS["models"])).values()) == [old]
        assert list((await call_rollback(url, None, ROLLBACKS["models"])).values()) == [new]
    with pytest.raises(Unavailable, match="does not answer"):
        await call_rollback(url, None, ROLLBACKS["models"])


async def test_an_erasure_after_a_rollback_overwrites(tmp_path: Path) -> None:
    """The version that came back overwrites pages, also when the newer one has ended."""
    file = File(tmp_path)
    new, old = file.add("new", 2), file.add("old", 1)
    file.use("old", relay={"t_life_s": 2.0})
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1})
        file.use("new", relay={"t_life_s": 2.0})
        await change(client, "reload")
        newer = weakref.ref(service.versions.ranker().engine)
        await change(client, "rollback")
        assert [m["version"] for m in await gone(client)] == [old]
        await asyncio.sleep(0.1)
        gc.collect()
        assert newer() is None, "the newer version is still held"
        relay = service.versions.ranker().relay
        body = {"user_id": "u1", "history": history(traffic.requests[1])}
        await traffic.post("/v1/signal", body)
        await encoded(relay)
        arena = relay.tiers.pool.arena
        everything = [PageRun(0, arena.num_pages)]
        assert any(bool(part.any()) for part in arena.copies(everything))
        async with client.delete("/v1/users/u1") as response:
            assert response.status == 204
        assert not relay.knows(UserKey("", "u1"))
        assert not any(bool(part.any()) for part in arena.copies(everything))
    assert new != old


async def test_a_version_that_has_ended_is_read_again_though_its_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training has replaced the files in their folder, as `npu-gr train all` does."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    file = File(tmp_path)
    new = file.add("new", 2)
    old = file.add("served", 1)
    file.use("served", **QUICK)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1, new: 2})
        for path in (tmp_path / "new").iterdir():
            path.replace(tmp_path / "served" / path.name)
        await change(client, "reload")
        assert [m["version"] for m in await gone(client)] == [new]
        shutil.rmtree(tmp_path / "served")
        await change(client, "rollback")
        assert (await traffic.rank(0))["model_version"] == old
        assert (await served(client))[0] == (old, False)
        await gone(client)
        assert service.parts.settings.config.checkpoint == str(tmp_path / "served")
        await change(client, "rollback")  # and the files of the newer one, too
        assert (await traffic.rank(0))["model_version"] == new
    assert not os.listdir(tmp_path / "scratch")  # the links to them are gone


async def test_files_that_were_overwritten_are_rejected_in_words(tmp_path: Path) -> None:
    file = File(tmp_path)
    new, old = file.add("new", 2), file.add("served", 1)
    file.use("served", **QUICK)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, _):
        detail = (await change(client, "rollback", 422))["detail"]
        assert detail == "rollback: there is no previous version of the models"
        for path in (tmp_path / "new").iterdir():
            (tmp_path / "served" / path.name).write_bytes(path.read_bytes())
        await change(client, "reload")
        await gone(client)
        detail = (await change(client, "rollback", 422))["detail"]
        assert f"version {old}, which served before, were overwritten" in detail
        assert await served(client) == [(new, False)]


async def test_a_generator_goes_back_too(tmp_path: Path) -> None:
    file = Generators(tmp_path)
    file.sections |= QUICK
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        first = await generate(client, num_items=20)
        ranker = service.versions.ranker()
        file.name("other")
        file.sections |= SLOW
        await change(client, "reload")
        second = await generate(client, num_items=20)
        assert second["model_version"] != first["model_version"]
        await change(client, "rollback")
        assert service.versions.ranker() is ranker  # its version was the same
        again = await generate(client, num_items=20)
        assert (again["model_version"], again["items"]) == (first["model_version"], first["items"])
        assert (await generate(client, num_items=20, model_version=second["model_version"]))[
            "items"
        ] == second["items"]


async def test_a_generator_that_has_ended_goes_back_too(tmp_path: Path) -> None:
    file = Generators(tmp_path)
    file.sections |= QUICK
    async with serving(tmp_path, read=file.read, **file.sections) as (client, _):
        first = await generate(client, num_items=20)
        file.name("other")
        file.sections |= QUICK
        await change(client, "reload")
        await gone(client)
        shutil.rmtree(tmp_path / "decoder")
        await change(client, "rollback")
        again = await generate(client, num_items=20)
        assert (again["model_version"], again["items"]) == (first["model_version"], first["items"])
        names = [m["name"] for m in (await (await client.get("/v1/models")).json())["models"]]
        assert "decoder" in names


async def test_events_of_a_new_action_keep_the_version_that_knows_it(tmp_path: Path) -> None:
    fewer = write_ranker(tmp_path / "fewer", 1, "view", "cart")
    more = write_ranker(tmp_path / "more", 2, "view", "cart", "buy")
    use: dict[str, Any] = {"checkpoint": str(tmp_path / "fewer"), **QUICK}
    async with serving(tmp_path, read=lambda: make_config(tmp_path, **use), **use) as (client, _):
        use["checkpoint"] = str(tmp_path / "more")
        await change(client, "reload")
        await gone(client)
        await change(client, "rollback")  # no event has the new action
        assert (await served(client))[0] == (fewer, False)
        await gone(client)
        await change(client, "rollback")
        events = {"items": [1000], "actions": ["buy"], "timestamps": [5]}
        body = {"user_id": "u", "events": events}
        async with client.post("/v1/events", json=body) as response:
            assert response.status == 200
        detail = (await change(client, "rollback", 422))["detail"]
        assert "action 2 is 'buy' there, and here there are only 2" in detail
        assert (await served(client))[0] == (more, False)


async def test_a_model_that_does_not_fit_is_rejected_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Generators(tmp_path)
    new = file.add("new", 2)
    file.name("decoder")
    read: list[Path] = []
    little = HostMemory(10_000, "the limit of its control group")
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        before = await served(client)
        traffic = Traffic(client, {service.versions.ranker().version: 1})
        monkeypatch.setattr("npu_gr.service.memory.free_memory", lambda: little)
        monkeypatch.setattr("npu_gr.service.build.load_checkpoint", read.append)
        # a reload that changes no model needs no memory
        file.sections |= {"slo": {"rank_s": 4.0}}
        await change(client, "reload")
        file.name("other")
        detail = (await change(client, "reload", 422))["detail"]
        assert detail.startswith(f"reload: generate.checkpoint: {tmp_path / 'other'} needs about ")
        file.use("new")
        file.sections |= {"generate": None}
        file.name("decoder")
        file.sections |= {"checkpoint": str(tmp_path / "new")}
        detail = (await change(client, "reload", 422))["detail"]
        assert detail.startswith(f"reload: checkpoint: {tmp_path / 'new'} needs about ")
        assert "but 0.0 MiB are free (the limit of its control group)" in detail
        assert await served(client) == before
        assert not read
        await traffic.rank(0)
        monkeypatch.undo()
        await change(client, "reload")
        assert (await served(client))[0] == (new, False)


async def test_a_catalogue_and_vectors_that_do_not_fit_are_rejected_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Generators(tmp_path)
    save(make_vectors(), tmp_path / "vectors")
    match = {"vectors": str(tmp_path / "vectors")}
    async with serving(tmp_path, read=file.read, match=match, **file.sections) as (client, _):
        for module in ("handlers.served_catalogue", "vector_search.vectors"):
            monkeypatch.setattr(
                f"npu_gr.{module}.free_memory", lambda: HostMemory(9, "the machine")
            )
        for what, path in (("catalog", "items.jsonl"), ("match", "vectors")):
            async with client.post(f"/v1/{what}/reload") as response:
                assert response.status == 422
                detail = (await response.json())["detail"]
                assert f"{tmp_path / path} needs about " in detail
        monkeypatch.undo()
        for what in ("catalog", "match"):
            async with client.post(f"/v1/{what}/reload") as response:
                assert response.status == 200
