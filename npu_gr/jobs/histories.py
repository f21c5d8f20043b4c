"""Where a request's behaviours come from: the request itself, a prefix that is known here, or the history store."""

from __future__ import annotations

from contextlib import suppress

from npu_gr.core.errors import BadRequest, Unavailable, UnknownPrefix, Unprocessable
from npu_gr.core.request import I64, Events, HistoryRef, UserKey
from npu_gr.features.base import HistoryStore
from npu_gr.features.prefix_history_cache import PrefixHistoryCache


class Histories:
    """Behaviours of users: read for a request, remembered for deltas, appended, erased. Event loop only."""

    def __init__(self, store: HistoryStore | None, cache: PrefixHistoryCache, cut_step_tokens: int) -> None:
        """Read nothing yet.

        Args:
            store: holds behaviours between requests; None = requests bring their own.
            cache: histories that later requests may continue by a delta.
            cut_step_tokens: a window's start moves in steps of this, so this many events are read before it.
        """
        self.store = store
        self.cache = cache
        self._cut_step_tokens = cut_step_tokens

    def reconfigure(self, cache_bytes: int, cut_step_tokens: int) -> None:
        """Apply other settings from now on; what is remembered stays as far as it fits."""
        self.cache.resize(cache_bytes)
        self._cut_step_tokens = cut_step_tokens

    async def read(self, user: UserKey, ref: HistoryRef, window_events: int) -> tuple[Events, int]:
        """Read the behaviours that a request names.

        Args:
            user: whose they are.
            ref: where they are.
            window_events: the newest ones that the model has room for.

        Returns:
            The behaviours, and the index of the first one in the user's whole history.

        Raises:
            UnknownPrefix: a delta continues a prefix that is not known here.
            BadRequest: the request brings no history, and there is no store.
        """
        if ref.base is not None:
            base = self.cache.find(user, ref.base)
            if base is None:
                raise UnknownPrefix("base: unknown here or forgotten; send the whole history")
            return (base if ref.events is None else base + ref.events), 0
        if ref.events is not None:
            return ref.events, 0
        if self.store is None:
            raise BadRequest("history: missing, and this instance has no history store")
        stored = await self.store.read(user, window_events + self._cut_step_tokens)
        return stored.events, stored.first_index

    async def read_items(self, user: UserKey, ref: HistoryRef, max_events: int) -> I64:
        """Read the items of a history for a job that can do without one: what cannot be read is empty.

        Returns:
            [n] external ids, oldest first.
        """
        if ref.events is not None:
            return ref.events.items
        if self.store is not None:
            with suppress(Unavailable):
                return (await self.store.read(user, max_events)).events.items
        return Events.empty().items

    def remember(self, user: UserKey, ref: HistoryRef, fingerprint: str, events: Events) -> None:
        """Keep the behaviours that a request brought, so that a later request may send a delta on them."""
        if ref.events is not None:
            self.cache.remember(user, fingerprint, events)

    async def append(self, user: UserKey, events: Events) -> int:
        """Append behaviours durably.

        Returns:
            How many the store now holds for the user.

        Raises:
            Unprocessable: there is no store.
        """
        if self.store is None:
            raise Unprocessable("events: this instance has no history store (features.kind is none)")
        return await self.store.append(user, events)

    async def erase(self, user: UserKey) -> None:
        """Forget the user's behaviours, here and in the store."""
        self.cache.forget(user)
        if self.store is not None:
            await self.store.erase(user)
