"""The replayed day, turns of a shadow, and the time until a fleet serves a delta."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks import delta, delta_day, delta_fleet, delta_shadow
from benchmarks.delta import Run
from benchmarks.delta_day import HOURS, Day, body, first_ranker, lines, write_deltas
from npu_gr.model.delta import read_manifest
from npu_gr.model.weights import save
from npu_gr.train.metrics import F64
from npu_gr.train.rank.options import TrainOptions
from tests.train.synthetic import planted

LOG = planted(num_users=24, num_events=24)
OPTIONS = TrainOptions(
    dim=8, qk_dim=4, v_dim=4, head_dim=8, num_layers=1, epochs=1, window_tokens=16
)


def test_a_rank_of_the_day_has_the_history_before_its_event() -> None:
    day = Day.of(LOG, 0.5, 1000)
    assert len(day.bounds) == HOURS + 1
    assert (day.bounds[0], day.bounds[-1]) == (len(LOG) // 2, len(LOG))
    assert len(day.asked) == len(LOG) // 2
    assert (np.diff(day.hours()) >= 0).all()
    event = int(day.asked[-1])
    user = int(LOG.users[event])
    own = np.flatnonzero(LOG.users == user)
    ids = np.unique(LOG.items)
    found = body(LOG, own, event, ids)
    before = LOG.items[own[own < event]]
    assert found["history"]["items"] == before.tolist()
    assert set(found["history"]["actions"]) <= {"1", "5"}
    assert set(found["candidates"]) == set(ids.tolist()) - set(before.tolist())
    assert len(Day.of(LOG, 0.5, 7).asked) == 7


def test_each_slice_but_the_last_gives_a_delta(tmp_path: Path) -> None:
    day = Day.of(LOG, 0.5, 10)
    save(first_ranker(day, OPTIONS), tmp_path / "v0")
    deltas = write_deltas(day, tmp_path / "v0", tmp_path / "rows", OPTIONS, only_items=True)
    assert [read_manifest(path).sequence for path in deltas] == [*range(1, HOURS)]


def test_arms_are_compared_with_the_frozen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(day: Day, _: Path, deltas: list[Path], __: Path, name: str) -> F64:
        assert bool(deltas) is (name != "frozen")
        return np.full(len(day.asked), {"frozen": 0.0, "rows": 0.0, "whole": 1.0}[name])

    monkeypatch.setattr(delta_day, "replayed", replayed)
    monkeypatch.setattr(delta_day, "write_deltas", lambda *_, **__: [Path("one")])
    found = [*lines(0.5, 100, OPTIONS, LOG)]
    assert len(found) == 10
    whole = [line for line in found if "all of 24" in line.case]
    assert [(line.ours, line.ok) for line in whole] == [(0.0, False), (1.0, True)]


def test_turns_of_a_shadow_change_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def call(_: int, method: str, body: Any = None) -> dict[str, Any]:
        calls.append(method)
        return {"scored": 3}

    class Asked:
        admin_port, seed = 1, 0

        def capacity_per_s(self) -> float:
            return 10.0

        def load(self, _seconds: float, rate_per_s: float, _seed: int) -> Run:
            assert rate_per_s == 5.0
            calls.append("load")
            is_open = calls.count("POST") > calls.count("DELETE")
            return Run(1.0, 102.0 if is_open else 100.0, 1.0)

    monkeypatch.setattr(delta_shadow, "call", call)
    asked: Any = Asked()
    (line,) = delta_shadow.turns(asked, Path("new"), "it", 1.0, 2, 0.5)
    with_ = ["POST", "load", "GET", "DELETE"]
    assert calls == ["load", *with_, *with_, "load"]
    assert line.ratio == pytest.approx(1 / 1.02)
    assert line.ok
    assert "6 ranks scored twice" in line.case
    assert msgspec.json.encode(line.as_dict())


def test_a_fleet_is_measured_until_the_last_instance_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Real Redis, and instances that follow after a look more each."""
    looks = 0
    given: list[list[str]] = []

    def served(port: int) -> int:
        nonlocal looks
        looks += 1
        return 0 if looks <= port else 1

    class One:
        port = 2

    def instance(*arguments: Any) -> One:
        given.append(arguments[3])
        return One()

    monkeypatch.setattr(delta_fleet, "served", served)
    monkeypatch.setattr(delta_fleet, "instance", instance)
    monkeypatch.setattr(delta_fleet, "running", lambda *_: nullcontext())
    monkeypatch.setattr(delta, "post", lambda *_: 0.0)
    stream: Any = SimpleNamespace(folder=tmp_path, checkpoint=tmp_path, files=[b"1"], changed=1)
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    found = [*delta_fleet.lines(stream, tmp_path)]
    assert [line.case.partition(",")[0] for line in found] == [
        "3 instances on one folder",
        "3 instances on one stream",
    ]
    folders = [words[0] for words in given]
    assert len(set(folders[:3])) == 1
    assert len(set(folders[3:])) == 3  # each has its own copy
    assert all("deltas_stream=unix://" in words[1] for words in given[3:])
