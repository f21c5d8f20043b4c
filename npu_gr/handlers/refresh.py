"""After a delta: encodes the prefixes that it has touched again, in the background.

    a delta is written -> users with prefixes in HBM, most useful first -> `PrefixRefresh` of each

The most useful ones wait for a rank now, and then come the latest used. The history of a user is
that of the newest request; where it is no longer cached, the prefix is left to the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from npu_gr.core.errors import Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.served import Refreshed
from npu_gr.handlers.prefix_histories import PrefixHistoryCache, UserHistory
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.versions import Versions
from npu_gr.model.served_weights import MOST_EARLIER
from npu_gr.model.weight_stamps import WeightStamps

PAUSE_S = 0.5  # after a prefix for which the device had no time, or HBM no room


class Refreshes:
    """Refreshes the prefixes of the current ranker, one at a time. Event loop only."""

    def __init__(
        self,
        versions: Versions,
        cache: PrefixHistoryCache,
        counted: Callable[[Refreshed], None],
    ) -> None:
        """Wait for a delta.

        Args:
            versions: Versions of the ranker.
            cache: Histories of users.
            counted: Called with what became of a prefix.
        """
        self.num_pending = 0  # users whose prefixes are to be looked at
        self._versions = versions
        self._cache = cache
        self._counted = counted
        self._begins = asyncio.Event()
        self._ranking: Ranking | None = None  # that the newest delta has changed
        # its weights before, oldest first, whose prefixes may not have been looked at since
        self._before: list[WeightStamps] = []

    def begin(self, ranking: Ranking, before: WeightStamps) -> None:
        """Look at all prefixes, since a delta was written; a round that runs begins anew.

        Args:
            ranking: The version that it has changed.
            before: Stamps of the weights before it.
        """
        earlier = self._before if ranking is self._ranking else []
        self._ranking = ranking
        self._before = [*earlier, before][-MOST_EARLIER:]
        self._begins.set()

    async def run(self) -> None:
        """Do a round after each delta, until cancelled."""
        while True:
            await self._begins.wait()
            self._begins.clear()
            assert self._ranking is not None
            if await self._round(self._ranking):
                self._before = []
                self.num_pending = 0

    async def _round(self, ranking: Ranking) -> bool:
        """Look at the prefixes of all users; return False if another delta came meanwhile."""
        relay = ranking.relay.refreshing
        users = relay.users_by_use()
        encoded = list[UserKey]()
        for number, user in enumerate(users, 1):
            if self._begins.is_set():
                return False
            if self._versions.ranker() is not ranking:
                break  # its prefixes end with it
            result = await self._refresh(ranking, user)
            self._counted(result)
            self.num_pending = len(users) - number
            if result is Refreshed.ENCODED:
                encoded.append(user)
            is_without = result in (Refreshed.NO_ROOM, Refreshed.FAILED)
            await asyncio.sleep(PAUSE_S if is_without else 0)  # 0 lets requests run
        # The most useful ones were encoded first, so they would be evicted first.
        relay.evict_last(reversed(encoded))
        return not self._begins.is_set()

    async def _refresh(self, ranking: Ranking, user: UserKey) -> Refreshed:
        known = self._cache.newest(user)
        if known is None:
            return Refreshed.GONE
        history = UserHistory.of(
            known.events,
            known.first_index,
            self._versions.max_events,
            known.user_features,
            older_items=known.older_items,
        )
        try:
            tokens = ranking.tokenize(history, is_request=False)
        except Unprocessable:
            return Refreshed.GONE  # the next request with it is rejected
        before = [tokens.under(stamps) for stamps in self._before]
        with ranking.use:
            return await ranking.relay.refreshing.refresh(user, tokens, before)
