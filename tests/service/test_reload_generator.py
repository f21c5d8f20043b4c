"""A generator replaced under load: no request fails, and answers match the version they name."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.catalogue.change_log import ChangeLog, Changes, read_log
from npu_gr.core.served import CatalogueChange
from npu_gr.service.config import Config
from tests.decoders import VARIANTS, saved
from tests.engine.kv_cache.invariants import check_pool
from tests.server.test_generate_over_http import HISTORY, Client, generate, section, write_catalogue
from tests.service.test_reload import File, gone
from tests.serving import make_config, serving


class Generators(File):
    """A configuration file that names one of several generators, and ranks too."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.add("ranker", 1)
        for name, seed in (("decoder", 0), ("other", 1)):
            (folder / name).mkdir()
            saved(folder / name, seed=seed, **VARIANTS["qwen3 g2 tied"])
        self.name("decoder")

    def name(self, decoder: str, **changes: Any) -> None:
        generator = section(self.folder, checkpoint=str(self.folder / decoder), **changes)
        self.use("ranker", generate=generator)

    def read(self) -> Config:
        return make_config(self.folder, **self.sections)


async def reload(client: Client, status: int = 200) -> dict[str, Any]:
    async with client.post("/v1/models/reload") as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


async def test_no_generate_fails_and_every_answer_is_of_the_version_it_names(
    tmp_path: Path,
) -> None:
    file = Generators(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        old = await generate(client, num_items=20)
        want = {old["model_version"]: old["items"]}
        seen, stop, engine = (
            list[str](),
            asyncio.Event(),
            weakref.ref(service.versions.generator().engine),
        )

        async def ask(number: int) -> None:
            while not stop.is_set():
                signal = {"user_id": f"u{number}", "history": HISTORY}
                async with client.post("/v1/signal", json=signal) as response:
                    assert response.status == 202
                answer = await generate(client, num_items=20, user_id=f"u{number}")
                assert answer["items"] == want.setdefault(answer["model_version"], answer["items"])
                seen.append(answer["model_version"])

        bandwidth = service.versions.generator().engine.copy_bytes_per_s
        assert bandwidth < float("inf")  # measured: a reload from DRAM must beat encoding again
        asking = [asyncio.create_task(ask(number)) for number in range(3)]
        await asyncio.sleep(0.1)
        ranker = service.versions.ranker()
        file.name("other")
        models = (await reload(client))["models"]
        assert [model["is_draining"] for model in models] == [False, False, True]
        assert service.versions.ranker() is ranker
        assert service.versions.generator().engine.copy_bytes_per_s == bandwidth
        named = await generate(client, num_items=20, model_version=old["model_version"])
        assert named["items"] == old["items"]
        assert [model["version"] for model in await gone(client)] == [
            ranker.version,
            service.versions.generator().version,
        ]
        stop.set()
        await asyncio.gather(*asking)
        assert set(seen) == {old["model_version"], service.versions.generator().version}
        assert len(set(map(tuple, want.values()))) == 2
        rejected = await generate(client, status=404, model_version=old["model_version"])
        assert old["model_version"] in rejected["detail"]
        hit = await generate(client, num_items=20)
        assert hit["items"] == want[service.versions.generator().version]
        await service.versions.generator().relay.settled()
        pool = service.versions.generator().relay.tiers[0]
        check_pool(pool)
        assert pool.reserved_bytes == 0
        del asking
        gc.collect()
        assert engine() is None, "the old version is still held by somebody"


async def test_new_weights_keep_what_was_changed_in_the_catalogue_and_another_file_is_read(
    tmp_path: Path,
) -> None:
    file = Generators(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        best = (await generate(client, num_items=5))["items"][0]
        async with client.post("/v1/catalog/items", json={"withdraw": [best]}) as response:
            assert response.status == 200
        file.name("other")
        await reload(client)
        items = service.versions.generator().items
        async with client.get("/v1/catalog") as response:
            assert (await response.json())["num_items"] == 199
        await gone(client)
        write_catalogue(tmp_path / "few.jsonl", num_items=50)
        file.name("other", catalogue=str(tmp_path / "few.jsonl"), beam_width=64)
        await reload(client)
        assert service.versions.generator().items is not items
        async with client.get("/v1/catalog") as response:
            assert (await response.json())["num_items"] == 50
        assert max((await generate(client, num_items=20))["items"]) < 50


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hbm_bytes": 5_000_000}, "generate.hbm_bytes"),
        ({"filter_cache_bytes": 5}, "generate.filter_cache_bytes"),
        ({"codes": [8, 8], "first_token": 0}, "generate.codes"),
        ({"catalogue": "nowhere.jsonl"}, "generate.catalogue: nowhere.jsonl"),
        ({"checkpoint": "nowhere"}, "nowhere"),
        (None, "generate: cannot be"),
    ],
)
async def test_what_cannot_be_served_changes_nothing(
    tmp_path: Path, changes: dict[str, Any] | None, word: str
) -> None:
    """Not the ranker either, whose new version was ready."""
    file = Generators(tmp_path)
    file.add("better ranker", 2)
    file.use("ranker", generate=section(tmp_path))
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        ranker, generator, erased = (
            service.versions.ranker(),
            service.versions.generator(),
            service.versions.ranker().relay.tiers[0].on_erased,
        )
        file.use(
            "better ranker",
            **({} if changes is None else {"generate": section(tmp_path, **changes)}),
        )
        assert word in (await reload(client, status=422))["detail"]
        assert (service.versions.ranker(), service.versions.generator()) == (ranker, generator)
        assert service.versions.ranker().relay.tiers[0].on_erased is erased
        assert not service.versions.is_draining
        file.use("better ranker", generate=section(tmp_path))
        await reload(client)
        assert service.versions.ranker() is not ranker
        assert service.versions.generator() is generator


