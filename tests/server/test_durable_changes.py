"""Changes of the catalogue survive a restart, a reload and a rollback, or are rejected."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from npu_gr.catalogue import change_log
from npu_gr.core.errors import ConfigError, StoreInUse
from npu_gr.service.config import Config
from tests.server.test_new_items_over_http import (
    GENRES,
    ITEMS,
    NEW,
    SEEN,
    SIDS,
    ByHand,
    Client,
    add,
    asked,
    folder,
    metric,
    post,
    rank,
    recommend,
    sections,
)
from tests.serving import encoded, make_config, serving

__all__ = ["folder"]

CHANGE = "/v1/catalog/items"


@asynccontextmanager
async def started(folder: Path, tmp_path: Path, **more: Any) -> AsyncIterator[Client]:
    """An instance on the catalogue of `tmp_path`, which `sections` has written."""
    table = {**sections(folder, tmp_path, more.pop("added", None))}
    table["generate"] = {**table["generate"], **more.pop("generate", {})}
    async with serving(folder, **table, **more) as (client, _):
        yield client


async def catalogue(client: Client) -> dict[str, Any]:
    async with client.get("/v1/catalog") as response:
        found: dict[str, Any] = await response.json()
        return found


async def offered(client: Client) -> set[int]:
    found = await recommend(client, SEEN, 80, exclude_seen=False)
    return set(found["items"])


async def test_acknowledged_changes_are_there_after_a_restart(folder: Path, tmp_path: Path) -> None:
    other = {900: (SIDS[7].tolist(), ["war", "comedy"])}
    want = ByHand(folder / "checkpoint", {**NEW, **other})
    async with started(folder, tmp_path) as client:
        assert (await add(client, NEW))["durable"] is True
        await post(client, CHANGE, withdraw=[900, ITEMS[3], ITEMS[4]])
        await add(client, other)
        last = await post(client, CHANGE, withdraw=[901, ITEMS[5]], restore=[ITEMS[5]])
    async with started(folder, tmp_path) as client:
        again = await catalogue(client)
        assert (again["version"], again["num_items"]) == (last["version"], last["num_items"])
        assert (again["durable"], again["previous"]) == (True, None)
        assert await offered(client) == set(ITEMS) - {ITEMS[3], ITEMS[4]} | set(NEW) - {901}
        scores = (await rank(client, SEEN, [900, 902]))["scores"]["click"]
        assert scores == pytest.approx(want.scores(SEEN, [900, 902]), abs=1e-5)
        # what is withdrawn can be restored, and what was left out be added again
        await post(client, CHANGE, restore=[901])
        await add(client, {ITEMS[3]: (SIDS[3].tolist(), ["war"])})
        assert {901, ITEMS[3]} < await offered(client)


async def test_a_reload_keeps_the_changes(folder: Path, tmp_path: Path) -> None:
    async with started(folder, tmp_path) as client:
        await add(client, NEW)
        changed = await post(client, CHANGE, withdraw=[ITEMS[3], 900])
        reloaded = await post(client, "/v1/catalog/reload")
        assert reloaded["version"] == changed["version"]
        # a newly trained site: it knows 901, and still has what was taken off sale
        trained = {901: (SIDS[9].tolist(), ["war"]), 900: NEW[900]}
        sections(folder, tmp_path, trained)
        reloaded = await post(client, "/v1/catalog/reload")
        assert reloaded["version"] != changed["version"]
        want = set(ITEMS) - {ITEMS[3]} | set(NEW) - {900}
        assert await offered(client) == want
    by_hand = ByHand(folder / "checkpoint", {901: trained[901]}).scores(SEEN, [901])
    async with started(folder, tmp_path, added=trained) as client:
        assert (await catalogue(client))["version"] == reloaded["version"]
        assert await offered(client) == want
        assert (await rank(client, SEEN, [901]))["scores"]["click"] == pytest.approx(
            by_hand, abs=1e-5
        )


async def test_a_rollback_is_kept_too(folder: Path, tmp_path: Path) -> None:
    async with started(folder, tmp_path) as client:
        before = await add(client, {900: NEW[900]})
        await post(client, CHANGE, withdraw=[ITEMS[3]])
        await post(client, "/v1/catalog/rollback")
    async with started(folder, tmp_path) as client:
        assert (await catalogue(client))["version"] == before["version"]
        assert {900, ITEMS[3]} < await offered(client)


async def test_another_catalogue_takes_the_changes_along(folder: Path, tmp_path: Path) -> None:
    """A reload of the configuration names the folder of a new site."""
    site = tmp_path / "new site"
    site.mkdir()
    old, new = sections(folder, tmp_path), sections(folder, site, {902: NEW[902]})
    log = site / "items.jsonl.changes"
    for section in (old, new):
        section["checkpoint"] = str(folder / "checkpoint")
    now = [old]

    def read() -> Config:
        return make_config(folder, **now[0])

    async with serving(folder, **old, read=read) as (client, _):
        await add(client, {900: NEW[900]})
        await post(client, CHANGE, withdraw=[ITEMS[3], 900])
        now[0] = new
        await post(client, "/v1/models/reload")
        want = set(ITEMS) - {ITEMS[3]} | {902}
        assert await offered(client) == want
        assert log.exists()
        assert await post(client, CHANGE, withdraw=[ITEMS[4]])
        await post(client, "/v1/models/rollback")
        assert await offered(client) == want - {ITEMS[4], 902}
        await post(client, "/v1/models/rollback")
        assert await offered(client) == want - {ITEMS[4]}
        await post(client, CHANGE, withdraw=[ITEMS[5]])
    async with serving(folder, **new) as (client, _):
        assert await offered(client) == want - {ITEMS[4], ITEMS[5]}
    # the former log is free for another process, and has what was changed until then
    async with serving(folder, **old) as (client, _):
        assert await offered(client) == want - {ITEMS[4], 902}


async def test_a_change_that_cannot_be_kept_is_not_made(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "log")
    async with started(folder, tmp_path, generate={"change_log": path}) as client:
        before = await catalogue(client)
        answer = await post(client, CHANGE, 503, withdraw=[ITEMS[3]])
        assert (
            "nothing is changed, since it cannot be kept: generate.change_log" in (answer["detail"])
        )
        await add(client, NEW, 503)
        after = await catalogue(client)
        assert (after["version"], after["previous"]) == (before["version"], before["previous"])
        assert await metric(client, 'npu_gr_new_items{state="scored"}') == 0
        assert await metric(client, "npu_gr_spare_item_rows") == 4096
        assert (await rank(client, SEEN, [900]))["unknown_candidates"] == 1


async def test_a_change_is_completed_although_its_client_has_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served and kept, or neither: a restart must not change what is offered."""
    async with started(folder, tmp_path) as client:
        append = change_log.ChangeLog.append
        entered = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*given: Any) -> None:
            loop.call_soon_threadsafe(entered.set)
            asyncio.run(asyncio.sleep(0.2))
            append(*given)

        monkeypatch.setattr(change_log.ChangeLog, "append", slow)
        task = asyncio.create_task(post(client, CHANGE, withdraw=[ITEMS[3]]))
        await entered.wait()
        task.cancel()
        monkeypatch.undo()
        await post(client, CHANGE, withdraw=[ITEMS[4]])
        assert not {ITEMS[3], ITEMS[4]} & await offered(client)
        version = (await catalogue(client))["version"]
    async with started(folder, tmp_path) as client:
        assert (await catalogue(client))["version"] == version


