"""Open loop: the service affects neither sending times nor the start of latencies."""

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

from npu_gr.core.errors import DataError
from npu_gr.replay.files import write
from npu_gr.replay.log import LoggedAnswer, LoggedGenerate, LoggedHistory, QueryRecord
from npu_gr.replay.plan import ReplayOptions, plan
from npu_gr.replay.player import play
from npu_gr.replay.requests import Sample
from npu_gr.replay.run import replay, stop_on_interrupt
from tests.replay.fake import Fake, ranked, service

EVENTS = LoggedHistory(items=[1], actions=[0], timestamps=[1])


def rank(ts: float, user: str = "a", **values: Any) -> QueryRecord:
    return QueryRecord(ts=ts, kind="rank", user_id=user, **({"candidates": [3, 1, 2]} | values))


def events(ts: float, user: str = "a") -> QueryRecord:
    return QueryRecord(ts=ts, kind="events", user_id=user, events=EVENTS)


async def played(log: list[QueryRecord], url: str, **values: Any) -> list[Sample]:
    samples: list[Sample] = []
    options = ReplayOptions(base_url=url, **values)
    await asyncio.wait_for(play(plan(log, options), options, samples.append), 20)
    return samples


async def test_a_stalled_service_slows_no_sending_and_is_charged_for_the_wait() -> None:
    count, all_came = 8, asyncio.Event()

    async def stall(fake: Fake, _body: dict[str, Any]) -> None:
        if len(fake.came) == count:
            all_came.set()
        await all_came.wait()  # a closed loop would never send the second one

    async with service(stall) as fake:
        samples = await played(
            [rank(i * 0.02, f"u{i}") for i in range(count)], fake.url, timeout_s=10
        )
    assert not any(sample.error for sample in samples)
    for sample in samples:
        assert sample.latency_s >= (count - 1) * 0.02 - sample.due_at


async def test_latency_counts_from_the_due_time_and_the_players_own_lateness_is_told() -> None:
    stalled_at: list[float] = []

    async def block(_fake: Fake, _body: dict[str, Any]) -> None:
        if not stalled_at:  # the whole loop, hence the player too
            stalled_at.append(time.monotonic())
            while time.monotonic() < stalled_at[0] + 0.2:
                pass
            stalled_at.append(time.monotonic())

    async with service(block) as fake:
        samples: list[Sample] = []
        start_at = time.monotonic() + 0.5
        log = [rank(i * 0.02, f"u{i}") for i in range(200)]
        options = ReplayOptions(base_url=fake.url)
        await play(plan(log, options), options, samples.append, start_at)
        report = await replay([rank(0.0)], options)
    assert len(samples) == 200
    began_at, ended_at = stalled_at
    during = [sample for sample in samples if began_at < start_at + sample.due_at < ended_at]
    assert during
    for sample in during:
        assert sample.lag_s >= ended_at - (start_at + sample.due_at) - 0.001
        assert sample.latency_s >= sample.lag_s
    assert report.lag_ms["p99"] >= 0


async def test_a_users_rank_waits_for_the_events_before_it_and_is_charged_for_it() -> None:
    b_came = asyncio.Event()

    async def slow_events(_fake: Fake, body: dict[str, Any]) -> None:
        if body["user_id"] == "b":
            b_came.set()
        if body["kind"] == "events":
            await b_came.wait()
            await asyncio.sleep(0.2)

    async with service(slow_events) as fake:
        samples = await played([events(0.0), rank(0.01), rank(0.01, "b")], fake.url)
        gone = [(kind, body["user_id"]) for kind, body in fake.went]
    assert gone == [("rank", "b"), ("events", "a"), ("rank", "a")]
    waited = next(s for s in samples if s.record.kind == "rank" and s.record.user_id == "a")
    assert waited.latency_s - waited.lag_s > 0.15


