"""A site's cascade is chosen by its own answers, whatever the actions are called."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml

from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import RECOMMEND
from npu_gr.core.names import ActionNames
from npu_gr.core.request import RecommendRequest, SourceName
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.weights import save
from npu_gr.service.app import instance
from npu_gr.service.config import load
from npu_gr.tools.served_quality import served_ranks
from npu_gr.train.cascade import (
    MISSED,
    TOP,
    CascadeChoice,
    CascadeWay,
    NextEventCase,
    SeenChoice,
    choose_way,
    next_events,
)
from npu_gr.train.data import to_train_on
from npu_gr.train.metrics import F64
from npu_gr.train.rank.train import train_rank
from npu_gr.train.site import choose
from tests.train.rank.test_train import TINY
from tests.train.synthetic import planted

SOURCES: dict[SourceName, int] = {
    "shared_encoder": 8,
    "transitions": 4,
    "neighbours": 5,
    "history": 6,
}
MAX_CANDIDATES = 9  # fewer than the sources find
NUM_EVALUATORS = 12
NUM_CHOOSERS = 6


@pytest.fixture(scope="module")
def log() -> Interactions:
    """Its actions are numbers that six digits cannot tell apart."""
    log = planted(num_users=NUM_EVALUATORS + NUM_CHOOSERS, num_events=8)
    return dataclasses.replace(log, values=log.values + 1234567.0)


@pytest.fixture(scope="module")
def configuration(log: Interactions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    checkpoint, _ = train_rank(log, [], TINY)
    assert checkpoint.model.config.actions == ("1234568", "1234572")
    save(checkpoint, folder / "ranker")
    recommend = {"sources": dict(SOURCES), "max_candidates": MAX_CANDIDATES}
    table = {
        "checkpoint": str(folder / "ranker"),
        "threads": 1,
        "recommend": recommend,
        "history_store": {"kind": "none"},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(table, sort_keys=False))
    return folder / "serve.yaml"


@pytest.fixture(autouse=True)
def few_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "EVALUATED_USERS", NUM_EVALUATORS)
    monkeypatch.setattr(choose, "LEAST_USERS", NUM_CHOOSERS // 2)


def always(excludes: bool) -> type[SeenChoice]:
    class Always(SeenChoice):
        @classmethod
        def of(cls, *_: F64) -> SeenChoice:
            return SeenChoice(excludes)

    return Always


def test_of_too_few_users_nothing_is_chosen(log: Interactions, configuration: Path) -> None:
    assert choose.choose_for_site(configuration, [], log, SOURCES, NUM_CHOOSERS - 1) is None


class Chosen(NamedTuple):
    """A choice with its measured ways: the place of each chooser's next item."""

    choice: CascadeChoice
    places: Mapping[CascadeWay, F64]


@pytest.fixture(scope="module", params=[True, False], ids=["excluded", "seen"])
def exclude_seen(request: pytest.FixtureRequest) -> bool:
    excludes: bool = request.param
    return excludes


@pytest.fixture(scope="module")
def chosen(log: Interactions, configuration: Path, exclude_seen: bool) -> Chosen:
    evaluated: dict[CascadeWay, F64] = {}

    def kept(places: Mapping[CascadeWay, F64], configured: CascadeWay) -> CascadeChoice:
        evaluated.update(places)
        return choose_way(places, configured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "EVALUATED_USERS", NUM_EVALUATORS)
        patch.setattr(choose, "LEAST_USERS", NUM_CHOOSERS // 2)
        patch.setattr(choose, "choose_way", kept)
        patch.setattr(choose, "SeenChoice", always(exclude_seen))
        choice = choose.choose_for_site(configuration, [], log, SOURCES, NUM_CHOOSERS)
    assert choice is not None
    return Chosen(choice, evaluated)


def test_every_way_is_evaluated_by_what_the_cascade_answers(
    log: Interactions, configuration: Path, chosen: Chosen, exclude_seen: bool
) -> None:
    assert chosen.choice.num_users == NUM_CHOOSERS // 2
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    evaluates = {case.user for case in next_events(log, known, NUM_EVALUATORS)}
    choosers = [case for case in next_events(log, known) if case.user not in evaluates]
    ways = chosen.places
    assert {way.order for way in ways} == {"retrieval", "blended", "rank", "fused"}
    for way, places in asyncio.run(
        answered(configuration, choosers, [*ways], exclude_seen)
    ).items():
        np.testing.assert_array_equal(ways[way], places, err_msg=way.name)


def test_what_is_measured_is_what_is_served(
    log: Interactions, configuration: Path, chosen: Chosen, exclude_seen: bool, tmp_path: Path
) -> None:
    way = chosen.choice.way
    table = yaml.safe_load(configuration.read_text())
    sources = {name: SOURCES[name] for name in way.sources}
    table["recommend"] |= {"sources": sources, "order": way.order, "exclude_seen": exclude_seen}
    path = tmp_path / "served.yaml"
    path.write_text(yaml.safe_dump(table, sort_keys=False))
    cases = choose.selection_cases(log, NUM_CHOOSERS)

    def hit_ratio(excludes: bool) -> float:
        places = asyncio.run(answered(path, cases, [way], excludes))[way]
        return float((places < MISSED).mean())

    # over HTTP, where it is not the default
    over_http = None if exclude_seen else served_ranks(path, [], cases)
    served = hit_ratio(True) if over_http is None else float((over_http < MISSED).mean())
    assert served == pytest.approx(chosen.choice.hr_of_all)
    assert served > 0
    # the users had most of the next items before
    assert hit_ratio(not exclude_seen) != served


async def answered(
    path: Path, cases: Sequence[NextEventCase], ways: Sequence[CascadeWay], exclude_seen: bool
) -> dict[CascadeWay, F64]:
    """Ask the served cascade every way: the place of each next item."""
    found = {way: np.full(len(cases), MISSED) for way in ways}
    async with instance(load(path)) as (_, service):
        actions = ActionNames(service.versions.ranker().model.actions)
        for row, case in enumerate(cases):
            events = Events.make(case.items, actions.indices(case.actions), case.timestamps)
            for way in ways:
                request = RecommendRequest(
                    user=UserKey("", case.user),
                    history=HistoryRef(events=events),
                    num_items=TOP,
                    exclude_seen=exclude_seen,
                    timestamp=case.happened_at,
                    sources=way.sources,
                    order=way.order,
                )
                items = (await service.serve(RECOMMEND, request, 60.0)).item_ids.tolist()
                if case.target in items:
                    found[way][row] = items.index(case.target)
    return found
