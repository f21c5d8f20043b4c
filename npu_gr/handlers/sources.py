"""Where a cascade's candidates come from: the ranker and its counts, generate, match, and a list of popular items.

`SharedEncoderUse` is one recommend's use of a ranker that also retrieves: two passes over one
prefix.

    find    lease of the prefix KV -> NEXT (with the encode, where something is missing) -> u -> the best items
    rank    the same prefix -> logits of the candidates, and u . e_i of each, whichever source it came from

Where nobody has a word between the two (`rank_ahead`), both passes are one job of the device:
`ranked_ahead` then has the scores, unless other candidates came to be ranked after all.

Lease, item table and order are of one version. A prefix that the first pass wrote is published
before the second, so that other requests of the user need not wait for this one's sources. Where no
page holds it (a short history, no room, a device that failed to read it), the second pass leases it
as any rank does.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ColdUser
from npu_gr.core.feature_schema.columns import NO_COLUMNS
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.history import HistoryRef, UserKey
from npu_gr.core.kinds import GENERATE, MATCH
from npu_gr.core.request import GenerateRequest, MatchRequest, RankAnswer, RankRequest
from npu_gr.engine.rank_engine import NextItems, PrefetchedScores
from npu_gr.handlers.base import Call
from npu_gr.handlers.cascade_plan import Denied, among
from npu_gr.handlers.histories import UserHistory
from npu_gr.handlers.match import MatchJob
from npu_gr.handlers.ranking import NOTHING, Ranking
from npu_gr.handlers.versions import Versions
from npu_gr.metrics.registry import Metrics
from npu_gr.model.history_tokenizer import UNKNOWN, Tokens
from npu_gr.relay.relay import Lease


class SharedEncoderUse:
    """What a request holds of the shared encoder: `async with`, which ends its lease.

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
        """Lease nothing yet.

        Args:
            ranking: the version that serves the request.
            user: whose history.
            tokens: of that history.
            shown_at: unix seconds of NEXT, and of the candidates.
            max_candidates: that the rank will bring.
            features: of the request, for NEXT; None = missing.
        """
        self._ranking = ranking
        self._user = user
        self._tokens = tokens
        self._shown_at = shown_at
        self._max_candidates = max_candidates
        self._features = features
        self._held: AbstractAsyncContextManager[Lease] | None = None
        self._first: Lease | None = None  # how the first pass got the prefix
        self._lease: Lease | None = None  # for the second
        self._ahead: PrefetchedScores | None = None
        self._found: NextItems | None = None
        self._ids: I64 | None = None  # of what was found, by this vocabulary
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
            merge: external ids that were found -> all candidates, known ones, of which the first
                will be ranked; None = they are what was found. Called on a device thread.
            least: candidates that make it certain that no others will be ranked.
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
            lambda rows: ranking.late.of_candidates(NO_COLUMNS, self._tokens, rows, self._shown_at),
        )

    def found_late(self) -> I64 | None:
        """Take what a job found for which `find` did not wait to the end: external ids, best first; None = nothing."""
        if self._ahead is None or self._ahead.found is None:
            return None
        self._found = self._ahead.found  # its u serves the rank
        return self._ranking.vocabulary.ids_of(self._found.rows)

    async def find(self, num_items: int, denied: Denied, call: Call) -> I64:
        """Find the items with the highest retrieval scores.

        Args:
            num_items: at most so many; 0 = only u is wanted.
            denied: what must not be found.
            call: when this stage began, and when it must be done.

        Returns:
            External ids, best first.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `RankEngine.find`.
        """
        ranking = self._ranking
        self._vocabulary = ranking.vocabulary
        lease = await self._leased(1, call.deadline_at)
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
        except BaseException:  # a cancellation too: pages that are half written must not be found
            lease.discard()
            await self._let_go()
            raise
        self._first = used
        self._found = found
        self._ids = ranking.vocabulary.ids_of(found.rows)
        if found.scores is not None:  # a rank of others would lease for itself
            await self._let_go()
            return self._ids
        if used.keep is not None:
            await self._let_go()  # publishes it; nobody can take it before it is leased again
            used = await self._leased(self._max_candidates, call.deadline_at)
        if used.cached is None or used.keep is not None:  # the second pass leases for itself
            lease.discard()
            used.discard()
            await self._let_go()
        else:
            self._lease = used
        return self._ids

    def _hidden(self, denied: Denied) -> I64:
        """List the rows that must not be found, in any order, maybe more than once."""
        ranking = self._ranking
        vocabulary = ranking.vocabulary
        parts = [ranking.items.hidden] if len(ranking.items.hidden) else []
        seen = denied.seen
        if seen is self._tokens.events.items and vocabulary is self._of_tokens:
            parts.append(self._tokens.rows)  # nothing was cut, and every item is known
            seen = None
        for ids in (denied.given, seen):
            if ids is not None and len(ids):
                rows = vocabulary.rows(ids)
                parts.append(rows[rows != UNKNOWN])
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, NOTHING])

    def rows_of(self, items: I64) -> I64 | None:
        """Tell the rows of the very array that `find` returned; None = of any other, or they may have changed."""
        if (
            self._found is None
            or items is not self._ids
            or self._ranking.vocabulary is not self._vocabulary
        ):
            return None
        return self._found.rows

    def ranked_ahead(self, request: RankRequest, rows: I64) -> RankAnswer | None:
        """Answer a rank of these item rows from what `find` scored; None = it did not score just these."""
        if self._first is None or self._found is None:
            return None
        return self._ranking.ranked_ahead(request, rows, self._tokens, self._first, self._found)

    async def rank(self, request: RankRequest, call: Call) -> RankAnswer:
        """Score candidates; if u was found, the answer has their retrieval scores too.

        Args:
            request: of this user, at this time.
            call: when this stage began, and when it must be done.

        Returns:
            As of `Ranking.rank`; it tells how the first pass got the prefix.
        """
        first, found = self._first, self._found
        vector = None if found is None else found.vector
        ranked = await self._ranking.rank(
            request, self._tokens, call, lease=self._lease, vector=vector
        )
        if first is None:
            return ranked
        cached = first.cached.num_tokens if first.cached else 0
        return replace(ranked, outcome=first.outcome, reason=first.reason, prefix_tokens=cached)

    async def _leased(self, num_candidates: int, deadline_at: float) -> Lease:
        """Lease the prefix; nothing else is held meanwhile."""
        held = self._ranking.relay.lease(self._user, self._tokens, num_candidates, deadline_at)
        lease = await held.__aenter__()
        self._held = held
        return lease

    async def _let_go(self) -> None:
        await self.__aexit__(None, None, None)


