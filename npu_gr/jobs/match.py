"""The `match` job of a service: its vectors, their versions, and one pass for all requests that wait.

    user -> what to search (target vector, source vector or popularity) -> one pass over the items for many -> items

A request holds one version of the vectors from start to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from npu_gr.backend.base import Backend
from npu_gr.core.errors import ConfigError, DataError, NotFound, NpuGrError, Unprocessable
from npu_gr.core.request import I64, MatchAnswer, MatchRequest, VectorsInfo
from npu_gr.engine.job import JobOrder
from npu_gr.engine.scheduler import Scheduler
from npu_gr.matching.index import IndexName
from npu_gr.matching.matcher import Found, Matcher, Search
from npu_gr.matching.vectors import load

Count = Annotated[int, msgspec.Meta(ge=1)]


class MatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What matches, from what."""

    vectors: str  # folder with manifest.json and vectors.safetensors, as `npu-gr train match` writes
    index: IndexName = "exact"  # hnsw: approximate, for catalogues of many millions
    max_items: Count = 1000  # that a request may ask for
    max_batch_requests: Count = 64  # in one pass over the items
    max_history_events: Count = 1000  # the newest, that a vector is made from where they are newer than the vectors


class _Waiting(NamedTuple):
    matcher: Matcher
    search: Search
    deadline_at: float
    since_s: float
    future: asyncio.Future[_Matched]


class _Matched(NamedTuple):
    found: Found
    queue_s: float
    device_s: float


class _Published(NamedTuple):
    current: Matcher
    previous: Matcher | None
    since_s: float


class Matching:
    """Vectors behind a service. Event loop only."""

    def __init__(self, config: MatchConfig, scheduler: Scheduler, backend: Backend) -> None:
        self.config = config
        self._scheduler, self._backend = scheduler, backend
        self._published: _Published | None = None
        self._reloading = asyncio.Lock()
        self._waiting: list[_Waiting] = []
        self._passes: asyncio.Task[None] | None = None
        self.on_pass: Callable[[int], None] = lambda _size: None

    async def start(self) -> None:
        """Load the vectors.

        Raises:
            ConfigError: they cannot be served.
        """
        try:
            await self.reload()
        except DataError as error:
            raise ConfigError(f"match.vectors: {error}") from error

    async def stop(self) -> None:
        """End the pass in progress; requests that wait are cancelled with it."""
        if self._passes is not None:
            self._passes.cancel()
            await asyncio.gather(self._passes, return_exceptions=True)
        for waiting in self._waiting:
            waiting.future.cancel()
        self._waiting = []

    # ---- versions

    async def reload(self) -> VectorsInfo:
        """Read the folder again and serve what is there; requests in progress keep theirs.

        Raises:
            DataError: names the file and the reason; the version served before still is.
        """
        async with self._reloading:
            matcher = await asyncio.to_thread(self._read)
            old = self._published
            if old is None:
                self._published = _Published(matcher, None, time.monotonic())
            elif matcher.vectors.version != old.current.vectors.version:
                self._published = _Published(matcher, old.current, time.monotonic())
        return self.vectors()

    def rollback(self) -> VectorsInfo:
        """Serve the version before, and keep the one served now: a second rollback undoes the first.

        Raises:
            DataError: there is none.
        """
        old = self._published
        if old is None or old.previous is None:
            raise DataError("no earlier version of the vectors is kept")
        self._published = _Published(old.previous, old.current, time.monotonic())
        return self.vectors()

    def vectors(self) -> VectorsInfo:
        """What is served."""
        now = self._now
        return VectorsInfo(
            version=now.current.vectors.version,
            num_users=len(now.current.vectors.user_names),
            num_items=len(now.current.vectors.item_ids),
            num_bytes=now.current.num_bytes,
            age_s=time.monotonic() - now.since_s,
            previous=now.previous.vectors.version if now.previous else None,
        )

    @property
    def _now(self) -> _Published:
        assert self._published is not None, "start() first"
        return self._published

    def _read(self) -> Matcher:
        return Matcher(load(Path(self.config.vectors)), self.config.index, self._backend)

    # ---- requests

    async def match(self, request: MatchRequest, history: I64, deadline_at: float) -> MatchAnswer:
        """The best items for a user.

        Args:
            request: what is asked.
            history: external ids of the user's items, oldest first; those that are none of the target's do not count.
            deadline_at: instant (time.monotonic()) by which the answer must be there.

        Raises:
            Unprocessable: more items than the limit.
            NotFound: another version is asked for than is served.
        """
        matcher = self._now.current
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
        done = await self._search(matcher, search, deadline_at)
        return MatchAnswer(
            vectors_version=vectors.version,
            basis=search.basis,
            status="complete" if len(done.found.items) == request.num_items else "exhausted",
            item_ids=vectors.item_ids[done.found.items],
            scores=done.found.scores.astype(np.float32, copy=False),
            stages_s={"queue": done.queue_s, "device": done.device_s},
        )

    async def _search(self, matcher: Matcher, search: Search, deadline_at: float) -> _Matched:
        """In the next pass; what comes while one runs shares the one after it."""
        future: asyncio.Future[_Matched] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(matcher, search, deadline_at, time.monotonic(), future))
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run_passes())
        return await future

    async def _run_passes(self) -> None:
        while self._waiting:
            waiting, self._waiting = [w for w in self._waiting if not w.future.done()], []
            if not waiting:
                return
            matcher = waiting[0].matcher  # the others wait for the next pass, as those that are too many
            taken = [w for w in waiting if w.matcher is matcher][: self.config.max_batch_requests]
            chosen = {id(w) for w in taken}
            self._waiting = [w for w in waiting if id(w) not in chosen]
            began_at = time.monotonic()
            try:
                done = await self._scheduler.call(
                    lambda m=matcher, t=taken: m.run([w.search for w in t]),  # type: ignore[misc]
                    max(w.deadline_at for w in taken),
                    JobOrder(min(w.deadline_at for w in taken)),
                )
            except NpuGrError as error:
                for w in taken:
                    if not w.future.done():
                        w.future.set_exception(error)
                continue
            self.on_pass(len(taken))
            for w, found in zip(taken, done.value, strict=True):
                if not w.future.done():
                    w.future.set_result(_Matched(found, began_at - w.since_s + done.queue_s, done.device_s))
