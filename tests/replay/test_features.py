"""Features are recorded as they were asked, and a replay of them is answered the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_gr.replay.files import read
from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.run import replay
from tests.features_of import every_feature
from tests.models import events
from tests.serving import FIRST_ID, columns, serving, write_checkpoint

FEATURES: dict[str, Any] = {
    "user": {"country": "fr", "tags": ["a", "b"]},
    "request": {"spent": 2.5},
}
CROSS: dict[str, Any] = {"tags": [["a"], None], "spent": [None, 0.125]}
OF_EVENTS: dict[str, Any] = {"country": ["fr", "de", None, "fr"] * 5, "age": [0.5] * 20}


async def test_a_replay_with_features_is_answered_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=every_feature(), retrieval=True)
    record = {
        "folder": str(tmp_path / "traffic"),
        "enabled": True,
        "suffix": ".jsonl",
        "users": "clear",
    }
    sections: dict[str, Any] = {"recommend": {"sources": {"shared_encoder": 20}}}
    history = {**columns(events(20)), "features": OF_EVENTS}
    asked: dict[str, Any] = {"user_id": "a", "timestamp": 1_700_000_000, "history": history}
    async with serving(tmp_path, record=record, **sections) as (client, _):
        rank = {
            **asked,
            "candidates": [FIRST_ID, FIRST_ID + 5],
            "features": {**FEATURES, "cross": CROSS},
        }
        answer = await (await client.post("/v1/rank", json=rank)).json()
        late = {"request": FEATURES["request"], "cross": CROSS}
        delta = {
            **rank,
            "history": None,
            "base": answer["history"]["fingerprint"],
            "features": late,
        }
        assert (await (await client.post("/v1/rank", json=delta)).json())["scores"] == answer[
            "scores"
        ]
        assert (
            await client.post("/v1/recommend", json={**asked, "features": FEATURES})
        ).status == 200
    (path,) = (tmp_path / "traffic").glob("traffic-*")
    first, second, third = read(path)
    assert first.features is not None
    assert (first.features.user, first.features.request) == (FEATURES["user"], FEATURES["request"])
    assert second.features is not None
    assert second.features.user is None, "those of the base"
    assert third.features is not None
    assert third.features.cross is None
    async with serving(tmp_path, watched=False, **sections) as (client, _):
        report = await replay(
            path, ReplayOptions(base_url=str(client.make_url("")), histories="whole")
        )
    assert not report.errors
    assert sum(report.logged_digests.values()) == 3
    assert report.logged_digests == {"equal": 3}