class SourceRequest(NamedTuple):
    """What a source is asked for."""

    user: UserKey
    history: UserHistory
    num_items: int
    denied: Denied
    exclude_seen: bool
    call: Call
    ranking: Ranking  # the version that serves the request
    rows: I64  # [n] the known items of its history as that version's item rows, oldest first
    shared_encoder: SharedEncoderUse


POPULAR = "popular"  # the list of popular items, among the names of sources

Source = Callable[[SourceRequest], Awaitable[I64]]
"""Answers items, best first, each once.

Raises ColdUser if it knows nothing of the user, NpuGrError if it failed.
"""


class SizedSource(NamedTuple):
    """A source, and how many items it is asked for."""

    ask: Source
    num_items: int
    waits: bool = True  # for the device, or for others; False = it answers at once


async def from_shared_encoder(asked: SourceRequest) -> I64:
    """Search the ranker's own items with its own user vector."""
    return await asked.shared_encoder.find(asked.num_items, asked.denied, asked.call)


async def from_transitions(asked: SourceRequest) -> I64:
    """List what most often followed the last events."""
    ranking = asked.ranking
    if ranking.order is None or not len(asked.rows):
        raise ColdUser("no item of the history has transitions")
    found = ranking.vocabulary.ids_of(
        ranking.order.top(asked.rows, asked.num_items + len(asked.denied.ids))
    )
    return found[~among(found, asked.denied.ids)][: asked.num_items]


async def from_neighbours(asked: SourceRequest) -> I64:
    """List what has most in common with the history: what the same users had."""
    order = asked.ranking.blend_sum
    rows = (
        asked.rows[:0]
        if order is None
        else order.nearest(asked.rows, asked.num_items + len(asked.denied.ids))
    )
    if not len(rows):
        raise ColdUser("no item of the history has neighbours")
    found = asked.ranking.vocabulary.ids_of(rows)
    return found[~among(found, asked.denied.ids)][: asked.num_items]


def from_generation(versions: Versions, metrics: Metrics) -> Source:
    """Make the source that searches with the generator in service."""

    async def retrieve(asked: SourceRequest) -> I64:
        began_at = time.monotonic()
        request = GenerateRequest(
            user=asked.user,
            history=HistoryRef(),
            num_items=asked.num_items,
            exclude_seen=False,  # what was seen is among the denied items
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
    """Make the source that searches by the user's vector."""

    async def retrieve(asked: SourceRequest) -> I64:
        began_at = time.monotonic()
        request = MatchRequest(
            user=asked.user,
            num_items=asked.num_items,
            exclude_seen=asked.exclude_seen,
            deny_items=asked.denied.ids,
        )
        answer = await job.match(request, asked.history.events.items, asked.call)
        metrics.requests.answered(MATCH, answer, time.monotonic() - began_at)
        return answer.item_ids

    return retrieve