async def test_closed_loop_keeps_so_many_in_flight_and_no_more() -> None:
    most = 0

    async def hold(fake: Fake, _body: dict[str, Any]) -> None:
        nonlocal most
        most = max(most, len(fake.came) - len(fake.went))
        await asyncio.sleep(0.005)

    async with service(hold) as fake:
        log = [rank(i * 100.0, f"u{i}") for i in range(40)]
        report = await replay(log, ReplayOptions(base_url=fake.url, closed=4))
    assert (most, report.num_ranks) == (4, 40)


async def test_the_warm_up_is_sent_and_not_counted() -> None:
    async with service() as fake:
        report = await replay(
            [rank(i * 0.05, f"u{i}") for i in range(10)],
            ReplayOptions(base_url=fake.url, warmup_s=0.24),
        )
    assert len(fake.came) == 10
    assert (report.num_ranks, report.num_warmup) == (5, 5)


async def test_a_generate_is_asked_and_counted_as_a_rank_is() -> None:
    record = QueryRecord(
        ts=0, kind="generate", user_id="a", generate=LoggedGenerate(num_items=2, beam_width=8)
    )
    async with service() as fake:
        report = await replay([record], ReplayOptions(base_url=fake.url))
    assert fake.came[0][1]["beam_width"] == 8
    assert (report.num_ranks, report.outcomes, report.errors) == (1, {"hbm_hit": 1}, {})


async def test_deltas_go_out_on_what_the_service_knows_and_whole_where_it_forgot() -> None:
    def grown(num: int) -> LoggedHistory:
        return LoggedHistory(items=list(range(num)), actions=[0] * num, timestamps=list(range(num)))

    async def forget_once(fake: Fake, body: dict[str, Any]) -> web.Response | None:
        if body.get("base") and len(fake.came) == 3:
            return web.json_response({}, status=409)
        return None

    async with service(forget_once) as fake:
        log = [rank(i * 0.1, history=grown(n)) for i, n in enumerate((3, 5, 9, 9))] + [
            rank(0.5, history=grown(2))
        ]
        report = await replay(log, ReplayOptions(base_url=fake.url, histories="delta"))
    bodies = [body for _, body in fake.came]
    assert [body.get("base") for body in bodies] == [None, "f", "f", None, "f", None]
    assert "history" not in bodies[4]  # nothing new
    assert bodies[1]["history"]["items"] == [3, 4]
    assert (report.num_resent, report.errors) == (1, {})


async def test_bases_of_the_log_are_sent_whole_where_the_log_says_what_they_were() -> None:
    known = LoggedHistory(items=[1, 2], actions=[0, 0], timestamps=[1, 2])
    log = [
        rank(0.0, history=known, answer=LoggedAnswer(fingerprint="x")),
        rank(0.1, base="x", history=EVENTS),
        rank(0.2, base="never seen", history=EVENTS),
    ]
    async with service() as fake:
        await replay(log, ReplayOptions(base_url=fake.url, histories="whole"))
    assert [body.get("base") for _, body in fake.came] == [None, None, "never seen"]
    assert fake.came[1][1]["history"]["items"] == [1, 2, 1]


async def test_a_run_stops_and_says_what_is_wrong_with_the_log(tmp_path: Path) -> None:
    write(tmp_path / "long.jsonl", [rank(0.0), events(0.0), rank(3600.0)])
    (tmp_path / "bad.jsonl").write_text("{")
    stop = asyncio.Event()

    async def then_stop(_fake: Fake, body: dict[str, Any]) -> None:
        if body["kind"] == "events":  # the rank's answer has been read
            stop.set()
            await asyncio.Event().wait()

    async with service(then_stop) as fake:
        options = ReplayOptions(base_url=fake.url)
        report = await asyncio.wait_for(replay(tmp_path / "long.jsonl", options, stop=stop), 30)
        assert (report.interrupted, report.num_ranks) == (True, 1)
        with pytest.raises(DataError, match=r"bad\.jsonl, line 1"):
            await asyncio.wait_for(replay(tmp_path / "bad.jsonl", options), 30)


