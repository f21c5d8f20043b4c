"""Open loop: what the service does changes neither when requests leave nor what their time counts from."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_gr.errors import DataError
from npu_gr.replay.log import LoggedHistory, Record, write
from npu_gr.replay.options import ReplayOptions
from npu_gr.replay.plan import plan
from npu_gr.replay.player import PlayerOptions, Sample, play
from npu_gr.replay.run import replay, stop_on_interrupt
from tests.replay.fake import Fake, ranked, service

EVENTS = LoggedHistory(items=[1], actions=[0], timestamps=[1])


def rank(ts: float, user: str = "a", **values: Any) -> Record:
    return Record(ts=ts, kind="rank", user_id=user, **({"candidates": [3, 1, 2]} | values))


def events(ts: float, user: str = "a") -> Record:
    return Record(ts=ts, kind="events", user_id=user, events=EVENTS)


async def played(log: list[Record], url: str, **values: Any) -> list[Sample]:
    samples: list[Sample] = []
    await asyncio.wait_for(
        play(plan(log, ReplayOptions(base_url=url)), PlayerOptions(url=url, **values), samples.append), 20
    )
    return samples


async def test_a_stalled_service_slows_no_sending_and_is_charged_for_the_wait() -> None:
    count, all_came = 8, asyncio.Event()

    async def stall(fake: Fake, _body: dict[str, Any]) -> None:
        if len(fake.came) == count:
            all_came.set()
        await all_came.wait()  # a closed loop would never send the second one

    async with service(stall) as fake:
        samples = await played([rank(i * 0.02, f"u{i}") for i in range(count)], fake.url, deadline_ms=10_000)
    assert not any(sample.error for sample in samples)
    for sample in samples:
        assert sample.latency_s >= (count - 1) * 0.02 - sample.due_s


async def test_latency_counts_from_the_due_time_and_the_players_own_lateness_is_told() -> None:
    stall_s = 0.1

    async def block(fake: Fake, _body: dict[str, Any]) -> None:
        if len(fake.came) == 1:  # the whole loop, hence the player too
            ends_s = time.monotonic() + stall_s
            while time.monotonic() < ends_s:
                pass

    async with service(block) as fake:
        samples = await played([rank(i * 0.01, f"u{i}") for i in range(5)], fake.url)
        report = await replay([rank(0.0)], ReplayOptions(base_url=fake.url))
    assert len(samples) == 5
    first, *later = sorted(samples, key=lambda sample: sample.due_s)
    for sample in later:
        late_s = first.due_s + stall_s - sample.due_s
        assert sample.lag_s >= late_s - 0.001
        assert sample.latency_s >= sample.lag_s
    assert report.lag_ms["p99"] >= 0


async def test_the_signal_comes_the_lead_before_its_rank_also_under_speed() -> None:
    async with service() as fake:
        await replay(
            [rank(100.0, tenant="t", history=EVENTS, top_k=2, timestamp=7), rank(110.0)],
            ReplayOptions(base_url=fake.url, speed=50.0, signal_lead_s=0.1),
        )
    assert fake.kinds() == ["signal", "rank", "signal", "rank"]
    history = {"items": [1], "actions": [0], "timestamps": [1]}
    assert fake.came[0][1] == {"user_id": "a", "tenant": "t", "history": history, "num_candidates": 3}
    assert fake.came[1][1] == {
        "user_id": "a", "tenant": "t", "history": history, "candidates": [3, 1, 2], "timestamp": 7, "top_k": 2,
    }  # fmt: skip
    assert fake.came_s[1] - fake.came_s[0] == pytest.approx(0.1, abs=0.05)
    assert fake.came_s[2] - fake.came_s[0] == pytest.approx(0.2, abs=0.05)


async def test_events_leave_after_the_users_rank_and_in_order_while_others_go_on() -> None:
    other_came = asyncio.Event()

    async def hold_a(_fake: Fake, body: dict[str, Any]) -> None:
        if body["user_id"] == "b":
            other_came.set()
        if body["kind"] == "rank" and body["user_id"] == "a":
            await other_came.wait()

    async with service(hold_a) as fake:
        log = [rank(0.0), events(0.01), events(0.01), rank(0.05, "b"), events(0.05, "b")]
        report = await asyncio.wait_for(replay(log, ReplayOptions(base_url=fake.url)), 20)
    by_user = {user: [kind for kind, body in fake.came if body["user_id"] == user] for user in "ab"}
    assert by_user == {"a": ["rank", "events", "events"], "b": ["rank", "events"]}
    assert fake.came[1][1]["user_id"] == "b"  # it did not wait for a
    gone = [(kind, body["user_id"]) for kind, body in fake.went]
    assert gone.index(("rank", "a")) < gone.index(("events", "a"))
    assert report.lag_ms["p50"] < 40  # waiting for the rank is not the player's lateness


async def test_errors_are_counted_by_what_went_wrong_and_events_still_follow() -> None:
    async def fail(_fake: Fake, body: dict[str, Any]) -> web.Response | None:
        match body["user_id"] if body["kind"] == "rank" else "":
            case "busy":
                return web.json_response({"status": 429}, status=429, content_type="application/problem+json")
            case "silent":
                await asyncio.Event().wait()
            case "odd":
                return web.json_response({"outcome": "hbm_hit"})
            case "short":
                return ranked(body, scores={"click": [1.0]})
        return None

    async with service(fail) as fake:
        log = [rank(0, "busy"), rank(0, "busy"), rank(0, "silent", deadline_ms=1.0), rank(0, "odd")]
        log += [rank(0, "short"), rank(0, "fine"), events(0.01, "silent"), events(0.01, "busy")]
        report = await replay(log, ReplayOptions(base_url=fake.url, slo_s=5.0))
    assert report.errors == {"rank 429": 2, "rank bad answer": 2, "rank timeout": 1}
    assert (report.num_ranks, report.num_within_slo, report.outcomes) == (6, 1, {"hbm_hit": 1})
    assert fake.kinds().count("events") == 2


async def test_nobody_listening_is_an_error_of_every_request() -> None:
    async with service() as fake:
        pass
    report = await replay([rank(0), events(0)], ReplayOptions(base_url=fake.url))
    assert report.errors == {"rank no connection": 1, "events no connection": 1}


async def test_the_budget_and_the_key_are_sent_and_the_key_is_not_reported() -> None:
    async with service() as fake:
        options = ReplayOptions(base_url=fake.url, api_key="s3cret", timeout_s=2.5)
        report = await replay([rank(0), rank(0.01, deadline_ms=70.0)], options)
    assert [float(headers["X-Request-Timeout-Ms"]) for headers in fake.headers] == [2500, 70]
    assert all(headers["Authorization"] == "Bearer s3cret" for headers in fake.headers)
    assert "s3cret" not in report.to_json()


async def test_a_stop_reports_what_was_answered_and_leaves_nothing_behind() -> None:
    stop = asyncio.Event()

    async def hold_the_third(fake: Fake, _body: dict[str, Any]) -> None:
        if len(fake.came) == 3:
            stop.set()
            await asyncio.Event().wait()

    async with service(hold_the_third) as fake:
        log = [rank(i * 0.02, f"u{i}") for i in range(3)] + [rank(3600.0)]
        report = await asyncio.wait_for(replay(log, ReplayOptions(base_url=fake.url), stop=stop), 20)
    assert report.interrupted
    assert (report.num_ranks, report.errors) == (2, {})
    assert gc.isenabled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_ctrl_c_stops_the_run() -> None:
    with stop_on_interrupt() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.wait(), 5)


async def test_cancelling_a_replay_cancels_it() -> None:
    came = asyncio.Event()

    async def hang(_fake: Fake, _body: dict[str, Any]) -> None:
        came.set()
        await asyncio.Event().wait()

    async with service(hang) as fake:
        running = asyncio.create_task(replay([rank(0)], ReplayOptions(base_url=fake.url)))
        await asyncio.wait_for(came.wait(), 5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert gc.isenabled()


async def test_a_log_file_is_read_and_an_empty_one_refused(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", [rank(0)])
    write(tmp_path / "none.jsonl", [])
    async with service() as fake:
        assert (await replay(tmp_path / "log.jsonl", ReplayOptions(base_url=fake.url))).num_ranks == 1
        with pytest.raises(DataError, match=r"none\.jsonl: no records"):
            await replay(tmp_path / "none.jsonl", ReplayOptions(base_url=fake.url))
