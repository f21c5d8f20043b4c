"""All kinds at once, with faults: answers are correct, and no resource is leaked.

Admission and brown-out are as they ship, and swaps of models end within seconds while the device is
full. Memory and descriptors stay bounded. The default suite runs seconds of it; `-m soak` runs
NPU_GR_SOAK_S of it (600).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.errors import DeviceError
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import ERASE
from npu_gr.core.logs import QueuedHandler
from npu_gr.core.request import EraseRequest
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.handlers.service import Service
from tests.decoders import VARIANTS, saved
from tests.engine.kv_cache.invariants import check_dram, check_pool
from tests.models import Request, full, tiny_model
from tests.server.test_generate_over_http import section
from tests.service.test_reload import File, history
from tests.serving import FIRST_ID, serving

log = logging.getLogger(__name__)
WORKERS, USERS, MODELS = 8, 12, {"a": 1, "b": 2}
SWAP_S = 10.0  # of a reload while workers fill the device, at the median
WARM_S = 20.0
GROWTH_BYTES = 64_000_000  # what an allocator keeps
GROWTH_BYTES_PER_S = 20_000.0  # 1.2 MB a minute
MORE_DESCRIPTORS = 4  # that a library opens once
# of the version before, for a rollback: 2 files of a ranker, 3 of a generator, both weights again
KEPT_DESCRIPTORS = 7
ANSWERED = (200, 202, 204, 404, 429, 503, 504)  # 404: the version that it names is gone


class Faults:
    """Makes a share of the calls of some methods fail while it is on."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._random, self.is_on = random.Random(seed), True
        self.planted: Counter[str] = Counter()
        for owner, name in (
            (KVArena, "write"),
            (KVArena, "copy_tokens_from"),
            (RankEngine, "forward"),
        ):
            patch.setattr(owner, name, self._failing(getattr(owner, name), name))

    def _failing(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_on and self._random.random() < 0.02:
                self.planted[name] += 1
                raise DeviceError("planted")
            return real(*args, **kwargs)

        return call


class Soak:
    """Workers that ask at random until the time is up."""

    def __init__(
        self, client: TestClient[Any, Any], file: File, versions: dict[str, str], seed: int
    ) -> None:
        self.client, self.file, self.random = client, file, random.Random(seed)
        self.seen: Counter[tuple[str, int]] = Counter()
        self.planted: Counter[str] = Counter()
        self.checked = self.swaps = 0
        self.swaps_s: list[float] = []
        self.requests = [Request(20 + 15 * user, 4, user) for user in range(USERS)]
        self.want = {
            version: [
                full(tiny_model(seed=MODELS[name]), request).numpy() for request in self.requests
            ]
            for name, version in versions.items()
        }
        self.versions: list[str | None] = [None] * USERS  # of the user's last signal
        self.generated: dict[tuple[str, int], Any] = {}

    async def ask(self, what: str, method: str, path: str, **body: Any) -> Any:
        headers = {"X-Request-Timeout-Ms": str(self.random.choice((20, 500, 5000)))}
        # by its session, because a test client keeps every response until it is closed: 7 KB each
        call = self.client.session.request(
            method, self.client.make_url(path), json=body or None, headers=headers
        )
        async with asyncio.timeout(30), call as response:
            answer = await response.json(content_type=None) if response.status != 204 else None
            self.seen[what, response.status] += 1
            assert response.status in ANSWERED, answer
            return answer if response.status < 300 else None

    async def rank(self, user: int) -> None:
        request = self.requests[user]
        body = {
            "user_id": str(user),
            "history": history(request),
            "candidates": (request.candidates + FIRST_ID).tolist(),
            "timestamp": request.shown_at,
        }
        if (version := self.versions[user]) and self.random.random() < 0.5:
            body["model_version"] = version
        answer = await self.ask("rank", "POST", "/v1/rank", **body)
        if answer and answer["outcome"] != "degraded":
            want = self.want[answer["model_version"]][user]
            assert np.allclose(answer["scores"]["like"], want[:, 1], rtol=0, atol=1e-5), answer
            self.checked += 1

    async def signal(self, user: int) -> None:
        answer = await self.ask(
            "signal", "POST", "/v1/signal", user_id=str(user), history=history(self.requests[user])
        )
        if answer:
            self.versions[user] = answer["model_version"]

    async def generate(self, user: int) -> None:
        past = {
            "items": list(range(user + 2)),
            "actions": [1] * (user + 2),
            "timestamps": list(range(user + 2)),
        }
        answer = await self.ask(
            "generate", "POST", "/v1/generate", user_id=str(user), history=past, num_items=5
        )
        if answer and answer["outcome"] != "degraded":
            assert (
                self.generated.setdefault((answer["model_version"], user), answer["items"])
                == answer["items"]
            )

    async def erase(self, user: int) -> None:
        await self.ask("erase", "DELETE", f"/v1/users/{user}")

    async def leave(self, user: int) -> None:
        task = asyncio.ensure_future(
            self.random.choice((self.rank, self.signal, self.generate))(user)
        )
        await asyncio.sleep(self.random.random() * 0.01)
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        assert list(results) == [None] or isinstance(results[0], asyncio.CancelledError), results
        self.seen["leave", 0] += 1

    async def work(self, end_s: float) -> None:
        kinds: list[Callable[[int], Awaitable[None]]] = [
            self.rank,
            self.signal,
            self.generate,
            self.erase,
            self.leave,
        ]
        while time.monotonic() < end_s:
            (kind,) = self.random.choices(kinds, (6, 4, 1, 1, 1))
            await kind(self.random.randrange(USERS))

    async def swap(self, end_s: float) -> None:
        names = list(MODELS)
        while time.monotonic() < end_s or not self.swaps:
            names.reverse()
            decoder = str(self.file.folder / self.random.choice(DECODERS))
            sections = SECTIONS | {"generate": section(self.file.folder, checkpoint=decoder)}
            self.file.use(names[0], **sections, relay={"t_life_s": self.random.choice((0.2, 0.4))})
            began_at = time.monotonic()
            async with self.client.post("/v1/models/reload") as response:
                assert response.status in (200, 429, 503), await response.text()
                if response.status == 200:
                    self.swaps += 1
                    self.swaps_s.append(time.monotonic() - began_at)
            await asyncio.sleep(0.4)


SECTIONS: dict[str, Any] = {}
DECODERS = ("decoder", "other")


async def left_nothing(service: Service, tasks_before: int) -> None:
    """Nothing is held, produced or waited for; every byte is free once every user is forgotten."""
    async with asyncio.timeout(30):
        while service.versions.is_retiring or service.admission.work.admitted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for job in service.versions.current():
            await job.relay.settled()
        await asyncio.gather(*service.versions.ranker()._selfcheck._background)
    for job in service.versions.current():
        relay = job.relay
        assert not relay.is_busy
        pool, dram = relay.tiers
        check_pool(pool)
        assert dram is not None
        check_dram(dram)
        assert not any(entry.leases for entry in pool._found.values())
        assert not any(entry.leases for entry in dram._found.values())
        assert pool.reserved_bytes == 0
    for user in range(USERS):
        await service.serve(ERASE, EraseRequest(user=UserKey("", str(user))), 10.0)
    for job in service.versions.current():
        await job.relay.settled()
        for tier in job.relay.tiers:
            assert tier is not None
            assert tier.free_bytes == tier.budget_bytes
    assert service.parts.scheduler.depth == 0
    for _ in range(100):  # connections of callers who left are closed in their own time
        if len(asyncio.all_tasks()) <= tasks_before:
            break
        await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks()) <= tasks_before


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def logged_as_shipped(path: Path) -> Iterator[None]:
    """Log to a file, since pytest retains records, and models in the frames of errors."""
    product = logging.getLogger("npu_gr")
    with path.open("w") as file:
        handler = QueuedHandler("soak", file.fileno())
        product.addHandler(handler)
        product.propagate = False
        try:
            yield
        finally:
            product.propagate = True
            product.removeHandler(handler)
            handler.close()


