"""A model replaced under load: no request fails, and answers match the version they name."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.errors import DeviceError, Overloaded
from npu_gr.core.kinds import RANK
from npu_gr.engine.queue import JobOrder
from npu_gr.model.weights import Checkpoint, save
from npu_gr.service.app import run
from npu_gr.service.config import Config
from tests.engine.kv_cache.invariants import check_pool
from tests.models import Request, full, tiny_model
from tests.ports import free_port
from tests.serving import FIRST_ACTION, FIRST_ID, make_config, serving, write_checkpoint

USERS, LENGTH = 6, 70


PATIENT = {"X-Request-Timeout-Ms": "20000"}  # a busy machine


@dataclass
class File:
    """Stands for the configuration file: what a reload reads."""

    folder: Path
    sections: dict[str, Any] = field(default_factory=dict)

    def read(self) -> Config:
        return make_config(self.folder, **self.sections)

    def add(self, name: str, seed: int, **changes: object) -> str:
        model = tiny_model(seed=seed, **changes)  # type: ignore[arg-type]
        ids = np.arange(model.config.num_items, dtype=np.int64) + FIRST_ID
        version = save(
            Checkpoint(model=model, item_ids=ids, name=name, action_values=(1.0, 2.0, 3.0)),
            self.folder / name,
        )
        self.use(name)
        return version

    def use(self, name: str, **sections: Any) -> None:
        self.sections = (
            {"relay": {"t_life_s": 0.5}} | sections | {"checkpoint": str(self.folder / name)}
        )


def history(request: Request) -> dict[str, list[int]]:
    return {
        "items": (request.items + FIRST_ID).tolist(),
        "actions": (request.actions + FIRST_ACTION).tolist(),
        "timestamps": request.times.tolist(),
    }


class Traffic:
    """Requests of a few users whose scores under every version are known."""

    def __init__(self, client: TestClient[Any, Any], versions: dict[str, int]) -> None:
        self.client = client
        self.requests = [Request(LENGTH, 5, seed) for seed in range(USERS)]
        self.want = {
            version: [full(tiny_model(seed=seed), request).numpy() for request in self.requests]
            for version, seed in versions.items()
        }
        self.seen = dict.fromkeys(versions, 0)
        self.named = 0

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.client.post(path, json=body, headers=PATIENT) as response:
            answer: dict[str, Any] = await response.json(content_type=None)
            assert response.status in (200, 202), answer
            return answer

    async def rank(self, number: int, version: str | None = None) -> dict[str, Any]:
        request = self.requests[number % USERS]
        body = {
            "user_id": f"u{number}",
            "history": history(request),
            "candidates": (request.candidates + FIRST_ID).tolist(),
            "timestamp": request.shown_at,
        }
        answer = await self.post(
            "/v1/rank", {**body, "model_version": version} if version else body
        )
        want = self.want[answer["model_version"]][number % USERS]
        assert np.allclose(answer["scores"]["click"], want[:, 0], rtol=0, atol=1e-5)
        assert version in (None, answer["model_version"])
        self.seen[answer["model_version"]] += 1
        return answer

    async def pair(self, number: int) -> None:
        """A signal, and a rank that wants the version of its answer."""
        body = {"user_id": f"u{number}", "history": history(self.requests[number % USERS])}
        signal = await self.post("/v1/signal", body)
        await asyncio.sleep(0.02)
        await self.rank(number, signal["model_version"])
        self.named += 1

    async def until(self, stop: asyncio.Event, first: int) -> None:
        number = first
        while not stop.is_set():
            await (self.pair(number) if number % 2 else self.rank(number))
            number += 1


async def gone(client: TestClient[Any, Any]) -> list[dict[str, Any]]:
    """The models once nothing drains any more."""
    ends_at = time.monotonic() + 30
    while True:
        models: list[dict[str, Any]] = (await (await client.get("/v1/models")).json())["models"]
        if not any(model["is_draining"] for model in models):
            return models
        assert time.monotonic() < ends_at, models
        await asyncio.sleep(0.05)


async def test_no_request_fails_and_every_answer_is_of_the_version_it_names(tmp_path: Path) -> None:
    file = File(tmp_path)
    old, new = file.add("old", 1), file.add("new", 2)
    slo = {"rank_s": 5.0, "signal_s": 5.0}  # nobody is rejected
    file.use("old", slo=slo)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic = Traffic(client, {old: 1, new: 2})
        stop = asyncio.Event()
        load = [asyncio.create_task(traffic.until(stop, 1000 * n)) for n in range(4)]
        engine, pool = (
            weakref.ref(service.versions.ranker().engine),
            service.versions.ranker().relay.tiers[0],
        )
        await traffic.pair(1)
        await asyncio.sleep(0.2)
        file.use("new", slo=slo)
        async with client.post("/v1/models/reload") as response:
            assert response.status == 200
            models = (await response.json())["models"]
        assert [(m["version"], m["is_draining"]) for m in models] == [(new, False), (old, True)]
        named = await traffic.rank(7, old)
        assert named["model_version"] == old
        async with client.post("/v1/models/reload") as response:
            assert response.status == 503
            assert "still drains" in (await response.json())["detail"]
        assert [m["version"] for m in await gone(client)] == [new]
        await asyncio.sleep(0.1)
        stop.set()
        await asyncio.gather(*load)
        assert min(traffic.seen.values()) > 5
        assert traffic.named > 5
        problem = {
            "user_id": "u",
            "candidates": [FIRST_ID],
            "history": history(traffic.requests[0]),
        }
        async with client.post("/v1/rank", json={**problem, "model_version": old}) as response:
            assert response.status == 404
        await service.versions.ranker().relay.settled()
        del load
        gc.collect()
        assert engine() is None, "the old version is still held by somebody"
        check_pool(pool)
        assert pool.reserved_bytes == 0


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"kv_cache": {"hbm_bytes": 9_000_000}}, "kv_cache: "),
        ({"server": {"max_candidates": 7}}, "server: "),
        ({"scheduler": {"streams": 2}}, "scheduler: "),
        ({"admission": {"max_inflight": 0}}, "admission.max_inflight"),
        ({"checkpoint": "nowhere"}, "nowhere"),
        ({"checkpoint": None, "threads": 2}, "must serve a model"),
    ],
)
async def test_what_cannot_change_is_rejected_by_name(
    tmp_path: Path, sections: dict[str, Any], word: str
) -> None:
    file = File(tmp_path)
    version = write_checkpoint(tmp_path / "checkpoint")
    async with serving(tmp_path, read=file.read) as (client, _):
        file.sections = sections
        async with client.post("/v1/models/reload") as response:
            assert response.status == 422
            assert word in (await response.json())["detail"]
        models = (await (await client.get("/v1/models")).json())["models"]
        assert [m["version"] for m in models] == [version]


async def test_another_layout_or_a_failed_self_test_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = File(tmp_path)
    wide = file.add("wide", 3, num_layers=2)
    file.add("new", 2)
    old = file.add("old", 1)
    assert wide != old
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        traffic, pool = Traffic(client, {old: 1}), service.versions.ranker().relay.tiers[0]
        file.use("wide")
        async with client.post("/v1/models/reload") as response:
            assert response.status == 422
            assert "another page layout" in (await response.json())["detail"]

        async def broken(*_: object) -> float:
            raise DeviceError("self-test: scores differ")

        monkeypatch.setattr("npu_gr.service.warmup.parity", broken)
        file.use("new")
        erased = pool.on_erased
        async with client.post("/v1/models/reload") as response:
            assert response.status == 503
        assert pool.on_erased is erased
        assert pool.free_bytes == pool.budget_bytes
        await traffic.pair(1)
        assert traffic.seen[old] == 1


async def test_a_reload_ends_while_the_device_is_full(tmp_path: Path) -> None:
    """Jobs that verify the new model queue like requests."""
    file = File(tmp_path)
    new, _ = file.add("new", 2), file.add("old", 1)
    # the jobs wait so long each
    sections = {"scheduler": {"aging_s": 30.0}, "slo": {"rank_s": RANK.objective_s}}
    file.use("old", **sections)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):

        async def hog() -> None:
            while True:
                await service.parts.scheduler.call(
                    lambda: time.sleep(0.003), far, JobOrder(time.monotonic() + 0.05)
                )

        far = float("inf")
        hogs = [asyncio.create_task(hog()) for _ in range(8)]
        file.use("new", **sections)
        async with asyncio.timeout(25), client.post("/v1/models/reload") as response:
            assert response.status == 200
            models = (await response.json())["models"]
        for task in hogs:
            task.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
        assert models[0]["version"] == new


async def test_settings_take_effect_without_a_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = File(tmp_path)
    write_checkpoint(tmp_path / "checkpoint")
    async with serving(tmp_path, read=file.read) as (client, service):
        relay, engine = service.versions.ranker().relay, service.versions.ranker().engine
        weighed: list[Mapping[str, float]] = []
        monkeypatch.setattr(engine.scheduler, "weigh", weighed.append)
        file.sections = {
            "relay": {"t_life_s": 3.0, "enabled": False},
            "slo": {"rank_s": 0.25},
            "admission": {"max_inflight": 3, "tenant_weights": {"shop": 2.0}},
            "service": {"max_history_tokens": 20},
        }
        async with client.post("/v1/models/reload") as response:
            assert response.status == 200
        assert service.versions.ranker().engine is engine
        assert weighed == [{"shop": 2.0}]
        assert (relay.t_life_s, relay.tiers[0].waits.t_life_s, engine.objective_s) == (
            3.0,
            3.0,
            0.25,
        )
        slots = [await service.admission.enter("rank", "", time.monotonic(), 1.0) for _ in range(3)]
        with pytest.raises(Overloaded):
            await service.admission.enter("rank", "", time.monotonic(), 0.01)
        for slot in slots:
            slot.__exit__()
        body = {"user_id": "u", "history": history(Request(LENGTH, 5, 0)), "candidates": [FIRST_ID]}
        answer = await (await client.post("/v1/rank", json=body)).json()
        assert answer["reason"] == "disabled"
        assert answer["history"]["num_tokens"] <= 20
        config = await (await client.get("/debug/config")).json()
        assert config["slo"]["rank_s"] == 0.25
    async with serving(tmp_path) as (client, _), client.post("/v1/models/reload") as response:
        assert response.status == 422
        assert "no configuration file to reload" in (await response.json())["detail"]


async def test_gauges_say_what_is_in_force(tmp_path: Path) -> None:
    file = File(tmp_path)
    write_checkpoint(tmp_path / "checkpoint")
    changes: dict[str, Any] = {
        "relay": {"t_life_s": 33.0},
        "admission": {"max_inflight": 7},
        "service": {"max_history_tokens": 20},
        "trigger": {"max_inflight": 3},
    }
    wanted = {
        'npu_gr_limit{name="inflight_requests"}': 7.0,
        'npu_gr_limit{name="history_tokens"}': 20.0,
        'npu_gr_limit{name="inflight_prefills"}': 3.0,
        "npu_gr_t_life_seconds": 33.0,
    }
    async with serving(tmp_path, read=file.read) as (client, _):
        assert not await scraped(client, wanted)
        file.sections = changes
        async with client.post("/v1/models/reload") as response:
            assert response.status == 200
        assert await scraped(client, wanted)


async def scraped(client: TestClient[Any, Any], wanted: dict[str, float]) -> bool:
    lines = (await (await client.get("/metrics")).text()).splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(tuple(wanted)))
    return {name: float(found[name]) for name in wanted} == wanted


async def test_sighup_reloads(tmp_path: Path) -> None:
    file = File(tmp_path)
    new, old = file.add("new", 2), file.add("old", 1)
    server = {
        "server": {
            "host": "127.0.0.1",
            "port": (port := free_port()),
            "admin_port": 0,
            "drain_grace_s": 0.1,
        }
    }
    file.use("old", **server)
    ready = asyncio.Event()
    task = asyncio.create_task(run(file.read(), ready, file.read))
    async with asyncio.timeout(30), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        await ready.wait()

        async def versions() -> list[str]:
            async with session.get("/v1/models") as response:
                return [model["version"] for model in (await response.json())["models"]]

        assert await versions() == [old]
        file.use("nowhere", **server)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.2)
        assert await versions() == [old]
        file.use("new", **server)
        os.kill(os.getpid(), signal.SIGHUP)
        while (await versions())[0] != new:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        await task
