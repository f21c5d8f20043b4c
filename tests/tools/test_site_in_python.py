"""`npu_gr.train` and `Site`: five lines from a frame to recommendations, over the served path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas  # type: ignore[import-untyped]
import pytest
import yaml

import npu_gr
from npu_gr.core.errors import ConfigError, DataError, Unavailable
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.weights import save
from npu_gr.tools import site as python_site
from npu_gr.train.rank.train import train_rank
from tests.ports import free_port
from tests.train.rank.test_train import TINY
from tests.train.synthetic import planted


@pytest.fixture(scope="module")
def log() -> Interactions:
    return planted(num_users=12, num_events=8)


@pytest.fixture
def folder(tmp_path: Path, log: Interactions) -> Path:
    """A folder that can be served, with titles."""
    checkpoint, _ = train_rank(log, [], TINY)
    save(checkpoint, tmp_path / "ranker")
    items = [int(item) for item in np.unique(log.items)[:3]]
    (tmp_path / "popular.txt").write_text("".join(f"{item}\n" for item in items))
    table = {
        "checkpoint": str(tmp_path / "ranker"),
        "threads": 1,
        "recommend": {
            "sources": {"transitions": 5},
            "order": "rank",
            "popular": str(tmp_path / "popular.txt"),
        },
        "history_store": {"kind": "embedded", "path": str(tmp_path / "history.db")},
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(table))
    return tmp_path


def test_a_site_answers_as_it_is_served_and_ends(folder: Path, log: Interactions) -> None:
    site = npu_gr.Site(folder)
    site.__dict__["_asked_at"] = None  # of a dataset, which this folder has not
    items = site.recommend("somebody", 3)
    assert sorted(item["item"] for item in items) == np.unique(log.items)[:3].tolist()
    assert {tuple(item) for item in items} == {("item", "title", "score")}
    process = site._process
    assert process is not None
    assert site.recommend("somebody", 3) == items
    assert site._process is process, "one instance for all requests"
    process.kill()  # an instance that ended is started again
    process.wait()
    assert site.recommend("somebody", 2) == items[:2]
    second = site._process
    site.close()
    assert second is not None
    assert second.returncode == 0
    with npu_gr.Site(folder) as other:
        port = free_port()
        assert other.start(port, free_port()) == f"http://127.0.0.1:{port}"
        assert python_site._is_ready(port)
        third = other._process
    assert third is not None
    assert third.returncode == 0


def test_a_site_that_cannot_be_served_says_where_its_log_is(folder: Path, tmp_path: Path) -> None:
    (folder / "serve.yaml").write_text("checkpoint: nowhere\n")
    with pytest.raises(Unavailable, match=r"did not start; its log: .*service\.log"):
        npu_gr.Site(folder).recommend("u")
    assert "nowhere" in (folder / "service.log").read_text()
    with pytest.raises(DataError, match="no site"):
        npu_gr.Site(tmp_path / "none")


def test_train_prepares_and_runs_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def run(words: list[str]) -> None:
        called.append(words)
        (tmp_path / "s" / "serve.yaml").write_text("")

    monkeypatch.setattr(python_site, "_run", run)
    log = pandas.DataFrame(
        {
            "user": ["a", "a", "b", "b"] * 3,
            "item": ["x", "y", "x", "z"] * 3,
            "time": [1_700_000_000 + n * 60 for n in range(12)],
        }
    )
    items = pandas.DataFrame({"item": ["x", "y", "z"], "title": ["X", "Y", "Z"]})
    site = npu_gr.train(
        log, items=items, out=tmp_path / "s", preset="quick", overrides=["num_matched=5"], threads=1
    )
    data = str(tmp_path / "s" / "data")
    words = f"train all {data} --out {tmp_path / 's'} --preset quick --set num_matched=5"
    assert called == [[*words.split(), "--threads", "1"]]
    assert isinstance(site, npu_gr.Site)


def test_the_trainers_stay_a_package_in_either_order_of_imports() -> None:
    for code in (
        "import npu_gr.train.data, npu_gr; npu_gr.train.data.Split; print(callable(npu_gr.train))",
        "import npu_gr; f = npu_gr.train; import npu_gr.train.data; print(npu_gr.train is f)",
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "True"


def test_a_command_that_fails_is_an_error_with_its_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=r"ended with code 2: npu-gr: .*nowhere"):
        python_site._run(["train", "all", "nowhere", "--out", "x"])
    assert "nowhere" in capsys.readouterr().out


def test_scores_that_are_missing_are_none(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    site = npu_gr.Site(folder)
    site.__dict__["_asked_at"] = 7
    asked: list[dict[str, Any]] = []

    def recommend(user: str, **body: Any) -> list[Any]:
        asked.append({"user": user, **body})
        return [SimpleNamespace(name="x", title="X", score=float("nan"))]

    monkeypatch.setattr(site, "_client", SimpleNamespace(recommend=recommend, close=lambda: None))
    monkeypatch.setattr(site, "_process", SimpleNamespace(poll=lambda: None))
    assert site.recommend("u", 4, exclude_seen=True) == [{"item": "x", "title": "X", "score": None}]
    body = {"num_items": 4, "fields": ["title"], "timestamp": 7, "exclude_seen": True}
    assert asked == [{"user": "u", **body}]
