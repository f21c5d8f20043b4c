"""A broken checkpoint published under load is rejected; a model that was replaced comes back."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

import aiohttp
import pytest
from torch import Tensor

from tests.chaos.open_loop import Ask, OpenLoop
from tests.chaos.rig import Bodies, Instance, Scale, check, each_scale, running
from tests.service.test_broken_checkpoints import (
    Change,
    broken,
    floats,
    infinities,
    one_nan,
    zeros,
)

PER_S = 40.0
RELOAD_S = 10.0  # of a good checkpoint under load


def publish(source: Path, served: Path) -> None:
    """Put a checkpoint where the configuration names it, as a job that publishes does."""
    shutil.rmtree(served)
    shutil.copytree(source, served)


@each_scale
@pytest.mark.parametrize(
    "change", [zeros, infinities, one_nan], ids=lambda change: str(change.__name__)
)
async def test_a_broken_checkpoint_is_rejected_under_load(
    change: Change, scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    served = folder / "served"
    shutil.copytree(checkpoint, served)
    bad = broken(checkpoint, folder / "bad", change)
    async with running(Instance(tmp_path, served)) as instance:
        load = OpenLoop(
            instance.url, lambda n: Ask(body=bodies.ranks[n % len(bodies.ranks)]), PER_S
        )
        async with load.running() as loop:
            quiet = await loop.over(scale.load_s / 2)
            from_at = time.monotonic()
            publish(bad, served)
            status, detail = await reload(instance)
            assert status == 422, detail
            assert "self-test" in detail
            assert await instance.metric('npu_gr_last_reload_successful{what="configuration"}') == 0
            publish(checkpoint, served)
            assert (await reload(instance))[0] == 200
            assert await instance.metric('npu_gr_last_reload_successful{what="configuration"}') == 1
            hurt = await loop.between(from_at, time.monotonic())
    check(hurt, quiet, scale)
    answers = [sample.body for sample in (*quiet.samples, *hurt.samples) if sample.status == 200]
    assert len({body["model_version"] for body in answers}) == 1


def slightly_other(tensors: dict[str, Tensor]) -> None:
    for tensor in floats(tensors):
        tensor.mul_(1.01)


@each_scale
async def test_a_model_goes_back_under_load(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """At once while the old one drains, and later from files that are deleted."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    served = folder / "served"
    shutil.copytree(checkpoint, served)
    new = broken(checkpoint, folder / "new", slightly_other)
    async with running(Instance(tmp_path, served)) as instance:
        load = OpenLoop(
            instance.url, lambda n: Ask(body=bodies.ranks[n % len(bodies.ranks)]), PER_S
        )
        async with load.running() as loop:
            quiet = await loop.over(scale.load_s / 2)
            (old,) = await versions(instance)
            from_at = time.monotonic()
            publish(new, served)
            assert (await reload(instance))[0] == 200
            assert (await reload(instance, "rollback"))[0] == 200
            assert (await versions(instance))[0] == old
            assert (await reload(instance, "rollback"))[0] == 200  # undone
            give_up_at = time.monotonic() + 60
            while len(await versions(instance)) > 1:
                assert time.monotonic() < give_up_at
                await asyncio.sleep(0.2)
            status, detail = await reload(instance, "rollback")
            assert status == 200, detail
            assert (await versions(instance))[0] == old
            hurt = await loop.between(from_at, time.monotonic())
    check(hurt, quiet, scale)
    answers = [sample.body for sample in hurt.samples if sample.status == 200]
    assert len({body["model_version"] for body in answers}) == 2


async def versions(instance: Instance) -> list[str]:
    """The versions that are served, the current one first."""
    async with aiohttp.request("GET", f"{instance.url}/v1/models") as answer:
        return [model["version"] for model in (await answer.json())["models"]]


async def reload(instance: Instance, what: str = "reload") -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.request(
        "POST", f"{instance.admin_url}/v1/models/{what}", timeout=timeout
    ) as answer:
        body = await answer.json(content_type=None)
        return answer.status, str(body.get("detail", ""))
