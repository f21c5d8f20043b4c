"""The `match` job: the best items for a user by vectors, in one pass over the items for all requests that wait.

    user -> what to search (target vector, source vector or popularity) -> one pass over the items for many -> items

A request keeps one version of the vectors from start to end.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from npu_gr.backend.base import Backend
from npu_gr.core.errors import ConfigError, DataError, NotFound, NpuGrError, Unprocessable
from npu_gr.core.published import Published
from npu_gr.core.request import I64, MatchAnswer, MatchRequest, VectorsInfo
from npu_gr.core.settings import Count
from npu_gr.engine.scheduler import Scheduler
from npu_gr.jobs.base import Call
from npu_gr.jobs.histories import Histories
from npu_gr.matching.index import IndexName
from npu_gr.matching.matcher import MatchedItems, Matcher, MatchQuery
from npu_gr.matching.vectors import load
from npu_gr.metrics.registry import Metrics


class MatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which vectors are searched, and how much a request may ask for."""

    vectors: str  # folder with manifest.json and vectors.safetensors, as `npu-gr train match` writes
    index: IndexName = "exact"  # hnsw: approximate, for catalogues of many millions
    max_items: Count = 1000  # that a request may ask for
    max_batch_requests: Count = 64  # in one pass over the items
    max_history_events: Count = 1000  # newest events that a vector is folded in from


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
        self._matchers: Published[Matcher] = Published("the vectors")
        self._reloading = asyncio.Lock()

    @property
    def current(self) -> Matcher:
        """The version in service."""
        return self._matchers.current

    async def reload(self) -> VectorsInfo:
        """Read the folder again and serve what is there; requests in progress keep their version.

        Raises:
            DataError: names the file and the reason; the version served before still is.
        """
        async with self._reloading:
            matcher = await asyncio.to_thread(self._read)
            if self._matchers.is_empty or matcher.vectors.version != self.current.vectors.version:
                self._matchers.publish(matcher)
        return self.info()

    def rollback(self) -> VectorsInfo:
        """Serve the version before, and keep the one served now: a second rollback undoes the first.

        Raises:
            DataError: no earlier version is kept.
        """
        self._matchers.rollback()
        return self.info()

    def info(self) -> VectorsInfo:
        """Describe the version in service."""
        now = self._matchers.now
        return VectorsInfo(
            version=now.current.vectors.version,
            num_users=len(now.current.vectors.user_names),
            num_items=len(now.current.vectors.item_ids),
            num_bytes=now.current.num_bytes,
            age_s=self._matchers.age_s,
            previous=now.previous.vectors.version if now.previous else None,
        )

    def _read(self) -> Matcher:
        return Matcher(load(Path(self._config.vectors)), self._config.index, self._backend)


class _Waiting(NamedTuple):
    matcher: Matcher
    search: MatchQuery
    call: Call
    queued_at: float
    future: asyncio.Future[_Matched]


class _Matched(NamedTuple):
    found: MatchedItems
    queue_s: float
    device_s: float


class MatchJob:
    """Matches over the vectors in service. Event loop only."""

    def __init__(
        self, config: MatchConfig, vectors: ServedVectors, histories: Histories, scheduler: Scheduler, metrics: Metrics
    ) -> None:
        """Serve matches.

        Args:
            config: limits of a request and of a pass.
            vectors: versions of what is searched.
            histories: where behaviours come from.
            scheduler: runs the passes.
            metrics: where answers are counted.
        """
        self.config = config
        self.vectors = vectors
        self._histories = histories
        self._scheduler = scheduler
        self._metrics = metrics
        self._waiting: list[_Waiting] = []
        self._passes: asyncio.Task[None] | None = None

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
        history = await self._histories.read_items(request.user, request.history, self.config.max_history_events)
        return await self.match(request, history, call, time.monotonic() - call.arrived_at)

    async def match(self, request: MatchRequest, history: I64, call: Call, history_s: float = 0.0) -> MatchAnswer:
        """Find the best items for a user.

        Args:
            request: how many, and which may be found.
            history: external ids of the user's items, oldest first; items that the target domain lacks do not count.
            call: when the request arrived, and its deadline.
            history_s: seconds that reading the history took.

        Raises:
            Unprocessable: the request asks for more items than the limit.
            NotFound: the request names a version that is not served.
        """
        matcher = self.vectors.current
        vectors = matcher.vectors
        if request.num_items > self.config.max_items:
            raise Unprocessable(f"num_items: {request.num_items}, the limit is {self.config.max_items}")
        if request.vectors_version not in (None, vectors.version):
            raise NotFound(f"vectors_version: {request.vectors_version!r} is not served; {vectors.version!r} is")
        search = matcher.search_for(
            request.user.user,
            request.num_items,
            request.exclude_seen,
            request.allow_items,
            request.deny_items,
            history[-self.config.max_history_events :],
        )
        done = await self._search(matcher, search, call)
        answer = MatchAnswer(
            vectors_version=vectors.version,
            basis=search.basis,
            status="complete" if len(done.found.items) == request.num_items else "exhausted",
            item_ids=vectors.item_ids[done.found.items],
            scores=done.found.scores.astype(np.float32, copy=False),
            stages_s={"history": history_s, "queue": done.queue_s, "device": done.device_s},
        )
        self._metrics.match.answered(answer)
        return answer

    async def _search(self, matcher: Matcher, search: MatchQuery, call: Call) -> _Matched:
        """Join the next pass; requests that come while a pass runs share the one after it."""
        future: asyncio.Future[_Matched] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(matcher, search, call, time.monotonic(), future))
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run_passes())
        return await future

    async def _run_passes(self) -> None:
        while self._waiting:
            waiting, self._waiting = [w for w in self._waiting if not w.future.done()], []
            if not waiting:
                return
            matcher = waiting[0].matcher  # other versions, and requests over the limit, wait for the next pass
            taken = [w for w in waiting if w.matcher is matcher][: self.config.max_batch_requests]
            chosen = {id(w) for w in taken}
            self._waiting = [w for w in waiting if id(w) not in chosen]
            began_at = time.monotonic()
            try:
                done = await self._scheduler.call(
                    lambda m=matcher, t=taken: m.run([w.search for w in t]),  # type: ignore[misc]
                    max(w.call.deadline_at for w in taken),
                    min(w.call.deadline_at for w in taken),
                )
            except NpuGrError as error:
                for w in taken:
                    if not w.future.done():
                        w.future.set_exception(error)
                continue
            self._metrics.match.pass_done(len(taken))
            for w, found in zip(taken, done.value, strict=True):
                if not w.future.done():
                    w.future.set_result(_Matched(found, began_at - w.queued_at + done.queue_s, done.device_s))

    async def stop(self) -> None:
        """End the pass in progress; requests that wait are cancelled with it."""
        if self._passes is not None:
            self._passes.cancel()
            await asyncio.gather(self._passes, return_exceptions=True)
        for waiting in self._waiting:
            waiting.future.cancel()
        self._waiting = []
