"""A site that is made again: equal files; and like another one: an instance can reload it."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from rich.console import Console

from npu_gr.dataset.build import prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.dataset.options import PrepareOptions
from npu_gr.service.app import instance
from npu_gr.service.config import Config, load
from npu_gr.train.rank import blend_choice
from npu_gr.train.site import choose, make
from tests.serving import InstanceServer
from tests.tools.test_site import TINY, one_after_the_other

NUM_USERS = 32
SMALL = "without=[generator]"
TIMES = ("made_at", "took_s", "cpu_s", "peak_bytes", "started_at")


def write_log(path: Path, events: tuple[str, ...]) -> Path:
    rows = [
        f"u{user},{(user * 3 + at * 7) % 20},{events[(user + at) % len(events)]},"
        f"{1_700_000_000 + 60 * at + user}"
        for user in range(NUM_USERS)
        for at in range(8)
    ]
    path.write_text("\n".join(["user_id,item_id,event,timestamp", *rows]) + "\n")
    return path


def train(folder: Path, site: str = "site", like: Path | None = None) -> Path:
    """Train a site in a folder, where the command runs, so that its paths are relative to it."""
    console = Console(file=io.StringIO(), width=200)
    with pytest.MonkeyPatch.context() as patch:
        # real trainings and a real choice, but in this process
        patch.setattr(make, "side_by_side", one_after_the_other)
        patch.setattr(choose, "EVALUATED_USERS", 8)
        patch.setattr(choose, "LEAST_USERS", 12)  # of the others, 24 choose
        patch.setattr(blend_choice, "FOLDS", 2)
        patch.chdir(folder)
        data = Path(site, "data")
        make.train_site(data, Path(site), (*TINY, SMALL), 1, console, "quick", like=like)
    return folder / site


def prepare_days(folder: Path) -> None:
    with contextlib.chdir(folder):
        prepare(write_log(Path("log.csv"), ("view", "buy")), Path("site", "data"))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    prepare_days(folder)
    return train(folder)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def files(site: Path, made_at: str) -> dict[str, object]:
    """The content of every file, without times."""
    return {
        str(path.relative_to(site)): without_times(json.loads(path.read_bytes()))
        if path.name in ("report.json", "manifest.json")
        else re.sub(rb"training took [^.]*", b"", path.read_bytes().replace(made_at.encode(), b""))
        for path in sorted(site.rglob("*"))
        if path.is_file() and path.name not in (".lock", "metrics.jsonl")
    }


def test_a_site_made_twice_has_equal_files(old: Path, tmp_path: Path) -> None:
    prepare_days(tmp_path)
    made = []
    for site in (old, train(tmp_path)):
        report = json.loads((site / "report.json").read_bytes())
        assert report["cascade"]["hr_at_10"] is not None, "the cascade was chosen"
        made.append(files(site, report["made_at"]))
    first, second = made
    assert {"serve.yaml", "evaluated.yaml", "popular.txt", "README.md"} <= first.keys()
    assert list(first) == list(second)
    assert not [name for name in first if first[name] != second[name]]


@pytest.fixture(scope="module")
def like(old: Path) -> Path:
    """A day with a new type of event, the first of the alphabet."""
    log = write_log(old.parent / "day.csv", ("view", "add_to_cart", "buy"))
    prepare(log, old.parent / "alone")
    assert read_dataset(old.parent / "alone").action_names[0] == "add_to_cart"
    prepare(log, old.parent / "like" / "data", PrepareOptions(like=str(old / "data")))
    return train(old.parent, "like", like=Path("site"))


async def test_a_site_like_the_one_in_service_is_reloaded(
    old: Path, like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each site has its `serve.yaml`, but the instance has one store."""
    monkeypatch.chdir(old.parent)
    vectors = (like / "vectors" / "manifest.json").read_text()
    serves = ["site"]

    def read() -> Config:
        store = f"history_store.path={tmp_path / 'history.db'}"  # one for all sites
        ports = ("server.port=0", "server.admin_port=0")
        return load(Path(serves[-1], "serve.yaml"), (store, *ports))

    async with instance(read(), read) as (app, service), TestClient(InstanceServer(app)) as client:

        async def recommended() -> int:
            async with client.post("/v1/recommend", json={"user_id": "u1"}) as response:
                return response.status

        before = service.versions.ranker().version
        assert await recommended() == 200
        serves.append("like")
        async with client.post("/v1/models/reload") as response:
            assert response.status == 200, await response.text()
        assert service.versions.ranker().version != before
        assert await recommended() == 200
        assert service.versions.ranker().model.actions == ("buy", "view", "add_to_cart")
        assert service.parts.settings.config == read()
        assert service.parts.vectors.versions()[0] in vectors
