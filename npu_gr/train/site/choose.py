"""Choose what a site's cascade asks and how it orders: its evaluated models are asked, in this process.

Each user is asked for once a source, and once for all that the sources found in every order; each
set of sources is then merged and ordered by hand, as the cascade does it. So many sets cost as much
as one.
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
from npu_gr.handlers.cascade_plan import best_first, by_both, in_turns
from npu_gr.handlers.service import Service
from npu_gr.history_store.interactions import Interactions
from npu_gr.history_store.store import HistoryConfig
from npu_gr.service.app import instance
from npu_gr.service.config import load
from npu_gr.train.cascade import (
    JUDGED_USERS,
    MISSED,
    TOP,
    CascadeChoice,
    CascadeWay,
    NextEventCase,
    cascade_ways,
    choose_way,
    hides_seen,
    next_events,
)
from npu_gr.train.data import to_train_on

AT_ONCE = 8
BUDGET_S = 60.0
LEAST_USERS = 50  # who choose; of fewer nothing can be learned
# of the ranker: its order is fitted on these
OWN: tuple[SourceName, ...] = ("shared_encoder", "transitions", "neighbours")
ASKED: tuple[OrderName, ...] = ("blended", "rank")  # whose scores decide every order


def choose_for_site(
    path: Path,
    overrides: Sequence[str],
    log: Interactions,
    sources: Mapping[SourceName, int],
    most_users: int,
) -> CascadeChoice | None:
    """Choose by users whom `npu-gr demo` does not evaluate.

    Args:
        path: configuration over the evaluated models, with every part as a section.
        overrides: `section.key=value`.
        log: all events; the models have not seen each user's last.
        sources: that may be chosen, and the items asked of each, the ranker's own first; these with
            the fitted order are what stays unless another way is measurably better.
        most_users: half of them choose.

    Returns:
        None = there are too few users.

    Raises:
        ConfigError: the configuration cannot be served. NpuGrError: a model failed.
    """
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    evaluated = {case.user for case in next_events(log, known, JUDGED_USERS)}
    cases = [case for case in next_events(log, known) if case.user not in evaluated][:most_users]
    if len(cases) < 2 * LEAST_USERS:
        return None
    return asyncio.run(_choose(path, overrides, cases, dict(sources)))


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
        # nobody waits for these answers
        admission=msgspec.structs.replace(config.admission, enabled=False),
    )
    exclude_seen = hides_seen(cases)
    ways = cascade_ways(list(sources), has_blend=True)
    places = {way: np.full(len(cases), MISSED) for way in ways}
    waiting = asyncio.Semaphore(AT_ONCE)
    async with instance(config) as (_, service):
        actions = ActionNames(service.versions.ranker().model.actions)

        async def one(row: int, case: NextEventCase) -> None:
            async with waiting:
                found = await _asked(
                    service, case, actions, sources, max_candidates, exclude_seen=exclude_seen
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
    return choose_way(
        places, CascadeWay(tuple(source for source in sources if source in OWN), "blended")
    )


class _Found:
    """What the sources found for one user, and the scores of all of it."""

    def __init__(
        self,
        lists: dict[SourceName, I64],
        scores: dict[OrderName, dict[int, float]],
        max_candidates: int,
    ) -> None:
        self._lists = lists
        self._scores = scores
        self._max_candidates = max_candidates  # that the cascade will rank

    def items(self, way: CascadeWay) -> list[int]:
        """List the ten items that a cascade of this way answers: its merge, then its order."""
        merged = in_turns([self._lists[source] for source in way.sources])[0][
            : self._max_candidates
        ]
        if way.order != "retrieval":
            known = self._scores["blended" if way.order == "blended" else "rank"]
            scores = np.array([known[item] for item in merged.tolist()], np.float32)
            merged = merged[(by_both if way.order == "fused" else best_first)(scores)]
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
    """Ask each source alone, then for the scores of all that they found."""
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
    scored = {order: await asked(None, order) for order in ASKED}
    scores = {
        order: dict(zip(items.tolist(), values, strict=True))
        for order, (items, values) in scored.items()
    }
    return _Found(lists, scores, max_candidates)
