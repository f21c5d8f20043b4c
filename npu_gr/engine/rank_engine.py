"""The ranker's device work: encode a history into pages, and score candidates against it.

Read `handlers/service.py` first.

A ranker with a retrieval head also finds items: a pass over the token NEXT gives the user vector u,
and an exact search with u gives the best items of the model's own table. A later pass over
candidates may return u's product with each of them as a retrieval score, next to the logits. If
only found items will be ranked, both passes are one job (`PrefetchedScores`).

Public coroutines submit a job to the scheduler and await it; only device threads build and read
tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Hidden
from npu_gr.backend.calls import HstuFindCall, HstuIds, HstuSegment
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import StaleEntry
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.kinds import RECOMMEND
from npu_gr.engine.cost import CostModel, fit
from npu_gr.engine.device_weights import DeviceWeights
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import HeldTokens, PageRun, PrefixLayout
from npu_gr.engine.page_jobs import CachedPrefix, PageJobs, chunks
from npu_gr.engine.queue import Demand, JobOrder, JobStep
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.feature_rows import FeatureValues
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import HostTokens, Past, Segment
from npu_gr.model.shown_term import ShownTerm

FOUND = 200  # items to find in the warm-up
SMOOTHING = 0.1  # weight of the newest search in the estimated time of one
_NO_ROWS: I64 = np.empty(0, np.int64)
ApproximateSearch = Callable[[torch.Tensor, int, Sequence[I64], int], I64 | None]
"""Finds most of the best items, with u [B, d], of the rows below a number, but hidden ones [B].

