"""The load generator counts every request once, and its latency begins when the request was due."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loadgen import LoadStream, Pause, StreamCounts, compiled, drive
from npu_gr.core.errors import ConfigError
from tests.benchmarks.stub_server import stub

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

NEAR = 0.97  # a quantile is within 3 %


@pytest.fixture
def bodies(tmp_path: Path) -> Path:
    path = tmp_path / "bodies"
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(5)))
    return path


def bursts(bodies: Path, **changes: Any) -> LoadStream:
    """Five at once, four times: 20 in all."""
    settings: dict[str, Any] = {
        "name": "load",
        "mode": "bursts",
        "bodies": bodies,
        "to_s": 0.2,
        "connections": 20,
    }
    return LoadStream(**{**settings, "burst_size": 5, "every_s": 0.05, **changes})


def closed(bodies: Path, **changes: Any) -> LoadStream:
    settings: dict[str, Any] = {
        "name": "load",
        "mode": "closed",
        "bodies": bodies,
        "to_s": 0.2,
        "connections": 4,
    }
    return LoadStream(**{**settings, **changes})


def total(counts: StreamCounts) -> int:
    return (
        counts.in_time
        + counts.late
        + counts.rejected
        + counts.other
        + counts.timeouts
        + counts.errors
    )


def one(port: int, stream: LoadStream, **more: Any) -> StreamCounts:
    counts = drive(port, [stream], **more).stream("load")
    assert total(counts) == counts.due
    assert sum(map(sum, counts.bins)) == counts.due
    assert counts.answered_ms.count == counts.in_time + counts.late
    return counts


def test_each_request_has_the_fate_that_the_server_gave_it(bodies: Path) -> None:
    with stub("ok", "refuse", "fail", "drop", "hang", "pieces", "strange") as (port, server):
        counts = one(port, bursts(bodies, connections=64), deadline_s=1.5, goal_s=1.5)
        assert counts.due == 20
        assert server.asked.total() == 20
        assert counts.in_time == server.asked["ok"] + server.asked["pieces"]
        assert counts.rejected == server.asked["refuse"]
        assert counts.other == server.asked["fail"]
        assert counts.errors == server.asked["drop"] + server.asked["strange"]
        assert (counts.timeouts, counts.unsent) == (server.asked["hang"], 0)


def test_a_closed_loop_counts_what_the_server_saw(bodies: Path) -> None:
    with stub("ok", "refuse") as (port, server):
        counts = one(port, closed(bodies), goal_s=30.0, deadline_s=30.0)
        assert counts.due == server.asked.total() > 4
        assert (counts.in_time, counts.rejected) == (server.asked["ok"], server.asked["refuse"])
        assert {json.loads(body)["number"] for body in server.bodies} <= set(range(5))


def test_a_request_has_its_own_headers_and_is_given_up_after_its_own_budget(tmp_path: Path) -> None:
    path = tmp_path / "bodies"
    path.write_text('X-User-Id: u\tX-Request-Timeout-Ms: 80.5\t{"number": 7}\n')
    with stub("hang") as (port, server):
        counts = one(port, bursts(path, burst_size=2, every_s=1.0), deadline_s=30.0)
        assert (counts.due, counts.timeouts) == (2, 2)
        assert server.bodies == [b'{"number": 7}'] * 2
        assert all(
            b"\r\nX-User-Id: u\r\nX-Request-Timeout-Ms: 80.5\r\n" in head for head in server.heads
        )


def test_an_answer_that_the_budget_is_over_is_late(bodies: Path) -> None:
    with stub("expired") as (port, _):
        counts = one(port, bursts(bodies), goal_s=30.0, deadline_s=60.0)
        assert (counts.in_time, counts.late) == (0, 20)


def test_latency_counts_from_the_due_instant(bodies: Path) -> None:
    """Three at once over one connection, 100 ms each: the second waits for the first, and so on."""
    with stub("ok", delay_s=0.1) as (port, _):
        counts = one(
            port,
            bursts(bodies, burst_size=3, every_s=1.0, connections=1),
            goal_s=0.15,
            deadline_s=60.0,
        )
        assert (counts.due, counts.unsent) == (3, 0)
        assert counts.in_time <= 1
        assert counts.answered_ms.p50 >= 200 * NEAR
        assert counts.answered_ms.max >= 300


def test_late_is_after_the_goal(bodies: Path) -> None:
    with stub("ok", delay_s=0.06) as (port, _):
        counts = one(port, bursts(bodies), goal_s=0.05, deadline_s=60.0)
        assert (counts.in_time, counts.late) == (0, 20)


def test_a_request_without_a_connection_times_out_unsent(bodies: Path) -> None:
    with stub("hang") as (port, server):
        counts = one(port, bursts(bodies, burst_size=8, every_s=1.0, connections=2), deadline_s=0.3)
        assert (counts.timeouts, counts.unsent) == (8, 6)
        assert server.asked["hang"] == 2


def test_a_rejected_client_sends_again_at_once(bodies: Path) -> None:
    with stub("refuse") as (port, server):
        counts = one(port, closed(bodies), deadline_s=30.0)
        assert counts.rejected == server.asked["refuse"] > 8


def test_arrivals_are_drawn_by_the_seed(bodies: Path) -> None:
    poisson = LoadStream(
        name="load", mode="poisson", bodies=bodies, to_s=0.5, connections=32, rate_per_s=800.0
    )
    with stub("ok") as (port, server):
        first = one(port, poisson, seed=1, deadline_s=60.0)
        again = one(port, poisson, seed=1, deadline_s=60.0)
        other = one(port, poisson, seed=2, deadline_s=60.0)
        assert server.asked["ok"] == first.due + again.due + other.due
    assert first.due == again.due != other.due
    assert [sum(row) for row in first.bins] == [sum(row) for row in again.bins]
    assert abs(first.due - 400) < 5 * 20  # five standard deviations


def test_streams_run_in_parallel_at_their_own_times(bodies: Path) -> None:
    with stub("ok") as (port, server):
        streams = [
            bursts(bodies, name="early", connections=5, to_s=0.1),
            bursts(bodies, name="late", connections=5, from_s=0.1, to_s=0.3),
        ]
        report = drive(port, streams, deadline_s=60.0)
        assert [report.stream(name).due for name in ("early", "late")] == [10, 20]
        assert server.asked["ok"] == 30
        assert report.ran_s >= 0.3
        assert report.late_tick_ms.count > 0


def test_a_large_body_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    text = json.dumps(list(range(300_000)))
    path.write_text(text)
    with stub("ok") as (port, server):
        counts = one(port, bursts(path, burst_size=2, every_s=1.0), deadline_s=60.0, goal_s=60.0)
        assert counts.in_time == 2
        assert server.bodies == [text.encode()] * 2


def test_a_pause_is_felt_and_cpu_is_read(bodies: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.stub_server"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            pause = Pause(pid=process.pid, at_s=0.1, for_s=0.25)
            counts = one(
                port, closed(bodies, to_s=0.5), pause=pause, watch=[process.pid], deadline_s=60.0
            )
        finally:
            process.kill()
    assert counts.answered_ms.max >= 200
    assert counts.late >= 1
    assert 0 < counts.server_cpu_s < 60


def test_what_stops_the_client_is_said(
    bodies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stub("ok") as (port, _):
        pass
    with pytest.raises(ConfigError, match="cannot connect"):
        drive(port, [bursts(bodies)])
    with stub("ok") as (port, _):
        with pytest.raises(ConfigError, match="cannot read bodies"):
            drive(port, [bursts(tmp_path / "none")])
        with pytest.raises(ConfigError, match="from < to"):
            drive(port, [bursts(bodies, to_s=0.0)])
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(ConfigError, match="needs a C compiler: cc, gcc or clang"):
        compiled(tmp_path / "build")


def test_it_is_compiled_once(tmp_path: Path) -> None:
    program = compiled(tmp_path)
    made_at = program.stat().st_mtime_ns
    assert compiled(tmp_path) == program
    assert program.stat().st_mtime_ns == made_at
    assert list(tmp_path.iterdir()) == [program]
