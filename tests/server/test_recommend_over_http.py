"""POST /v1/recommend against a real instance.

It answers what its stages answer one by one, and failures degrade it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, DeviceError
from npu_gr.engine.queue import Job, JobQueue
from npu_gr.handlers.hooks import HookContext
from npu_gr.handlers.service import Service
from npu_gr.vector_search.vectors import save
from tests.decoders import VARIANTS, saved
from tests.models import events
from tests.serving import FIRST_ID, columns, make_config, serving
from tests.vector_search.vectors import KNOWN, make_vectors

Client = TestClient[Any, Any]
HERE = "tests.server.test_recommend_over_http"
SHOWN_AT = 1_700_000_000
HISTORY = columns(events(40))
NUM_ITEMS = 250  # of the catalogue; the ranker knows 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tests share one ranker and one generator."""
    return tmp_path_factory.mktemp("recommend")


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    """A generator of the ranker's items, and the cascade over both."""
    if not (folder / "decoder").exists():
        (folder / "decoder").mkdir()
        saved(folder / "decoder", **VARIANTS["qwen3 g2 tied"])
        sids = np.random.default_rng(0).integers(0, 8, (NUM_ITEMS, 3)).tolist()
        rows = [
            {"item_id": FIRST_ID + row, "sid": sid, "order": 0.0} for row, sid in enumerate(sids)
        ]
        (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate = {
        "checkpoint": str(folder / "decoder"),
        "catalogue": str(folder / "items.jsonl"),
        "codes": [8, 8, 8],
        "max_beams": 64,
        "beam_width": 64,
        "max_prompt_tokens": 48,
        "hbm_bytes": 4_000_000,
    }
    return {"generate": generate, "recommend": {"sources": {"generate": 30}, **changes}}


def popular(folder: Path, more: Iterable[int] = ()) -> str:
    path = folder / "popular.txt"
    seen = sorted(set(HISTORY["items"]))[:5]  # the user had them already
    path.write_text(
        "".join(f"{item}\n" for item in (*more, *seen, *range(FIRST_ID + 299, FIRST_ID + 199, -1)))
    )
    return str(path)


IN_COLUMNS = {"/v1/recommend": {"format": "columns"}}  # what its tests look at is not in objects


async def post(
    client: Client, path: str, status: int = 200, budget_ms: float = 30_000, **body: Any
) -> dict[str, Any]:
    headers = {"X-Request-Timeout-Ms": str(int(budget_ms))}
    body = {"user_id": "u", **IN_COLUMNS.get(path, {}), **body}
    async with client.post(path, json=body, headers=headers) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        assert response.status == status, answer
        return answer


async def recommend(client: Client, status: int = 200, **body: Any) -> dict[str, Any]:
    return await post(
        client, "/v1/recommend", status, **{"history": HISTORY, "timestamp": SHOWN_AT, **body}
    )


def results(answer: dict[str, Any]) -> dict[str, str]:
    return {stage["stage"]: stage["result"] for stage in answer["stages"]}


def only_seen(answer: dict[str, Any]) -> set[int]:
    return set(answer["items"]) & set(HISTORY["items"])


async def test_it_is_signal_generate_and_rank_by_hand(folder: Path) -> None:
    async with serving(folder, **section(folder)) as (client, _):
        whole = await recommend(client, num_items=12)
        assert (whole["degraded"], results(whole)) == ([], {"generate": "ok", "rank": "ok"})
        assert whole["verdict"] == "preinfer"
        assert set(whole["stages_s"]) == {"history", "retrieve", "preprocess", "rank"}

        found = await post(
            client,
            "/v1/generate",
            user_id="v",
            history=HISTORY,
            num_items=30,
            deny_items=HISTORY["items"],
        )
        ranked = await post(
            client,
            "/v1/rank",
            user_id="v",
            history=HISTORY,
            candidates=found["items"],
            top_k=12,
            timestamp=SHOWN_AT,
        )
        assert whole["items"] == ranked["top"]
        assert whole["num_candidates"] == len(found["items"])
        best = sorted(ranked["scores"]["click"], reverse=True)[:12]
        np.testing.assert_allclose(whole["scores"], best, atol=1e-5)
        assert set(whole["origins"]) == {"generate"}

        media = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        body = msgspec.msgpack.encode(
            {"user_id": "u", "history": HISTORY, "num_items": 12, "timestamp": SHOWN_AT}
        )
        async with client.post("/v1/recommend", data=body, headers=media) as response:
            raw = msgspec.msgpack.decode(await response.read())
            assert response.headers["X-Cache"] in ("hit-hbm", "joined")
        assert np.frombuffer(raw["items"], "<i8").tolist() == whole["items"]
        np.testing.assert_allclose(np.frombuffer(raw["scores"], "<f4"), whole["scores"], atol=1e-5)


async def slow_rules(items: I64, shown: HookContext) -> I64:
    """Retrieval elsewhere: longer than the prefill."""
    await asyncio.sleep(0.3)
    return items


async def test_the_rank_finds_its_prefix_where_retrieval_takes_longer_than_the_prefill(
    folder: Path,
) -> None:
    waits = section(folder, hook=f"{HERE}:slow_rules", hook_budget_s=10.0)
    async with serving(folder, **waits) as (client, _):
        with_relay = await recommend(client)
        assert (with_relay["outcome"], with_relay["prefix_tokens"]) == ("hbm_hit", 40)
        assert (await client.delete("/v1/users/u")).status == 204
        again = await recommend(client)  # nothing is left of the user: encoded anew
        assert (again["verdict"], again["items"]) == ("preinfer", with_relay["items"])
    async with serving(folder, relay={"enabled": False}, **waits) as (client, _):
        without = await recommend(client)
        assert (without["verdict"], without["outcome"]) == ("skip_disabled", "miss_full")
        assert without["items"] == with_relay["items"]
        np.testing.assert_allclose(without["scores"], with_relay["scores"], atol=1e-4)


async def test_seen_denied_and_too_many_are_left_out(folder: Path) -> None:
    async with serving(folder, **section(folder, max_candidates=20)) as (client, _):
        free = await recommend(client, num_items=100)
        assert (free["num_candidates"], len(free["items"])) == (20, 20)
        assert not only_seen(free)
        assert len(set(free["items"])) == 20
        denied = await recommend(client, num_items=100, deny_items=free["items"][:5])
        assert not set(free["items"][:5]) & set(denied["items"])
        few = await recommend(client, num_items=100, num_candidates=7)
        assert (few["num_candidates"], len(few["items"])) == (7, 7)
        assert (await recommend(client, num_items=3, num_candidates=1000))["num_candidates"] == 20
        everything = await recommend(client, num_items=100, exclude_seen=False)
        found = await post(
            client, "/v1/generate", history=HISTORY, num_items=30, exclude_seen=False
        )
        assert sorted(everything["items"]) == sorted(found["items"][:20])


def matching(folder: Path) -> str:
    save(make_vectors(item_ids=np.arange(40, dtype=np.int64) + FIRST_ID), folder / "vectors")
    return str(folder / "vectors")


async def test_generate_and_match_are_merged_in_turns(folder: Path) -> None:
    both = section(folder, sources={"match": 6, "generate": 9}) | {
        "match": {"vectors": matching(folder)}
    }
    async with serving(folder, **both) as (client, _):
        answer = await recommend(client, num_items=100, user_id=KNOWN)
        assert results(answer) == {"match": "ok", "generate": "ok", "rank": "ok"}
        who: dict[str, Any] = {"user_id": KNOWN}
        matched = (
            await post(client, "/v1/match", **who, num_items=6, deny_items=HISTORY["items"])
        )["items"]
        generate: dict[str, Any] = {
            **who,
            "history": HISTORY,
            "num_items": 9,
            "deny_items": HISTORY["items"],
        }
        generated = (await post(client, "/v1/generate", **generate))["items"]
        assert set(answer["items"]) == {*matched, *generated}
        by_match = {
            item
            for item, origin in zip(answer["items"], answer["origins"], strict=True)
            if origin == "match"
        }
        assert by_match == set(matched) - {
            item for place, item in enumerate(generated) if item in matched[place + 1 :]
        }
    with pytest.raises(ConfigError, match=r"sources\.match: 6 is over match\.max_items 5"):
        make_config(
            folder, **both | {"match": {"vectors": str(folder / "vectors"), "max_items": 5}}
        )


async def test_the_order_may_be_that_of_both_stages(folder: Path) -> None:
    async with serving(folder, **section(folder, order="fused")) as (client, _):
        answer = await recommend(client, num_items=100)
        found = await post(
            client, "/v1/generate", history=HISTORY, num_items=30, deny_items=HISTORY["items"]
        )
        ranked = await post(
            client,
            "/v1/rank",
            history=HISTORY,
            candidates=found["items"],
            top_k=100,
            timestamp=SHOWN_AT,
        )
        gain = {
            item: 1 / (60 + found["items"].index(item)) + 1 / (60 + place)
            for place, item in enumerate(ranked["top"])
        }
        assert [round(gain[item], 12) for item in answer["items"]] == sorted(
            (round(value, 12) for value in gain.values()), reverse=True
        )
        assert answer["items"] != ranked["top"]


async def test_a_short_answer_says_why(folder: Path) -> None:
    async with serving(folder, **section(folder, max_candidates=20)) as (client, _):

        async def ended(**body: Any) -> tuple[str, str, int]:
            answer = await recommend(client, **body)
            return answer["status"], answer["limited_by"], len(answer["items"])

        assert await ended(num_items=20) == ("complete", "", 20)
        assert await ended(num_items=600) == ("exhausted", "limit", 20)
        assert await ended(num_items=9, num_candidates=5) == ("exhausted", "limit", 5)
    few = section(folder, max_candidates=100, sources={"generate": 30})
    async with serving(folder, **few) as (client, _):
        assert await ended(num_items=50) == ("exhausted", "limit", 30)  # what it is asked for


async def test_a_failing_generator_gives_popular_items_or_503(folder: Path) -> None:
    async def fails(*_: object) -> None:
        raise DeviceError("it broke")

    async with serving(folder, **section(folder, popular=popular(folder))) as (client, service):
        service.versions.generator().engine.generate = fails  # type: ignore[method-assign,assignment]
        answer = await recommend(client, num_items=10)
        assert results(answer) == {"generate": "failed", "popular": "ok", "rank": "ok"}
        assert answer["degraded"] == ["generate"]
        assert len(answer["items"]) == 10
        assert set(answer["origins"]) == {"popular"}
        assert not only_seen(answer)
        async with client.get("/metrics") as response:
            text = await response.text()
        assert 'npu_gr_recommend_stages_total{result="failed",stage="generate"} 1.0' in text
        assert 'npu_gr_recommend_duration_seconds_count{degraded="true"} 1.0' in text
    async with serving(folder, **section(folder)) as (client, service):
        service.versions.generator().engine.generate = fails  # type: ignore[method-assign,assignment]
        problem = await recommend(client, 503)
        assert problem["detail"] == (
            "retrieval failed (generate failed), and no list of popular items is configured"
        )
        await nothing_held(service)


async def test_a_failing_rank_keeps_the_order_of_the_retrieval(folder: Path) -> None:
    async def fails(*_: object) -> None:
        raise DeviceError("it broke")

    async with serving(folder, **section(folder)) as (client, service):
        found = await post(
            client, "/v1/generate", history=HISTORY, num_items=30, deny_items=HISTORY["items"]
        )
        service.versions.ranker().engine.rank = fails  # type: ignore[method-assign,assignment]
        answer = await recommend(client, num_items=5)
        assert (answer["outcome"], answer["degraded"]) == (None, ["rank"])
        assert (answer["items"], answer["scores"]) == (found["items"][:5], [None] * 5)
        await nothing_held(service)
    async with serving(folder, **section(folder, on_rank_failure="fail")) as (client, service):
        service.versions.ranker().engine.rank = fails  # type: ignore[method-assign,assignment]
        await recommend(client, 503)


async def test_a_generator_out_of_time_leaves_the_rank_its_own(folder: Path) -> None:
    async def hangs(*_: object) -> None:
        await asyncio.sleep(60)

    patient = section(folder, popular=popular(folder), min_rank_s=2.0)
    async with serving(folder, **patient) as (client, service):
        service.versions.generator().engine.generate = hangs  # type: ignore[method-assign,assignment]
        answer = await recommend(client, budget_ms=2500)
        assert results(answer) == {"generate": "out_of_time", "popular": "ok", "rank": "ok"}
        service.versions.ranker().engine.rank = hangs  # type: ignore[method-assign,assignment]
        answer = await recommend(client, budget_ms=2500)
        assert results(answer) == {
            "generate": "out_of_time",
            "popular": "ok",
            "rank": "out_of_time",
        }
        assert answer["items"][0] == next(
            item for item in range(FIRST_ID + 299, FIRST_ID, -1) if item not in HISTORY["items"]
        )
        await nothing_held(service)


async def test_a_caller_who_leaves_leaves_nothing_behind(folder: Path) -> None:
    started = asyncio.Event()

    async def hangs(*_: object) -> None:
        started.set()
        await asyncio.sleep(60)

    async with serving(folder, **section(folder)) as (client, service):
        service.versions.generator().engine.generate = hangs  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(recommend(client))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(1000):
            await asyncio.sleep(0.01 if service.admission.work.admitted else 0)
        await nothing_held(service)


async def nothing_held(service: Service) -> None:
    assert service.admission.work.admitted == 0
    for job in (service.versions.ranker(), service.versions.generator()):
        await job.relay.settled()
        pool = job.relay.tiers.pool
        assert pool.reserved_bytes == 0
        assert not any(entry.leases for entry in pool._found.values())


async def test_a_cold_user_gets_what_is_popular(folder: Path) -> None:
    nobody: dict[str, list[int]] = {"items": [], "actions": [], "timestamps": []}
    async with serving(folder, **section(folder, popular=popular(folder))) as (client, _):
        answer = await recommend(client, history=nobody)
        assert results(answer) == {"generate": "cold", "popular": "ok", "rank": "ok"}
        assert len(answer["items"]) == 10
    async with serving(folder, **section(folder)) as (client, _):
        answer = await recommend(client, history=nobody)
        assert (answer["items"], answer["outcome"], results(answer)) == (
            [],
            None,
            {"generate": "cold"},
        )


async def test_a_new_list_of_popular_items_comes_with_a_reload(
    folder: Path, tmp_path: Path
) -> None:
    nobody: dict[str, list[int]] = {"items": [], "actions": [], "timestamps": []}
    path = tmp_path / "popular.txt"
    sections = section(folder, popular=str(path), min_coverage=0.5)

    def write(*items: int) -> set[int]:
        path.write_text("".join(f"{item}\n" for item in items))
        return set(items)

    async def found(client: Client, reload_status: int | None = None) -> set[int]:
        if reload_status is not None:
            async with client.post("/v1/models/reload") as response:
                assert response.status == reload_status, await response.text()
        return set((await recommend(client, history=nobody))["items"])

    old = write(FIRST_ID + 200, FIRST_ID + 201)
    async with serving(folder, read=lambda: make_config(folder, **sections), **sections) as (
        client,
        _,
    ):
        assert await found(client) == old
        new = write(FIRST_ID + 210, FIRST_ID + 211, 10**9, 10**9 + 1)
        assert await found(client) == old
        assert await found(client, 200) == new
        async with client.get("/metrics") as response:
            assert 'npu_gr_catalogue_coverage_ratio{source="popular"} 0.5' in await response.text()
        path.write_text("\n")
        assert await found(client, 422) == new
        path.unlink()
        assert await found(client, 422) == new
        assert await found(client, 422) == new


async def test_popular_items_fill_up_a_short_retrieval(folder: Path) -> None:
    few = section(folder, sources={"generate": 4}, popular=popular(folder))
    async with serving(folder, **few) as (client, _):
        found = await recommend(client, num_items=4)
    popular(folder, found["items"])
    async with serving(folder, **few) as (client, _):
        answer = await recommend(client, num_items=9, num_candidates=9)
        assert sorted(answer["origins"]) == ["generate"] * 4 + ["popular"] * 5
        assert len(set(answer["items"])) == 9
        assert not only_seen(answer)


# ---- hooks


def every_other(items: I64, shown: HookContext) -> list[int]:
    """Rules as a site might have them: told the user and the page, may drop, repeat and add."""
    assert shown.user.user == "u"
    assert len(shown.history) == 40
    assert shown.timestamp == SHOWN_AT
    extra = [int(shown.context["extra"])] * 2 if "extra" in shown.context else []
    return [*items[::2].tolist(), *extra]


def raises(items: I64, shown: HookContext) -> I64:
    raise KeyError("a bug of theirs")


def answers_text(items: I64, shown: HookContext) -> str:
    return "nothing"


def hangs(items: I64, shown: HookContext) -> I64:
    time.sleep(0.5)
    return items[:0]


async def test_a_hook_decides_what_is_ranked(folder: Path) -> None:
    async with serving(folder, **section(folder, hook=f"{HERE}:every_other")) as (client, _):
        found = await post(
            client, "/v1/generate", history=HISTORY, num_items=30, deny_items=HISTORY["items"]
        )
        extra = FIRST_ID + 299
        answer = await recommend(client, num_items=100, context={"extra": extra})
        assert sorted(answer["items"]) == sorted([*found["items"][::2], extra])
        assert answer["origins"][answer["items"].index(extra)] == "hook"


@pytest.mark.parametrize(
    ("hook", "result"), [("raises", "failed"), ("answers_text", "failed"), ("hangs", "out_of_time")]
)
async def test_a_hook_that_fails_is_left_out_and_told(folder: Path, hook: str, result: str) -> None:
    async with serving(folder, **section(folder, hook=f"{HERE}:{hook}", hook_budget_s=0.1)) as (
        client,
        _,
    ):
        answer = await recommend(client)
        assert (answer["degraded"], results(answer)["hook"]) == (["hook"], result)
        assert len(answer["items"]) == 10
    strict = section(folder, hook=f"{HERE}:{hook}", hook_budget_s=0.1, on_hook_failure="fail")
    async with serving(folder, **strict) as (client, _):
        assert (await recommend(client, 503))["detail"].startswith("hook: ")


# ---- the configuration, the log line, the record


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"hook": "no.such:thing"}, "recommend.hook: 'no.such:thing': No module"),
        ({"hook": f"{HERE}:nothing"}, "has no attribute 'nothing'"),
        ({"hook": f"{HERE}:results"}, "too many positional arguments"),
        ({"hook": "json"}, "recommend.hook: 'json'"),
        ({"popular": "/nowhere"}, "recommend.popular: /nowhere"),
        ({"sources": {}}, "sources: needs at least one"),
        ({"sources": {"elsewhere": 5}}, "elsewhere"),
        ({"max_rank_share": 1.0}, "max_rank_share"),
    ],
)
async def test_a_bad_section_is_told_at_the_start(
    folder: Path, change: dict[str, Any], detail: str
) -> None:
    with pytest.raises(ConfigError) as error:
        async with serving(folder, **section(folder, **change)):
            pass
    assert detail in str(error.value)


