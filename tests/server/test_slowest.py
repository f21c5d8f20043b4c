"""The slowest requests are kept by kind, and are slow by the objective of their kind."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.kinds import KINDS
from npu_gr.history_store.embedded import GroupWriter
from npu_gr.server.access_log import (
    NUM_SLOW,
    SLOW_FACTOR,
    SLOW_WITHIN_S,
    AccessLine,
    AccessLog,
    RecentRequests,
)
from npu_gr.server.config import ServerConfig
from tests.models import events
from tests.server.fake import metrics_of_all_kinds
from tests.serving import FIRST_ID, columns, serving

EVENTS: dict[str, Any] = {"user_id": "u", "events": columns(events(2))}
RANK: dict[str, Any] = {"user_id": "u", "candidates": [FIRST_ID], "history": columns(events(8))}
LATE_S = 0.3


def line(duration_s: float, ended_s_ago: float = 0.0, status: int = 200) -> AccessLine:
    return AccessLine(
        time_s=time.time() - ended_s_ago,
        request_id=f"{duration_s}",
        trace_id="t",
        span_id="s",
        method="POST",
        route="/v1/rank",
        status=status,
        duration_s=duration_s,
        key=None,
        user=None,
        error=None,
        detail=None,
        answer_fields={},
        stages_s={},
    )


def kept(recent: RecentRequests, kind: str) -> list[float]:
    return [ended.line.duration_s for ended in recent.slowest() if ended.kind == kind]


def test_a_busy_kind_pushes_no_other_out() -> None:
    recent = RecentRequests()
    recent.add("events", line(0.4))
    for number in range(5000):
        recent.add("rank", line(number / 1e4))
    recent.add("rank", line(9.0, status=429))
    assert kept(recent, "events") == [0.4]
    assert kept(recent, "rank") == [0.4999, 0.4998, 0.4997, 0.4996, 0.4995][:NUM_SLOW]


def test_an_old_one_makes_room_for_a_faster_one() -> None:
    recent = RecentRequests()
    for number in range(NUM_SLOW):
        recent.add("rank", line(5.0 + number, ended_s_ago=SLOW_WITHIN_S + 1))
    assert kept(recent, "rank") == []
    recent.add("rank", line(0.1))
    assert kept(recent, "rank") == [0.1]
    for number in range(NUM_SLOW):
        recent.add("rank", line(2.0 + number))
    recent.add("rank", line(0.2))
    assert kept(recent, "rank") == [2.0 + number for number in range(NUM_SLOW)][::-1]


async def test_a_slow_append_is_found_among_many_fast_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Four times its objective, yet under `slow_request_s`."""
    submit = GroupWriter.submit

    async def late(*given: Any, **named: Any) -> Any:
        await asyncio.sleep(LATE_S)
        return await submit(*given, **named)

    slo = {"events_s": 0.05, "rank_s": 30.0}
    with caplog.at_level(logging.WARNING, "npu_gr.request"):
        async with serving(tmp_path, slo=slo, server={"slow_request_s": 60.0}) as (client, _):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GroupWriter, "submit", late)
                headers = {"X-Request-Id": "late"}
                async with client.post("/v1/events", json=EVENTS, headers=headers) as answer:
                    assert answer.status == 200
            for _ in range(3 * NUM_SLOW):
                assert (await client.post("/v1/rank", json=RANK)).status == 200
            status = await (await client.get("/debug/status")).json()
    found = status["slow"]
    assert [one["request_id"] for one in found if one["kind"] == "events"] == ["late"]
    assert found[0]["kind"] == "events", "those first that took most of their objective"
    assert found[0]["duration_s"] > LATE_S > 5 * found[0]["objective_s"]
    assert len([one for one in found if one["kind"] == "rank"]) == NUM_SLOW
    logged = [record.getMessage() for record in caplog.records if record.name == "npu_gr.request"]
    assert [text for text in logged if '"late"' in text] == logged
    assert len(logged) == 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: str(kind.name))
def test_a_warning_goes_by_the_objective_of_the_kind(kind: Any) -> None:
    objectives = metrics_of_all_kinds().requests.objectives
    for slow_request_s in (0.01, 60.0):
        access_log = AccessLog(ServerConfig(slow_request_s=slow_request_s), objectives.values())
        least_s = min(slow_request_s, SLOW_FACTOR * kind.objective_s)
        assert access_log.slow_s(kind) == least_s
        assert access_log.slow_s(None) == slow_request_s
