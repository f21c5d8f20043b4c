"""The ranker's device work: prefill a history into pages, score candidates against one.

READ after `service.py`.

A ranker that also retrieves finds items too: a pass over NEXT gives the user vector u, and u the
best of every item of the model's own table. A later pass over candidates may give each one's
retrieval score beside its logits; where what was found is all that will be ranked, both passes are
one job (`PrefetchedScores`).

Every method submits a job to the scheduler and awaits it; tensors are built and read on the device
threads only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Hidden
from npu_gr.backend.calls import HstuFindCall, HstuIds, HstuSegment
from npu_gr.core.arrays import F32, I64
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.kinds import RECOMMEND
from npu_gr.engine.cost import CostModel, fit
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix, PageJobs, chunks
from npu_gr.engine.queue import Demand, JobOrder, JobStep
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.feature_rows import FeatureValues, NewItems
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import HostTokens, Past, Segment

FOUND = 200  # items that the warm-up finds


class LateFeatures(NamedTuple):
    """The features that no cached prefix holds; None = missing, or the model has none."""

    request: Encoded | None = None  # [1]
    cross: Encoded | None = None  # [c]


NONE_LATE = LateFeatures()


class RankPass(msgspec.Struct, frozen=True, eq=False):
    """One request's share of a forward pass, in host arrays.

        history    0 ........ cached.num_tokens ........ len(tokens)
                   [ read from `cached` ][ computed now, and written to `keep` ]

    Without `cached`, the tokens before `first_token` are left out of the pass.
    """

    tokens: Tokens
    first_token: int
    candidates: I64  # [c] item rows; none = a prefill
    candidate_time: int  # unix seconds at which the candidates are shown
    cached: CachedPrefix | None = None
    # pages for the whole history; those of `cached`, if there are any
    keep: tuple[PageRun, ...] | None = None
    vector: F32 | None = None  # [d] u, whose product with each candidate is wanted too
    features: LateFeatures = NONE_LATE

    @property
    def demand(self) -> Demand:
        """The tokens and candidates that the pass computes."""
        start = self.cached.num_tokens if self.cached else self.first_token
        return Demand(len(self.tokens) - start, len(self.candidates))

    def leasing(self, cached: CachedPrefix | None, keep: tuple[PageRun, ...] | None) -> RankPass:
        """Make the same pass over a prefix that is leased; `replace` takes three times as long."""
        return RankPass(
            self.tokens,
            self.first_token,
            self.candidates,
            self.candidate_time,
            cached,
            keep,
            self.vector,
            self.features,
        )

    def then(self, candidates: I64, vector: F32, cross: Encoded | None) -> RankPass:
        """Make the pass over candidates [c] that follows this one at once: it reads the pages that this one wrote."""
        cached = self.cached if self.keep is None else CachedPrefix(self.keep, len(self.tokens))
        features = LateFeatures(self.features.request, cross)
        return RankPass(
            self.tokens, self.first_token, candidates, self.candidate_time, cached, None, vector, features
        )  # fmt: skip


class RankScores(NamedTuple):
    """A rank's logits, and where its time went."""

    logits: F32  # [c, tasks]
    retrieval: F32 | None  # [c] u . e_i, if the pass had a vector
    queue_s: float = 0.0
    device_s: float = 0.0


class NextItems(NamedTuple):
    """What NEXT found."""

    rows: I64  # [<= k] item rows, best first; of equals the lower row
    vector: F32  # [d] u
    candidates: I64 | None = None  # [c] item rows that were scored ahead; None = none were
    scores: RankScores | None = None  # of them
    features: LateFeatures = NONE_LATE  # of them


@dataclass(slots=True, eq=False)
class PrefetchedScores:
    """A rank of what a pass finds, in the same job: the request would ask for it as soon as it had the items."""

    # found item rows -> all candidates; called on a device thread; None = as found
    merge: Callable[[I64], I64] | None
    max_candidates: int  # the first so many are scored
    least: int = 0  # of fewer candidates none is scored
    cross: Callable[[I64], Encoded | None] = lambda _rows: None  # of those; called there too
    # kept here too, for a request whose wait ended before the job did
    found: NextItems | None = None

    def candidates(self, found: I64) -> I64:
        """Choose the rows that are scored, or none."""
        rows = found if self.merge is None else self.merge(found)
        return rows[: self.max_candidates if len(rows) >= self.least else 0]


