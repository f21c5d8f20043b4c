"""One recommend's use of a ranker that also retrieves: two passes over one prefix.

    find    lease of the prefix KV -> NEXT (with the encode, where something is missing) -> u -> the best items
    rank    the same prefix -> logits of the candidates, and u . e_i of each, whichever source it came from

Where nobody has a word between the two (`rank_ahead`), both passes are one job of the device: `rank` then finds its
scores there already, unless other candidates came to be ranked after all.

Lease, item table and order are of one version. A prefix that the first pass wrote is published before the second, so
that other requests of the user need not wait for this one's sources. Where no page holds it (a short history, no room,
a device that failed to read it), the second pass leases it as any rank does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType

import numpy as np
from msgspec.structs import replace

from npu_gr.catalogue.items import UNKNOWN
from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.arrays import I64
from npu_gr.core.history import UserKey
from npu_gr.core.request import RankAnswer, RankRequest
from npu_gr.engine.rank_engine import Ahead, NextItems
from npu_gr.feature_schema.columns import NO_COLUMNS
from npu_gr.feature_schema.encode import Encoded
from npu_gr.jobs.base import Call
from npu_gr.jobs.cascade_plan import each_once
from npu_gr.jobs.ranking import Ranking
from npu_gr.relay.relay import Lease


class TrunkUse:
    """What a request holds of the trunk: `async with`, which ends its lease. Event loop only."""

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
        self._held = AsyncExitStack()
        self._first: Lease | None = None  # how the first pass got the prefix
        self._lease: Lease | None = None  # for the second
        self._ahead: Ahead | None = None
        self._found: NextItems | None = None

    async def __aenter__(self) -> TrunkUse:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._held.__aexit__(kind, error, where)

    def rank_ahead(self, choose: Callable[[I64], I64]) -> None:
        """Let `find` score candidates in the same job.

        Args:
            choose: external ids that were found -> those that will be ranked, all known; none = that is not known yet.
                Called on a device thread.
        """
        ranking = self._ranking

        def chosen(rows: I64) -> I64:
            known = ranking.vocabulary
            return known.rows(choose(known.ids_of(rows)))

        self._ahead = Ahead(
            chosen,
            self._max_candidates,
            lambda rows: ranking.late.of_candidates(NO_COLUMNS, self._tokens, rows, self._shown_at),
        )

    def found_late(self) -> I64 | None:
        """Take what a job found for which `find` did not wait to the end: external ids, best first; None = nothing."""
        if self._ahead is None or self._ahead.found is None:
            return None
        self._found = self._ahead.found  # its u serves the rank
        return self._ranking.vocabulary.ids_of(self._found.rows)

    async def find(self, num_items: int, denied: I64, call: Call) -> I64:
        """Find the items with the highest retrieval scores.

        Args:
            num_items: at most so many; 0 = only u is wanted.
            denied: external ids that must not be found, each once.
            call: when this stage began, and when it must be done.

        Returns:
            External ids, best first.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `RankEngine.find`.
        """
        ranking = self._ranking
        lease = await self._leased(1, call.deadline_at)
        try:
            rows = ranking.vocabulary.rows(denied)
            hidden = rows[rows != UNKNOWN]
            if len(ranking.items.hidden):  # few instances have any, and it costs a sort of the user's history
                hidden = each_once(np.concatenate([hidden, ranking.items.hidden]))
            used, found = await ranking.find(
                self._tokens, self._shown_at, num_items, hidden, lease, call, self._features, self._ahead
            )
        except BaseException:  # a cancellation too: pages that are half written must not be found
            lease.discard()
            await self._held.aclose()
            raise
        self._first = used
        self._found = found
        if found.scores is not None:  # a rank of others would lease for itself
            await self._held.aclose()
            return ranking.vocabulary.ids_of(found.rows)
        if used.keep is not None:
            await self._held.aclose()  # publishes it; nobody can take it before it is leased again
            used = await self._leased(self._max_candidates, call.deadline_at)
        if used.cached is None or used.keep is not None:  # the second pass leases for itself
            lease.discard()
            used.discard()
            await self._held.aclose()
        else:
            self._lease = used
        return ranking.vocabulary.ids_of(found.rows)

    async def rank(self, request: RankRequest, call: Call) -> RankAnswer:
        """Score candidates; if u was found, the answer has their retrieval scores too.

        Args:
            request: of this user, at this time.
            call: when this stage began, and when it must be done.

        Returns:
            As of `Ranking.rank`; it tells how the first pass got the prefix.
        """
        first, found = self._first, self._found
        if first and found and (ahead := self._ranking.ranked_ahead(request, self._tokens, first, found)):
            return ahead
        vector = None if found is None else found.vector
        ranked = await self._ranking.rank(request, self._tokens, call, lease=self._lease, vector=vector)
        if first is None:
            return ranked
        cached = first.cached.num_tokens if first.cached else 0
        return replace(ranked, outcome=first.outcome, reason=first.reason, prefix_tokens=cached)

    async def _leased(self, num_candidates: int, deadline_at: float) -> Lease:
        lease = self._ranking.relay.lease(self._user, self._tokens, num_candidates, deadline_at)
        return await self._held.enter_async_context(lease)
