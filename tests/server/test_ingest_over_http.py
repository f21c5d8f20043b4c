"""Many users in one call over HTTP: each is durable or has its reason; a repeat changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import Unavailable
from npu_gr.core.history import HistoryRef, Mode, UserKey, Write, Written
from npu_gr.core.kinds import Scope
from npu_gr.server.schemas.ingest import INGEST_BYTES, MOST_USERS
from npu_gr.tools.ingest import ServiceWriter
from tests.keys import bearer, write_keys
from tests.keys import entry as key
from tests.models import events
from tests.serving import columns, serving

PATIENT = {"X-Request-Timeout-Ms": "20000"}  # a busy machine
PATH = "/v1/events/bulk"


async def post(client: Any, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    async with client.post(PATH, json=body, headers={**PATIENT, **headers}) as answer:
        return answer.status, await answer.json()


def entry(user: str, num: int = 3, **more: Any) -> dict[str, Any]:
    return {"user_id": user, "events": columns(events(num)), **more}


async def length(service: Any, user: str, tenant: str = "") -> int:
    return len((await service.parts.histories.store.read(UserKey(tenant, user), 99_999)).events)


async def test_one_bad_user_fails_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        await post(client, {"users": [entry("used", 2, idempotency_key="k")]})
        uneven = entry("uneven")
        uneven["events"]["actions"].pop()
        strange = entry("strange")
        strange["events"]["actions"][1] = 77
        users = [
            entry("a"),
            uneven,
            strange,
            entry("used", idempotency_key="k"),
            entry("b", 5),
            entry("a", 2),
            entry("a "),
        ]
        status, body = await post(client, {"users": users})
        assert status == 200
        assert (body["num_added"], body["num_failed"]) == (10, 4)
        assert [one["num_events"] for one in body["users"]] == [3, None, None, None, 5, 5, None]
        errors = [one["error"] for one in body["users"]]
        assert [error and error["status"] for error in errors] == [
            *(None, 422, 422, 422, None, None, 422)
        ]
        assert "blanks around" in errors[-1]["detail"]
        assert "items, actions and timestamps have 3, 2 and 3" in errors[1]["detail"]
        assert "actions" in errors[2]["detail"]
        assert "used for other events" in errors[3]["detail"]
        assert [
            await length(service, user) for user in ("a", "uneven", "strange", "used", "b")
        ] == [5, 0, 0, 2, 5]


async def test_keys_merges_and_replacements_count_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        keyed = {"users": [entry(f"u{number}", idempotency_key="k") for number in range(50)]}
        assert (await post(client, keyed))[1]["num_added"] == 150
        again = (await post(client, keyed))[1]
        assert again["num_added"] == 0
        assert {one["num_events"] for one in again["users"]} == {3}
        merged = {"mode": "merge", "users": [entry("u0", 3), entry("m", 9)]}
        assert (await post(client, merged))[1]["num_added"] == 9
        assert (await post(client, merged))[1]["num_added"] == 0
        await post(client, {"mode": "replace", "users": [entry("m", 4)]})
        assert (await length(service, "m"), await length(service, "u0")) == (4, 3)
        twice = (await post(client, {"mode": "replace", "users": [entry("m", 2), entry("m", 3)]}))[
            1
        ]["users"]
        assert twice[0]["num_events"] == 2
        assert "repeated in this call" in twice[1]["error"]["detail"]
        odd = (
            await post(client, {"mode": "merge", "users": [entry("m", 2, idempotency_key="k")]})
        )[1]["users"]
        assert "only for the mode append" in odd[0]["error"]["detail"]


async def test_a_call_has_bounds(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        small: dict[str, list[int]] = {"items": [], "actions": [], "timestamps": []}
        many = [{"user_id": "u", "events": small} for _ in range(MOST_USERS + 1)]
        assert (await post(client, {"users": many[:-1]}))[0] == 200
        status, body = await post(client, {"users": many})
        assert status == 422
        assert "length <= 1000" in body["detail"]
        assert (await post(client, {"users": []}))[0] == 422
        status, body = await post(client, {"users": [entry("u", 4000)] * 4})
        assert status == 413
        assert str(INGEST_BYTES) in body["detail"]
        status, body = await post(client, {"users": [entry("a"), {"user_id": "", "events": small}]})
        assert status == 422  # this is not the form: nobody is written
        assert "users" in body["detail"]
        assert await length(service, "a") == 0


async def test_a_key_is_for_its_tenant_and_its_scope(tmp_path: Path) -> None:
    entries = [
        key("shop", tenant="shop", scopes=[Scope.INGEST]),
        key("reader", tenant="shop", scopes=[Scope.INFER]),
    ]
    keys = write_keys(tmp_path / "keys", *entries)
    async with serving(tmp_path, server={"api_keys_file": keys}) as (client, service):
        mine = bearer("shop")
        assert (await post(client, {"users": [entry("u")]}, **mine))[0] == 200
        assert await length(service, "u", "shop") == 3
        assert (await post(client, {"tenant": "other", "users": [entry("u")]}, **mine))[0] == 403
        assert (await post(client, {"users": [entry("u")]}, **bearer("reader")))[0] == 403
        assert (await post(client, {"users": [entry("u")]}))[0] == 401
        assert await length(service, "u", "other") == 0


async def test_without_a_store_nobody_is_written(tmp_path: Path) -> None:
    async with serving(tmp_path, history_store={"kind": "none"}) as (client, _):
        status, body = await post(client, {"users": [entry("u")]})
        assert status == 422
        assert "history_store.kind is none" in body["detail"]


# ---- the writer of our own commands


def writer_of(client: Any, patience_s: float = 20.0) -> ServiceWriter:
    return ServiceWriter(client.session, str(client.make_url("/")), patience_s)


async def test_long_histories_and_many_users_go_through(tmp_path: Path) -> None:
    history = events(20_000)
    batch = [Write(UserKey("t", "long"), history, Mode.MERGE)]
    batch += [
        Write(UserKey("t", f"u{number}"), events(number % 40, seed=number), Mode.MERGE)
        for number in range(900)
    ]
    async with serving(tmp_path, watched=False) as (client, service):
        writer = writer_of(client)
        assert (await writer.model()).actions == service.models()[0].actions
        for turn in range(2):
            done = await writer.write_many(batch)
            added = [one.num_added for one in done if isinstance(one, Written)]
            assert added == (
                [0] * 901 if turn else [20_000, *(number % 40 for number in range(900))]
            )
        stored = (
            await service.parts.histories.read(UserKey("t", "long"), HistoryRef(), 99_999)
        ).events
        assert stored.fingerprint() == history.fingerprint()
        replaced = [one._replace(mode=Mode.REPLACE, events=one.events[:9000]) for one in batch]
        assert all(isinstance(one, Written) for one in await writer.write_many(replaced))
        assert await length(service, "long", "t") == 9000


async def test_equal_events_of_a_long_history_are_kept(tmp_path: Path) -> None:
    """A cut between two equal events would make one of them look as if it were there already."""
    history = events(1)
    while len(history) < 12_000:
        history = history + history
    async with serving(tmp_path, watched=False) as (client, service):
        (done,) = await writer_of(client).write_many(
            [Write(UserKey("", "u"), history[:12_000], Mode.MERGE)]
        )
        assert done == Written(12_000, 12_000)
        assert await length(service, "u") == 12_000


class Scripted:
    """A session whose answers are given."""

    def __init__(self, *answers: tuple[int, dict[str, str], Any]) -> None:
        self.answers = list(answers)
        self.calls = 0

    def request(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

        class Answer:
            def __init__(self) -> None:
                self.status, self.headers = status, headers

            async def read(self) -> bytes:
                return json.dumps(body).encode()

            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *_: object) -> None:
                pass

        return Answer()


FULL = {"detail": "the instance is busy"}
DONE = {
    "request_id": "r",
    "num_added": 1,
    "num_failed": 0,
    "users": [{"num_events": 1, "num_added": 1}],
}


@pytest.mark.parametrize(
    ("status", "key", "mode", "is_tried_again"),
    [
        (429, None, Mode.APPEND, True),  # nothing was begun
        (503, None, Mode.APPEND, False),  # it may have happened
        (503, "k", Mode.APPEND, True),
        (504, None, Mode.MERGE, True),
        (413, None, Mode.MERGE, False),
    ],
)
async def test_what_is_called_again(
    status: int, key: str | None, mode: Mode, is_tried_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    monkeypatch.setattr("npu_gr.tools.ingest.asyncio.sleep", sleep)
    http: Any = Scripted((status, {"Retry-After": "0.2"}, FULL), (200, {}, DONE))
    writer = ServiceWriter(http, "http://x", 60.0)
    batch = [Write(UserKey("", "u"), events(1), mode, key)]
    if is_tried_again:
        assert await writer.write_many(batch) == [Written(1, 1)]
        assert waits == [0.2]
    else:
        with pytest.raises(Exception, match="the instance is busy"):
            await writer.write_many(batch)
        assert http.calls == 1


async def test_patience_ends() -> None:
    http: Any = Scripted((503, {}, FULL))
    with pytest.raises(Unavailable, match="status 503: the instance is busy"):
        await ServiceWriter(http, "http://x", 0.3).write_many(
            [Write(UserKey("", "u"), events(1), Mode.MERGE)]
        )
    assert 1 < http.calls < 5
