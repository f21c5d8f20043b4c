"""The `match` job: the best items for a user by vectors, in one pass over the items for all requests that wait.

    user -> what to search (target vector, source vector or popularity) -> one pass over the items
    for many -> items

A request keeps one version of the vectors from start to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npu_gr.backend.base import Backend
from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, DataError, NotFound, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import MATCH
from npu_gr.core.lifetime import Published
from npu_gr.core.request import MatchAnswer, MatchRequest
from npu_gr.core.served import VectorsInfo
from npu_gr.core.text_format import quoted
from npu_gr.engine.queue import NOTHING, Demand, JobResult
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.base import Call
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.scored_items import Before, anything
from npu_gr.metrics.registry import Metrics
from npu_gr.vector_search.config import MatchConfig
from npu_gr.vector_search.matcher import MatchedItems, Matcher, MatchQuery
from npu_gr.vector_search.vectors import load

SMOOTHING = 0.1  # weight of the newest pass in the estimate of a match


class MatchWork(NamedTuple):
    """One match in a pass over the items."""

    query: MatchQuery

    @property
    def demand(self) -> Demand:
        """Nothing: a pass of matches is bounded by its number of requests."""
        return NOTHING


class MatchVersion:
    """One version of the vectors.

    Matches of two versions never share a pass, because `run` differs.
    """

    def __init__(self, matcher: Matcher, names: ItemNames) -> None:
        self.matcher = matcher
        # of the items; replaced where a reload finds others beside the same vectors
        self.names = names

    def run(self, works: Sequence[MatchWork]) -> Sequence[MatchedItems]:
        """Search for all matches of a pass, on a device thread."""
        return self.matcher.run([work.query for work in works])


class ServedVectors:
    """Versions of the vectors: read from a folder, published, rolled back. Event loop only."""

    def __init__(self, config: MatchConfig, backend: Backend) -> None:
        """Read nothing yet.

        Args:
            config: names the folder and the index.
            backend: on which items are searched.
        """
        self._config = config
        self._backend = backend
        self._versions: Published[MatchVersion] = Published("the vectors")
        self._reloading = asyncio.Lock()

    @property
    def current(self) -> MatchVersion:
        """The version in service."""
        return self._versions.current

    async def reload(self, before: Before = anything) -> VectorsInfo:
        """Read the folder again and serve what is there; requests in progress keep their version.

        Raises:
            DataError: names the file and the reason; the version served before still is.
            What `before` raises; the same.
        """
        async with self._reloading:
            read = await asyncio.to_thread(self._read)
            await before(lambda: read.matcher.vectors.item_ids)
            if (
                self._versions.is_empty
                or read.matcher.vectors.version != self.current.matcher.vectors.version
            ):
                self._versions.publish(read)
            else:
                self.current.names = read.names
        return self.info()

    def rollback(self) -> VectorsInfo:
        """Serve the version before, and keep the one served now: a second rollback undoes the first.

        Raises:
            DataError: no earlier version is kept.
        """
        self._versions.rollback()
        return self.info()

    def item_ids(self) -> I64:
        """List the items that can be found, in ascending order. Any thread."""
        return self.current.matcher.vectors.item_ids

    def knows(self, user: UserKey) -> bool:
        """Whether a version that is kept was trained with the user."""
        return any(version.matcher.knows(user) for version in self.kept())

    def kept(self) -> list[MatchVersion]:
        """List the version in service, and the one before it if there is one."""
        now = self._versions.now
        return [now.current] + ([now.previous] if now.previous else [])

    def info(self) -> VectorsInfo:
        """Describe the version in service."""
        now = self._versions.now
        matcher = now.current.matcher
        return VectorsInfo(
            version=matcher.vectors.version,
            num_users=len(matcher.vectors.user_keys),
            num_items=len(matcher.vectors.item_ids),
            num_bytes=matcher.num_bytes,
            age_s=self._versions.age_s,
            previous=now.previous.matcher.vectors.version if now.previous else None,
        )

    def _read(self) -> MatchVersion:
        folder = Path(self._config.vectors)
        matcher = Matcher(load(folder), self._config.index, self._backend)
        return MatchVersion(matcher, ItemNames.load(folder) or EMPTY)


class MatchJob:
    """Matches over the vectors in service. Event loop only."""

    def __init__(
        self,
        config: MatchConfig,
        vectors: ServedVectors,
        histories: Histories,
        scheduler: Scheduler,
        metrics: Metrics,
        objective_s: Callable[[], float],
    ) -> None:
        """Serve matches.

        Args:
            config: limits of a request and of a pass.
            vectors: versions of what is searched.
            histories: where behaviours come from.
            scheduler: runs the passes.
            metrics: where answers are counted.
            objective_s: the objective in force, in seconds.
        """
        self.config = config
        self.vectors = vectors
        self._histories = histories
        self._scheduler = scheduler
        self._metrics = metrics
        self._objective_s = objective_s
        self._estimate_s = 0.0  # device seconds of one match, smoothed

    async def start(self) -> None:
        """Load the vectors.

        Raises:
            ConfigError: they cannot be served.
        """
        try:
            await self.vectors.reload()
        except DataError as error:
            raise ConfigError(f"match.vectors: {error}") from error

    async def run(self, request: MatchRequest, call: Call) -> MatchAnswer:
        """Read what is known of the user, and search."""
        with call.slot.suspended():
            history = await self._histories.read_items(
                request.user, request.history, self.config.max_history_events
            )
        return await self.match(request, history, call, time.monotonic() - call.arrived_at)

    async def match(
        self, request: MatchRequest, history: I64, call: Call, history_s: float = 0.0
    ) -> MatchAnswer:
        """Find the best items for a user.

        Args:
            request: how many, and which may be found.
            history: external ids of the user's items, oldest first; items that the target domain
                lacks do not count.
            call: when the request arrived, and its deadline.
            history_s: seconds that reading the history took.

        Raises:
            Unprocessable: the request asks for more items than the limit.
            NotFound: the request names a version that is not served.
        """
        version = self.vectors.current
        matcher = version.matcher
        vectors = matcher.vectors
        if request.num_items > self.config.max_items:
            raise Unprocessable(
                f"num_items: {request.num_items}, the limit is {self.config.max_items}"
            )
        if request.vectors_version not in (None, vectors.version):
            raise NotFound(
                f"vectors_version: {quoted(request.vectors_version)} is not served; "
                f"{vectors.version!r} is"
            )
        query = matcher.search_for(
            request.user,
            request.num_items,
            request.exclude_seen,
            request.allow_items,
            request.deny_items,
            history[-self.config.max_history_events :],
        )
        done = await self._search(version, query, call)
        answer = MatchAnswer(
            vectors_version=vectors.version,
            basis=query.basis,
            status="complete" if len(done.value.items) == request.num_items else "exhausted",
            item_ids=vectors.item_ids[done.value.items],
            scores=done.value.scores.astype(np.float32, copy=False),
            stages_s={"history": history_s, "queue": done.queue_s, "device": done.device_s},
        )
        self._metrics.match.answered(answer)
        return answer

    async def _search(
        self, version: MatchVersion, query: MatchQuery, call: Call
    ) -> JobResult[MatchedItems]:
        """Join the next pass; requests that come while a pass runs share the one after it."""
        done: JobResult[MatchedItems] = await self._scheduler.batch(
            MatchWork(query),
            version.run,
            call.deadline_at,
            objective_s=self._objective_s(),
            arrived_at=call.arrived_at,
            tenant=call.tenant,
            estimate_s=self._estimate_s,
            max_requests=self.config.max_batch_requests,
            kind=MATCH.name,
        )
        self._estimate_s += SMOOTHING * (done.device_s / done.batch_size - self._estimate_s)
        return done

    async def stop(self) -> None:
        """Do nothing: passes belong to the scheduler."""
