"""A sharded checkpoint answers as the whole one, also through deltas, rollbacks and restarts."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.memory import HostMemory
from tests.models import events
from tests.server.test_deltas_over_http import (
    RELAY,
    Client,
    Stream,
    post,
    rank,
    roll_back,
    rows_of,
    served,
)
from tests.serving import make_config, serving

HISTORIES = [events(length, seed) for seed, length in enumerate((9, 40))]


def shard(folder: Path, dtype: str) -> Path:
    out = folder / dtype
    done = CliRunner().invoke(
        main, ["shard", str(folder / "checkpoint"), "--out", str(out), "--dtype", dtype]
    )
    assert done.exit_code == 0, done.output
    assert re.search(rf"version \w{{16}}, \S+ MiB of item rows in {dtype}", done.output)
    return out


@asynccontextmanager
async def sharded(folder: Path, checkpoint: Path) -> AsyncIterator[Client]:
    async with serving(
        folder,
        relay=RELAY,
        checkpoint=str(checkpoint),
        models={"hot_item_bytes": 3000},
        history_store={"path": str(folder / "sharded.db")},
    ) as (client, _):
        yield client


async def answers(client: Client) -> list[Any]:
    """Cold, then from the prefix cache."""
    both = [
        [(await rank(client, f"u{n}", one))["scores"] for n, one in enumerate(HISTORIES)]
        for _ in range(2)
    ]
    assert both[0] == both[1]
    return both[0]


async def test_a_sharded_checkpoint_follows_deltas_as_the_whole_one(tmp_path: Path) -> None:
    stream = Stream(tmp_path)

    def mixed(tensors: dict[str, torch.Tensor]) -> None:
        rows_of("layers.1.uvqk.weight", 1, 2)(tensors)
        rows_of("item.weight", *range(60, 140))(tensors)

    deltas = [
        await stream.next(rows_of("item.weight", *range(100))),
        await stream.next(mixed),
        await stream.next(rows_of("head.0.weight", 3)),
    ]
    shared = await stream.next(rows_of("feature.0.weight", 2))
    most = await stream.next(rows_of("item.weight", *range(200)))
    most = most.rename(tmp_path / "made" / "most")
    want = {}
    async with serving(tmp_path, relay=RELAY) as (client, _):
        want[0] = await answers(client)
        for number, path in enumerate(deltas, 1):
            await post(client, path)
            want[number] = await answers(client)
    assert want[0] != want[1] != want[2] != want[3]
    out = shard(tmp_path, "float32")
    async with sharded(tmp_path, out) as client:
        assert await answers(client) == want[0]
        for number, path in enumerate(deltas, 1):
            await post(client, path)
            assert await answers(client) == want[number]
        text = (await post(client, shared, 422))["detail"]
        assert "'feature.0.weight': rows of many items depend on it" in text
        assert "npu-gr shard" in text
        counts = dict(
            re.findall(
                r'npu_gr_item_rows_total\{where="(\w+)"\} (\S+)',
                await (await client.get("/metrics")).text(),
            )
        )
        assert min(float(counts[where]) for where in ("hot", "disk", "changed")) > 0
        assert counts.keys() == {"hot", "disk", "changed", "prefetched"}
    async with sharded(tmp_path, out) as client:
        assert await served(client) == 3
        assert await answers(client) == want[3]
        for number in (1, 3, 0, 2):
            await roll_back(client, number)
            assert await answers(client) == want[number]
    async with sharded(tmp_path, out) as client:
        assert await answers(client) == want[2]


async def test_int8_rows_serve_and_answer_close_to_the_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, relay=RELAY) as (client, _):
        want = await answers(client)
    async with sharded(tmp_path, shard(tmp_path, "int8")) as client:
        got = await answers(client)
    for one, other in zip(got, want, strict=True):
        for task, scores in other.items():
            spread = float(torch.tensor(scores).std())
            assert one[task] == pytest.approx(scores, abs=0.2 * spread)
            assert one[task] != scores


async def test_a_reload_counts_the_memory_of_hot_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not fit beside the served one is rejected before it is read."""
    Stream(tmp_path)
    sections = {"checkpoint": str(shard(tmp_path, "int8"))}
    little = HostMemory(500 << 20, "the machine")
    async with serving(tmp_path, read=lambda: make_config(tmp_path, **sections)) as (client, _):
        monkeypatch.setattr("npu_gr.service.memory.free_memory", lambda: little)
        async with client.post("/v1/models/reload") as response:
            assert response.status == 422
            detail = (await response.json())["detail"]
        assert re.search(r"checkpoint: .*int8 needs about 51\d.\d MiB", detail), detail
        monkeypatch.setattr("npu_gr.service.memory.free_memory", lambda: None)
        async with client.post("/v1/models/reload") as response:
            assert response.status == 200, await response.text()
        assert len(await answers(client)) == len(HISTORIES)