@dataclass(frozen=True, slots=True, eq=False)
class FindPass:
    """One request's share of a pass that finds items."""

    history: RankPass  # without candidates; `candidate_time` is that of NEXT
    k: int  # most items to find; 0 = only u is wanted
    hidden: I64  # [n] item rows that must not be found, in any order, maybe more than once
    ahead: PrefetchedScores | None = None  # None = nothing is scored

    @property
    def scored_as_found(self) -> tuple[int, int]:
        """Most of the found items that are scored as they stand, and of how few none is."""
        ahead = self.ahead
        if ahead is None or ahead.merge is not None or self.k < ahead.least:
            return 0, 0
        return min(self.k, ahead.max_candidates), ahead.least

    @property
    def demand(self) -> Demand:
        """The tokens that the pass computes, NEXT, and the candidates of the pass after it."""
        return self.history.demand.plus(
            Demand(rows=1 + (self.ahead.max_candidates if self.ahead else 0))
        )


class _Batches:
    """Says what passes compute: in numbers, for kernels of whole passes, and in tensors."""

    def __init__(self, model: HSTU, arena: KVArena) -> None:
        self._arena = arena
        self._next: I64 = np.array([model.items.num_rows])
        self._has_plain_passes = model.config.has_plain_passes

    def told(self, passes: Sequence[RankPass], *, is_next: bool) -> list[HstuSegment] | None:
        """Say a batch in numbers; None = the model's passes, or one of these, are not for kernels of whole passes."""
        if not self._has_plain_passes:
            return None
        told = []
        for work in passes:
            one = self._one_told(work, is_next=is_next)
            if one is None:
                return None
            told.append(one)
        return told

    def tensors(
        self, backend: Backend, passes: Sequence[RankPass], *, is_next: bool
    ) -> list[Segment]:
        """Make a batch of tensors on the backend's device."""
        return [self._one(backend, work, is_next=is_next) for work in passes]

    def _one_told(self, work: RankPass, *, is_next: bool) -> HstuSegment | None:
        """Say in numbers what `_one` makes tensors of; None = pages do not say it all."""
        tokens, cached = work.tokens, work.cached
        keep = work.keep
        start = _start(work)
        first = 0 if cached else start
        if keep is not None and first:
            return None  # its rows stand behind tokens that the pass leaves out
        runs = keep or (cached.runs if cached else None)
        event = max(start - tokens.num_user, 0)
        candidates = self._next if is_next else work.candidates
        return HstuSegment(
            start - first,
            len(tokens) - start,
            len(candidates),
            _times(work)[first:],
            work.candidate_time,
            None if runs is None else self._arena.paged(runs),
            keep is not None,
            HstuIds(tokens.rows[event:], tokens.events.actions[event:], candidates),
        )

    def _one(self, backend: Backend, work: RankPass, *, is_next: bool) -> Segment:
        cached = work.cached
        start = _start(work)
        times = _times(work)
        new = work.tokens[start:] if start else work.tokens
        told = self._one_told(work, is_next=is_next)
        past = None
        if cached:
            arena = self._arena
            held = cached
            past = Past(
                backend.upload(times[:start]),
                lambda layer: arena.slabs(layer, held.runs, held.num_tokens),
            )
        candidates = self._next if is_next else work.candidates
        return Segment(
            items=backend.upload(new.rows),
            actions=backend.upload(new.events.actions.astype(np.int64)),
            times=backend.upload(times[start:]),
            candidates=backend.upload(candidates),
            candidate_time=work.candidate_time,
            is_next=is_next,
            past=past,
            sink=None if work.keep is None else self._arena.sink(work.keep, start),
            host=None if told is None else HostTokens(told.times, told.pages, told.ids),
            user=_values(backend, new.user),
            events=_values(backend, new.features),
            request=_values(backend, work.features.request),
            cross=None if is_next else _values(backend, work.features.cross),
        )


def _values(backend: Backend, encoded: Encoded | None) -> FeatureValues | None:
    return None if encoded is None else FeatureValues(*map(backend.upload, encoded))


