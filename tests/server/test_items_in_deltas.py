"""Deltas carry changes of the catalogue: one order with the weights, each once, in one step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gr.catalogue.change_log import ChangeLog, read_log
from npu_gr.cli.delta import delta as command
from npu_gr.core.errors import DataError, Unavailable
from npu_gr.core.served import DeltaMark
from npu_gr.handlers.service import Service
from npu_gr.model.delta import read_manifest
from tests.server.test_deltas_over_http import changed, roll_back, rows_of, served
from tests.server.test_deltas_over_http import post as post_file
from tests.server.test_durable_changes import CHANGE, catalogue, offered
from tests.server.test_new_items_over_http import (
    ITEMS,
    NEW,
    SEEN,
    ByHand,
    Client,
    add,
    folder,
    post,
    rank,
    sections,
)
from tests.serving import serving, until

__all__ = ["folder"]

write: Any = command.callback
GENRE = "feature.0.weight"  # which new items read too


def body(*add: int, withdraw: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    rows = [
        {"item_id": one, "sid": NEW[one][0], "features": {"genre": NEW[one][1]}, **more}
        for one in add
    ]
    return {"add": rows, "withdraw": list(withdraw)}


def delta(old: Path, new: Path, out: Path, *changes: dict[str, Any]) -> Path:
    """Write the next delta of a folder, by the command."""
    lines = out.parent / "changes.jsonl"
    lines.write_text("".join(json.dumps(change) + "\n" for change in changes))
    write(old, new, out, lines)
    return max(out.iterdir())


@asynccontextmanager
async def started(
    folder: Path, tmp_path: Path, log: str = "log", **more: Any
) -> AsyncIterator[tuple[Client, Service]]:
    table = sections(folder, tmp_path, checkpoint=str(tmp_path / "v0"), **more)
    table["generate"]["change_log"] = str(tmp_path / log)
    async with serving(folder, watched="models" not in more, **table) as found:
        yield found


@pytest.fixture
def v1(folder: Path, tmp_path: Path) -> Path:
    """The weights of a delta: those of some items, and those of a genre."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        rows_of("item.weight", 3, 5)(tensors)
        rows_of(GENRE, 0)(tensors)

    changed(folder / "checkpoint", tmp_path / "v0", lambda _: None)
    changed(tmp_path / "v0", tmp_path / "v1", change)
    return tmp_path / "v1"


async def scores(client: Client, *items: int) -> Any:
    return pytest.approx((await rank(client, SEEN, [*items]))["scores"]["click"], abs=1e-5)


async def test_rows_and_items_are_served_in_one_step_and_after_a_restart(
    folder: Path, tmp_path: Path, v1: Path
) -> None:
    v0 = tmp_path / "v0"
    path = delta(v0, v1, tmp_path / "made", body(900, 901), body(withdraw=(901, ITEMS[3])))
    before, after = (ByHand(one, {900: NEW[900]}).scores(SEEN, [900]) for one in (v0, v1))
    assert before != pytest.approx(after, abs=1e-4)
    want = set(ITEMS) - {ITEMS[3]} | {900}
    seen = set()

    async def watch(service: Service) -> None:
        items = service.versions.generator().items
        while True:
            seen.add((service.versions.ranker().weights.sequence, items.info().version))
            await asyncio.sleep(0)

    async with started(folder, tmp_path) as (client, service):
        watching = asyncio.create_task(watch(service))
        await post_file(client, path)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        assert sorted(sequence for sequence, _ in seen) == [0, 1], seen
        assert await scores(client, 900) == after
        assert await offered(client) == want
        await post_file(client, path)  # again: nothing changes
        assert await offered(client) == want
    async with started(folder, tmp_path) as (client, _):
        assert (await served(client), await offered(client)) == (1, want)
        assert await scores(client, 900) == after
        # what was taken off sale stays so
        await roll_back(client, 0)
        assert (await served(client), await offered(client)) == (0, want)
        assert await scores(client, 900) == before


async def test_an_invalid_item_changes_nothing(folder: Path, tmp_path: Path, v1: Path) -> None:
    v0 = tmp_path / "v0"
    wrong = {
        "unknown feature 'taste'": body(900, features={"taste": "sweet"}),
        "item 7 is not in the catalogue": body(withdraw=(7,)),
        "item 100 is already in the catalogue": {"add": [{"item_id": 100, "sid": [1, 1, 1]}]},
    }
    async with started(folder, tmp_path) as (client, _):
        was = await catalogue(client), await scores(client, *ITEMS)
        for number, (words, change) in enumerate(wrong.items()):
            made = await asyncio.to_thread(
                delta, v0, v1, tmp_path / f"made{number}", body(901), change
            )
            assert words in (await post_file(client, made, 422))["detail"]
        now = await catalogue(client), await scores(client, *ITEMS)
        assert now[0]["version"] == was[0]["version"]
        assert now[1].expected == was[1]
        assert (await served(client), [*(tmp_path / "v0.deltas").iterdir()]) == (0, [])