async def test_no_item_comes_back_on_sale_with_another_site(tmp_path: Path) -> None:
    file = Generators(tmp_path)

    async def change(client: Client, **body: Any) -> None:
        async with client.post("/v1/catalog/items", json=body) as response:
            assert response.status == 200

    async def serve(client: Client, name: str) -> None:
        await gone(client)
        file.name("decoder", catalogue=str(tmp_path / name), beam_width=64)
        await reload(client)

    async def withdrawn(name: str) -> set[int]:
        found = await asyncio.to_thread(read_log, tmp_path / f"{name}.changes")
        return set() if found is None else {*found.changes.withdrawn, *found.changes.removed}

    for name in ("empty.jsonl", "two.jsonl"):
        write_catalogue(tmp_path / name, num_items=50)
    own = ChangeLog(tmp_path / "two.jsonl.changes")  # of an instance that has ended
    gone_there = CatalogueChange(withdraw=np.array([3, 4]))
    own.append(gone_there, Changes().then(gone_there))
    own.close()
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        await change(client, withdraw=[7])
        await serve(client, "empty.jsonl")
        assert service.versions.generator().items.changes.withdrawn == {7}
        assert await withdrawn("empty.jsonl") == {7}  # also after a restart with this site
        await serve(client, "two.jsonl")
        assert await withdrawn("two.jsonl") == {3, 4, 7}
        answer = await generate(client, num_items=50)
        assert not {3, 4, 7} & {*answer["items"]}
        # a log that this instance has left brings nothing back that it has restored since
        await serve(client, "empty.jsonl")
        await change(client, restore=[3])
        await serve(client, "two.jsonl")
        assert await withdrawn("two.jsonl") == {4, 7}


async def test_a_damaged_log_of_another_site_rejects_it(tmp_path: Path) -> None:
    file = Generators(tmp_path)
    write_catalogue(tmp_path / "two.jsonl", num_items=50)
    (tmp_path / "two.jsonl.changes").write_text("no checksum\n")
    async with serving(tmp_path, read=file.read, **file.sections) as (client, _):
        file.name("decoder", catalogue=str(tmp_path / "two.jsonl"), beam_width=64)
        answer = await reload(client, 422)
        assert "two.jsonl.changes, line 1" in answer["detail"]
