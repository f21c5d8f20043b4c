"""Choose the sources and the order of a site's cascade, by requests to its evaluated models.

An instance with the evaluated models runs in this process. For each user it gets one request per
source, and one request per order for the scores of all items that the sources found. The lists of
each set of sources are then merged and ordered here, as the cascade does. So many sets cost as many
requests as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import RECOMMEND
from npu_gr.core.names import ActionNames
from npu_gr.core.request import OrderName, RecommendRequest, SourceName
from npu_gr.handlers.cascade_plan import best_first, fused_order, interleave
from npu_gr.handlers.service import Service
from npu_gr.history_store.interactions import Interactions
from npu_gr.history_store.store import HistoryConfig
from npu_gr.service.app import instance
from npu_gr.service.config import load
from npu_gr.train.cascade import (
    EVALUATED_USERS,
    MISSED,
    OTHER_MODELS,
    TOP,
    CascadeChoice,
    CascadeWay,
    NextEventCase,
    SeenChoice,
    cascade_ways,
    choose_way,
    drawn_users,
    next_events,
    repeat_ratio,
)
from npu_gr.train.data import to_train_on
from npu_gr.train.metrics import F64

AT_ONCE = 8  # users whose requests run at once
BUDGET_S = 60.0  # deadline of each request, long enough for any machine
LEAST_USERS = 50  # fewest users who choose, and who evaluate
# the ranker's own sources, on whose lists its score blend is fitted
OWN: tuple[SourceName, ...] = ("shared_encoder", "transitions", "neighbours", "history")
SCORED_ORDERS: tuple[OrderName, ...] = ("blended", "rank")  # all orders follow from their scores


def choose_for_site(
    path: Path,
    overrides: Sequence[str],
    log: Interactions,
    sources: Mapping[SourceName, int],
    most_users: int,
    tested: Sequence[str] = (),
) -> CascadeChoice | None:
    """Choose the cascade, by users other than those on whom `npu-gr demo` evaluates it.

    Args:
        path: Configuration of the evaluated models, with a section for every part.
        overrides: `section.key=value` of that configuration.
        log: All events; the models were trained without each user's last event.
        sources: Source -> items to request, the ranker's own sources first. These with the order
            `blended` stay, unless another choice is significantly better.
        most_users: Most users; half of them choose, the others evaluate.
        tested: Names of users who come first, see `selection_cases`.

    Returns:
        None = there are fewer than 2 x `LEAST_USERS` users.

    Raises:
        ConfigError: the configuration cannot be served.
        NpuGrError: a model failed.
    """
    cases = selection_cases(log, most_users, tested)
    if len(cases) < 2 * LEAST_USERS:
        return None
    return asyncio.run(_choose(path, overrides, cases, dict(sources)))


def selection_cases(
    log: Interactions, most_users: int, tested: Sequence[str] = ()
) -> list[NextEventCase]:
    """Return the last events of users other than those on whom `npu-gr demo` evaluates.

    Args:
        log: All events.
        most_users: Most users.
        tested: Names of users who come first: those for whom the baselines' ranks are known, so
            that they can be compared.
    """
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    evaluated = drawn_users(log, known, EVALUATED_USERS)
    others = np.setdiff1d(drawn_users(log, known), evaluated)
    is_other = ~np.isin(np.array(log.user_names, np.str_)[others], np.array(tested, np.str_))
    others = others[np.argsort(is_other, kind="stable")][:most_users]
    return next_events(log, known, users=np.sort(others))


def other_cases(
    log: Interactions, tested: Sequence[str], cases: Sequence[NextEventCase]
) -> list[NextEventCase]:
    """Return the last events of the tested users who are not among the cases."""
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    users = drawn_users(log, known)
    names = np.array(log.user_names, np.str_)[users]
    asked = np.array([case.user for case in cases], np.str_)
    is_other = np.isin(names, np.array(tested, np.str_)) & ~np.isin(names, asked)
    return next_events(log, known, users=users[is_other])


async def _choose(
    path: Path,
    overrides: Sequence[str],
    cases: Sequence[NextEventCase],
    sources: dict[SourceName, int],
) -> CascadeChoice:
    config = load(path, overrides)
    assert config.recommend is not None
    max_candidates = config.recommend.max_candidates
    recommend = msgspec.structs.replace(
        config.recommend,
        sources=sources,
        max_candidates=sum(sources.values()),
        order=None,
        popular=None,
    )
    config = msgspec.structs.replace(
        config,
        recommend=recommend,
        history_store=HistoryConfig(kind="none"),
        # all requests should be answered, however long it takes
        admission=msgspec.structs.replace(config.admission, enabled=False),
    )
    # a seen item is never hit if none is a repeat
    settings = (True, False) if repeat_ratio(cases) else (True,)
    async with instance(config) as (_, service):
        places = {
            exclude_seen: await places_of_ways(
                service, cases, sources, max_candidates, exclude_seen=exclude_seen
            )
            for exclude_seen in settings
        }
    return choose_with_seen(places, list(sources))


def choose_with_seen(
    places: Mapping[bool, Mapping[CascadeWay, F64]], sources: Sequence[SourceName]
) -> CascadeChoice:
    """Choose whether to exclude seen items, and then the sources and the order.

    Args:
        places: Whether seen items are excluded -> way -> [users] rank of the right item, from 0.
            `True` alone if no next item is a repeat.
        sources: Sources of the ways, the ranker's own first.
    """
    usual = {exclude: configured_way(sources, exclude_seen=exclude) for exclude in places}
    ways = {exclude: {"recommend": usual[exclude]} for exclude in places}
    for exclude in places:
        ways[exclude] |= {name: CascadeWay((name,), "retrieval") for name in OTHER_MODELS}
    seen = {
        kind: SeenChoice.of(*(places[exclude][ways[exclude][kind]] for exclude in (False, True)))
        if False in places
        else SeenChoice(True)
        for kind, way in ways[True].items()
        if way in places[True]
    }
    excludes = seen["recommend"].excludes
    return choose_way(places[excludes], usual[excludes])._replace(seen=seen)


def configured_way(sources: Sequence[SourceName], *, exclude_seen: bool) -> CascadeWay:
    """Return the way that stays unless another is better: the ranker's own sources, blended."""
    own = [name for name in sources if name in OWN and not (exclude_seen and name == "history")]
    return CascadeWay(tuple(own), "blended")