async def test_none_keeps_nothing_and_says_so(folder: Path, tmp_path: Path) -> None:
    nowhere = {"change_log": "none"}
    async with started(folder, tmp_path, generate=nowhere) as client:
        assert (await add(client, NEW))["durable"] is False
        assert os.listdir(tmp_path) == ["items.jsonl"]
    async with started(folder, tmp_path, generate=nowhere) as client:
        assert not set(NEW) & await offered(client)


async def test_two_instances_never_share_a_log(folder: Path, tmp_path: Path) -> None:
    """Unwatched, since the start of the second one blocks the event loop of the first."""
    async with started(folder, tmp_path, watched=False) as client:
        async with started(
            folder, tmp_path, watched=False
        ) as other:  # neither has changed anything yet
            await add(client, {900: NEW[900]})
            answer = await post(other, CHANGE, 503, withdraw=[ITEMS[3]])
            assert "in use by another process" in answer["detail"]
        with pytest.raises(StoreInUse, match=r"generate.change_log: .*items.jsonl.changes is in"):
            async with started(folder, tmp_path, watched=False):
                pass
        own = {"change_log": str(tmp_path / "own" / "log")}
        async with started(folder, tmp_path, generate=own, watched=False) as other:
            await post(other, CHANGE, withdraw=[ITEMS[3]])