async def soak(folder: Path, streams: int, seconds: float, patch: pytest.MonkeyPatch) -> Soak:
    SECTIONS.clear()
    SECTIONS.update(
        scheduler={"streams": streams, "prefill_chunk_tokens": 64},
        generate=section(folder, checkpoint=str(folder / DECODERS[0])),
        service={"selfcheck_ratio": 0.05},
        brownout={"enabled": True},
        kv_cache={"hbm_bytes": 2_000_000, "dram_bytes": 2_000_000},
    )
    for seed, name in enumerate(DECODERS):
        saved(folder / name, seed=seed, **VARIANTS["qwen3 g2 tied"])
    file = File(folder)
    versions = {name: file.add(name, seed) for name, seed in MODELS.items()}
    file.use("a", **SECTIONS)
    async with serving(folder, watched=False, read=file.read, **file.sections) as (client, service):
        await client.get("/readyz")
        descriptors_before = num_descriptors()
        tasks_before = len(asyncio.all_tasks()) + WORKERS  # a connection each, kept open
        run, faults, end_s = Soak(client, file, versions, seed=streams), Faults(patch, streams), 0.0
        end_s = time.monotonic() + seconds
        await asyncio.gather(run.swap(end_s), *(run.work(end_s) for _ in range(WORKERS)))
        faults.is_on = False
        await left_nothing(service, tasks_before)
        assert (
            num_descriptors()
            <= descriptors_before + 2 * WORKERS + KEPT_DESCRIPTORS + MORE_DESCRIPTORS
        )  # both ends of a connection each
        log.info(
            f"streams={streams}: {dict(run.seen)}, {run.checked} checked, {run.swaps} swaps, "
            f"{dict(faults.planted)}"
        )
        run.planted = faults.planted
    return run


@pytest.mark.parametrize("streams", [1, 2])
async def test_a_few_seconds_of_everything(
    streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await soak(tmp_path, streams, 2.5, monkeypatch)
    assert run.swaps
    assert run.checked
    assert run.planted


@pytest.mark.soak
@pytest.mark.parametrize("streams", [1, 2])
async def test_minutes_of_everything(
    streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = float(os.environ.get("NPU_GR_SOAK_S", "600")) / 2
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with logged_as_shipped(tmp_path / "log"):
        # what the process allocates once
        await soak(tmp_path / "first", streams, WARM_S, monkeypatch)
        before_bytes = resident_bytes()
        run = await soak(tmp_path / "second", streams, seconds, monkeypatch)
    assert resident_bytes() - before_bytes <= GROWTH_BYTES + GROWTH_BYTES_PER_S * seconds
    assert run.swaps > 5
    assert sorted(run.swaps_s)[len(run.swaps_s) // 2] <= SWAP_S
    assert len({version for version, _ in run.generated}) == len(DECODERS)
    assert all(run.planted[name] for name in ("write", "copy_tokens_from", "forward"))
