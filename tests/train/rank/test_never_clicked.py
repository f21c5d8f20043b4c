"""Items that were shown often and never clicked are recommended to nobody, by no source."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from npu_gr.dataset.build import prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.dataset.options import PrepareOptions
from npu_gr.model.weights import save
from npu_gr.train.rank import blend_choice
from npu_gr.train.rank.train import train_rank
from npu_gr.train.site.make import _popular
from tests.serving import serving
from tests.train.rank.test_train import TINY

NUM_USERS, NUM_SHOWN, NUM_ITEMS = 40, 20, 12
SOURCES = ("shared_encoder", "transitions", "neighbours", "history")


def write_log(path: Path) -> Path:
    """Write four impressions in five of items that nobody clicks; all others are clicked."""
    draw = random.Random(3)
    lines = ["user_id,item_id,timestamp,click"]
    for user in range(NUM_USERS):
        for at in range(NUM_SHOWN):
            kind, click = ("never", 0) if draw.random() < 0.8 else ("liked", 1)
            item, time = draw.randrange(NUM_ITEMS), 1_700_000_000 + 60 * user + 40 * at
            lines.append(f"u{user},{kind}-{item},{time},{click}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("has_items", [False, True])
async def test_nobody_gets_what_nobody_clicked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_items: bool
) -> None:
    monkeypatch.setattr(blend_choice, "FOLDS", 2)
    items = None
    if has_items:  # so that the models know all of them
        items = tmp_path / "items.csv"
        rows = [f"{kind}-{at},c{at % 3}" for kind in ("never", "liked") for at in range(NUM_ITEMS)]
        items.write_text("\n".join(["item_id,category", *rows]) + "\n")
    log = write_log(tmp_path / "log.csv")
    prepare(log, tmp_path / "data", PrepareOptions(positive=("click=1",)), items=items)
    dataset = read_dataset(tmp_path / "data")
    folder = tmp_path / "checkpoint"
    options = msgspec.structs.replace(TINY, epochs=4, refit=True, test_users=20)
    features = dataset.item_features()
    checkpoint, _ = train_rank(dataset.interactions(), features, options)
    folder.mkdir()
    dataset.names.save(folder)
    save(checkpoint, folder)
    popular = _popular(dataset, 5)
    assert "never" not in popular
    (tmp_path / "popular.txt").write_text(popular)
    recommend = {
        "sources": dict.fromkeys(SOURCES, 12),
        "popular": str(tmp_path / "popular.txt"),
        "exclude_seen": False,
    }
    users = [f"u{user}" for user in range(NUM_USERS)] + ["cold"]
    async with serving(tmp_path, watched=False, recommend=recommend) as (client, _):

        async def recommended(user: str, source: str) -> list[str]:
            clicked = [
                (item, int(time))
                for one, item, time, click in (
                    line.split(",") for line in log.read_text().splitlines()[1:]
                )
                if (one, click) == (user, "1")
            ]
            body = {
                "user_id": user,
                "num_items": 5,
                "history": {
                    "items": [item for item, _ in clicked],
                    "actions": ["event"] * len(clicked),
                    "timestamps": [time for _, time in clicked],
                },
                "timestamp": 1_700_010_000,
            } | ({"sources": [source]} if source else {})
            async with client.post("/v1/recommend", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return [one["item"] for one in answer["items"]]

        for source in ("", *SOURCES):
            found = [item for user in users for item in await recommended(user, source)]
            assert len(found) > 2 * NUM_USERS
            assert [item for item in found if item.startswith("never")] == [], source
