"""Names on the wire: every spelling of a request scores the same, answers use the company's."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.catalogue.names import FILE, ItemNames
from npu_gr.core.names import item_id as id_of
from npu_gr.core.names import item_ids as ids_of
from npu_gr.model.weights import Checkpoint, save
from npu_gr.server.schemas.fields import MOST_ITEMS
from tests.models import events, tiny_model
from tests.server.test_generate_over_http import section
from tests.serving import serving

Client = TestClient[Any, Any]
KEY = b"a key of 16 byte"
ACTIONS = ("view", "cart", "4.5")
NAMES: list[str] = [
    str(row) if row % 3 == 0 else f'SKU-{row:04d}, "{row}" \\ é' for row in range(300)
]
TITLES = [f"Title {row}" if row % 2 == 0 else "" for row in range(300)]
item_id, item_ids = partial(id_of, key=KEY), partial(ids_of, key=KEY)
HISTORY = events(60)
CANDIDATES = np.arange(0, 40)


def write(folder: Path, seed: int = 0, names: bool = True) -> None:
    model = tiny_model(seed=seed)
    save(
        Checkpoint(model=model, item_ids=item_ids(NAMES), name="tiny", action_names=ACTIONS), folder
    )
    if names:
        ItemNames.make(NAMES, TITLES, KEY).save(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "checkpoint")
    return tmp_path


def texts(rows: npt.NDArray[Any]) -> list[str]:
    return [NAMES[row] for row in rows]


def shortest(rows: npt.NDArray[Any]) -> list[str | int]:
    return [int(NAMES[row]) if NAMES[row].isdecimal() else NAMES[row] for row in rows]


def raw(rows: npt.NDArray[Any]) -> bytes:
    return item_ids(texts(rows)).tobytes()


def body(form: Any, actions: Any) -> dict[str, Any]:
    history = {
        "items": form(HISTORY.items),
        "actions": actions,
        "timestamps": HISTORY.timestamps.tolist(),
    }
    return {
        "user_id": 7,
        "candidates": form(CANDIDATES),
        "history": history,
        "timestamp": 2_000_000_000,
    }


BY_NAME = [ACTIONS[index] for index in HISTORY.actions]
BODIES: dict[str, dict[str, Any]] = {
    "texts": body(texts, BY_NAME),
    "numbers where they are": body(shortest, [4.5 if name == "4.5" else name for name in BY_NAME]),
    "raw": body(raw, HISTORY.actions.astype("<i2").tobytes()),
}


async def scores(client: Client, sent: bytes, media: str) -> dict[str, bytes]:
    headers = {"Content-Type": media, "Accept": "application/msgpack"}
    async with client.post("/v1/rank", data=sent, headers=headers) as response:
        answer = msgspec.msgpack.decode(await response.read())
        assert response.status == 200, answer
        found: dict[str, bytes] = answer["scores"]
        return found


def base64ed(value: Any) -> str:
    return base64.b64encode(value).decode()


async def test_texts_numbers_and_raw_bytes_score_the_same_bit_for_bit(folder: Path) -> None:
    async with serving(folder, relay={"enabled": False}) as (client, _):
        found = {}
        for form, sent in BODIES.items():
            found[form, "json"] = await scores(
                client, json.dumps(sent, default=base64ed).encode(), "application/json"
            )
            found[form, "msgpack"] = await scores(
                client, msgspec.msgpack.encode(sent), "application/msgpack"
            )
        want = found["texts", "json"]
        assert not np.isnan(np.frombuffer(want["click"], "<f4")).any()
        assert all(each == want for each in found.values()), found.keys()


async def post(client: Client, path: str, status: int = 200, **fields: Any) -> Any:
    async with client.post(path, json=fields) as response:
        answer = await response.json(content_type=None)
        assert response.status == status, answer
        return answer


async def test_an_answer_has_names_and_titles_where_they_are_asked_for(folder: Path) -> None:
    async with serving(folder) as (client, _):
        asked = {**BODIES["texts"], "top_k": 5}
        answer = await post(client, "/v1/rank", **asked)
        assert "titles" not in answer
        assert all(isinstance(one, int) == str(one).isdecimal() for one in answer["top"])
        named = await post(client, "/v1/rank", **asked, fields=["title"])
        assert named["top"] == answer["top"]
        assert named["titles"] == [TITLES[NAMES.index(str(one))] or None for one in named["top"]]
        again = await post(client, "/v1/rank", **{**asked, "candidates": answer["top"]})
        assert again["top"] == answer["top"], "what is answered can be asked"
        rejected = await post(client, "/v1/rank", 422, **asked, fields=["title", "colour"])
        assert rejected["detail"] == "fields: unknown field 'colour'; there are: title"
        headers = {"Accept": "application/msgpack"}
        async with client.post(
            "/v1/rank", json={**asked, "fields": ["title"]}, headers=headers
        ) as response:
            packed = msgspec.msgpack.decode(await response.read())
        assert packed["top"] == item_ids(named["top"]).tolist()
        assert packed["titles"] == named["titles"]


async def test_events_are_stored_by_name_and_ranked_as_if_they_were_sent(folder: Path) -> None:
    async with serving(folder, relay={"enabled": False}) as (client, _):
        sent = BODIES["texts"]
        stored = await post(client, "/v1/events", user_id="7", events=sent["history"])
        assert (stored["num_events"], stored["sorted_events"]) == (60, 0)
        want = await post(client, "/v1/rank", **sent)
        by_store = {name: value for name, value in sent.items() if name != "history"}
        got = await post(client, "/v1/rank", **by_store)  # user 7 is user "7"
        assert (got["history"]["source"], got["scores"]) == ("store", want["scores"])
        detail = (
            await post(
                client,
                "/v1/events",
                422,
                user_id="u",
                events={**sent["history"], "actions": [1] * 60},
            )
        )["detail"]
        assert detail == (
            "events.actions: 1 at index 0 is not an action of the model; it has view, cart, 4.5"
        )


async def test_models_say_the_names_of_their_actions(folder: Path) -> None:
    async with serving(folder) as (client, _), client.get("/v1/models") as response:
        assert (await response.json())["models"][0]["actions"] == list(ACTIONS)


async def items(client: Client, query: str, status: int = 200) -> Any:
    async with client.get(f"/v1/items?{query}") as response:
        answer = await response.json(content_type=None)
        assert response.status == status, answer
        return answer if status == 200 else answer["detail"]


async def test_items_are_found_by_id_and_by_name(folder: Path) -> None:
    odd, unknown = NAMES[4], item_id("nobody's")
    async with serving(folder) as (client, _):
        found = await items(client, f"ids=6,{item_id(odd)}&ids={unknown}&names=8,SKU-x&name=a,b")
        assert found == [
            {"id": 6, "name": 6, "title": "Title 6"},
            {"id": item_id(odd), "name": odd, "title": "Title 4"},
            {"id": unknown, "name": None, "title": None},
            {"id": 8, "name": "8", "title": None},  # row 8 is called otherwise
            {"id": item_id("SKU-x"), "name": "SKU-x", "title": None},
            {"id": item_id("a,b"), "name": "a,b", "title": None},
        ]
        assert (
            len(await items(client, "ids=" + ",".join(map(str, range(MOST_ITEMS))))) == MOST_ITEMS
        )
        too_many = "ids=" + ",".join(map(str, range(MOST_ITEMS + 1)))
        assert "send 1 to 1000" in await items(client, too_many, 413)
        assert "send 1 to 1000" in await items(client, "", 422)
        assert (
            await items(client, "ids=1,-2", 422) == "ids: '-2' is not an id; ids are 0 to 2^63 - 1"
        )
        assert await items(client, f"ids={2**63}", 422) == (
            f"ids: '{2**63}' is not an id; ids are 0 to 2^63 - 1"
        )
        assert "index 1: a name of 0 bytes" in await items(client, "names=a,", 422)
        assert "a name of 513 bytes" in await items(client, "names=" + "a" * 513, 422)


async def test_a_reload_brings_other_names_beside_the_same_weights(folder: Path) -> None:
    name = NAMES[4]
    async with serving(folder, read=lambda: config) as (client, service):
        config = service.parts.settings.config
        renamed = ItemNames.make([name], ["Renamed"], KEY)
        await asyncio.to_thread(renamed.save, folder / "checkpoint")
        assert (await items(client, f"ids={item_id(name)}"))[0]["title"] == "Title 4"
        await post(client, "/v1/models/reload")
        assert (await items(client, f"ids={item_id(name)}"))[0]["title"] == "Renamed"
        await asyncio.to_thread((folder / "checkpoint" / FILE).write_bytes, b"garbage")
        detail = (await post(client, "/v1/models/reload", 422))["detail"]
        assert "names.safetensors" in detail
        assert (await items(client, f"ids={item_id(name)}"))[0]["title"] == "Renamed"


async def test_a_new_item_is_answered_by_its_name_and_withdrawn_by_it(folder: Path) -> None:
    name = 'NEW, "one"'
    asked: dict[str, Any] = {
        "user_id": "u",
        "num_items": 2,
        "fields": ["title"],
        "allow_items": [name, 3],
    }
    asked["history"] = {"items": [5, 10, 17], "actions": ["view"] * 3, "timestamps": [1, 2, 3]}
    async with serving(folder, generate=section(folder)) as (client, _):
        before = await post(client, "/v1/generate", **asked)
        assert (before["items"], before["titles"]) == ([3], [None])
        new = {
            "item_id": name,
            "title": "Brand new",
            "sid": before["sids"][:3],
            "order": 0.0,
            "attributes": {"kind": "a", "stock": 1},
        }
        await post(client, "/v1/catalog/items", add=[new])
        found = await post(client, "/v1/generate", **asked)
        assert dict(zip(found["items"], found["titles"], strict=True)) == {
            3: None,
            name: "Brand new",
        }
        await post(client, "/v1/catalog/items", withdraw=[name])
        assert (await post(client, "/v1/generate", **asked))["items"] == [3]
        await post(client, "/v1/catalog/rollback")
        assert name in (await post(client, "/v1/generate", **asked))["items"]
        rejected = await post(client, "/v1/catalog/items", 422, add=[{**new, "item_id": "é" * 257}])
        assert rejected["detail"].startswith(
            "add[0].item_id: a name of 514 bytes is not an item name"
        )


BACKWARDS: dict[str, Any] = {
    "items": [NAMES[1], NAMES[2], NAMES[5]],
    "actions": ["view", "cart", 4.5],
    "timestamps": [30, 10, 20],
}
FORWARDS: dict[str, Any] = {
    "items": [NAMES[2], NAMES[5], NAMES[1]],
    "actions": ["cart", 4.5, "view"],
    "timestamps": [10, 20, 30],
}


async def test_rows_that_run_backwards_are_rejected_or_sorted_and_counted(folder: Path) -> None:
    asked: dict[str, Any] = {"user_id": "u", "candidates": [0, 3], "timestamp": 99}
    async with serving(folder, relay={"enabled": False}) as (client, service):
        rejected = await post(client, "/v1/rank", 422, **asked, history=BACKWARDS)
        assert rejected["detail"].startswith(
            "history.timestamps: 10 at index 1 is before 30; send the oldest event first"
        )
        want = await post(client, "/v1/rank", **asked, history=FORWARDS)
        assert want["history"]["sorted_events"] == 0
        late: dict[str, Any] = {
            "items": [NAMES[1], NAMES[2]],
            "actions": ["view", "cart"],
            "timestamps": [25, 50],
        }
        base = want["history"]["fingerprint"]
        rejected = await post(client, "/v1/rank", 422, **asked, history=late, base=base)
        assert rejected["detail"].startswith(
            "history.timestamps: 25 at index 0 is before 30, the last of base; send the oldest "
            "event first"
        )
        service.parts.histories.on_unsorted = "sort"
        got = await post(client, "/v1/rank", **asked, history=BACKWARDS)
        assert got["history"] == want["history"] | {"sorted_events": 2}
        assert got["scores"] == want["scores"]
        delta = {"items": [NAMES[1], NAMES[2]], "actions": ["view", "cart"], "timestamps": [50, 40]}
        longer = await post(
            client, "/v1/rank", **asked, history=delta, base=got["history"]["fingerprint"]
        )
        assert (longer["history"]["num_tokens"], longer["history"]["sorted_events"]) == (5, 1)
        late["timestamps"] = [27, 25]  # behind the base, and backwards by itself
        whole = {column: [*FORWARDS[column], *late[column]] for column in FORWARDS}
        want_late = await post(client, "/v1/rank", **asked, history=whole)
        got_late = await post(client, "/v1/rank", **asked, history=late, base=base)
        assert got_late["history"] == want_late["history"]
        assert got_late["history"]["sorted_events"] == 2
        assert got_late["scores"] == want_late["scores"]
        stored = await post(client, "/v1/events", user_id="s", events=BACKWARDS)
        assert (stored["num_events"], stored["sorted_events"]) == (3, 2)
        by_store = await post(client, "/v1/rank", **(asked | {"user_id": "s"}))
        assert by_store["scores"] == want["scores"]


HOSTILE = [
    (b'"candidates":["\\ud800"]', 400),
    (b'"candidates":["\\ud800\\u0041"]', 400),
    (b'"candidates":["' + b"x" * 1_000_000 + b'"]', 422),
    (b'"candidates":[' + b'"a,\\",",' * 200_000 + b'"a"]', 413),
    (b'"candidates":[' + b",".join([b'"a,\\",\\\\"'] * 10_000) + b"]", 200),
    (b'"candidates":["a\\u0000b","a"]', 200),
    (b'"candidates":[true]', 422),
    (b'"candidates":[null]', 422),
    (b'"candidates":[1.0]', 422),
    (b'"candidates":[4611686018427387904]', 200),
    (b'"candidates":[99999999999999999999999999]', 200),
    (b'"candidates":[["a"]]', 422),
    (b'"candidates":["a"],"fields":"title"', 422),
]


@pytest.mark.parametrize(("fields", "status"), HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_names_are_rejected_in_few_words(
    folder: Path, fields: bytes, status: int
) -> None:
    nothing = b'"history":{"items":[],"actions":[],"timestamps":[]}'
    data = b'{"user_id":"u",' + nothing + b"," + fields + b"}"
    async with serving(folder) as (client, _):
        headers = {"Content-Type": "application/json"}
        async with client.post("/v1/rank", data=io.BytesIO(data), headers=headers) as response:
            answer = await response.text()
            assert response.status == status, answer[:300]
            assert status == 200 or len(answer) < 500
