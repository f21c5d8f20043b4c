"""Deltas change a ranker that serves: scores, prefixes, restarts, rollbacks, folders."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient
from msgspec.structs import replace

from npu_gr.core.errors import StaleEntry
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.request import RankRequest
from npu_gr.core.served import Refreshed
from npu_gr.engine.kv_cache.prefix_pool import by_use
from npu_gr.engine.kv_cache.tier import PrefixKey
from npu_gr.engine.queue import JobOrder
from npu_gr.handlers.base import Call
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.service import Service
from npu_gr.model.delta import file_name, make_delta, write_delta
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.weights import load, read_weights, save
from npu_gr.relay.refresh import PrefixRefresh
from npu_gr.relay.relay import Relay
from tests.models import events
from tests.server.test_new_items_over_http import metric
from tests.service.test_reload import File
from tests.serving import FIRST_ID, columns, serving, until, write_checkpoint

Client = TestClient[Any, Any]
CANDIDATES = [FIRST_ID + row for row in range(0, 300, 15)]
RELAY = {"t_life_s": 60.0}
Change = Callable[[dict[str, torch.Tensor]], None]


def changed(old: Path, new: Path, change: Change) -> str:
    """Write a checkpoint that differs from another in what `change` does to its tensors."""
    checkpoint = load(old)
    with torch.no_grad():
        change(checkpoint.model.state_dict())
    return save(checkpoint, new)


def rows_of(name: str, *rows: int, by: float = 0.5) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        part = tensors[name][list(rows)]
        # not the same in every column, or the norms would remove it
        tensors[name][list(rows)] += by * torch.linspace(-1, 1, part.numel()).view(part.shape)

    return change


def delta_file(folder: Path, old: Path, new: Path, number: int) -> Path:
    path = folder / file_name(number)
    write_delta(make_delta(read_weights(old), read_weights(new), number), path)
    return path


def delta_to(old: Path, new: Path, change: Change, folder: Path, number: int) -> Path:
    """Write a changed checkpoint, and the delta to it. It reads files: not on the event loop."""
    changed(old, new, change)
    return delta_file(folder, old, new, number)


class Stream:
    """Checkpoints that follow each other, and the deltas between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "checkpoint").exists():
            write_checkpoint(folder / "checkpoint")
        self.checkpoints = [folder / "checkpoint"]

    async def next(self, change: Change, *, to: str = "made") -> Path:
        number = len(self.checkpoints)
        self.checkpoints.append(self.folder / f"v{number}")
        old, new = self.checkpoints[-2:]
        return await asyncio.to_thread(delta_to, old, new, change, self.folder / to, number)


