"""What a user has seen is the whole history, however short the windows that the models read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.errors import StoreFailed
from npu_gr.core.history import Events
from npu_gr.history_store.bulkhead import GuardedStore
from npu_gr.vector_search.vectors import save
from tests.models import events
from tests.server.test_recommend_over_http import section as cascade
from tests.serving import FIRST_ID, columns, serving
from tests.vector_search.test_fold import make_folding
from tests.vector_search.vectors import make_vectors

PATIENT = {"X-Request-Timeout-Ms": "30000"}
SHOWN_AT = 1_700_000_000
WINDOW = 16  # tokens of the ranker; it moves by 4
MATCHED = [FIRST_ID + 220 + 2 * row for row in range(40)]  # which the ranker knows, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seen")


def sections(folder: Path) -> dict[str, Any]:
    """Windows of at most 32 events."""
    if not (folder / "vectors").exists():
        item_ids = np.array(MATCHED, np.int64)
        save(make_vectors(folding=make_folding(), item_ids=item_ids), folder / "vectors")
    parts = cascade(folder, sources={"generate": 50, "match": 50})
    parts["generate"] |= {"max_prompt_tokens": 24, "cut_step_items": 2}
    return {
        **parts,
        "match": {"vectors": str(folder / "vectors"), "max_history_events": 10},
        "service": {"max_history_tokens": WINDOW, "cut_step_tokens": 4},
    }


async def post(client: Any, path: str, status: int = 200, **body: Any) -> Any:
    async with client.post(path, json=body, headers=PATIENT) as answer:
        said = await answer.json()
        assert answer.status == status, said
        return said


def in_turn(items: list[int]) -> dict[str, list[int]]:
    times = [1_600_000_000 + place for place in range(len(items))]
    return {"items": items, "actions": [1] * len(items), "timestamps": times}


@pytest.mark.parametrize("num", [5, 20, 60, 200])
async def test_generate_and_recommend_leave_out_all_that_was_seen(num: int, folder: Path) -> None:
    seen = [FIRST_ID + row for row in range(num)]
    async with serving(folder, **sections(folder)) as (client, _):
        user = f"u{num}"
        await post(client, "/v1/events", user_id=user, events=in_turn(seen))
        base = (await post(client, "/v1/rank", user_id=user, candidates=seen[:1]))["history"]
        assert base["source"] == "store"
        ways: tuple[dict[str, Any], ...] = (
            {},
            {"history": in_turn(seen)},
            {"base": base["fingerprint"]},
        )
        for path in ("/v1/generate", "/v1/recommend"):
            more: dict[str, Any] = {}
            if path == "/v1/recommend":
                more = {"timestamp": SHOWN_AT, "format": "columns"}
            found = [
                await post(client, path, user_id=user, num_items=50, **more, **way) for way in ways
            ]
            for answer in found:
                assert answer["items"] == found[0]["items"]
                assert len(answer["items"]) == 50
                assert not set(seen) & set(answer["items"])
            every = await post(client, path, user_id=user, num_items=50, exclude_seen=False, **more)
            assert set(seen) & set(every["items"])


@pytest.mark.parametrize("num", [5, 20, 35])
async def test_match_leaves_out_all_that_was_seen(num: int, folder: Path) -> None:
    """A vector is folded in from the newest ten; items of before them are seen all the same."""
    items = [MATCHED[place % num] for place in range(60)]
    async with serving(folder, **sections(folder)) as (client, _):
        user = f"m{num}"
        await post(client, "/v1/events", user_id=user, events=in_turn(items))
        stored = await post(client, "/v1/match", user_id=user, num_items=40)
        sent = await post(client, "/v1/match", user_id="x", num_items=40, history=in_turn(items))
        for answer in (stored, sent):
            assert answer["basis"] == "folded"
            # none of the history is known to the source, so nothing else is left out
            assert sorted(answer["items"]) == sorted(set(MATCHED) - set(items))
        assert stored["items"] == sent["items"]
        assert stored["scores"] == sent["scores"]
        newest = await post(
            client, "/v1/match", user_id="y", num_items=40, history=in_turn(items[-10:])
        )
        scores = dict(zip(newest["items"], newest["scores"], strict=True))
        assert stored["scores"] == [scores[item] for item in stored["items"]]


async def test_items_that_cannot_be_read_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base goes on without the store, and the answer has the fault."""
    seen = [FIRST_ID + row for row in range(100)]
    async with serving(folder, **sections(folder)) as (client, _):
        await post(client, "/v1/events", user_id="f", events=in_turn(seen))
        ranked = await post(client, "/v1/rank", user_id="f", candidates=seen[:1])
        base = ranked["history"]["fingerprint"]

        async def fails(*_: object) -> None:
            raise StoreFailed("no store today")

        monkeypatch.setattr(GuardedStore, "read", fails)
        answer = await post(client, "/v1/generate", user_id="f", num_items=50, base=base)
        assert answer["history"]["source"] == "last_known"
        assert answer["history"]["fault"] == "store_unavailable"
        assert not set(seen[-WINDOW:]) & set(answer["items"])