def test_it_needs_both_models(folder: Path) -> None:
    with pytest.raises(ConfigError, match="recommend: needs generate"):
        make_config(folder, recommend={})
    with pytest.raises(ConfigError, match="recommend: needs checkpoint"):
        make_config(folder, **{**section(folder), "checkpoint": None})


async def test_an_instance_without_the_section_says_so(folder: Path) -> None:
    async with serving(folder) as (client, _):
        assert "no section recommend" in (await recommend(client, 404))["detail"]


async def test_bad_input_is_explained(folder: Path) -> None:
    async with serving(folder, **section(folder)) as (client, _):
        for change, status, detail in (
            ({"num_items": 0}, 422, "num_items: Expected `int` >= 1"),
            ({"num_candidates": 0}, 422, "num_candidates: Expected `int` >= 1"),
            ({"deny_items": [-1]}, 422, "deny_items[0]: Expected `int` >= 0"),
            ({"context": {"a": [1]}}, 422, "context[...]: "),
            ({"candidates": [1]}, 422, "unknown field candidates"),
            ({"model_version": "nope"}, 404, "model_version: 'nope' is not served"),
            (
                {"history": {"items": [1], "actions": [9], "timestamps": [1]}},
                422,
                "history.actions: 9",
            ),
        ):
            assert (await recommend(client, status, **change))["detail"].startswith(detail), detail


