"""The evaluation asks for what came next, of the right users, and counts what a service answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from npu_gr.core.errors import Unavailable
from npu_gr.history_store.interactions import Interactions
from npu_gr.tools.evaluate import EvaluationClient, ServiceEvaluation, evaluate
from npu_gr.train.cascade import hides_seen, next_events, repeat_ratio
from tests.keys import secret, write_keys
from tests.server.test_recommend_over_http import NUM_ITEMS, section
from tests.serving import FIRST_ID, serving


def log(num_users: int = 6, num_events: int = 12) -> Interactions:
    random = np.random.default_rng(0)
    rows = [random.permutation(NUM_ITEMS)[:num_events] + FIRST_ID for _ in range(num_users)]
    users = np.tile(np.arange(num_users, dtype=np.int32), num_events)
    items = np.stack(rows, axis=1).ravel().astype(np.int64)
    times = np.repeat(np.arange(num_events), num_users) + 1_600_000_000
    names = [f"user {index}" for index in range(num_users)]
    return Interactions(users, items, np.full(len(users), 1.0), times.astype(np.int64), names)


def test_a_case_is_the_first_event_that_is_not_known() -> None:
    events = log()
    known = np.arange(len(events)) < 6 * 10
    known[events.users == 3] = True  # nothing left to ask
    cases = next_events(events, known)
    assert [case.user for case in cases] == ["user 0", "user 1", "user 2", "user 4", "user 5"]
    own = events.items[events.users == 1]
    assert (cases[1].items, cases[1].target) == (own[:10].tolist(), own[10])
    assert len(next_events(events, known, 2)) == 2


async def test_it_counts_what_the_service_answers(tmp_path: Path) -> None:
    sections = section(tmp_path)
    events = log()
    known = np.arange(6 * 12) < 6 * 11
    cases = next_events(events, known)
    async with serving(tmp_path, watched=False, **sections) as (client, _):
        url = str(client.make_url("/"))
        found = await evaluate(url, url, cases, range(FIRST_ID, FIRST_ID + NUM_ITEMS))
        assert {way: len(ranks) for way, ranks in found.ranks.items()} == dict.fromkeys(
            ("generate", "rank", "recommend"), 6
        )
        want = []
        for case in cases:
            body = case.body("by-hand") | {"num_items": 10, "timestamp": case.happened_at}
            async with client.post("/v1/recommend", json=body) as response:
                items = [one["item"] for one in (await response.json())["items"]]
            want.append(items.index(case.target) if case.target in items else float("inf"))
        assert sorted(found.ranks["recommend"]) == sorted(want)
        figures = found.as_dict()
        assert json.loads(json.dumps(figures))["num_users"] == 6
        assert sum(found.outcomes.values()) == 6
        with (tmp_path / "out").open("w") as out:
            Console(file=out, width=120).print(found.table())
        assert "recommend: all of them, order rank" in (tmp_path / "out").read_text()
    server = {"api_keys_file": write_keys(tmp_path / "keys")}
    async with serving(tmp_path, watched=False, **sections, server=server) as (client, _):
        url = str(client.make_url("/"))
        with pytest.raises(Unavailable, match="/debug/config: status 401"):
            await evaluate(url, url, cases[:1], [FIRST_ID])
        keyed = await evaluate(
            url, url, cases[:1], range(FIRST_ID, FIRST_ID + NUM_ITEMS), api_key=secret("all")
        )
        assert len(keyed.ranks["recommend"]) == 1
    async with serving(tmp_path, watched=False) as (client, _):
        with pytest.raises(Unavailable, match="status 404; give the admin address"):
            await evaluate(
                str(client.make_url("/")), str(client.make_url("/v1")), cases, [FIRST_ID]
            )
        with pytest.raises(Unavailable, match="add the section `recommend`"):
            await evaluate(str(client.make_url("/")), str(client.make_url("/")), cases, [FIRST_ID])


def test_what_a_user_had_is_asked_for_where_many_next_items_are_repeats() -> None:
    events = log()
    cases = next_events(events, np.arange(6 * 12) < 6 * 11)
    assert hides_seen(cases)
    again = [replace(case, target=case.items[0]) for case in cases]
    assert hides_seen([*cases[:4], again[0]])
    assert not hides_seen([*cases[:3], again[0]])
    assert hides_seen([])
    assert [repeat_ratio(some) for some in (cases, again, [*cases[:1], *again[:3]], [])] == [
        0.0,
        1.0,
        0.75,
        0.0,
    ]


def test_a_case_names_its_actions() -> None:
    events = log()
    known = np.arange(len(events)) < 6 * 11
    stars, named = (
        next_events(each, known, 1)[0]
        for each in (events, replace(events, action_names=("view", "buy")))
    )
    assert stars.body("t")["history"]["actions"] == [1.0] * 11
    assert named.body("t")["history"]["actions"] == ["buy"] * 11


async def test_a_request_that_is_rejected_for_load_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses = [429, 429, 200, 429]

    async def answer(_: web.Request) -> web.Response:
        status = statuses.pop(0)
        return web.json_response({"detail": "busy"}, status=status, headers={"Retry-After": "0"})

    app = web.Application()
    app.router.add_post("/v1/rank", answer)
    async with TestServer(app) as server, EvaluationClient(str(server.make_url(""))) as client:
        body, took_s = await client.post("/v1/rank", {})
        assert body == {"detail": "busy"}
        assert took_s > 0
        assert statuses == [429]
        monkeypatch.setattr("npu_gr.tools.evaluate.PATIENCE_S", 0.0)
        with pytest.raises(Unavailable, match="/v1/rank: 429: busy"):
            await client.post("/v1/rank", {})


@pytest.mark.parametrize(
    ("hides", "ratio", "words"),
    [
        (True, 0.0, "without seen items"),
        (
            True,
            0.125,
            "without seen items: 12.5% of the next items are repeats, which cannot be hit",
        ),
        (False, 0.75, "with seen items: 75.0% of the next items are repeats"),
    ],
)
def test_the_title_says_what_became_of_seen_items(hides: bool, ratio: float, words: str) -> None:
    ranks = {way: [0.0, 4.0] for way in ("shared_encoder", "rank", "recommend")}
    found = ServiceEvaluation(
        ranks=ranks,
        seconds={way: [0.01, 0.01] for way in ranks},
        sources={"shared_encoder": 10},
        order="blended",
        retrieved=1.0,
        outcomes={},
        hides_seen=hides,
        repeat_ratio=ratio,
    )
    assert found.table().title == f"next item of 2 users, whole catalogue, {words}"
    assert found.as_dict()["repeat_ratio"] == ratio