# ---- a base from any earlier answer


def rank_of(user: str, history: Events | None = None, **more: Any) -> dict[str, Any]:
    body = {"user_id": user, "candidates": [FIRST_ID + 3, FIRST_ID + 5], "timestamp": SHOWN_AT}
    return body | ({} if history is None else {"history": columns(history)}) | more


async def test_every_answer_from_the_store_is_a_base(folder: Path) -> None:
    """Also after more events were stored, of a signal, a rank, a recommend and a generate."""
    whole = events(90, seed=8)
    async with serving(folder, **sections(folder)) as (client, _):
        bases: list[tuple[int, str]] = []
        for num, path in ((0, "rank"), (10, "signal"), (40, "generate"), (70, "recommend")):
            start = bases[-1][0] if bases else 0
            if num:
                part = columns(whole[start:num])
                await post(client, "/v1/events", user_id="s", events=part)
            body = {"candidates": [FIRST_ID], "timestamp": SHOWN_AT} if path == "rank" else {}
            status = 202 if path == "signal" else 200
            body |= {"format": "columns"} if path == "recommend" else {}
            answer = await post(client, f"/v1/{path}", status, user_id="s", **body)
            assert answer["history"]["source"] == "store"
            bases.append((num, answer["history"]["fingerprint"]))
        for num, base in bases:
            for end in (num, num + 1, num + 15):
                want = await post(client, "/v1/rank", **rank_of("w", whole[:end]))
                delta = whole[num:end] if end > num else None
                got = await post(client, "/v1/rank", **rank_of("s", delta, base=base))
                assert got["scores"] == want["scores"]
                assert got["history"]["cut_tokens"] == want["history"]["cut_tokens"]
                assert got["history"]["source"] == "request"
        await post(client, "/v1/rank", 409, **rank_of("another", base=bases[-1][1]))
        async with client.delete("/v1/users/s") as answer:
            assert answer.status in (202, 204)
        await post(client, "/v1/rank", 409, **rank_of("s", base=bases[-1][1]))


# ---- late events


async def test_no_prefix_outlives_a_late_event(folder: Path) -> None:
    """Scores behind a cached prefix are those of the history in time order, before and after."""
    whole = events(14, seed=9)
    late = whole[6:9]
    first = whole[:6] + whole[9:]
    async with serving(folder, **sections(folder)) as (client, service):
        await post(client, "/v1/events", user_id="p", events=columns(first))
        await post(client, "/v1/signal", 202, user_id="p")
        want = await post(client, "/v1/rank", **rank_of("w", first))
        for _ in range(2):
            before = await post(client, "/v1/rank", **rank_of("p"))
            assert before["scores"] == want["scores"]
        said = await post(client, "/v1/events", user_id="p", events=columns(late))
        assert (said["num_events"], said["sorted_events"]) == (14, 3)
        metric = "npu_gr_history_late_events_total"
        assert service.parts.metrics.registry.get_sample_value(metric) == 3
        want = await post(client, "/v1/rank", **rank_of("w", whole))
        for _ in range(2):
            after = await post(client, "/v1/rank", **rank_of("p"))
            assert after["scores"] == want["scores"]
            assert after["history"]["fingerprint"] == want["history"]["fingerprint"]
        bulk: dict[str, Any] = {
            "mode": "append",
            "users": [{"user_id": "p", "events": columns(whole[2:3])}],
        }
        (user,) = (await post(client, "/v1/events/bulk", **bulk))["users"]
        assert (user["num_events"], user["sorted_events"]) == (15, 1)


async def test_what_an_older_version_stored_out_of_order_is_read_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = events(12, seed=10)
    backwards = whole.take([*range(8, 12), *range(8)])
    async with serving(folder, **sections(folder)) as (client, _):
        with monkeypatch.context() as patch:  # an append as it was
            patch.setattr("npu_gr.history_store.embedded_file.in_time_order", lambda one: one)
            patch.setattr("npu_gr.history_store.embedded_file.count_late", lambda *_: 0)
            for part in (backwards[:4], backwards[4:]):
                patch.setattr("npu_gr.history_store.event_features.Chunk.newest", -1)
                await post(client, "/v1/events", user_id="o", events=columns(part))
        want = await post(client, "/v1/rank", **rank_of("w", whole))
        got = await post(client, "/v1/rank", **rank_of("o"))
        assert got["scores"] == want["scores"]
        assert (want["history"]["sorted_events"], got["history"]["sorted_events"]) == (0, 8)
        newest = columns(whole[11:])
        newest["timestamps"] = [newest["timestamps"][0] + 9]
        # the first write that comes late, or a repair, stores it in order
        await post(client, "/v1/events", user_id="o", events=newest)
        late = columns(whole[:1])
        await post(client, "/v1/events", user_id="o", events=late)
        assert (await post(client, "/v1/rank", **rank_of("o")))["history"]["sorted_events"] == 0
