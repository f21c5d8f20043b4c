"""Sources of a cascade's candidates: shared encoder, counts of the ranker, generate, match.

`SharedEncoderUse` is the use of a ranker that also retrieves by one recommend: two passes over one
prefix.

    find    lease of the prefix KV -> encode missing tokens and NEXT -> u -> best items
    rank    the same prefix -> logits of the candidates, and u . e_i of all candidates

If no other source or hook runs between them (`rank_ahead`), both passes are one device job, and
`ranked_ahead` returns the scores, unless other candidates are ranked after all.

Lease, item table and order are of one version. A prefix that the first pass wrote is published
before the second, so that other requests of the user need not wait for the sources of this one. If
it is not in pages (a short history, no free pages, a device failure), the second pass takes a new
lease.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ColdUser, Unprocessable
from npu_gr.core.feature_schema.columns import NO_COLUMNS
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.history import HistoryRef, UserKey
from npu_gr.core.kinds import GENERATE, MATCH
from npu_gr.core.request import (
    GenerateRequest,
    MatchRequest,
    Outcome,
    RankAnswer,
    RankRequest,
)
from npu_gr.core.text_format import quoted
from npu_gr.engine.rank_engine import NextItems, PrefetchedScores
from npu_gr.handlers.base import Call
from npu_gr.handlers.cascade_plan import Denied
from npu_gr.handlers.match import MatchJob
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.ranking import NOTHING, Ranking
from npu_gr.handlers.versions import Versions
from npu_gr.metrics.registry import Metrics
from npu_gr.model.history_tokenizer import UNKNOWN, Tokens
from npu_gr.model.own_items import OwnItems
from npu_gr.relay.relay import Lease


class SharedEncoderUse:
    """A request's lease and results of the shared encoder, used with `async with`.

    Event loop only.
    """

    def __init__(
        self,
        ranking: Ranking,
        user: UserKey,
        tokens: Tokens,
        shown_at: int,
        max_candidates: int,
        features: Encoded | None = None,
    ) -> None:
        """Begin without a lease.

        Args:
            ranking: Version of the ranker that serves the request.
            user: The user.
            tokens: Tokens of the history.
            shown_at: Unix seconds of NEXT, and of the candidates.
            max_candidates: Maximum number of candidates of the rank.
            features: Features of the request, for NEXT; None if missing.
        """
        self._ranking = ranking
        self._user = user
        self._tokens = tokens
        self._shown_at = shown_at
        self._max_candidates = max_candidates
        self._features = features
        self._held: AbstractAsyncContextManager[Lease] | None = None
        self._first: Lease | None = None  # of the first pass
        self._lease: Lease | None = None  # for the second pass
        self._ahead: PrefetchedScores | None = None
        self._found: NextItems | None = None
        self.read = tokens  # what `find` read: fewer tokens if its lease is degraded
        self._ids: I64 | None = None  # ids of the found items, by this vocabulary
        self._vocabulary = self._of_tokens = ranking.vocabulary

    async def __aenter__(self) -> SharedEncoderUse:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.__aexit__(kind, error, where)

    def rank_ahead(self, merge: Callable[[I64], I64] | None, least: int) -> None:
        """Let `find` score candidates in the same job.

        Args:
            merge: Function from found external ids to all known candidates, of which the first are
                ranked; None if these are the found ones. Called on a device thread.
            least: Number of candidates from which on no others are added.
        """
        ranking = self._ranking

        def merged(rows: I64) -> I64:
            assert merge is not None
            known = ranking.vocabulary
            return known.rows(merge(known.ids_of(rows)))

        self._ahead = PrefetchedScores(
            None if merge is None else merged,
            self._max_candidates,
            least,
            lambda rows: ranking.late.of_candidates(NO_COLUMNS, self.read, rows, self._shown_at),
        )

    def found_late(self) -> I64 | None:
        """Return the ids that a job found after `find` timed out, best first; None if none."""
        if self._ahead is None or self._ahead.found is None:
            return None
        self._found = self._ahead.found  # the rank uses its u
        return self._ranking.vocabulary.ids_of(self._found.rows)

    async def find(self, num_items: int, denied: Denied, call: Call) -> I64:
        """Find the items with the highest retrieval scores.

        Args:
            num_items: Maximum number of items; 0 to compute only u.
            denied: Items to exclude.
            call: Start and deadline of this stage.

        Returns:
            External ids, best first.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `RankEngine.find`.
        """
        ranking = self._ranking
        self._vocabulary = ranking.vocabulary
        lease = await self._leased(1, call.deadline_at)
        self.read = ranking.read_by(self._tokens, lease)
        try:
            hidden = self._hidden(denied)
            used, found = await ranking.find(
                self._tokens,
                self._shown_at,
                num_items,
                hidden,
                lease,
                call,
                self._features,
                self._ahead,
            )
        except BaseException:  # also a cancellation, since pages may be partially written
            lease.discard()
            await self._release()
            self.read = self._tokens
            raise
        self._first = used
        self._found = found
        self._ids = ranking.vocabulary.ids_of(found.rows)
        if found.scores is not None:  # a rank of other candidates takes a new lease
            await self._release()
            return self._ids
        if used.keep is not None:
            await self._release()  # publishes it; no other task runs before the new lease
            used = await self._leased(self._max_candidates, call.deadline_at)
        if used.cached is None or used.keep is not None:  # the second pass takes a new lease
            lease.discard()
            used.discard()
            await self._release()
        else:
            self._lease = used
        return self._ids

    def _hidden(self, denied: Denied) -> I64:
        """Return the rows to exclude, in any order, possibly repeated."""
        ranking = self._ranking
        vocabulary = ranking.vocabulary
        parts = [ranking.items.hidden] if len(ranking.items.hidden) else []
        if denied.allowed is not None:
            is_hidden = np.ones(len(vocabulary), np.bool_)
            rows = vocabulary.rows(denied.allowed)
            is_hidden[rows[rows != UNKNOWN]] = False
            parts.append(np.flatnonzero(is_hidden))
        seen = denied.seen
        if seen is self._tokens.events.items and vocabulary is self._of_tokens:
            parts.append(self._tokens.rows)  # the history was not cut, and all items are known
            seen = None
        for ids in (denied.given, seen):
            if ids is not None and len(ids):
                rows = vocabulary.rows(ids)
                parts.append(rows[rows != UNKNOWN])
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, NOTHING])

    def rows_of(self, items: I64) -> I64 | None:
        """Return the rows of the array that `find` returned; None for others, or if outdated."""
        if (
            self._found is None
            or items is not self._ids
            or self._ranking.vocabulary is not self._vocabulary
        ):
            return None
        return self._found.rows

    def ranked_ahead(self, request: RankRequest, rows: I64) -> RankAnswer | None:
        """Answer a rank of these rows with prefetched scores; None if `find` scored others."""
        if self._first is None or self._found is None:
            return None
        return self._ranking.ranked_ahead(request, rows, self._tokens, self._first, self._found)

    async def rank(self, request: RankRequest, call: Call) -> RankAnswer:
        """Score candidates, with retrieval scores if `find` has computed u.

        Args:
            request: Request of the same user and time.
            call: Start and deadline of this stage.

        Returns:
            The answer, with the prefix outcome of the first pass, but degraded if one of both is:
            this pass reads no more events than the first one.
        """
        first, found = self._first, self._found
        vector = None if found is None else found.vector
        ranked = await self._ranking.rank(
            request, self.read, call, lease=self._lease, vector=vector
        )
        if first is None or ranked.outcome is Outcome.DEGRADED:
            return ranked
        cached = first.cached.num_tokens if first.cached else 0
        return replace(ranked, outcome=first.outcome, reason=first.reason, prefix_tokens=cached)

    async def _leased(self, num_candidates: int, deadline_at: float) -> Lease:
        """Lease the prefix; no other lease may be held."""
        held = self._ranking.relay.lease(self._user, self._tokens, num_candidates, deadline_at)
        lease = await held.__aenter__()
        self._held = held
        return lease

    async def _release(self) -> None:
        await self.__aexit__(None, None, None)


class SourceRequest(NamedTuple):
    """The request to a source."""

    user: UserKey
    history: UserHistory
    num_items: int
    denied: Denied
    exclude_seen: bool
    call: Call
    ranking: Ranking  # version that serves the request
    rows: I64  # [n] item rows of the known items of the history, oldest first
    shared_encoder: SharedEncoderUse


Source = Callable[[SourceRequest], Awaitable[I64]]
"""Returns distinct items, best first. Raises ColdUser without data of the user, else NpuGrError."""


class SizedSource(NamedTuple):
    """A source, and the number of items to request."""

    ask: Source
    num_items: int
    waits: bool = True  # False if it answers at once


async def from_shared_encoder(asked: SourceRequest) -> I64:
    """Retrieve by the ranker's user vector."""
    return await asked.shared_encoder.find(asked.num_items, asked.denied, asked.call)


