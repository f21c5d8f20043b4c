"""The whole path over HTTP on a real instance.

Every way to bring a history and every body format give the same scores.
"""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.backend.calls import FusedForwardCall
from npu_gr.core.arrays import F32
from npu_gr.core.errors import DeviceError
from npu_gr.core.kinds import RANK
from tests.models import events
from tests.serving import FIRST_ID, columns, encoded, serving, write_checkpoint

CANDIDATES = [FIRST_ID + row for row in (5, 17, 200, 3)]
SHOWN_AT = 1_700_000_000
Client = TestClient[Any, Any]


async def post(client: Client, path: str, status: int = 200, /, **body: object) -> dict[str, Any]:
    async with client.post(path, json=body) as response:
        answer = await response.json(content_type=None)
        assert response.status == status, answer
        return answer  # type: ignore[no-any-return]


async def rank(client: Client, user: str = "u", **body: object) -> dict[str, Any]:
    return await post(
        client, "/v1/rank", user_id=user, candidates=CANDIDATES, timestamp=SHOWN_AT, **body
    )


def close(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        np.allclose(a["scores"][task], b["scores"][task], rtol=0, atol=1e-5)
        for task in ("click", "like")
    )


async def test_signal_then_rank_is_a_hit_with_the_cold_scores(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        history = columns(events(80))
        cold = await rank(client, "cold", history=history)
        await client.delete("/v1/users/cold")
        assert (cold["outcome"], cold["reason"]) == ("miss_full", "no_signal")
        signal = await post(client, "/v1/signal", 202, user_id="u", history=history)
        assert signal["verdict"] == "preinfer"
        assert signal["resident_for_s"] > 0
        await encoded(service.versions.ranker().relay)
        hit = await rank(client, history=history)
        assert hit["outcome"] == "hbm_hit"
        assert hit["prefix_tokens"] == 80
        assert close(hit, cold)
        assert set(hit["stages_s"]) == {"history", "lease", "queue", "device"}


async def test_a_delta_and_the_store_say_what_the_whole_history_says(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        whole = events(90)
        want = await rank(client, "whole", history=columns(whole))
        first = await post(client, "/v1/signal", 202, user_id="d", history=columns(whole[:70]))
        delta = await rank(
            client, "d", base=first["history"]["fingerprint"], history=columns(whole[70:])
        )
        assert delta["history"] == want["history"]
        assert delta["prefix_tokens"] == 70
        assert close(delta, want)

        stored: dict[str, Any] = {}
        for part in (whole[:1], whole[1:40], whole[40:90]):
            stored = await post(client, "/v1/events", user_id="s", events=columns(part))
            assert (await rank(client, "s"))["history"]["num_tokens"] == stored["num_events"]
        assert stored["num_events"] == 90
        from_store = await rank(client, "s")
        assert from_store["history"] == {**want["history"], "source": "store"}
        assert close(from_store, want)

        problem = await post(
            client, "/v1/rank", 409, user_id="x", candidates=CANDIDATES, base="f" * 32
        )
        assert "send the full history" in problem["detail"]


async def test_every_body_format_gives_the_same_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        history = events(60)
        want = await rank(client, history=columns(history))
        raw = {
            "items": (history.items + FIRST_ID).astype("<i8").tobytes(),
            "actions": history.actions.astype("<i2").tobytes(),
            "timestamps": history.timestamps.astype("<i8").tobytes(),
        }
        candidates = np.array(CANDIDATES, "<i8").tobytes()
        encoded = {name: base64.b64encode(data).decode() for name, data in raw.items()}
        assert close(await rank(client, "b64", history=encoded), want)
        for body in (
            {
                "user_id": "mp",
                "candidates": CANDIDATES,
                "timestamp": SHOWN_AT,
                "history": columns(history),
            },
            {"user_id": "raw", "candidates": candidates, "timestamp": SHOWN_AT, "history": raw},
        ):
            headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
            async with client.post(
                "/v1/rank", data=msgspec.msgpack.encode(body), headers=headers
            ) as response:
                assert response.status == 200
                assert response.content_type == "application/msgpack"
                answer = msgspec.msgpack.decode(await response.read())
            for task, scores in answer["scores"].items():
                assert np.allclose(
                    np.frombuffer(scores, "<f4"), want["scores"][task], rtol=0, atol=1e-5
                )


async def test_unknown_items_are_counted_or_rejected(tmp_path: Path) -> None:
    history = columns(events(30))
    history["items"][4] = 7
    async with serving(tmp_path) as (client, _):
        answer = await rank(client, history=history)
        assert answer["history"]["unknown_items"] == 1
        body = {"user_id": "v", "history": history, "timestamp": SHOWN_AT, "top_k": 3}
        answer = await post(client, "/v1/rank", **body, candidates=[1, *CANDIDATES])
        assert answer["scores"]["click"][0] is None
        assert answer["unknown_candidates"] == 1
        order = np.argsort(-np.array(answer["scores"]["click"][1:]), kind="stable")
        assert answer["top"] == [CANDIDATES[index] for index in order[:3]]
        answer = await post(client, "/v1/rank", **body, candidates=[1, 2])
        assert (answer["scores"]["click"], answer["top"]) == ([None, None], [])
        metrics = await (await client.get("/metrics")).text()
        assert 'npu_gr_unknown_items_total{where="candidates"} 3.0' in metrics
    async with serving(tmp_path, service={"unknown_items": "reject"}) as (client, _):
        problem = await post(
            client, "/v1/rank", 422, user_id="u", history=history, candidates=CANDIDATES
        )
        assert problem["detail"] == "history.items: 1 unknown, the first is 7"
        problem = await post(
            client,
            "/v1/rank",
            422,
            user_id="u",
            history=columns(events(3)),
            candidates=[*CANDIDATES, 9],
        )
        assert problem["detail"] == "candidates: 1 unknown item: 9"


async def test_a_long_history_is_cut_and_says_so(tmp_path: Path) -> None:
    limits = {"max_history_tokens": 50, "cut_step_tokens": 16}
    async with serving(tmp_path, service=limits) as (client, _):
        answer = await rank(client, history=columns(events(100)))
        assert (answer["history"]["num_tokens"], answer["history"]["cut_tokens"]) == (36, 64)
        await post(client, "/v1/events", user_id="s", events=columns(events(100)))
        assert (await rank(client, "s"))["history"]["fingerprint"] == answer["history"][
            "fingerprint"
        ]


async def test_an_erased_user_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        user = "a/b ü"
        signal = await post(client, "/v1/signal", 202, user_id=user, history=columns(events(40)))
        await post(client, "/v1/events", user_id=user, events=columns(events(40)))
        async with client.delete("/v1/users/a%2Fb%20%C3%BC") as response:
            assert response.status == 204
        answer = await rank(client, user)
        assert (answer["history"]["num_tokens"], answer["outcome"]) == (0, "miss_full")
        base = signal["history"]["fingerprint"]
        await post(client, "/v1/rank", 409, user_id=user, candidates=CANDIDATES, base=base)


async def test_deadlines_and_versions(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        body = {"user_id": "u", "candidates": CANDIDATES, "history": columns(events(10))}
        for value, status in (("0", 504), ("x", 400), ("0.0001", 504)):
            async with client.post(
                "/v1/rank", json=body, headers={"X-Request-Timeout-Ms": value}
            ) as response:
                assert response.status == status
        problem = await post(client, "/v1/rank", 404, **body, model_version="other")
        assert "other" in problem["detail"]
        version = service.versions.models()[0].version
        assert (await rank(client, history=body["history"], model_version=version))[
            "model_version"
        ] == version


async def test_a_device_that_fails_with_the_prefix_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (client, service):
        history = columns(events(80))
        want = await rank(client, "cold", history=history)
        await post(client, "/v1/signal", 202, user_id="u", history=history)
        await asyncio.sleep(0.2)

        backend = service.versions.ranker().engine.backend
        whole = backend.fused_forward

        def fails_with_a_prefix(call: FusedForwardCall) -> F32 | None:
            if any(segment.num_cached for segment in call.segments):
                raise RuntimeError("planted")
            return whole(call)

        monkeypatch.setattr(backend, "fused_forward", fails_with_a_prefix)
        answer = await rank(client, history=history)
        assert (answer["outcome"], answer["reason"]) == ("miss_full", "read_failed")
        assert close(answer, want)


async def test_a_prefix_half_written_by_a_pass_that_failed_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (client, service):
        history = columns(events(80))
        backend = service.versions.ranker().engine.backend
        whole = backend.fused_forward
        calls = list[FusedForwardCall]()

        def fails_once(call: FusedForwardCall) -> F32 | None:
            calls.append(call)
            found = whole(call)  # its pages are written, whatever comes of it
            if len(calls) == 1:
                raise DeviceError("planted")
            return found

        monkeypatch.setattr(backend, "fused_forward", fails_once)
        first = await rank(client, history=history)
        assert (first["outcome"], first["reason"]) == ("miss_full", "read_failed")
        pool, _ = service.versions.ranker().relay.tiers
        assert len(pool) == 0
        assert pool.free_bytes == pool.budget_bytes
        second, third = [await rank(client, history=history) for _ in range(2)]
        assert (second["outcome"], third["outcome"]) == ("miss_full", "hbm_hit")
        assert close(first, second)
        assert close(first, third)


async def test_a_failed_device_makes_it_unready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (client, service):
        assert (await client.get("/readyz")).status == 200

        def broken(*_: object) -> None:
            raise DeviceError("planted")

        def lost(*_: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(service.versions.ranker().engine, "forward", lost)
        for _ in range(3):
            await post(
                client,
                "/v1/rank",
                503,
                user_id="u",
                candidates=CANDIDATES,
                history=columns(events(3)),
            )
        async with client.get("/readyz") as response:
            assert response.status == 503
            assert "the device failed" in (await response.json(content_type=None))["detail"]
        assert (await client.get("/healthz")).status == 200


async def test_the_selfcheck_finds_no_drift_and_would_find_one(tmp_path: Path) -> None:
    async with serving(tmp_path, service={"selfcheck_ratio": 1.0}) as (client, service):
        history = columns(events(80))
        await rank(client, history=history)
        await rank(client, history=history)
        await asyncio.gather(*service.versions.ranker()._selfcheck._background)
        text = await (await client.get("/metrics")).text()
        assert "npu_gr_drift_ratio_count 1.0" in text
        assert "npu_gr_selfcheck_failures_total 0.0" in text
        service.versions.ranker().engine.arena._keys[0].mul_(1.5)
        await rank(client, history=history)
        await asyncio.gather(*service.versions.ranker()._selfcheck._background)
        assert "npu_gr_selfcheck_failures_total 1.0" in await (await client.get("/metrics")).text()


async def test_full_house(tmp_path: Path) -> None:
    async with serving(tmp_path, admission={"max_inflight": 1}) as (client, service):
        with await service.admission.enter(RANK.name, "", time.monotonic(), 1.0):
            async with client.post(
                "/v1/rank",
                json={"user_id": "u", "candidates": CANDIDATES, "history": columns(events(3))},
            ) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
        await rank(client, history=columns(events(3)))


async def test_a_caller_that_hangs_up_frees_its_slot(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        held = asyncio.Event()

        async def slow(*_: object) -> None:
            held.set()
            await asyncio.Event().wait()

        service.parts.histories.read = slow  # type: ignore[method-assign, assignment]
        asking = asyncio.create_task(rank(client, history=columns(events(3))))
        await asyncio.wait_for(held.wait(), 10)
        assert service.admission.work.admitted == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for _ in range(100):
            if not service.admission.work.admitted:
                break
            await asyncio.sleep(0.01)
        assert service.admission.work.admitted == 0


async def test_an_inexact_model_is_rejected_with_the_cache_on(tmp_path: Path) -> None:
    from npu_gr.core.errors import ConfigError

    write_checkpoint(tmp_path / "checkpoint", scaling="runtime")
    with pytest.raises(ConfigError, match=r"model\.scaling: 'runtime' with the prefix cache on"):
        async with serving(tmp_path):
            pass
    async with serving(tmp_path, relay={"enabled": False}) as (client, _):
        assert (await rank(client, history=columns(events(30))))["reason"] == "disabled"


async def test_two_instances_in_one_process(tmp_path: Path) -> None:
    for name in "ab":
        write_checkpoint(tmp_path / name / "checkpoint")
    async with (
        # while the other starts, which may block
        serving(tmp_path / "a", watched=False) as (one, _),
        serving(tmp_path / "b", watched=False) as (two, _),
    ):
        a = await rank(one, history=columns(events(30)))
        b = await rank(two, history=columns(events(30)))
        assert a["scores"] == b["scores"]
