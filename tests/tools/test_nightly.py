"""`npu-gr nightly`: no worse models replace the site, whole at every moment, and come back."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from npu_gr.core.errors import ConfigError, DataError, Unavailable
from npu_gr.dataset.files import read_dataset
from npu_gr.server.config import ServerConfig
from npu_gr.tools import nightly
from npu_gr.train.site import make
from npu_gr.train.site.folder import SiteFolder
from tests.train.site.test_make import Trainings, dataset

QUIET = Console(file=io.StringIO())


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    found = Trainings()
    monkeypatch.setattr(make, "side_by_side", found.side_by_side)
    monkeypatch.setattr(make, "choose_for_site", found.choose)
    return found


@pytest.fixture
def site(tmp_path: Path, trainings: Trainings) -> Path:
    data = dataset(tmp_path)
    make.train_site(data, tmp_path / "site", ("num_matched=50",), 2, QUIET, "quick")
    return tmp_path / "site"


def next_day(folder: Path, day: int = 1) -> str:
    path = folder / f"day{day}.csv"
    path.write_text(f"user,item,rating,time\nu'0,B08,2,18000000{day:02}\n")
    return str(path)


def answering(
    monkeypatch: pytest.MonkeyPatch, old: float, new: float
) -> Callable[[], list[tuple[str, list[str]]]]:
    """In the place of services: the share of the users whose item each answers first."""
    asked: list[tuple[str, list[str]]] = []

    def ranks(config: Path, overrides: Any, cases: Any) -> Any:
        asked.append((str(config), [case.user for case in cases]))
        share = new if ".new" in str(config) else old
        return np.where(np.arange(len(cases)) < share * len(cases), 0.0, np.inf)

    monkeypatch.setattr(nightly, "served_ranks", ranks)
    return lambda: asked


def number(site: Path) -> str:
    return (site / "ranker" / "number").read_text()


def test_a_new_day_is_added_trained_on_and_compared_by_the_same_users(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, trainings: Trainings
) -> None:
    asked = answering(monkeypatch, 0.5, 0.5)
    before = number(site)
    report = nightly.nightly(site, [next_day(tmp_path)], 2, QUIET)
    assert report.num_events == 38
    assert (report.preset, report.overrides) == ("quick", ("num_matched=50",))
    assert number(site) != before
    (old, old_users), (new, new_users) = asked()
    assert (old, new) == (str(site / "evaluated.yaml"), str(site / ".new" / "evaluated.yaml"))
    assert old_users == new_users == ["u'0", "u'1", "u'2", "u'3"]
    [kept] = nightly.versions(site)
    assert (kept / "ranker" / "number").read_text() == before
    # the same command once more: the day is known, and nothing is trained, compared or kept
    num_trained = len(trainings.trained)
    assert nightly.nightly(site, [next_day(tmp_path)], 2, QUIET).num_events == 38
    assert len(trainings.trained) == num_trained
    assert len(asked()) == 2
    assert len(nightly.versions(site)) == 1


def test_a_site_without_a_generator_is_trained_without_it_every_night(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, trainings: Trainings
) -> None:
    answering(monkeypatch, 0.5, 0.5)
    make.train_site(site / "data", site, ("without=[generator]",), 2, QUIET, "quick")
    trainings.trained.clear()
    report = nightly.nightly(site, [next_day(tmp_path)], 2, QUIET)
    assert trainings.trained == ["ranker", "vectors"] == list(report.parts)
    assert report.overrides == ("without=[generator]",)


def test_the_paths_of_a_running_instance_stay_however_the_site_is_named(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, 0.5, 0.5)
    monkeypatch.chdir(tmp_path)
    was, before = (site / "serve.yaml").read_text(), number(site)
    nightly.nightly(Path("site"), [next_day(tmp_path)], 2, QUIET)
    assert number(site) != before
    assert (site / "serve.yaml").read_text().splitlines()[3:] == was.splitlines()[3:]


def test_worse_models_are_refused_and_the_site_stays(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, 1.0, 0.0)
    before = [(path, path.read_bytes()) for path in sorted(site.glob("*.*")) if path.is_file()]
    was = number(site)
    with pytest.raises(nightly.Worse, match="the new models are worse"):
        nightly.nightly(site, [next_day(tmp_path)], 2, QUIET)
    assert number(site) == was
    assert [(path, path.read_bytes()) for path, _ in before] == before
    assert nightly.versions(site) == []
    assert len(read_dataset(site / "data").interactions()) == 38
    nightly.nightly(site, [], 2, QUIET, force=True)
    assert number(site) != was


def test_three_versions_are_kept_and_the_newest_comes_back(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, 0.5, 0.5)
    numbers = []
    for day in range(1, 6):
        numbers.append(number(site))
        path = site / "report.json"  # made at another second
        report = json.loads(path.read_text()) | {"made_at": f"2026-01-0{day}T00:00:00+00:00"}
        path.write_text(json.dumps(report))
        nightly.nightly(site, [next_day(tmp_path, day)], 2, QUIET)
    kept = nightly.versions(site)
    assert [path.name for path in kept] == [f"2026-01-0{day}T000000" for day in (5, 4, 3)]
    assert nightly.restore(site) == kept[0]
    assert number(site) == numbers[-1]
    assert nightly.versions(site) == kept[1:]
    (site / "serve.yaml").write_text("# an operator's own\n")
    nightly.restore(site)
    assert number(site) == numbers[-2]
    assert (site / "serve.yaml").read_text() == "# an operator's own\n"
    nightly.restore(site)
    with pytest.raises(ConfigError, match="no version is kept"):
        nightly.restore(site)


@pytest.mark.parametrize("num_calls", [0, 1, 3, 6, 9, 12, 15])
def test_killed_at_any_rename_the_same_command_goes_on(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    answering(monkeypatch, 0.5, 0.5)
    was = number(site)
    left = num_calls
    rename = os.rename

    def dying(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        rename(*args)

    day = next_day(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", dying)
        with contextlib.suppress(KeyboardInterrupt):
            nightly.nightly(site, [day], 2, QUIET)
    report = nightly.nightly(site, [day], 2, QUIET)
    assert report.num_events == 38
    assert number(site) != was
    assert [(path / "ranker" / "number").read_text() for path in nightly.versions(site)] == [was]
    assert list((site / ".new").iterdir()) == []


def test_two_runs_and_a_training_exclude_each_other(tmp_path: Path, site: Path) -> None:
    with (
        nightly._one_at_a_time(site),
        pytest.raises(ConfigError, match="another nightly run works on it"),
    ):
        nightly.nightly(site, [], 2, QUIET)
    with (
        SiteFolder.opened(site),
        pytest.raises(ConfigError, match="another process makes this site"),
    ):
        nightly.nightly(site, [], 2, QUIET)
    with pytest.raises(ConfigError, match="No such file"):
        nightly.nightly(tmp_path / "none", [], 2, QUIET)
    with pytest.raises(ConfigError, match="no site of `npu-gr train all`"):
        nightly.nightly(tmp_path, [], 2, QUIET)


def test_a_log_that_does_not_fit_changes_nothing(tmp_path: Path, site: Path) -> None:
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n")
    was = number(site)
    with pytest.raises(DataError):
        nightly.nightly(site, [str(tmp_path / "wrong.csv")], 2, QUIET)
    assert number(site) == was
    assert len(read_dataset(site / "data").interactions()) == 37


async def test_a_running_instance_reloads_everything_and_its_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nightly, "RETRY_S", 0.0)
    called: list[str] = []
    statuses = {"/v1/catalog/reload": [409, 200]}

    async def answer(request: web.Request) -> web.Response:
        called.append(request.path)
        assert request.headers["authorization"] == "Bearer key"
        left = statuses.get(request.path, [200])
        return web.json_response({}, status=left.pop(0) if len(left) > 1 else left[0])

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        config = ServerConfig(admin_host="127.0.0.1", admin_port=server.port or 0)
        assert await nightly.reload(config, "key", QUIET)
        assert called == [nightly.RELOADS[0], *[nightly.RELOADS[1]] * 2, nightly.RELOADS[2]]
        statuses["/v1/catalog/reload"] = [404]  # a site without a generator
        called.clear()
        assert await nightly.reload(config, "key", QUIET)
        assert called == list(nightly.RELOADS)
        statuses["/v1/models/reload"] = [422]
        with pytest.raises(Unavailable, match="/v1/models/reload answered 422"):
            await nightly.reload(config, "key", QUIET)
    assert not await nightly.reload(config, None, QUIET), "nobody listens any more"