Returns item rows [B, k], best first, ties by the lower row, -1 where there are no more; None =
search exactly. The hidden rows come in any order, with or without repeats."""


class LateFeatures(NamedTuple):
    """The features that are no part of a prefix; None = missing, or the model has none."""

    request: Encoded | None = None  # [1]
    cross: Encoded | None = None  # [c]


NONE_LATE = LateFeatures()


class RankPass(msgspec.Struct, frozen=True, eq=False):
    """One request's part of a forward pass, in host arrays.

        history    0 ........ cached.num_tokens ........ len(tokens)
                   [ read from `cached` ][ computed now, and written to `keep` ]

    Without `cached`, the pass skips the tokens before `first_token`.
    """

    tokens: Tokens
    first_token: int
    candidates: I64  # [c] item rows; empty = a prefill
    candidate_time: int  # unix seconds at which the candidates are shown
    cached: CachedPrefix | None = None
    # pages for the whole history; they include those of `cached`
    keep: tuple[PageRun, ...] | None = None
    vector: F32 | None = None  # [d] u, to be multiplied with each candidate too; None = not
    features: LateFeatures = NONE_LATE
    # positions that `tokens` leaves out behind its first `gap_at`, see `AttentionWindow`
    gap_at: int = 0
    gap: int = 0
    # read keys and values as they are computed, not as they are stored (`HstuCall.stored`): to see
    # by how much int8 moves the scores. Only without pages.
    is_unrounded: bool = False

    @property
    def demand(self) -> Demand:
        """Number of tokens and candidates that the pass computes."""
        start = self.cached.num_tokens if self.cached else self.first_token
        return Demand(len(self.tokens) - start, len(self.candidates))

    def leasing(
        self,
        cached: CachedPrefix | None,
        keep: tuple[PageRun, ...] | None,
        is_unrounded: bool = False,
    ) -> RankPass:
        """Copy the pass with a lease. `msgspec.structs.replace` takes three times as long."""
        return RankPass(
            self.tokens,
            self.first_token,
            self.candidates,
            self.candidate_time,
            cached,
            keep,
            self.vector,
            self.features,
            is_unrounded=is_unrounded,
        )

    def then(self, candidates: I64, vector: F32, cross: Encoded | None) -> RankPass:
        """Make the next pass, over candidates [c], which reads the pages that this one wrote."""
        cached = self.cached if self.keep is None else CachedPrefix(self.keep, len(self.tokens))
        features = LateFeatures(self.features.request, cross)
        return RankPass(
            self.tokens,
            self.first_token,
            candidates,
            self.candidate_time,
            cached,
            None,
            vector,
            features,
            self.gap_at,
            self.gap,
            self.is_unrounded,
        )

    def beginning_at(self, token: int, first_end: int) -> RankPass:
        """Leave out the tokens [first_end, token), which no score depends on."""
        if self.keep or (self.cached and self.cached.num_tokens >= first_end):
            runs = self.keep or (self.cached.runs if self.cached else ())
            return self.leasing(CachedPrefix(runs, token, token), self.keep)
        tokens = self.tokens.without(first_end, token) if first_end else self.tokens[token:]
        gap = first_end, token - first_end
        return RankPass(
            *(tokens, 0, self.candidates, self.candidate_time, self.cached, None),
            *(self.vector, self.features, *gap, self.is_unrounded),
        )


class PrefillPass(NamedTuple):
    """One pass of the encoding of a history, after which the pages hold all of its tokens."""

    work: RankPass
    estimate_s: float  # device seconds


class RankScores(NamedTuple):
    """The scores of a rank, and its times in seconds."""

    logits: F32  # [c, tasks]
    retrieval: F32 | None  # [c] u . e_i, if the pass had a vector
    queue_s: float = 0.0
    device_s: float = 0.0


class NextItems(NamedTuple):
    """The items that a pass over NEXT has found."""

    rows: I64  # [<= k] item rows, best first; ties by the lower row
    vector: F32  # [d] u
    candidates: I64 | None = None  # [c] item rows that were scored in the same job; None = none
    scores: RankScores | None = None  # scores of `candidates`
    features: LateFeatures = NONE_LATE  # features of `candidates`


@dataclass(slots=True, eq=False)
class PrefetchedScores:
    """Scores found items in the same job, which the request would otherwise ask for next."""

    # Found item rows -> all candidates, called on a device thread; None = the found rows.
    merge: Callable[[I64], I64] | None
    max_candidates: int  # only the first candidates are scored, so many at most
    least: int = 0  # with fewer candidates none is scored
    # Cross features of the scored rows, called on a device thread.
    cross: Callable[[I64], Encoded | None] = lambda _rows: None
    # The result, for a request that stopped waiting before the job ended.
    found: NextItems | None = None

    def candidates(self, found: I64) -> I64:
        """Return the rows to score; may be empty."""
        rows = found if self.merge is None else self.merge(found)
        return rows[: self.max_candidates if len(rows) >= self.least else 0]


@dataclass(frozen=True, slots=True, eq=False)
class FindPass:
    """One request's part of a pass that finds items."""

    history: RankPass  # without candidates; `candidate_time` is the time of NEXT
    k: int  # most items to find; 0 = only u is needed
    hidden: I64  # [n] item rows that must not be found, in any order, with or without repeats
    ahead: PrefetchedScores | None = None  # None = the found items are not scored

    def of(self, history: RankPass) -> FindPass:
        """Return the pass with another part of its history to compute."""
        if history is self.history:
            return self
        return FindPass(history, self.k, self.hidden, self.ahead)

    @property
    def scored_as_found(self) -> tuple[int, int]:
        """Most found rows to score unmerged, and the least number of rows to score any."""
        ahead = self.ahead
        if ahead is None or ahead.merge is not None or self.k < ahead.least:
            return 0, 0
        return min(self.k, ahead.max_candidates), ahead.least

    @property
    def demand(self) -> Demand:
        """Number of tokens and candidates that the pass computes, with NEXT and `ahead`."""
        return self.history.demand.plus(
            Demand(rows=1 + (self.ahead.max_candidates if self.ahead else 0))
        )