async def test_a_damaged_log_stops_the_start(folder: Path, tmp_path: Path) -> None:
    async with started(folder, tmp_path) as client:
        await add(client, NEW)
    log = tmp_path / "items.jsonl.changes"
    log.write_bytes(log.read_bytes().replace(b"drama", b"dramA"))
    with pytest.raises(ConfigError, match="line 1: is damaged; restore the file, or remove it"):
        async with started(folder, tmp_path):
            pass


async def test_forty_changes_of_one_item_fit_on_three_rows(folder: Path, tmp_path: Path) -> None:
    """Each is scored by its own features, also behind a prefix that an older one is part of."""
    item, sid = 900, SIDS[0].tolist()
    by_genre = {
        genre: ByHand(folder / "checkpoint", {item: (sid, [genre])}).scores([*SEEN, item], [item])
        for genre in GENRES
    }
    body = asked([*SEEN, item])
    del body["timestamp"]
    async with serving(folder, **sections(folder, tmp_path, service={"spare_items": 3})) as (
        client,
        service,
    ):
        for number in range(40):
            genre = GENRES[number % 3]
            await add(client, {item: (sid, [genre])})
            ranked = await rank(client, [*SEEN, item], [item])
            assert ranked["scores"]["click"] == pytest.approx(by_genre[genre], abs=1e-5)
            if number < 4:  # the contents of the first three come back later, with their prefixes
                await post(client, "/v1/signal", 202, **body)
                await encoded(service.versions.ranker().relay)
            await post(client, CHANGE, withdraw=[item])
        assert await metric(client, "npu_gr_spare_item_rows") == 2


async def test_no_rank_mixes_the_features_of_two_changes(folder: Path, tmp_path: Path) -> None:
    """Ranks run while their item's rows are written again and again, with and without prefixes."""
    item, sid = 900, SIDS[0].tolist()
    scores = [
        ByHand(folder / "checkpoint", {item: (sid, [genre])}).scores([*SEEN, item], [item])[0]
        for genre in GENRES
    ]
    found: list[float] = []
    async with serving(
        folder, **sections(folder, tmp_path, service={"spare_items": 2, "selfcheck_ratio": 1.0})
    ) as (client, _):

        async def change() -> None:
            for number in range(30):
                await add(client, {item: (sid, [GENRES[number % 3]])})
                await post(client, CHANGE, withdraw=[item])

        async def ask(user: int) -> None:
            body = {**asked([*SEEN, item]), "user_id": f"u{user}"}
            signal = {name: value for name, value in body.items() if name != "timestamp"}
            while not changing.done():
                await post(client, "/v1/signal", 202, **signal)
                for _ in range(2):
                    answer = await post(client, "/v1/rank", **body, candidates=[item])
                    (score,) = answer["scores"]["click"]
                    if score is not None:  # the item is known
                        found.append(score)

        changing = asyncio.create_task(change())
        await asyncio.gather(*(ask(user) for user in range(3)))
        await changing
        assert await metric(client, "npu_gr_selfcheck_failures_total") == 0
    assert len(found) > 10
    for score in found:
        assert min(abs(score - one) for one in scores) < 1e-5


async def test_an_item_that_left_the_catalogue_gives_its_row_to_another(
    folder: Path, tmp_path: Path
) -> None:
    async with serving(folder, **sections(folder, tmp_path, service={"spare_items": 2})) as (
        client,
        _,
    ):
        for number in range(12):
            new = {910 + number: (SIDS[number].tolist(), ["war"])}
            await add(client, new)
            assert (await rank(client, SEEN, [*new]))["unknown_candidates"] == 0
            await post(client, CHANGE, withdraw=[*new])
        assert (await rank(client, SEEN, [910]))["unknown_candidates"] == 1
