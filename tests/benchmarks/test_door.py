"""The servers of the bench answer as the reference model does, and the bench runs from start to end."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import door, door_costs, door_loads
from benchmarks.door import DoorOptions, lines
from benchmarks.door_client import ClientReport, ClientTimes, LoadStream, StreamCounts
from benchmarks.door_costs import density
from benchmarks.door_servers import (
    PEERS,
    Server,
    Traffic,
    check,
    hit_ratio,
    make_checkpoint,
    our_server,
    peer_server,
    write_bodies,
)
from npu_gr.core.errors import Unavailable
from npu_gr.model.weights import load

CONFIG = Path(__file__).parent.parent.parent / "configs" / "cpu.yaml"
TRAFFIC = Traffic(history_tokens=30, num_candidates=10, num_users=4)
NO_TIMES = ClientTimes(count=0, p50=0.0, p90=0.0, p99=0.0, max=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("door") / "checkpoint"
    make_checkpoint(folder, 1, 64, 0)
    return folder


@pytest.fixture(scope="module")
def bodies(checkpoint: Path) -> list[dict[str, Any]]:
    return TRAFFIC.bodies(load(checkpoint), "tenant", 0)


def test_a_rank_is_as_large_as_ranks_are(checkpoint: Path, tmp_path: Path) -> None:
    made = Traffic().bodies(load(checkpoint), "", 0)
    path = write_bodies(tmp_path / "ranks", made)
    sizes = [len(line) for line in path.read_text().splitlines()]
    assert len(sizes) == 256
    assert all(2000 < size < 3000 for size in sizes)
    assert len({body["user_id"] for body in made}) == 256
    assert made == Traffic().bodies(load(checkpoint), "", 0)


def test_our_server_is_checked_and_its_prefixes_are_found(
    checkpoint: Path, bodies: list[dict[str, Any]], tmp_path: Path
) -> None:
    with our_server("as configured", CONFIG, checkpoint, tmp_path) as server:
        check(server, checkpoint, bodies)
        assert hit_ratio(server, bodies, 0) == 1.0
        other = tmp_path / "other"
        make_checkpoint(other, 1, 64, 1)
        with pytest.raises(AssertionError, match="as configured: click differs by"):
            check(server, other, bodies)
    logged = [
        json.loads(line) for line in (tmp_path / "as-configured.log").read_text().splitlines() if line.startswith("{")
    ]
    assert sum(line["route"] == "/v1/rank" for line in logged) >= 3 * len(bodies)  # logged as it ships


def test_a_server_that_does_not_start_says_why(checkpoint: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match=r"ours did not start: npu-gr: .*kv\.hbm_bytes"),
        our_server("ours", CONFIG, checkpoint, tmp_path, ["kv.hbm_bytes=1"]),
    ):
        pass


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_the_same_model(name: str, checkpoint: Path, bodies: list[dict[str, Any]], tmp_path: Path) -> None:
    if importlib.util.find_spec(PEERS[name]) is None:
        pytest.skip(f"{name} is not installed (the extra bench)")
    with peer_server(name, checkpoint, tmp_path) as server:
        check(server, checkpoint, bodies)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_from_start_to_end(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_loads, "CLOSED", (2,))
    monkeypatch.setattr(door_loads, "POISSON", (1.0, 2.0))
    monkeypatch.setattr(door, "CAPACITY_S", 0.3)
    options = DoorOptions(
        config=CONFIG,
        checkpoint=checkpoint,
        traffic=TRAFFIC,
        parts=("closed", "poisson"),
        with_peers=False,
        seconds=0.2,
    )
    goodput, normal, reference, *_, refusals = lines(options)
    assert goodput.case.startswith("closed loop of 2: ")
    assert "hits 100%" in goodput.case
    assert goodput.ours > 0
    assert (normal.unit, reference.target) == ("s", None)
    assert refusals.case.startswith("refusals: ")


def counts(name: str, **changes: Any) -> StreamCounts:
    zero = dict.fromkeys(("due", "unsent", "in_time", "late", "refused", "other", "timeouts", "errors"), 0)
    rest = {"span_s": 2.0, "server_cpu_s": 1.0, "main_thread_cpu_s": 0.5, "main_thread_wait_s": 0.0, "bins": []}
    none = dict.fromkeys(("answered_ms", "refused_ms", "late_start_ms"), NO_TIMES)
    return StreamCounts(**{"name": name, **zero, **rest, **none, **changes})


def test_density_is_the_best_before_the_goal_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients are the best of a core, eight miss the goal, and sixteen are not asked."""
    asked = list[int]()

    def drive(_port: int, streams: list[LoadStream], **_more: Any) -> ClientReport:
        clients = streams[-1].connections
        asked.append(clients)
        p99 = ClientTimes(count=1, p50=1.0, p90=1.0, p99=10.0 * clients, max=80.0)
        answers = {1: 100, 2: 300, 4: 200, 8: 900}[clients]
        found = counts("load", in_time=answers, due=answers, answered_ms=p99)
        return ClientReport(cpu_s=0.0, ran_s=1.0, late_tick_ms=NO_TIMES, streams=[found])

    monkeypatch.setattr(door_costs, "drive", drive)
    best = density(Server(name="x", port=1, pids=(1,)), Path("none"), 1.0, 0.05, 0)
    assert best is not None
    assert (best.clients, best.ranks_per_core_s, best.ranks_per_s) == (2, 300.0, 150.0)
    assert asked == [1, 2, 4, 8]