async def places_of_ways(
    service: Service,
    cases: Sequence[NextEventCase],
    sources: dict[SourceName, int],
    max_candidates: int,
    *,
    exclude_seen: bool,
) -> dict[CascadeWay, F64]:
    """Ask for each user's next item: [cases] the rank of the right one by every way, from 0."""
    # the user's own items are all excluded then
    asked = {name: num for name, num in sources.items() if not (exclude_seen and name == "history")}
    ways = cascade_ways(list(asked), has_blend=True)
    places = {way: np.full(len(cases), MISSED) for way in ways}
    waiting = asyncio.Semaphore(AT_ONCE)
    actions = ActionNames(service.versions.ranker().model.actions)

    async def one(row: int, case: NextEventCase) -> None:
        async with waiting:
            found = await _asked(
                service, case, actions, asked, max_candidates, exclude_seen=exclude_seen
            )
        for way in ways:
            items = found.items(way)
            if case.target in items:
                places[way][row] = items.index(case.target)

    try:
        async with asyncio.TaskGroup() as group:
            for row, case in enumerate(cases):
                group.create_task(one(row, case))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return places


class _Found:
    """What the sources found for one user, and the scores of all these items."""

    def __init__(
        self,
        lists: dict[SourceName, I64],
        scores: dict[OrderName, dict[int, float]],
        max_candidates: int,
    ) -> None:
        self._lists = lists
        self._scores = scores
        self._max_candidates = max_candidates  # most items that the cascade ranks

    def items(self, way: CascadeWay) -> list[int]:
        """Return the ten items that such a cascade answers: merge the lists, then order."""
        merged = interleave([self._lists[source] for source in way.sources])[0][
            : self._max_candidates
        ]
        if way.order != "retrieval":
            known = self._scores["blended" if way.order == "blended" else "rank"]
            scores = np.array([known[item] for item in merged.tolist()], np.float32)
            merged = merged[(fused_order if way.order == "fused" else best_first)(scores)]
        best: list[int] = merged[:TOP].tolist()
        return best


async def _asked(
    service: Service,
    case: NextEventCase,
    actions: ActionNames,
    sources: dict[SourceName, int],
    max_candidates: int,
    *,
    exclude_seen: bool,
) -> _Found:
    """Request each source alone, and then the scores of all items that they found."""
    events = Events.make(case.items, actions.indices(case.actions), case.timestamps)

    async def asked(
        chosen: tuple[SourceName, ...] | None, order: OrderName
    ) -> tuple[I64, list[float]]:
        request = RecommendRequest(
            user=UserKey("", case.user),
            history=HistoryRef(events=events),
            num_items=sum(sources.values()),
            exclude_seen=exclude_seen,
            unknown_items="drop",
            timestamp=case.happened_at,
            sources=chosen,
            order=order,
        )
        answer = await service.serve(RECOMMEND, request, BUDGET_S)
        return answer.item_ids, answer.scores.tolist()

    lists = {source: (await asked((source,), "retrieval"))[0] for source in sources}
    scored = {order: await asked(tuple(sources), order) for order in SCORED_ORDERS}
    scores = {
        order: dict(zip(items.tolist(), values, strict=True))
        for order, (items, values) in scored.items()
    }
    return _Found(lists, scores, max_candidates)
