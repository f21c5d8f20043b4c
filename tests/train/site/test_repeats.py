"""Logs of 0, 30, 46 and 70 % repeats: what is reported is what a bare call over HTTP answers.

`exclude_seen` is chosen on the validation, and where people repeat, a user's own items are found
and ordered no worse than by their recency and frequency alone.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from npu_gr.core.names import answered_ids
from npu_gr.core.request import SourceName
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.weights import save
from npu_gr.train.baselines import OwnHistory
from npu_gr.train.cascade import repeat_ratio
from npu_gr.train.metrics import difference_of_users, hits
from npu_gr.train.rank import blend_choice
from npu_gr.train.rank.train import train_rank
from npu_gr.train.site import choose
from tests.serving import serving
from tests.train.rank.test_train import TINY

NUM_ITEMS, NUM_EVENTS, NUM_CHOOSERS = 120, 16, 120
SOURCES: dict[SourceName, int] = {
    "shared_encoder": 20,
    "transitions": 20,
    "neighbours": 20,
    "history": 20,
}


def log_of(share: float) -> Interactions:
    """Each event is one of the user's last ten again, for a share of them, else a new one."""
    draw = random.Random(0)
    items = []
    for _ in range(NUM_CHOOSERS + 8):
        had: list[int] = []
        for _ in range(NUM_EVENTS):
            follows = (had[-1] * 7 + 3) % NUM_ITEMS if had else 0
            new = [item for item in range(NUM_ITEMS) if item not in had]
            if had and draw.random() < share:
                had.append(draw.choice(had[-10:]))
            else:
                had.append(follows if follows in new and draw.random() < 0.5 else draw.choice(new))
        items += had
    num_users = len(items) // NUM_EVENTS
    times = np.tile(np.arange(NUM_EVENTS) * 3600, num_users) + 1_600_000_000
    users = np.repeat(np.arange(num_users, dtype=np.int32), NUM_EVENTS)
    order = np.argsort(times, kind="stable")
    return Interactions(
        users[order],
        np.array(items)[order] * 10,
        np.ones(len(items)),
        times[order],
        [f"u{user}" for user in range(num_users)],
    )


@pytest.mark.parametrize("share", [0.0, 0.3, 0.46, 0.7])
async def test_what_is_reported_is_what_a_bare_call_answers(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "EVALUATED_USERS", 8)
    monkeypatch.setattr(blend_choice, "FOLDS", 2)
    log = log_of(share)
    options = msgspec.structs.replace(TINY, test_users=1000)
    checkpoint, found = train_rank(log, [], options)
    save(checkpoint, tmp_path / "checkpoint")
    cases = choose.selection_cases(log, NUM_CHOOSERS)
    assert repeat_ratio(cases) == pytest.approx(share, abs=0.1)
    recommend = {"sources": dict(SOURCES), "max_candidates": 60}
    async with serving(tmp_path, watched=False, recommend=recommend) as (_, service):
        places = {
            exclude_seen: await choose.places_of_ways(
                service, cases, SOURCES, 60, exclude_seen=exclude_seen
            )
            for exclude_seen in (True, False)[: 1 + (share > 0)]
        }
    choice = choose.choose_with_seen(places, list(SOURCES))
    assert choice.seen["recommend"].excludes == (share == 0)
    # a simple source alone may be chosen instead of the ranker's own sources
    usual = choose.configured_way(list(SOURCES), exclude_seen=share == 0)
    assert ("history" in usual.sources) == (share > 0)
    assert choice.way == usual or len(choice.way.sources) == 1
    recommend |= {
        "sources": {name: SOURCES[name] for name in choice.way.sources},
        "order": choice.way.order,
        "exclude_seen": choice.seen["recommend"].excludes,
    }
    ranks = []
    async with serving(tmp_path, watched=False, recommend=recommend) as (client, _):
        for case in cases:
            body = case.body("default") | {"timestamp": case.happened_at}
            answer = await client.post("/v1/recommend", json=body)
            named = [one["item"] for one in (await answer.json())["items"]]
            items = answered_ids(named).tolist()[:10]
            ranks.append(items.index(case.target) if case.target in items else np.inf)
    served = hits(np.array(ranks), 10)
    assert served.mean() == pytest.approx(choice.hr_of_all)
    own = next(row for row in found.baselines if row.model == OwnHistory.name)
    assert found.ranker.ranks.evaluates_all == (share > 0)
    if share == 0.7:
        theirs = hits(own.ranks.overall, 10)
        users = [int(case.user[1:]) for case in cases]
        assert difference_of_users(served, theirs[users]).high >= 0
        assert served.mean() > 0.5