async def test_a_start_takes_what_a_crash_left_in_the_folder_once(
    folder: Path, tmp_path: Path, v1: Path
) -> None:
    """The file of a delta is durable before the catalogue's log is."""
    v0, deltas = tmp_path / "v0", tmp_path / "v0.deltas"
    delta(v0, v1, deltas, body(900, withdraw=(ITEMS[3],)))
    async with started(folder, tmp_path) as (client, _):
        assert await served(client) == 1
        assert await offered(client) == set(ITEMS) - {ITEMS[3]} | {900}
        log = await asyncio.to_thread(read_log, tmp_path / "log")
        assert log is not None
        assert log.changes.delta == DeltaMark(str(deltas), 1)
        # later changes of this instance are not undone, also where a training has made a new file
        await post(client, CHANGE, restore=[ITEMS[3]], withdraw=[900])
        sections(folder, tmp_path, {902: NEW[902]})
        await post(client, "/v1/catalog/reload")
        assert await offered(client) == {*ITEMS, 902}
    async with started(folder, tmp_path) as (client, _):
        assert await offered(client) == set(ITEMS)


async def test_a_full_disk_after_the_delta_is_durable_is_a_fault_that_a_start_mends(
    folder: Path, tmp_path: Path, v1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = delta(tmp_path / "v0", v1, tmp_path / "made", body(900, withdraw=(ITEMS[3],)))

    def full(*_: Any) -> None:
        raise Unavailable("the disk is full")

    async with started(folder, tmp_path) as (client, service):
        monkeypatch.setattr(ChangeLog, "write", full)
        await post_file(client, path, 503)
        monkeypatch.undo()
        assert await served(client) == 0
        assert set(service.versions.generator().items.item_ids()) == set(ITEMS)
        assert service.is_ready() == (False, "a delta was served in part: the disk is full")
    async with started(folder, tmp_path) as (client, service):
        assert (await served(client), service.is_ready()) == (1, (True, ""))
        assert await offered(client) == set(ITEMS) - {ITEMS[3]} | {900}


async def test_a_fleet_has_one_catalogue(folder: Path, tmp_path: Path, v1: Path) -> None:
    v0, shared = tmp_path / "v0", tmp_path / "shared"
    followed = {"models": {"deltas_from": str(shared)}}
    await asyncio.to_thread(delta, v0, v0, shared, body(900))  # items alone
    async with (
        started(folder, tmp_path, "a", **followed) as (a, first),
        started(folder, tmp_path, "b", **followed) as (b, second),
    ):
        assert await served(a) == await served(b) == 1
        await add(b, {901: NEW[901]})  # at one instance only
        # a change of 900, new items, and one that is already there at one instance
        changes = body(withdraw=(900,)), body(900, 901, 902)
        await asyncio.to_thread(delta, v0, v1, shared, *changes)
        fleet = [one.versions.ranker().weights for one in (first, second)]
        await until(lambda: all(weights.sequence == 2 for weights in fleet))
        want = ByHand(v1, NEW).scores(SEEN, [900, 901, 902])
        for client in (a, b):
            assert await offered(client) == {*ITEMS, 900, 901, 902}
            assert await scores(client, 900, 901, 902) == want
        # a rollback of the catalogue stays, although the folder has its items
        await post(a, "/v1/catalog/rollback")
        await asyncio.to_thread(delta, v1, v1, shared, body(withdraw=(ITEMS[3],)))
        await until(lambda: ITEMS[3] not in first.versions.generator().items.item_ids())
        assert await offered(a) == {*ITEMS, 900} - {ITEMS[3]}
    async with started(folder, tmp_path, "c", **followed) as (late, _):
        assert await offered(late) == {*ITEMS, 900, 901, 902} - {ITEMS[3]}
        assert await served(late) == 3


def test_a_change_that_is_none_is_told_by_its_line(tmp_path: Path, v1: Path) -> None:
    lines = tmp_path / "changes"
    lines.write_text(json.dumps(body(900)) + '\n{"withdraw": ["a", ""]}\n')
    with pytest.raises(DataError, match=r"changes, line 2: .* at `\$\.withdraw\[1\]`"):
        write(v1, v1, tmp_path / "out", lines)
    lines.write_text(json.dumps(body(900)))
    write(v1, v1, tmp_path / "out", lines)
    (path,) = (tmp_path / "out").iterdir()
    (change,) = read_manifest(path).items
    assert [one.item_id for one in change.add] == [900]