async def from_transitions(asked: SourceRequest) -> I64:
    """Retrieve items that most often followed the last events."""
    ranking = asked.ranking
    if ranking.order is None or not len(asked.rows):
        raise ColdUser("no item of the history has transitions")
    found = ranking.vocabulary.ids_of(ranking.order.top(asked.rows, _enough(asked)))
    return asked.denied.left(found)[: asked.num_items]


async def from_neighbours(asked: SourceRequest) -> I64:
    """Retrieve items that co-occur with those of the history."""
    order = asked.ranking.blend_sum
    rows = asked.rows[:0] if order is None else order.nearest(asked.rows, _enough(asked))
    if not len(rows):
        raise ColdUser("no item of the history has neighbours")
    found = asked.ranking.vocabulary.ids_of(rows)
    return asked.denied.left(found)[: asked.num_items]


def _enough(asked: SourceRequest) -> int:
    """Return how many items to look up, so that enough are left."""
    if asked.denied.allowed is not None:
        return len(asked.ranking.vocabulary)
    return asked.num_items + len(asked.denied.ids)


async def from_history(asked: SourceRequest) -> I64:
    """Retrieve the user's own items, by how often and how lately the user had them."""
    history = asked.history.all_items
    if not len(history):
        raise ColdUser("there is no history")
    found = OwnItems.of(history).best(len(history))
    return found[~asked.denied.bans(found)][: asked.num_items]