async def post(client: Client, path: Path, status: int = 200) -> dict[str, Any]:
    headers = {"Content-Type": "application/octet-stream"}
    body = await asyncio.to_thread(path.read_bytes)
    async with client.post("/v1/models/delta", data=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


async def roll_back(client: Client, number: int, status: int = 200) -> dict[str, Any]:
    async with client.post("/v1/models/rollback", json={"delta": number}) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


async def served(client: Client) -> int:
    models = (await (await client.get("/v1/models")).json())["models"]
    number: int = models[0]["delta"]["sequence"]
    return number


async def rank(client: Client, user: str, history: Events) -> dict[str, Any]:
    body = {
        "user_id": user,
        "history": columns(history),
        "candidates": CANDIDATES,
        "timestamp": int(history.timestamps[-1]) + 60,
    }
    async with client.post("/v1/rank", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def cold_scores(checkpoint: Path, histories: list[Events]) -> list[Any]:
    """Scores of an instance that starts on a checkpoint."""
    store = {"path": str(checkpoint.with_suffix(".db"))}
    async with serving(
        checkpoint.parent, watched=False, checkpoint=str(checkpoint), history_store=store
    ) as (client, _):
        answers = [await rank(client, f"c{n}", one) for n, one in enumerate(histories)]
    return [answer["scores"] for answer in answers]


def assert_close(got: list[Any], want: list[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        for task in other:
            assert one[task] == pytest.approx(other[task], abs=1e-5)


def a_change(random_: random.Random, items: np.ndarray[Any, Any]) -> tuple[Change, str]:
    """Return a change, and what of a prefix it touches: nothing, everything, or its items."""
    kind = random_.choice(["items", "ids", "feature", "head", "layers"])
    if kind == "items":
        return rows_of("item.weight", *random_.sample(range(300), random_.randint(1, 8))), "items"
    if kind == "feature":
        return rows_of("feature.0.weight", random_.randrange(7)), "items"
    if kind == "ids":

        def swap(tensors: dict[str, torch.Tensor]) -> None:
            ids = tensors["feature_ids_0"]
            ids[random_.randrange(300)] = torch.randint(0, 8, ids.shape[1:])

        return swap, "items"
    name = "head.0.weight" if kind == "head" else "layers.1.uvqk.weight"
    return rows_of(name, random_.randrange(4)), "nothing" if kind == "head" else "everything"


def key_of(relay: Relay[Tokens], user: str) -> PrefixKey:
    """Return the key of a user's only prefix in HBM."""
    pool = relay.tiers.pool
    (entry,) = (one for one in by_use(pool) if one.key.user.user == user)
    return entry.key


async def refreshed(client: Client, number: int) -> None:
    """Wait until so many prefixes have been looked at since the start."""
    counts: list[str] = []
    for _ in range(1000):
        text = await (await client.get("/metrics")).text()
        counts = re.findall(r"^npu_gr_prefix_refreshes_total.* (\S+)$", text, re.MULTILINE)
        if sum(map(float, counts)) >= number:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"only {counts} of {number} were looked at")


async def test_a_prefix_is_kept_exactly_if_a_delta_does_not_touch_it(tmp_path: Path) -> None:
    """Kept prefixes give the bits of cold scores; touched ones are encoded again, before a rank."""
    random_ = random.Random(0)
    stream = Stream(tmp_path)
    histories = [events(length, seed) for seed, length in enumerate((5, 9, 14, 20, 30, 45))]
    kept = {True: 0, False: 0}
    async with serving(tmp_path, relay=RELAY, service={"selfcheck_ratio": 1.0}) as (client, it):
        ranking = it.versions.ranker()
        table = ranking.engine.model.items
        looked_at = 0
        for step in range(14):
            for user, history in enumerate(histories):
                await rank(client, f"u{user}", history)  # the prefix is resident
            assert table.table is not None
            before = table.table.clone()
            change, touches = a_change(random_, histories[0].items)
            keys = [key_of(ranking.relay, f"u{user}") for user in range(len(histories))]
            await ranking.relay.settled()
            looked_at += 0 if touches == "nothing" else len(ranking.relay.refreshing.users_by_use())
            await post(client, await stream.next(change))
            await refreshed(client, looked_at)
            differ = set(np.flatnonzero((before != table.table).any(1).numpy()).tolist())
            for user, history in enumerate(histories):
                is_same = key_of(ranking.relay, f"u{user}") == keys[user]
                again = await rank(client, f"u{user}", history)
                cold = await rank(client, f"cold{user}.{step}", history)
                assert again["scores"] == cold["scores"]
                assert (again["outcome"], again["reason"]) == ("hbm_hit", "")
                is_kept = touches == "nothing" or (
                    touches == "items" and not differ & set(history.items.tolist())
                )
                assert is_same == is_kept, (step, touches, differ)
                kept[is_kept] += 1
        got = [(await rank(client, f"w{n}", one))["scores"] for n, one in enumerate(histories)]
        assert await served(client) == 14
        assert await metric(client, "npu_gr_selfcheck_failures_total") == 0
    assert min(kept.values()) > 10
    assert_close(got, await cold_scores(stream.checkpoints[-1], histories))


async def test_restarts_and_rollbacks_serve_what_was_answered(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    history = events(30, 1)

    def both(tensors: dict[str, torch.Tensor]) -> None:
        rows_of("layers.0.uvqk.weight", 1, 2, 3)(tensors)
        rows_of("item.weight", *range(50, 150))(tensors)

    first = await stream.next(rows_of("item.weight", *range(100)))
    second = await stream.next(both)
    third = await stream.next(rows_of("feature.0.weight", 2, 4))
    want = {n: (await cold_scores(one, [history]))[0] for n, one in enumerate(stream.checkpoints)}
    user = 0

    async def check(client: Client, number: int) -> None:
        nonlocal user
        user += 1
        assert await served(client) == number
        assert await metric(client, "npu_gr_delta_sequence") == number
        for name in ("always", f"u{user}"):  # with the prefixes of before, and without
            assert_close([(await rank(client, name, history))["scores"]], [want[number]])

    async with serving(tmp_path, relay=RELAY) as (client, _):
        await check(client, 0)
        for number, path in enumerate((first, second, third), 1):
            await post(client, path)
            await check(client, number)
        assert await metric(client, "npu_gr_delta_rows_total") == 205
    async with serving(tmp_path, relay=RELAY) as (client, _):
        await check(client, 3)
        for number in (1, 3, 0, 2):
            await roll_back(client, number)
            await check(client, number)
        answer = await roll_back(client, 4, 422)
        assert "delta 4 is not kept; there are 1 to 3" in answer["detail"]
    # the next delta rests on what is served now
    stream.checkpoints = [*stream.checkpoints[:3], stream.checkpoints[2]]
    fourth = await stream.next(rows_of("item.weight", *range(50)))
    want[4] = (await cold_scores(stream.checkpoints[-1], [history]))[0]
    async with serving(tmp_path, relay=RELAY) as (client, _):
        await check(client, 2)
        await post(client, fourth)
        await check(client, 4)
        await roll_back(client, 2)
        await check(client, 2)


async def test_a_wrong_delta_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    one, two, three = [await stream.next(rows_of("item.weight", row)) for row in (1, 2, 3)]
    history = events(20, 1)
    write_checkpoint(tmp_path / "other", num_layers=2)
    async with serving(tmp_path, relay=RELAY) as (client, _):
        before = await rank(client, "u", history)

        async def refused(path: Path, words: str) -> None:
            answer = await post(client, path, 422)
            assert words in answer["detail"], answer

        await refused(two, "delta 2: wrong base: it changes the weights")
        (tmp_path / "torn").write_bytes(one.read_bytes()[:-5])
        await refused(tmp_path / "torn", "is torn, or no delta")
        await post(client, one)
        await post(client, one)  # again: it is served already
        await refused(three, "delta 3: gap: the newest is 1, so 2 must come first")
        other = await asyncio.to_thread(
            delta_to, tmp_path / "other", tmp_path / "new", rows_of("item.weight", 1), tmp_path, 2
        )
        await refused(other, "architecture: it is of a model with another architecture")
        assert await served(client) == 1
        assert sorted(path.name for path in (tmp_path / "checkpoint.deltas").iterdir()) == [
            file_name(1)
        ]
        await roll_back(client, 0)
        await refused(one, "delta 1: duplicate: it is applied already; the newest is 1")
        assert (await rank(client, "v", history))["scores"] == before["scores"]


async def test_a_stale_prefix_is_served_until_it_is_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_time = asyncio.Event()
    refresh = PrefixRefresh.refresh

    async def later(*given: Any) -> Refreshed:
        await has_time.wait()
        return await refresh(*given)

    monkeypatch.setattr(PrefixRefresh, "refresh", later)
    stream = Stream(tmp_path)
    history = events(40, 1)
    async with serving(tmp_path, relay={**RELAY, "max_stale_s": 60.0}) as (client, it):
        old = await rank(client, "u", history)
        key = key_of(it.versions.ranker().relay, "u")
        await post(client, await stream.next(rows_of("layers.1.uvqk.weight", 1, 2)))
        stale = await rank(client, "u", history)
        assert (stale["outcome"], stale["reason"]) == ("hbm_hit", "stale")
        cold = await rank(client, "other", history)
        assert cold["scores"] != stale["scores"] != old["scores"]
        # a signal encodes it again
        body = {"user_id": "u", "history": columns(history)}
        async with client.post("/v1/signal", json=body) as response:
            assert (await response.json())["verdict"] == "preinfer"
        await it.versions.ranker().relay.settled()
        exact = await rank(client, "u", history)
        assert (exact["outcome"], exact["reason"]) == ("hbm_hit", "")
        assert exact["scores"] == cold["scores"]
        assert (
            await metric(client, 'npu_gr_rank_outcomes_total{outcome="hbm_hit",reason="stale"}')
            == 1
        )
        # and so does the instance itself, once the device has time
        await post(client, await stream.next(rows_of("layers.1.uvqk.weight", 3)))
        assert (await rank(client, "u", history))["reason"] == "stale"
        cold = await rank(client, "another", history)
        has_time.set()
        await refreshed(client, 2)
        await it.versions.ranker().relay.settled()
        exact = await rank(client, "u", history)
        assert (exact["outcome"], exact["reason"]) == ("hbm_hit", "")
        assert exact["scores"] == cold["scores"]
        assert await metric(client, 'npu_gr_prefix_refreshes_total{result="encoded"}') == 2
        # in the place of the stale ones, of which no tier keeps one
        (entry,) = it.versions.ranker().relay.tiers.pool.find(UserKey("", "u"), *key[1:3])
        assert entry.key != key


async def test_a_reload_keeps_the_deltas_and_a_rollback_of_models_finds_them(
    tmp_path: Path,
) -> None:
    file = File(tmp_path)
    new, old = file.add("new", 2), file.add("old", 1)
    file.use("old", relay={"t_life_s": 0.2})
    history = events(20, 1)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, it):
        folder = Path(it.parts.settings.config.checkpoint or "")
        change = rows_of("item.weight", *range(200))
        made = await asyncio.to_thread(
            delta_to, folder, tmp_path / "v1", change, tmp_path / "made", 1
        )
        await post(client, made)
        scores = (await rank(client, "a", history))["scores"]
        ranking = it.versions.ranker()
        assert (await client.post("/v1/models/reload")).status == 200
        assert it.versions.ranker() is ranking  # it serves what the files say
        file.use("new", relay={"t_life_s": 0.2})
        assert (await client.post("/v1/models/reload")).status == 200
        assert (await rank(client, "b", history))["model_version"] == new
        await until(lambda: not it.versions.is_retiring)
        assert (await client.post("/v1/models/rollback")).status == 200
        assert await served(client) == 1
        assert_close([(await rank(client, "c", history))["scores"]], [scores])
    assert new != old


async def test_instances_follow_one_folder_in_order(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    history = events(20, 1)
    shared = tmp_path / "shared"
    models = {"deltas_from": str(shared)}

    async def at(number: int, *its: Service) -> None:
        await until(lambda: all(it.versions.ranker().weights.sequence == number for it in its))

    await stream.next(rows_of("item.weight", *range(0, 300, 2)), to="shared")
    async with serving(tmp_path, watched=False, models=models) as (a, first):
        assert await served(a) == 1  # before it is ready
        second_store = {"path": str(tmp_path / "b.db")}
        async with serving(tmp_path, watched=False, models=models, history_store=second_store) as (
            b,
            second,
        ):
            # posted at one instance, it reaches the other
            await post(a, await stream.next(rows_of("head.0.weight", 3)))
            await at(2, first, second)
            await stream.next(rows_of("layers.0.uvqk.weight", 3), to="shared")
            await at(3, first, second)
            await roll_back(b, 1)
            await at(1, first, second)
            await roll_back(a, 3)
            await at(3, first, second)
            # a gap and a file that is no delta are errors that an operator sees; what serves stays
            (shared / file_name(4)).write_bytes(b"no delta")
            name = 'npu_gr_last_reload_successful{what="delta"}'
            async with asyncio.timeout(10):
                while await metric(a, name) != 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await served(a), (await rank(b, "u", history))["outcome"]) == (3, "miss_full")
            got = [(await rank(one, "x", history))["scores"] for one in (a, b)]
    (shared / file_name(4)).unlink()
    assert got[0] == got[1]
    assert_close(got[:1], await cold_scores(stream.checkpoints[3], [history]))


async def test_every_answer_is_of_one_delta(tmp_path: Path) -> None:
    """Two streams score from prefixes and without, while the weights go back and forth."""
    stream = Stream(tmp_path)
    histories = [events(20 + 3 * user, user) for user in range(4)]

    def everywhere(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and name != "item.weight":
                tensor.mul_(1.25)
        tensors["item.weight"][: histories[0].items.min() + 150] += 0.5

    async with serving(tmp_path, relay=RELAY, scheduler={"streams": 2}) as (client, _):
        want = [[(await rank(client, "first", one))["scores"]] for one in histories]
        await post(client, await stream.next(everywhere))
        for user, history in enumerate(histories):
            want[user].append((await rank(client, "second", history))["scores"])
        is_over = False
        seen: set[tuple[int, int]] = set()

        async def ask(user: int) -> None:
            turn = 0
            while not is_over:
                turn += 1
                # a prefix of this user, and then of one that nobody knows
                name = f"u{user}" if turn % 3 else f"u{user}.{turn}"
                scores = (await rank(client, name, histories[user]))["scores"]
                assert scores in want[user]
                seen.add((user, want[user].index(scores)))

        tasks = [asyncio.create_task(ask(user)) for user in range(4)]
        for turn in range(24):
            await roll_back(client, turn % 2)
            await asyncio.sleep(0)
        is_over = True
        await asyncio.gather(*tasks)
    assert len(seen) == 8


async def test_a_prefix_that_was_leased_before_a_delta_is_not_read_after_it(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path)
    history = events(40, 1)
    async with serving(tmp_path, relay=RELAY) as (client, it):
        await rank(client, "u", history)
        ranking = it.versions.ranker()
        user = UserKey("", "u")
        request = RankRequest(
            user=user,
            candidates=np.array(CANDIDATES),
            history=HistoryRef(events=history),
            timestamp=int(history.timestamps[-1]) + 60,
        )
        own = replace(history, items=history.items + FIRST_ID)
        tokens = ranking.tokenize(UserHistory.of(own, 0, 1000))
        call = Call(time.monotonic(), time.monotonic() + 30)
        async with ranking.relay.lease(user, tokens, 20, call.deadline_at) as lease:
            assert lease.cached is not None
            await post(client, await stream.next(rows_of("item.weight", int(history.items[3]))))
            answer = await ranking.rank(request, tokens, call, lease=lease)
        assert (answer.outcome, answer.reason) == ("miss_full", "stale")
        cold = (await rank(client, "cold", history))["scores"]
        assert {task: own.tolist() for task, own in answer.scores.items()} == cold
        # nor does a prefill of before leave keys and values under the key of before
        with pytest.raises(StaleEntry):
            await ranking.engine.prefill(tokens, lease.cached.runs, call.deadline_at, JobOrder(0.0))
