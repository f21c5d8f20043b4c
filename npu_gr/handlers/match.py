"""The handler of `match`: vector search, in one pass over the items for all waiting requests.

    user -> query (target vector, source vector or popularity)
         -> one pass for many requests -> items

A request uses one version of the vectors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from npu_gr.backend.base import Backend
from npu_gr.catalogue.names import EMPTY, ItemNames, key_of
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, DataError, NotFound, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import MATCH
from npu_gr.core.lifetime import Published
from npu_gr.core.request import LimitedBy, MatchAnswer, MatchRequest
from npu_gr.core.served import VectorsInfo
from npu_gr.core.text_format import quoted
from npu_gr.engine.queue import NOTHING, Demand, JobResult
from npu_gr.engine.scheduler import Scheduler, is_idle
from npu_gr.handlers.base import Call
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.item_filters import ItemFilters
from npu_gr.handlers.match_recall import RecallChecks
from npu_gr.handlers.scored_items import Before, accept_any
from npu_gr.metrics.registry import Metrics
from npu_gr.vector_search.config import MatchConfig
from npu_gr.vector_search.matcher import MatchedItems, Matcher, MatchQuery
from npu_gr.vector_search.vectors import check_fits, load

SMOOTHING = 0.1  # weight of the newest pass in the estimated time of a match


class MatchWork(NamedTuple):
    """One match in a pass over the items."""

    query: MatchQuery

    @property
    def demand(self) -> Demand:
        """Nothing, since a pass of matches is limited by its number of requests."""
        return NOTHING


class MatchVersion:
    """One version of the vectors.

    Matches of different versions never share a pass, because `run` differs.
    """

    def __init__(self, matcher: Matcher, names: ItemNames) -> None:
        self.matcher = matcher
        # item names, which a reload may replace
        self.names = names

    def run(self, works: Sequence[MatchWork]) -> Sequence[MatchedItems]:
        """Search for all matches of a pass. Device thread only."""
        return self.matcher.run([work.query for work in works])


class ServedVectors:
    """Versions of the vectors of a folder. Event loop only."""

    def __init__(self, config: MatchConfig, backend: Backend) -> None:
        """Prepare; `reload` reads the vectors.

        Args:
            config: Section `match` of the configuration.
            backend: Backend of the search.
        """
        self.config = config
        self._backend = backend
        self._versions: Published[MatchVersion] = Published("the vectors")
        self._reloading = asyncio.Lock()

    @property
    def current(self) -> MatchVersion:
        """The current version."""
        return self._versions.current

    async def reload(self, before: Before = accept_any) -> VectorsInfo:
        """Serve the folder as it is now; requests in progress keep their version.

        Raises:
            DataError: the folder is invalid; the current version stays. Also after errors of
                `before`.
        """
        async with self._reloading:
            read = await asyncio.to_thread(self.read, self.config)
            await before(lambda: read.matcher.vectors.item_ids)
            self.serve(read, self.config)
        return self.info()

    def serve(self, read: MatchVersion, config: MatchConfig) -> None:
        """Serve vectors that were read, and a section."""
        self.config = config
        if (
            self._versions.is_empty
            or read.matcher.vectors.version != self.current.matcher.vectors.version
        ):
            self._versions.publish(read)
        else:
            self.current.names = read.names

    def rollback(self) -> VectorsInfo:
        """Serve the previous version; a second rollback undoes the first.

        Raises:
            DataError: there is no previous version.
        """
        self._versions.rollback()
        return self.info()

    def item_ids(self) -> I64:
        """Return the ids of all items, ascending. Thread-safe."""
        return self.current.matcher.vectors.item_ids

    def knows(self, user: UserKey) -> bool:
        """Whether a retained version was trained with the user."""
        return any(version.matcher.knows(user) for version in self.kept())

    def kept(self) -> list[MatchVersion]:
        """Return the current version, and the previous one if there is one."""
        now = self._versions.now
        return [now.current] + ([now.previous] if now.previous else [])

    def info(self) -> VectorsInfo:
        """Describe the current version."""
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

    def read(self, config: MatchConfig) -> MatchVersion:
        """Read the vectors of a section. Thread-safe.

        Raises:
            DataError: the folder is invalid.
            ConfigError: the items have another key than those of the current version.
        """
        folder = Path(config.vectors)
        if not self._versions.is_empty:
            check_fits(folder)
        matcher = Matcher(load(folder), config.index, self._backend)
        names = ItemNames.load(folder) or EMPTY
        if not self._versions.is_empty:
            key_of({"the served vectors": self.current.names, "match.vectors": names})
        return MatchVersion(matcher, names)


class MatchJob:
    """Handles matches by the current vectors. Event loop only."""

    def __init__(
        self,
        vectors: ServedVectors,
        histories: Histories,
        filters: ItemFilters,
        scheduler: Scheduler,
        metrics: Metrics,
        objective_s: Callable[[], float],
    ) -> None:
        """Store the parts.

        Args:
            vectors: Versions of the vectors, with the limits of a request and of a pass.
            histories: Histories of users.
            filters: Attributes of items.
            scheduler: Scheduler of the passes.
            metrics: Metrics of the instance.
            objective_s: Returns the current latency objective, in seconds.
        """
        self.vectors = vectors
        self._histories = histories
        self._filters = filters
        self._scheduler = scheduler
        self._metrics = metrics
        self._objective_s = objective_s
        self._checks = RecallChecks(
            partial(is_idle, scheduler), partial(metrics.match.checked, "match")
        )
        self._estimate_s = 0.0  # device seconds of one match, smoothed

    async def start(self) -> None:
        """Load the vectors.

        Raises:
            ConfigError: the vectors cannot be served.
        """
        try:
            await self.vectors.reload()
        except DataError as error:
            raise ConfigError(f"match.vectors: {error}") from error

    async def run(self, request: MatchRequest, call: Call) -> MatchAnswer:
        """Read the history, and search."""
        if request.attributes:
            passing = await self._filters.passing(
                request.allow_items, request.deny_items, request.attributes
            )
            request = structs.replace(request, allow_items=passing.allow)
        with call.slot.suspended():
            history = await self._histories.read_items(
                request.user,
                request.history,
                self.vectors.config.max_history_events,
                call.deadline_at,
            )
        return await self.match(request, history, call, time.monotonic() - call.arrived_at)

    async def match(
        self, request: MatchRequest, history: I64, call: Call, history_s: float = 0.0
    ) -> MatchAnswer:
        """Find the best items for a user.

        Args:
            request: The request.
            history: External ids of all of the user's items, oldest first; others than those of
                the target domain are ignored.
            call: Arrival, deadline and permit.
            history_s: Seconds of reading the history.

        Raises:
            Unprocessable: the request exceeds the limit of items.
            NotFound: the requested version is not served.
        """
        version = self.vectors.current
        config = self.vectors.config
        matcher = version.matcher
        vectors = matcher.vectors
        if request.num_items > config.max_items:
            raise Unprocessable(f"num_items: {request.num_items}, the limit is {config.max_items}")
        if request.vectors_version not in (None, vectors.version):
            raise NotFound(
                f"vectors_version: {quoted(request.vectors_version)} is not served; "
                f"the current one is {vectors.version!r}"
            )
        denied = self._filters.withdrawn()
        if request.deny_items is not None:
            denied = np.concatenate((denied, request.deny_items))
        query = matcher.search_for(
            request.user,
            request.num_items,
            config.exclude_seen if request.exclude_seen is None else request.exclude_seen,
            request.allow_items,
            denied if len(denied) else None,
            history,
            config.max_history_events,
        )
        done = await self._search(version, query, call)
        if not matcher.is_exact:
            self._checks.offer(done.value.items, partial(matcher.exactly, query))
        limited_by = LimitedBy.NONE
        if (num_found := len(done.value.items)) < request.num_items:
            num_items = len(vectors.item_ids)
            rest = LimitedBy.FILTER if num_found < num_items else LimitedBy.CATALOGUE
            is_cut = num_found < query.num_allowed(num_items)
            limited_by = LimitedBy.INDEX if is_cut else rest
        answer = MatchAnswer(
            vectors_version=vectors.version,
            basis=query.basis,
            limited_by=limited_by,
            item_ids=vectors.item_ids[done.value.items],
            scores=done.value.scores.astype(np.float32, copy=False),
            stages_s={"history": history_s, "queue": done.queue_s, "device": done.device_s},
        )
        self._metrics.match.answered(answer)
        return answer

    async def _search(
        self, version: MatchVersion, query: MatchQuery, call: Call
    ) -> JobResult[MatchedItems]:
        """Search in the next pass, which all requests share that arrive during the current one."""
        done: JobResult[MatchedItems] = await self._scheduler.batch(
            MatchWork(query),
            version.run,
            call.deadline_at,
            objective_s=self._objective_s(),
            arrived_at=call.arrived_at,
            tenant=call.tenant,
            estimate_s=self._estimate_s,
            max_requests=self.vectors.config.max_batch_requests,
            kind=MATCH.name,
        )
        self._estimate_s += SMOOTHING * (done.device_s / done.batch_size - self._estimate_s)
        return done

    async def stop(self) -> None:
        """End a check of the index; passes belong to the scheduler."""
        await self._checks.stop()
