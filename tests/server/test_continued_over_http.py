"""`train rank --continue` on a day's events: its delta makes a served ranker the new checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest

from npu_gr.catalogue.names import ItemNames
from npu_gr.cli.main import main
from npu_gr.history_store.interactions import Interactions
from tests.server.test_deltas_over_http import Client, post, served
from tests.serving import serving
from tests.train.synthetic import NUM_ITEMS, planted

DAY = 86_400
LOG = planted(num_users=20, num_events=48)  # an event of each user an hour: two days
START = int(LOG.timestamps[0])
OPTIONS = ["dim=16", "qk_dim=8", "v_dim=8", "head_dim=16", "window_tokens=32", "refit=false"]
SMALL = [word for option in [*OPTIONS, "epochs=1"] for word in ("--set", option)]


def write(log: Interactions, path: Path) -> Path:
    rows = zip(log.users, log.items, log.values, log.timestamps, strict=True)
    path.write_text(
        "".join(
            json.dumps({"user_id": f"u{u}", "item_id": int(i), "rating": v, "timestamp": int(t)})
            + "\n"
            for u, i, v, t in rows
        )
    )
    return path


def train(*words: str | Path) -> None:
    arguments = ["train", "rank", *map(str, words), *SMALL, "--threads", "1"]
    main(arguments, standalone_mode=False)


async def scores(client: Client, user: int) -> Any:
    own = LOG[LOG.users == user]
    history = {
        "items": own.items.tolist(),
        "actions": [f"{value:g}" for value in own.values],
        "timestamps": own.timestamps.tolist(),
    }
    body = {
        "user_id": f"u{user}",
        "history": history,
        "candidates": [10 * item for item in range(NUM_ITEMS)],
        "timestamp": START + 3 * DAY,
    }
    async with client.post("/v1/rank", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["scores"]


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v0, a ranker of the first day, and v1 and v2, which half a day more each made of it."""
    folder = tmp_path_factory.mktemp("days")
    first = write(LOG[LOG.timestamps < START + DAY], folder / "first.jsonl")
    train(first, "--out", folder / "v0")
    half = write(LOG[LOG.timestamps < START + DAY * 3 // 2], folder / "half.jsonl")
    whole = write(LOG, folder / "whole.jsonl")
    # START + a day and a half
    for number, (log, since) in enumerate(
        ((half, str(START + DAY)), (whole, "2020-09-15T00:26:40"))
    ):
        train(
            log, "--continue", folder / f"v{number}", "--since", since,
            "--deltas", folder / "deltas", "--out", folder / f"v{number + 1}",
        )  # fmt: skip
    return folder


async def test_a_days_delta_serves_what_the_new_checkpoint_would(
    days: Path, tmp_path: Path
) -> None:
    async with serving(tmp_path, watched=False, checkpoint=str(days / "v0")) as (client, _):
        before = [await scores(client, user) for user in range(3)]
        for path in sorted(await asyncio.to_thread(lambda: [*(days / "deltas").iterdir()])):
            await post(client, path)
        assert await served(client) == 2
        got = [await scores(client, user) for user in range(3)]
    store, new = {"path": str(tmp_path / "new.db")}, str(days / "v2")
    async with serving(tmp_path, watched=False, checkpoint=new, history_store=store) as (client, _):
        assert got == [await scores(client, user) for user in range(3)]
    assert got != before


def test_what_continue_cannot_keep_is_refused(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = days / "v0"
    log, out = write(LOG, tmp_path / "log.jsonl"), tmp_path / "out"
    with pytest.raises(click.UsageError, match="--continue keeps features and codes"):
        train(log, "--continue", old, "--budget-s", "3", "--out", out)
    with pytest.raises(click.UsageError, match="belong to --continue"):
        train(log, "--only-items", "--out", out)
    with pytest.raises(click.BadParameter, match="or give unix seconds"):
        train(log, "--continue", old, "--since", "yesterday", "--out", out)
    shutil.copytree(old, tmp_path / "named")
    ItemNames.make(["a", "b"], [], b"k" * 16).save(tmp_path / "named")
    with pytest.raises(SystemExit):
        train(log, "--continue", tmp_path / "named", "--out", out)
    assert "has another key of item ids" in capsys.readouterr().err
    assert not out.exists()