def from_generation(versions: Versions, metrics: Metrics) -> Source:
    """Make the source of the current generator."""

    async def retrieve(asked: SourceRequest) -> I64:
        began_at = time.monotonic()
        request = GenerateRequest(
            user=asked.user,
            history=HistoryRef(),
            num_items=asked.num_items,
            exclude_seen=False,  # seen items are among the denied ones
            allow_items=asked.denied.allowed,
            deny_items=asked.denied.ids,
        )
        generation = versions.generator()
        with generation.use:
            answer = await generation.generate(request, asked.history, asked.call)
        metrics.generate.answered(answer)
        metrics.requests.answered(GENERATE, answer, time.monotonic() - began_at)
        return answer.item_ids

    return retrieve


def from_match(job: MatchJob, metrics: Metrics) -> Source:
    """Make the source of match."""

    async def retrieve(asked: SourceRequest) -> I64:
        began_at = time.monotonic()
        request = MatchRequest(
            user=asked.user,
            num_items=asked.num_items,
            exclude_seen=asked.exclude_seen,
            allow_items=asked.denied.allowed,
            deny_items=asked.denied.ids,
        )
        answer = await job.match(request, asked.history.all_items, asked.call)
        metrics.requests.answered(MATCH, answer, time.monotonic() - began_at)
        return answer.item_ids

    return retrieve


def chosen_sources(
    sources: Mapping[str, SizedSource], names: tuple[str, ...] | None
) -> dict[str, SizedSource]:
    """Return the sources that a request names, in the configured order; None for all."""
    if names is None:
        return dict(sources)
    if missing := [name for name in names if name not in sources]:
        raise Unprocessable(
            f"sources: {quoted(missing[0])} is not configured; there are {', '.join(sources)}"
        )
    if not names:
        raise Unprocessable("sources: needs at least one")
    return {name: source for name, source in sources.items() if name in names}