class _Batches:
    """Converts passes to the model's input: tensors, or host arrays for fused kernels."""

    def __init__(self, model: HSTU, arena: KVArena) -> None:
        self._arena = arena
        self._next: I64 = np.array([model.items.num_rows])
        self._has_plain_passes = model.config.has_plain_passes

    @property
    def _stored(self) -> torch.dtype | None:
        """Dtype to which a pass rounds the keys and values of a history; None = its own."""
        return torch.int8 if self._arena.layout.dtype == "int8" else None

    def host_segments(
        self, passes: Sequence[RankPass], *, is_next: bool
    ) -> list[HstuSegment] | None:
        """Convert a batch to host arrays for a fused kernel; None = no fused kernel takes it."""
        if not self._has_plain_passes:
            return None
        segments = []
        for work in passes:
            segment = self._host_segment(work, is_next=is_next)
            if segment is None:
                return None
            segments.append(segment)
        return segments

    def tensors(
        self, backend: Backend, passes: Sequence[RankPass], *, is_next: bool
    ) -> list[Segment]:
        """Convert a batch to tensors on the backend's device."""
        return [self._segment(backend, work, is_next=is_next) for work in passes]

    def _host_segment(self, work: RankPass, *, is_next: bool) -> HstuSegment | None:
        """Convert a pass to host arrays; None = a fused kernel does not take it."""
        tokens, cached = work.tokens, work.cached
        keep = work.keep
        start = _start(work)
        first = 0 if cached else start
        if keep is not None and first:
            return None  # its pages begin with tokens that the pass skips
        held = self._held(work, start)
        event = max(start - tokens.num_user, 0)
        candidates = self._next if is_next else work.candidates
        times = _times(work)
        return HstuSegment(
            held.num_cached if held else start - first,
            len(tokens) - start,
            len(candidates),
            _without(times, held) if held else times[first:],
            work.candidate_time,
            None if held is None else self._arena.paged(held.runs),
            keep is not None,
            HstuIds(tokens.rows[event:], tokens.events.actions[event:], candidates),
            *_gap(work, held),
            None if work.is_unrounded else self._stored,
        )

    def _held(self, work: RankPass, start: int) -> HeldTokens | None:
        """Arrange the pages that a pass reads and writes; None = it has none."""
        runs = work.keep or (work.cached.runs if work.cached else None)
        if runs is None:
            return None
        stop = len(work.tokens) if work.keep else start
        begins_at = work.cached.begins_at if work.cached else 0
        return self._arena.layout.held(runs, start, stop, begins_at)

    def _segment(self, backend: Backend, work: RankPass, *, is_next: bool) -> Segment:
        cached = work.cached
        start = _start(work)
        times = _times(work)
        new = work.tokens[start:] if start else work.tokens
        host = self._host_segment(work, is_next=is_next)
        past = sink = None
        if (held := self._held(work, start)) is not None:
            arena = self._arena
            runs, num_cached = held.runs, held.num_cached
            if cached:
                past = Past(
                    backend.upload(_without(times[:start], held)),
                    lambda layer: arena.slabs(layer, runs, num_cached),
                )
            if work.keep is not None:
                sink = arena.sink(runs, num_cached)
        candidates = self._next if is_next else work.candidates
        gap_at, gap = _gap(work, held)
        return Segment(
            items=backend.upload(new.rows),
            actions=backend.upload(new.events.actions.astype(np.int64)),
            times=backend.upload(times[start:]),
            candidates=backend.upload(candidates),
            candidate_time=work.candidate_time,
            is_next=is_next,
            past=past,
            sink=sink,
            host=None if host is None else HostTokens(host.times, host.pages, host.ids),
            user=_values(backend, new.user),
            events=_values(backend, new.features),
            request=_values(backend, work.features.request),
            cross=None if is_next else _values(backend, work.features.cross),
            gap_at=gap_at,
            gap=gap,
            stored=None if work.is_unrounded else self._stored,
        )


def _values(backend: Backend, encoded: Encoded | None) -> FeatureValues | None:
    return None if encoded is None else FeatureValues(*map(backend.upload, encoded))