async def test_it_is_recorded_and_told_in_the_log(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"folder": str(tmp_path / "traffic"), "enabled": True, "suffix": ".jsonl"}
    with caplog.at_level("INFO", "npu_gr.request"):
        async with serving(
            folder, watched=False, record=record, server={"log_requests": "all"}, **section(folder)
        ) as (
            client,
            _,
        ):
            answer = await recommend(client, num_items=4, context={"page": "home"})
    [path] = (tmp_path / "traffic").glob("*.jsonl")
    logged = json.loads(path.read_text())
    assert (logged["kind"], logged["timestamp"]) == ("recommend", SHOWN_AT)
    assert logged["recommend"] == {"num_items": 4, "context": {"page": "home"}}
    assert logged["answer"]["outcome"] == answer["outcome"]
    line = next(json.loads(r.message) for r in caplog.records if "/v1/recommend" in r.message)
    assert (line["num_items"], line["num_candidates"]) == (4, answer["num_candidates"])
    assert line["stages_s"].keys() == answer["stages_s"].keys()
    assert "degraded" not in line


async def test_every_job_for_the_device_says_whose_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[tuple[str, str]] = []
    put = JobQueue.put

    def noted(queue: JobQueue, job: Job, now_at: float, *, force: bool = False) -> Job | None:
        if job.shares:
            jobs.append((job.kind, job.tenant))
        return put(queue, job, now_at, force=force)

    monkeypatch.setattr(JobQueue, "put", noted)
    sections = section(folder, sources={"match": 6, "generate": 9}) | {
        "match": {"vectors": matching(folder)}
    }
    async with serving(folder, admission={"tenant_weights": {"shop": 2.0}}, **sections) as (
        client,
        service,
    ):
        assert service.parts.jobs.keys() >= {"rank", "generate", "match", "recommend"}
        jobs.clear()  # what warmed up
        asked: dict[str, dict[str, Any]] = {
            "rank": {"candidates": [FIRST_ID]},
            "generate": {"num_items": 3},
            "match": {"user_id": KNOWN, "num_items": 3},
            "recommend": {},
        }
        for kind, body in asked.items():
            await post(client, f"/v1/{kind}", tenant="shop", history=HISTORY, **body)
        assert {kind for kind, _ in jobs} == {"rank", "generate", "match"}
        assert {tenant for _, tenant in jobs} == {"shop"}
