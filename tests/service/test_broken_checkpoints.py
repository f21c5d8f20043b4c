"""A checkpoint with constant scores is rejected at start, and by a reload."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient
from safetensors.torch import load_file, save_file
from torch import Tensor

from npu_gr.core.errors import CheckpointError, ConfigError
from npu_gr.model.weights import digest
from npu_gr.service.app import instance
from npu_gr.vector_search.vectors import save
from tests.decoders import VARIANTS, saved
from tests.models import events
from tests.server.test_generate_over_http import HISTORY, generate, section
from tests.server.test_match_over_http import section as match_section
from tests.service.test_reload import File
from tests.serving import FIRST_ID, columns, make_config, serving
from tests.vector_search.vectors import make_vectors

Change = Callable[[dict[str, Tensor]], None]


def zeros(tensors: dict[str, Tensor]) -> None:
    for tensor in floats(tensors):
        tensor.zero_()


def infinities(tensors: dict[str, Tensor]) -> None:
    for tensor in floats(tensors):
        tensor.fill_(float("inf"))


def one_nan(tensors: dict[str, Tensor]) -> None:
    floats(tensors)[3].view(-1)[0] = float("nan")


def one_row_of_infinities(tensors: dict[str, Tensor]) -> None:
    for name in ("item.weight", "model.embed_tokens.weight"):  # of a ranker, of a generator
        if name in tensors:
            tensors[name][7] = float("inf")


def huge(tensors: dict[str, Tensor]) -> None:
    for tensor in floats(tensors):
        tensor.fill_(1e30)


def constant(tensors: dict[str, Tensor]) -> None:
    """The weights that read the rows are gone, their biases stay: every row has the same scores."""
    for tensor in floats(tensors):
        if tensor.ndim > 1:
            tensor.zero_()
        else:
            tensor.fill_(0.5)


def floats(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors.values() if tensor.is_floating_point()]


BROKEN = {
    zeros: "have the same score of",
    infinities: "are not finite, the first is inf",
    one_row_of_infinities: "are not finite, the first is inf",
    one_nan: "are not finite, the first is nan",
    huge: "scores of",
    constant: "have the same score of",
}
every_fault = pytest.mark.parametrize(
    ("change", "words"), BROKEN.items(), ids=[change.__name__ for change in BROKEN]
)


def broken(source: Path, target: Path, change: Change) -> Path:
    """Write a copy of a checkpoint with other weights, whose digest is right."""
    shutil.copytree(source, target)
    weights = target / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    manifest = json.loads((target / "config.json").read_text())
    if "version" in manifest:  # a ranker; a Hugging Face folder has no digest
        manifest["version"] = digest(weights)
        (target / "config.json").write_text(json.dumps(manifest))
    return target


async def reload(client: TestClient[Any, Any]) -> tuple[int, dict[str, Any]]:
    async with client.post("/v1/models/reload") as response:
        return response.status, await response.json()


async def gauge(client: TestClient[Any, Any], what: str) -> float:
    text = await (await client.get("/metrics")).text()
    (line,) = (
        x
        for x in text.splitlines()
        if x.startswith(f'npu_gr_last_reload_successful{{what="{what}"}}')
    )
    return float(line.rsplit(" ", 1)[1])


@every_fault
@pytest.mark.parametrize("relay", [True, False], ids=["relay", "no relay"])
async def test_an_instance_does_not_start_with_a_broken_ranker(
    tmp_path: Path, change: Change, words: str, relay: bool
) -> None:
    file = File(tmp_path)
    file.add("good", 1)
    folder = broken(tmp_path / "good", tmp_path / "bad", change)
    with pytest.raises(CheckpointError) as error:
        async with instance(
            make_config(tmp_path, checkpoint=str(folder), relay={"enabled": relay})
        ):
            pass
    assert f"checkpoint {folder}: self-test: " in str(error.value)
    assert words in str(error.value)


@every_fault
async def test_a_reload_rejects_a_broken_ranker_and_the_old_one_goes_on(
    tmp_path: Path, change: Change, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = File(tmp_path)
    version = file.add("good", 1)
    broken(tmp_path / "good", tmp_path / "bad", change)
    body = {"user_id": "u", "history": columns(events(40)), "candidates": [FIRST_ID, FIRST_ID + 1]}
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        before = await (await client.post("/v1/rank", json=body)).json()
        assert await gauge(client, "configuration") == 1
        file.use("bad")
        status, answer = await reload(client)
        assert status == 422
        assert words in answer["detail"]
        assert str(tmp_path / "bad") in answer["detail"]
        assert any("reload rejected" in line and words in line for line in caplog.messages)
        assert await gauge(client, "configuration") == 0
        after = await (await client.post("/v1/rank", json=body)).json()
        assert (after["model_version"], after["scores"]) == (version, before["scores"])
        assert service.is_ready()[0]
        pool = service.versions.ranker().relay.tiers[0]
        assert pool.reserved_bytes == 0
        file.use("good")
        assert (await reload(client))[0] == 200
        assert await gauge(client, "configuration") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (zeros, "have the same score of the next token, 0"),
        (infinities, "NaN or infinity"),
        (one_nan, "NaN or infinity"),
        (huge, "have the same score of the next token"),
    ],
    ids=["zeros", "infinities", "one nan", "huge"],
)
async def test_a_broken_generator_is_rejected(tmp_path: Path, change: Change, words: str) -> None:
    file = File(tmp_path)
    file.add("ranker", 1)
    (tmp_path / "decoder").mkdir()
    saved(tmp_path / "decoder", **VARIANTS["qwen3 g2 tied"])
    bad = broken(tmp_path / "decoder", tmp_path / "bad", change)
    file.use("ranker", generate=section(tmp_path, checkpoint=str(tmp_path / "decoder")))
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        before = await generate(client, history=HISTORY, num_items=20)
        file.use("ranker", generate=section(tmp_path, checkpoint=str(bad)))
        status, answer = await reload(client)
        assert (status, await gauge(client, "configuration")) == (422, 0)
        assert str(bad) in answer["detail"]
        assert words in answer["detail"]
        assert (await generate(client, history=HISTORY, num_items=20))["items"] == before["items"]
        assert service.is_ready()[0]
    with pytest.raises(CheckpointError, match=words):
        async with instance(make_config(tmp_path, **file.sections)):
            pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"items": np.zeros((40, 8), np.float32)}, "all 40 rows of items are the same"),
        ({"items": np.full((40, 8), 2.5, np.float32)}, "all 40 rows of items are the same"),
        ({"users": np.zeros((3, 8), np.float32)}, "users has only zeros"),
        ({"items": np.full((40, 8), np.nan, np.float32)}, "items has a value that is not finite"),
    ],
)
async def test_broken_vectors_are_rejected(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    match = match_section(tmp_path)
    folder = Path(match["vectors"])
    async with serving(tmp_path, match=match) as (client, _):
        before = await (
            await client.post("/v1/match", json={"user_id": "known", "num_items": 5})
        ).json()
        await asyncio.to_thread(save, make_vectors(**changes), folder)
        async with client.post("/v1/match/reload") as response:
            assert response.status == 422
            assert words in (await response.json())["detail"]
        assert await gauge(client, "vectors") == 0
        after = await (
            await client.post("/v1/match", json={"user_id": "known", "num_items": 5})
        ).json()
        assert after["items"] == before["items"]
    with pytest.raises(ConfigError, match=words):
        async with instance(make_config(tmp_path, match=match)):
            pass