class RankEngine(PageJobs):
    """One ranker on one backend. Other engines may share its scheduler."""

    def __init__(self, model: HSTU, backend: Backend, scheduler: Scheduler, arena: KVArena) -> None:
        super().__init__(scheduler, backend, arena)
        self.model = model
        # device seconds of finding items once u is there, until the warm-up has measured them
        self.find_s = 0.0
        # that `find` searches: of trained items, and of new ones that are shown
        self.num_rows = model.config.num_items
        # [spare rows included, d], fp32: what u is compared with
        self._items: torch.Tensor | None = None
        self._batches = _Batches(model, arena)

    async def prefill(
        self,
        tokens: Tokens,
        keep: tuple[PageRun, ...],
        deadline_at: float,
        order: JobOrder,
        first_token: int = 0,
    ) -> int:
        """Encode a history into pages, one chunk a pass: a rank waits for one chunk at most.

        Args:
            tokens: the whole history.
            keep: pages for all of it; they hold its first `first_token` tokens already.
            deadline_at: instant on time.monotonic(); a chunk that has not begun by then is dropped
                with the rest.
            order: its place in the queue. If it is cancelled at a step, the prefill ends with the
                chunk that runs.
            first_token: where to continue.

        Returns:
            how many tokens the pages hold now: all of them, unless `order` was cancelled at a step.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.sequence`.
        """

        def step(start: int, stop: int) -> JobStep:
            cached = CachedPrefix(keep, start) if start else None
            work = RankPass(tokens[:stop], 0, np.empty(0, np.int64), 0, cached=cached, keep=keep)
            return JobStep(lambda: self.forward([work]), self.cost.pass_s(stop - start, start, 0))

        # which are never parted
        most = max(self.scheduler.config.prefill_chunk_tokens, tokens.num_user)
        parts = list(chunks(first_token, len(tokens), most))
        steps = [step(start, stop) for start, stop in parts]
        done = await self.scheduler.sequence(
            steps, deadline_at, order, preemptible=True, kind="prefill"
        )
        return parts[done.steps - 1][1] if done.steps else first_token

    async def rank(
        self, work: RankPass, deadline_at: float, arrived_at: float | None = None, tenant: str = ""
    ) -> RankScores:
        """Score a request's candidates, in a pass that it may share with other ranks.

        Args:
            work: the request.
            deadline_at: instant on time.monotonic(); a pass that has not begun by then is dropped.
            arrived_at: the instant at which the request arrived at this instance, before its
                history was read. Its place in the queue is `arrived_at + objective_s`, and aging
                counts from it, so time spent reading the history makes the request older, not
                younger. None = now.
            tenant: of the request; see `Scheduler.batch`.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.batch`.
        """
        cached = work.cached.num_tokens if work.cached else 0
        start = cached if work.cached else work.first_token
        expected_s = self.cost.pass_s(len(work.tokens) - start, cached, len(work.candidates))
        done = await self.scheduler.batch(
            work,
            self.forward,
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
        """Find the best items for a request, in a pass that it may share with others that find.

        Args:
            work, deadline_at, arrived_at, tenant: as of `rank`. Only where the model retrieves.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.batch`.
        """
        history = work.history
        cached = history.cached.num_tokens if history.cached else 0
        expected_s = self.cost.pass_s(history.demand.tokens, cached, 1) + self.find_s
        if work.ahead:
            expected_s += self.cost.pass_s(0, len(history.tokens), work.ahead.max_candidates)
        done = await self.scheduler.batch(
            work,
            self.find_all,
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
            one array of logits [c, tasks] a request; [c, tasks + 1] with the retrieval scores if it
            has a vector.
        """
        scores = self._at_once(passes, is_next=False)
        if scores is not None:
            for place, p in enumerate(passes):
                if p.vector is not None:
                    (products,) = self.backend.fetch([self._products(p)])
                    scores[place] = np.concatenate([scores[place], products[:, None]], 1)
            return scores
        tensors = self.model(
            self.backend, self._batches.tensors(self.backend, passes, is_next=False)
        )
        for place, p in enumerate(passes):
            if p.vector is not None:
                tensors[place] = torch.cat([tensors[place], self._products(p)[:, None]], 1)
        # a prefill: its pages are read once this returns
        if not any(len(p.candidates) for p in passes):
            self.backend.synchronize()
        return self.backend.fetch(tensors)

    def find_all(self, works: Sequence[FindPass]) -> list[NextItems]:
        """Run NEXT behind every history, and search for all of them at once.

        Then score what is wanted ahead.

        Only on a device thread.
        """
        answers = self._found_at_once(works)
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
            hidden = Hidden.of([work.hidden for work in works])
            table = self._table()[: self.num_rows]
            best = self.backend.best_items(vectors, table, most, hidden).items.cpu().numpy()
        answers = []
        for work, u, rows in zip(works, host, best, strict=True):
            own = rows[: work.k]
            answers.append(NextItems(own[own >= 0], u))
        return answers

    def _found_at_once(self, works: Sequence[FindPass]) -> list[NextItems] | None:
        """Find, and score what is ranked as it was found, in one call of the device; None = it has none for this."""
        most = max(work.k for work in works)
        passes = [work.history for work in works]
        told = self._batches.told(passes, is_next=True) if most else None
        if told is None:
            return None
        wanted, least = zip(*(work.scored_as_found for work in works), strict=True)
        hidden = [work.hidden for work in works]
        found = self.model.fused.find(
            self.backend,
            told,
            partial(self._batches.tensors, self.backend, passes, is_next=True),
            lambda call: HstuFindCall(
                call, self._table(), self.num_rows, most, hidden, wanted, least
            ),
        )
        if found is None:
            return None
        answers, end = [], 0
        for work, u, rows, count in zip(
            works, found.vectors, found.items, found.num_scored.tolist(), strict=True
        ):
            own = rows[: work.k]
            if work.k and own[-1] < 0:  # there are fewer
                own = own[own >= 0]
            answer = NextItems(own, u)
            if count:
                part = slice(end, end := end + count)
                scores = RankScores(found.logits[part], found.products[part])
                answer = NextItems(own, u, own[:count], scores, work.history.features)
            answers.append(answer)
        return answers

    def _ranked_ahead(self, works: Sequence[FindPass], answers: list[NextItems]) -> list[NextItems]:
        """Score what the requests choose of what they found, where that was not done yet, all in one more pass."""
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

    @torch.inference_mode()
    def write_items(self, first_row: int, new: NewItems) -> None:
        """Write the vectors of new items into rows that nobody reads yet.

        Only on a device thread.
        """
        vectors = self.model.items.new_vectors(new)
        self.model.items.write(first_row, vectors)
        # a copy where the model is bf16, or normalises its items; the warm-up made it
        if self._items is not None:
            self._items[first_row : first_row + len(vectors)] = self.model.items.compared(vectors)
        self.backend.synchronize()

    def _table(self) -> torch.Tensor:
        if self._items is None:
            self._items = self.model.items.vectors()
        return self._items

    def _products(self, work: RankPass) -> torch.Tensor:
        """Multiply u with each candidate, [c]: row by row, so that a score does not depend on the others."""
        assert work.vector is not None
        return self.backend.item_products(
            self.backend.upload(work.vector), self._table(), self.backend.upload(work.candidates)
        )

    def _at_once(self, passes: Sequence[RankPass], *, is_next: bool) -> list[F32] | None:
        """Run the model over all requests in one call, without a tensor; None = the device does not take them."""
        told = self._batches.told(passes, is_next=is_next)
        if told is None:
            return None
        return self.model.fused.run(
            self.backend,
            told,
            is_next,
            partial(self._batches.tensors, self.backend, passes, is_next=is_next),
        )

    async def warm_up(
        self, tokens: Tokens, lengths: Sequence[int], candidates: Sequence[int]
    ) -> CostModel:
        """Run every shape twice, time the second run, fit the cost model and keep it.

        A live rank waits for one of these passes at most.

        Args:
            tokens: a history at least as long as the longest of `lengths`.
            lengths: history tokens of the shapes.
            candidates: candidates of the shapes; every length runs with each of them.
        """
        rows = np.zeros(max(candidates), np.int64)
        samples = []
        for n in lengths:
            for c in candidates:
                work = RankPass(
                    tokens, len(tokens) - n, rows[:c], int(tokens.events.timestamps[-1])
                )
                samples.append((n, c, await self.timed(partial(self.forward, [work]))))
        self.cost = fit(samples)
        if self.model.config.retrieval:
            self.find_s = await self._time_finding(tokens[-min(lengths) :])
        return self.cost

    async def _time_finding(self, tokens: Tokens) -> float:
        """Time what follows u in a lone pass."""
        history = RankPass(tokens, 0, np.empty(0, np.int64), int(tokens.events.timestamps[-1]))
        without_s, with_s = [
            await self.timed(partial(self.find_all, [FindPass(history, k, np.empty(0, np.int64))]))
            for k in (0, FOUND)
        ]
        return max(0.0, with_s - without_s)


def _start(work: RankPass) -> int:
    """The first token that a pass computes: never one among the user's, which are not parted."""
    start = work.cached.num_tokens if work.cached else work.first_token
    return max(start, work.tokens.num_user) if start else 0


def _times(work: RankPass) -> I64:
    """Unix seconds of each token.

    Of a history without events, the user's tokens are as old as the candidates.
    """
    times = work.tokens.timestamps
    return times if len(work.tokens.rows) else np.full_like(times, work.candidate_time)


def _scores(work: RankPass, scores: F32, queue_s: float = 0.0, device_s: float = 0.0) -> RankScores:
    """Part what `forward` returns for a request."""
    if work.vector is None:
        return RankScores(scores, None, queue_s, device_s)
    return RankScores(scores[:, :-1], scores[:, -1], queue_s, device_s)