class RankEngine(PageJobs):
    """One ranker on one backend. Other engines may share its scheduler."""

    def __init__(self, model: HSTU, backend: Backend, scheduler: Scheduler, arena: KVArena) -> None:
        super().__init__(scheduler, backend, arena)
        self.model = model
        # Device seconds of the search with u; 0 until the warm-up has measured them.
        self.find_s = 0.0
        # Rows that `find` searches: trained items, and spare rows that have been used.
        self.num_rows = model.config.num_items
        self.search: ApproximateSearch | None = None  # None = every search is exact
        self._batches = _Batches(model, arena)
        self.weights = DeviceWeights(model, backend)

        # not bound methods, since they are compared by identity to share a pass
        def ranked(works: Sequence[RankPass]) -> list[F32 | StaleEntry]:
            return self.weights.current(works, lambda work: work, self.forward)

        def found(works: Sequence[FindPass]) -> list[NextItems | StaleEntry]:
            return self.weights.current(works, lambda work: work.history, self.find_all)

        self._ranked, self._found_by = ranked, found

    async def prefill(
        self,
        tokens: Tokens,
        keep: tuple[PageRun, ...],
        deadline_at: float,
        order: JobOrder,
        first_token: int = 0,
    ) -> int:
        """Encode a history into pages, one chunk a pass, so a rank waits for one chunk at most.

        Args:
            tokens: the whole history.
            keep: Pages for the whole history; they hold its first `first_token` tokens already.
            deadline_at: instant on time.monotonic(); a chunk that has not begun by then is dropped
                with the rest.
            order: Place in the queue. If it is cancelled at a step, the prefill ends with the chunk
                that runs.
            first_token: First token to encode.

        Returns:
            Number of tokens that the pages hold now: all, unless `order` was cancelled at a step.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.sequence`.
            StaleEntry: a delta has changed what the tokens read since they were made.
        """
        chunk_tokens = self.scheduler.config.prefill_chunk_tokens
        most = min(chunk_tokens, order.step_tokens or chunk_tokens)
        passes = self.prefill_passes(tokens, keep, most, first_token)

        def encode(work: RankPass) -> None:
            (done,) = self._ranked([work])
            if isinstance(done, StaleEntry):
                raise done

        steps = [JobStep(partial(encode, one.work), one.estimate_s) for one in passes]
        done = await self.scheduler.sequence(
            steps, deadline_at, order, preemptible=True, kind="prefill"
        )
        return len(passes[done.steps - 1].work.tokens) if done.steps else first_token

    def prefill_passes(
        self, tokens: Tokens, keep: tuple[PageRun, ...], most_tokens: int, first_token: int = 0
    ) -> list[PrefillPass]:
        """Cut the encoding of a history into passes.

        Args:
            tokens, keep, first_token: As of `prefill`.
            most_tokens: Most tokens of a pass. The user's own tokens are never split.
        """
        layout = self.arena.layout.prefix
        needed = _first_needed(tokens, layout)
        most = max(most_tokens, tokens.num_user)
        parts = list(chunks(first_token, len(tokens), most))
        if first_token < needed:
            first = chunks(first_token, layout.first_end, most)
            parts = [*first, *chunks(needed, len(tokens), most)]
        passes = []
        for start, stop in parts:
            cached = CachedPrefix(keep, start, needed if start >= needed else 0) if start else None
            work = RankPass(tokens[:stop], 0, _NO_ROWS, 0, cached=cached, keep=keep)
            passes.append(PrefillPass(work, self.cost.pass_s(stop - start, start, 0)))
        return passes

    async def rank(
        self, work: RankPass, deadline_at: float, arrived_at: float | None = None, tenant: str = ""
    ) -> RankScores:
        """Score a request's candidates, in a pass shared with other ranks.

        Args:
            work: the request.
            deadline_at: instant on time.monotonic(); a pass that has not begun by then is dropped.
            arrived_at: Instant at which the request arrived, before its history was read. Its place
                in the queue is `arrived_at + objective_s`, and aging counts from it, so a slow read
                of the history does not put the request back. None = now.
            tenant: Tenant of the request (see `Scheduler.batch`).

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.batch`.
            StaleEntry: a delta has changed what the prefix read; rank without it.
        """
        cached = work.cached.num_tokens if work.cached else 0
        start = cached if work.cached else work.first_token
        expected_s = self.cost.pass_s(len(work.tokens) - start, cached, len(work.candidates))
        done = await self.scheduler.batch(
            work,
            self._ranked,
            deadline_at,
            objective_s=self.objective_s,
            arrived_at=arrived_at,
            tenant=tenant,
            estimate_s=expected_s,
        )
        if work.cached is None and done.batch_size == 1:
            self.observe_pass(expected_s, done.device_s)
        return _scores(work, done.value, done.queue_s, done.device_s)

    async def find(
        self, work: FindPass, deadline_at: float, arrived_at: float | None = None, tenant: str = ""
    ) -> NextItems:
        """Find the best items for a request, in a pass shared with other finds.

        The model must have a retrieval head. The arguments are those of `rank`.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.batch`.
            StaleEntry: as `rank`.
        """
        history = work.history
        cached = history.cached.num_tokens if history.cached else 0
        expected_s = self.cost.pass_s(history.demand.tokens, cached, 1) + self.find_s
        if work.ahead:
            expected_s += self.cost.pass_s(0, len(history.tokens), work.ahead.max_candidates)
        done = await self.scheduler.batch(
            work,
            self._found_by,
            deadline_at,
            objective_s=self.objective_s,
            arrived_at=arrived_at,
            tenant=tenant,
            estimate_s=expected_s,
            kind=RECOMMEND.name,
        )
        found: NextItems = done.value
        if found.scores is not None:
            found = found._replace(
                scores=found.scores._replace(queue_s=done.queue_s, device_s=done.device_s)
            )
        return found

    def forward(self, passes: Sequence[RankPass]) -> list[F32]:
        """Run one forward pass over all requests. Only on a device thread.

        Returns:
            Logits [c, tasks] for each request; [c, tasks + 1] with the retrieval scores if the
            request has a vector.
        """
        if len({work.is_unrounded for work in passes}) > 1:  # one call has one arithmetic
            return [scores for work in passes for scores in self.forward([work])]
        passes = _last_steps(passes, self.arena.layout.prefix, self.forward)
        scores = self._at_once(passes, is_next=False)
        if scores is not None:
            for place, p in enumerate(passes):
                if p.vector is not None:
                    (products,) = self.backend.fetch([self._products(p)])
                    scores[place] = np.concatenate([scores[place], products[:, None]], 1)
            return _with_shown(self.weights.shown, passes, scores)
        tensors = self.model(
            self.backend, self._batches.tensors(self.backend, passes, is_next=False)
        )
        for place, p in enumerate(passes):
            if p.vector is not None:
                tensors[place] = torch.cat([tensors[place], self._products(p)[:, None]], 1)
        # A prefill: wait, since its pages may be read once this returns.
        if not any(len(p.candidates) for p in passes):
            self.backend.synchronize()
        return _with_shown(self.weights.shown, passes, self.backend.fetch(tensors))

    def find_all(self, works: Sequence[FindPass]) -> list[NextItems]:
        """Find items for all requests in one pass and one search, and score them if asked to.

        Only on a device thread.
        """
        histories = [work.history for work in works]
        rest = _last_steps(histories, self.arena.layout.prefix, self.forward)
        works = [work.of(history) for work, history in zip(works, rest, strict=True)]
        answers = None if self.search else self._found_at_once(works)
        return self._ranked_ahead(works, self._found(works) if answers is None else answers)

    def _found(self, works: Sequence[FindPass]) -> list[NextItems]:
        passes = [work.history for work in works]
        if (found := self._at_once(passes, is_next=True)) is not None:
            vectors = self.backend.upload(np.concatenate(found))
        else:
            vectors = torch.cat(
                self.model(self.backend, self._batches.tensors(self.backend, passes, is_next=True))
            ).float()
        host = vectors.cpu().numpy()
        most = max(work.k for work in works)
        best = np.empty((len(works), 0), np.int64)
        if most:
            best = self._best(vectors, most, [work.hidden for work in works])
        answers = []
        for work, u, rows in zip(works, host, best, strict=True):
            own = rows[: work.k]
            answers.append(NextItems(own[own >= 0], u))
        return answers

    def _best(self, vectors: torch.Tensor, k: int, hidden: Sequence[I64]) -> I64:
        """Search with each u [B, d]: item rows [B, k], -1 where there are no more."""
        began_at = time.perf_counter()
        if self.search and (rows := self.search(vectors, k, hidden, self.num_rows)) is not None:
            each_s = (time.perf_counter() - began_at) / len(vectors)
            self.find_s += SMOOTHING * (each_s - self.find_s)
            return rows
        table = self.weights.table()[: self.num_rows]
        best = self.backend.best_items(vectors, table, k, Hidden.of(hidden))
        found: I64 = best.items.cpu().numpy()
        return found

    def _found_at_once(self, works: Sequence[FindPass]) -> list[NextItems] | None:
        """Find and score items in one fused call; None = the device has no such call for these."""
        most = max(work.k for work in works)
        passes = [work.history for work in works]
        segments = self._batches.host_segments(passes, is_next=True) if most else None
        if segments is None:
            return None
        wanted, least = zip(*(work.scored_as_found for work in works), strict=True)
        hidden = [work.hidden for work in works]
        found = self.model.fused.find(
            self.backend,
            segments,
            partial(self._batches.tensors, self.backend, passes, is_next=True),
            lambda call: HstuFindCall(
                call, self.weights.table(), self.num_rows, most, hidden, wanted, least
            ),
        )
        if found is None:
            return None
        answers, end = [], 0
        for work, u, rows, count in zip(
            works, found.vectors, found.items, found.num_scored.tolist(), strict=True
        ):
            own = rows[: work.k]
            if work.k and own[-1] < 0:  # fewer than k were found
                own = own[own >= 0]
            answer = NextItems(own, u)
            if count:
                part = slice(end, end := end + count)
                ranked = work.history.then(own[:count], u, None)
                (logits,) = _with_shown(self.weights.shown, [ranked], [found.logits[part]])
                scores = RankScores(logits, found.products[part])
                answer = NextItems(own, u, own[:count], scores, work.history.features)
            answers.append(answer)
        return answers

    def _ranked_ahead(self, works: Sequence[FindPass], answers: list[NextItems]) -> list[NextItems]:
        """Score found items that are not scored yet, for all requests in one more pass."""
        passes: dict[int, RankPass] = {}
        for place, (work, found) in enumerate(zip(works, answers, strict=True)):
            if work.ahead is not None:
                work.ahead.found = found
                if found.scores is None and len(rows := work.ahead.candidates(found.rows)):
                    passes[place] = work.history.then(rows, found.vector, work.ahead.cross(rows))
        if passes:
            for (place, one), scores in zip(
                passes.items(), self.forward([*passes.values()]), strict=True
            ):
                answers[place] = answers[place]._replace(
                    candidates=one.candidates, scores=_scores(one, scores), features=one.features
                )
        return answers

    def _products(self, work: RankPass) -> torch.Tensor:
        """Multiply u with each candidate, [c].

        Row by row, so that a score does not depend on the other candidates.
        """
        assert work.vector is not None
        return self.backend.item_products(
            self.backend.upload(work.vector),
            self.weights.table(),
            self.backend.upload(work.candidates),
        )

    def _at_once(self, passes: Sequence[RankPass], *, is_next: bool) -> list[F32] | None:
        """Run the model in one fused call; None = the device has no such call for these."""
        segments = self._batches.host_segments(passes, is_next=is_next)
        if segments is None:
            return None
        return self.model.fused.run(
            self.backend,
            segments,
            is_next,
            partial(self._batches.tensors, self.backend, passes, is_next=is_next),
        )

    async def warm_up(
        self, tokens: Tokens, lengths: Sequence[int], candidates: Sequence[int]
    ) -> CostModel:
        """Run every shape twice, time the second run, and fit the cost model to the times.

        A live rank waits for one of these passes at most.

        Args:
            tokens: A history at least as long as the longest of `lengths`.
            lengths: Numbers of history tokens to run.
            candidates: Numbers of candidates to run, each with every length.
        """
        rows = np.zeros(max(candidates), np.int64)
        samples = []
        for n in lengths:
            for c in candidates:
                work = RankPass(
                    tokens, len(tokens) - n, rows[:c], int(tokens.events.timestamps[-1])
                )
                samples.append((n, c, await self.timed(partial(self.forward, [work]))))
        self.cost = replace(fit(samples), most_tokens=self.arena.layout.prefix.most_tokens)
        if self.model.config.retrieval:
            self.find_s = await self._time_finding(tokens[-min(lengths) :])
        return self.cost

    async def _time_finding(self, tokens: Tokens) -> float:
        """Return the device seconds of the search with u, for a pass of one request."""
        history = RankPass(tokens, 0, np.empty(0, np.int64), int(tokens.events.timestamps[-1]))
        without_s, with_s = [
            await self.timed(partial(self.find_all, [FindPass(history, k, np.empty(0, np.int64))]))
            for k in (0, FOUND)
        ]
        return max(0.0, with_s - without_s)