async def test_the_signal_comes_the_lead_before_its_rank_also_under_speed() -> None:
    log = [rank(100.0, tenant="t", history=EVENTS, top_k=2, timestamp=7), rank(110.0)]
    samples: list[Sample] = []
    async with service() as fake:
        options = ReplayOptions(base_url=fake.url, speed=50.0, signal_lead_s=0.1)
        start_at = time.monotonic() + 0.1
        await play(plan(log, options), options, samples.append, start_at)
    samples.sort(key=lambda sample: sample.due_at)
    assert [sample.record.kind for sample in samples] == ["signal", "rank", "signal", "rank"]
    assert [sample.due_at - samples[0].due_at for sample in samples] == pytest.approx(
        [0.0, 0.1, 0.2, 0.3]
    )
    assert min(fake.came_at) >= start_at + samples[0].due_at
    assert max(fake.came_at) >= start_at + samples[-1].due_at
    history = {"items": [1], "actions": [0], "timestamps": [1]}
    signal_body = {"user_id": "a", "tenant": "t", "history": history, "num_candidates": 3}
    rank_body = {
        "user_id": "a", "tenant": "t", "history": history,
        "candidates": [3, 1, 2], "timestamp": 7, "top_k": 2,
    }  # fmt: skip
    assert ("signal", signal_body) in fake.came
    assert ("rank", rank_body) in fake.came


async def test_events_leave_after_the_users_rank_and_in_order_while_others_go_on() -> None:
    other_came = asyncio.Event()

    async def hold_a(_fake: Fake, body: dict[str, Any]) -> None:
        if body["user_id"] == "b":
            other_came.set()
        if body["kind"] == "rank" and body["user_id"] == "a":
            await other_came.wait()
            await asyncio.sleep(0.5)

    async with service(hold_a) as fake:
        log = [rank(0.0), events(0.01), events(0.01), rank(0.05, "b"), events(0.05, "b")]
        report = await asyncio.wait_for(replay(log, ReplayOptions(base_url=fake.url)), 20)
    by_user = {user: [kind for kind, body in fake.came if body["user_id"] == user] for user in "ab"}
    assert by_user == {"a": ["rank", "events", "events"], "b": ["rank", "events"]}
    assert fake.came[1][1]["user_id"] == "b"  # it did not wait for a
    gone = [(kind, body["user_id"]) for kind, body in fake.went]
    assert gone.index(("rank", "a")) < gone.index(("events", "a"))
    assert report.lag_ms["p50"] < 400  # waiting for the rank is not the player's lateness


async def test_errors_are_counted_by_what_went_wrong_and_events_still_follow() -> None:
    async def fail(_fake: Fake, body: dict[str, Any]) -> web.Response | None:
        match body["user_id"] if body["kind"] == "rank" else "":
            case "busy":
                return web.json_response(
                    {"status": 429}, status=429, content_type="application/problem+json"
                )
            case "silent":
                await asyncio.Event().wait()
            case "odd":
                return web.json_response({"outcome": "hbm_hit"})
            case "short":
                return ranked(body, scores={"click": [1.0]})
            case _:
                pass
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
        report = await asyncio.wait_for(
            replay(log, ReplayOptions(base_url=fake.url), stop=stop), 20
        )
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


async def test_a_log_file_is_read_and_an_empty_one_rejected(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", [rank(0)])
    write(tmp_path / "none.jsonl", [])
    async with service() as fake:
        assert (
            await replay(tmp_path / "log.jsonl", ReplayOptions(base_url=fake.url))
        ).num_ranks == 1
        with pytest.raises(DataError, match=r"none\.jsonl: no records"):
            await replay(tmp_path / "none.jsonl", ReplayOptions(base_url=fake.url))