def _with_shown(term: ShownTerm | None, passes: Sequence[RankPass], scores: list[F32]) -> list[F32]:
    """Add the term of shown items, if there is one, to the logits [c, ...] of each pass."""
    if term is not None:
        for work, own in zip(passes, scores, strict=True):
            own[:, term.task] += term(work.tokens.rows, work.candidates)
    return scores


def _last_steps(
    passes: Sequence[RankPass],
    layout: PrefixLayout,
    forward: Callable[[Sequence[RankPass]], object],
) -> list[RankPass]:
    """Leave out what no score depends on, and encode what a pass would overwrite as it reads it.

    Returns:
        The rest of each pass.
    """
    rest = []
    for work in passes:
        keep, tokens = work.keep, work.tokens
        start, stop = _start(work), len(tokens)
        needed = 0 if work.gap else _first_needed(tokens, layout)
        if start < needed and (work.cached or not work.first_token):
            if keep and start < layout.first_end:
                first = RankPass(tokens[: layout.first_end], 0, _NO_ROWS, 0, work.cached, keep)
                forward([first])
            work = work.beginning_at(needed, layout.first_end)
            start = needed
        begins_at = needed if start >= needed else 0
        while keep and start < stop and (end := layout.step_end(start, stop)) < stop:
            cached = CachedPrefix(keep, start, begins_at) if start else None
            forward([RankPass(tokens[:end], 0, _NO_ROWS, 0, cached, keep)])
            start = end
            work = work.leasing(CachedPrefix(keep, start, begins_at), keep)
        rest.append(work)
    return rest


def _first_needed(tokens: Tokens, layout: PrefixLayout) -> int:
    """Return where to begin, see `PrefixLayout.first_needed`; the user's tokens stay together."""
    first_end = layout.first_end
    return 0 if 0 < first_end < tokens.num_user else layout.first_needed(len(tokens))


def _gap(work: RankPass, held: HeldTokens | None) -> tuple[int, int]:
    """Return the positions that the tokens of a pass leave out."""
    return (held.gap_at, held.gap) if held and held.gap else (work.gap_at, work.gap)


def _start(work: RankPass) -> int:
    """Return the first token that a pass computes. It never splits the user's own tokens."""
    start = work.cached.num_tokens if work.cached else work.first_token
    return max(start, work.tokens.num_user) if start else 0


def _times(work: RankPass) -> I64:
    """Return the unix seconds of each token; of the candidates if the history has no events."""
    times = work.tokens.timestamps
    return times if len(work.tokens.rows) else np.full_like(times, work.candidate_time)


def _without(times: I64, held: HeldTokens) -> I64:
    """Leave out the times of the tokens in the gap."""
    if not held.gap:
        return times
    return np.concatenate((times[: held.gap_at], times[held.gap_at + held.gap :]))


def _scores(work: RankPass, scores: F32, queue_s: float = 0.0, device_s: float = 0.0) -> RankScores:
    """Split the result of `forward` for a request into logits and retrieval scores."""
    if work.vector is None:
        return RankScores(scores, None, queue_s, device_s)
    return RankScores(scores[:, :-1], scores[:, -1], queue_s, device_s)
