"""Histories of users: read for a request, cached for deltas, appended, erased.

`Histories` reads the history of a request: that in the request, a delta on a cached one, or that of
the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from prometheus_client import Counter

from npu_gr.core.arrays import I64
from npu_gr.core.errors import (
    BadRequest,
    NpuGrError,
    StoreFailed,
    StoreFault,
    Unavailable,
    UnknownPrefix,
    Unprocessable,
)
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import (
    FROM_STORE,
    Events,
    HistoryOrigin,
    HistoryRef,
    HistorySource,
    Mode,
    OnUnsorted,
    UserKey,
    Write,
    Written,
    oldest_first,
)
from npu_gr.core.names import difference
from npu_gr.feature_store.user_features import UserFeatures
from npu_gr.handlers.prefix_histories import KnownHistory, PrefixHistoryCache, UserHistory
from npu_gr.history_store.store import NO_ITEMS, FailurePolicy, HistoryStore, StoredHistory
from npu_gr.metrics.registry import Metrics

# Share of a request's remaining time that it waits for a history that has no replacement. The rest
# is for its own work.
WAITED_SHARE = 0.8


class StoreReads:
    """Reads the history store for requests, and caches what it finds. Event loop only.

    A request whose user is cached waits `wait_s` for the store, then uses the cached history. The
    read goes on, and its result is cached for the next request. If nothing is cached, the request
    waits for `WAITED_SHARE` of its remaining time, but not longer than the store's own limit.
    """

    def __init__(
        self, cache: PrefixHistoryCache, wait_s: float, late_events: Counter, *, caches: bool
    ) -> None:
        """Read nothing yet.

        Args:
            cache: Cached histories.
            wait_s: Seconds to wait for the store if there is a cached history.
            late_events: Metric of events that the store has out of order.
            caches: Whether cached histories replace those that cannot be read.
        """
        self._cache = cache
        self._wait_s = wait_s
        self._late_events = late_events
        self._caches = caches
        self._running: set[asyncio.Task[StoredHistory]] = set()
        self.num_erasures = 0  # begun and ended ones

    async def read(
        self,
        store: HistoryStore,
        user: UserKey,
        last: int,
        deadline_at: float,
        window_events: int | None,
        all_items: bool,
    ) -> StoredHistory:
        """Read a user's newest events.

        Args:
            store: The store.
            user: The user.
            last: Number of events.
            deadline_at: Deadline of the request, as time.monotonic().
            window_events: Number of newest events to cache; None = do not cache.
            all_items: Also read the items of all older events.

        Raises:
            StoreFailed: the store failed, or the request should go on without it.
        """
        waits_s = self._wait_s
        if not (self._caches and self._cache.knows(user)):
            waits_s = max(waits_s, WAITED_SHARE * (deadline_at - time.monotonic()))
        task = asyncio.get_running_loop().create_task(
            self._read_and_cache(store, user, last, window_events, all_items)
        )
        self._running.add(task)
        task.add_done_callback(self._ended)
        began_at = time.monotonic()
        # `wait` does not cancel the read, so that the next request finds its result
        await asyncio.wait((task,), timeout=None if waits_s == float("inf") else waits_s)
        late_s = time.monotonic() - began_at - waits_s
        if late_s > waits_s / 4:
            # The event loop was blocked, so it may not have read the answer yet: wait once more.
            await asyncio.wait((task,), timeout=min(late_s, waits_s))
        if not task.done():
            text = f"the history store did not answer within {waits_s * 1e3:.0f} ms"
            raise StoreFailed(text, StoreFault.SLOW)
        return task.result()

    def _ended(self, task: asyncio.Task[StoredHistory]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its request may have gone on without it

    async def _read_and_cache(
        self,
        store: HistoryStore,
        user: UserKey,
        last: int,
        window_events: int | None,
        all_items: bool,
    ) -> StoredHistory:
        num_erasures = self.num_erasures
        stored = await store.read(user, last, all_items)
        # an older version may have stored events out of order
        events = oldest_first(stored.events, "sort", "history")
        num_late = events.origin.sorted_events
        self._late_events.inc(num_late)
        events = events.coming_from(FROM_STORE._replace(sorted_events=num_late))
        first = stored.first_index
        older = stored.older_items if first else NO_ITEMS
        # do not cache what is being erased
        if window_events is not None and num_erasures == self.num_erasures:
            history = UserHistory.of(events, first, window_events, older_items=older)
            self._cache.remember(user, history.fingerprint, history.newest)
        return StoredHistory(events, first, older)


class Histories:
    """Reads, caches, appends and erases histories. Event loop only."""

    def __init__(
        self,
        store: HistoryStore | None,
        cache: PrefixHistoryCache,
        cut_step_tokens: int,
        on_failure: FailurePolicy,
        metrics: Metrics,
        action_names: Callable[[], Sequence[str]] = tuple,
        on_unsorted: OnUnsorted = "reject",
        of_users: UserFeatures | None = None,
        read_timeout_s: float = float("inf"),
    ) -> None:
        """Store the parts.

        Args:
            store: History store; None if requests must have histories.
            cache: Cached histories, for deltas and failures of the store.
            cut_step_tokens: Step of the window's start; as many more events are read.
            on_failure: Policy if the store fails.
            metrics: Metrics of the instance.
            action_names: Action names of the current ranker, if there is one.
            on_unsorted: Policy for events out of time order.
            of_users: Source of user features, if there is one.
            read_timeout_s: Seconds to wait for the store if there is a cached history.
        """
        self.store = store
        self.cache = cache
        self._cut_step_tokens = cut_step_tokens
        self._on_failure = on_failure
        self._metrics = metrics
        self._action_names = action_names
        self.on_unsorted = on_unsorted
        self._of_users = of_users
        self._num_named = 0  # actions whose names the store has confirmed
        self._reads = StoreReads(
            cache, read_timeout_s, metrics.store.late_events, caches=on_failure != "fail"
        )
        self._window_events = 0  # newest events that the current models read

    def reconfigure(
        self,
        cache_bytes: int,
        cut_step_tokens: int,
        tenant_weights: Mapping[str, float],
        on_unsorted: OnUnsorted,
    ) -> None:
        """Apply new settings; cached histories stay as far as they fit."""
        self.cache.resize(cache_bytes, tenant_weights)
        self._cut_step_tokens = cut_step_tokens
        self.on_unsorted = on_unsorted

    async def read(
        self,
        user: UserKey,
        ref: HistoryRef,
        window_events: int,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        reads: Mapping[str, Feature] | None = None,
        deadline_at: float = float("inf"),
        *,
        all_items: bool = False,
    ) -> UserHistory:
        """Read the history of a request, and user features if neither request nor base has them.

        Args:
            user: The user.
            ref: History of the request.
            window_events: Number of newest events that the current models read.
            while_waiting: Context for waiting on the store or the source of user features.
            reads: User features of the model, if they are needed.
            deadline_at: Deadline of the request, as time.monotonic().
            all_items: Also read the items of events that are older than any window.

        Raises:
            UnknownPrefix: the base of a delta is not cached, and is not what the store has.
            Unprocessable: a delta begins before its base ends, and the policy rejects it.
            BadRequest: the request has no history, and there is no store.
            StoreFailed: the store failed, and the policy has no replacement.
        """
        base = None
        if ref.base is not None:
            base = self.cache.find(user, ref.base)
            if base is None:
                with while_waiting():
                    base = await self._stored_base(user, ref.base, window_events, deadline_at)
        given = (
            base.user_features
            if base is not None and ref.user_features is None
            else ref.user_features
        )
        known = _brought(ref, base, self.on_unsorted)
        num_erasures = self._reads.num_erasures
        self._window_events = window_events
        is_stored = known is None
        found = fetching = None
        if given is None and reads and self._of_users is not None:
            found = self._of_users.remembered(user, reads)
            if found is None:
                # concurrently with reading the store
                fetching = asyncio.ensure_future(self._of_users.fetch(user, reads))
        lacks_items = all_items and known is not None and known.older_items is None
        if known is None or lacks_items or fetching is not None:
            with while_waiting():
                if known is None:
                    known = await self._stored(user, window_events, deadline_at, all_items)
                elif lacks_items:
                    known = await self._with_older_items(user, known, deadline_at)
                found = found if fetching is None else await fetching
        values, origin = (given, None) if found is None else found
        history = UserHistory.of(
            known.events, known.first_index, window_events, values, origin, known.older_items
        )
        is_whole = not known.events.origin.fault and num_erasures == self._reads.num_erasures
        if is_stored and is_whole:  # with its user features, which `StoreReads` does not have
            self.cache.remember(user, history.fingerprint, history.newest)
        return history

    async def _stored(
        self, user: UserKey, window_events: int, deadline_at: float, all_items: bool
    ) -> StoredHistory:
        if self.store is None:
            raise BadRequest("history: required, since this instance has no history store")
        last = window_events + self._cut_step_tokens
        try:
            return await self._reads.read(
                self.store, user, last, deadline_at, window_events, all_items
            )
        except StoreFailed as error:
            return self._degraded(user, error, self._on_failure)

    async def _stored_base(
        self, user: UserKey, fingerprint: str, window_events: int, deadline_at: float
    ) -> KnownHistory:
        """Return the store's history, if it has the fingerprint.

        So a base is known after a restart, after an eviction and on other instances, until events
        are appended. Raises UnknownPrefix.
        """
        if self.store is not None:
            last = window_events + self._cut_step_tokens
            with contextlib.suppress(StoreFailed):  # the client has the history
                await self._reads.read(self.store, user, last, deadline_at, window_events, False)
        base = self.cache.find(user, fingerprint)
        if base is None:
            raise UnknownPrefix("base: not cached here (any more); send the full history")
        return base

    async def _with_older_items(
        self, user: UserKey, known: StoredHistory, deadline_at: float
    ) -> StoredHistory:
        """Add to a base the items of stored events before it; none if the store fails."""
        if self.store is None:
            return known
        try:
            stored = await self._reads.read(self.store, user, 0, deadline_at, None, True)
        except StoreFailed as error:
            origin = self._degraded(user, error, self._on_failure).events.origin
            return known._replace(events=known.events.coming_from(origin))
        items = NO_ITEMS if stored.older_items is None else stored.older_items
        given_up = stored.first_index - len(items)
        return known._replace(older_items=items[: max(0, known.first_index - given_up)])

    async def read_items(
        self, user: UserKey, ref: HistoryRef, max_events: int, deadline_at: float = float("inf")
    ) -> I64:
        """Read the items of a history for a handler that works without; empty if that fails.

        Args:
            user: The user.
            ref: History of the request.
            max_events: Number of newest events that the handler needs.
            deadline_at: Deadline of the request, as time.monotonic().

        Returns:
            [n] external ids of all events, oldest first.
        """
        if ref.events is not None:
            return ref.events.items
        if self.store is None:
            return NO_ITEMS
        try:
            window = max(max_events, self._window_events)
            stored = await self._reads.read(self.store, user, window, deadline_at, window, True)
        except StoreFailed as error:
            stored = self._degraded(user, error, "nothing")
        older = NO_ITEMS if stored.older_items is None else stored.older_items
        return np.concatenate([older, stored.events.items])

    def _degraded(self, user: UserKey, error: StoreFailed, policy: FailurePolicy) -> StoredHistory:
        """Return a replacement for a history that cannot be read, or raise the error."""
        known = None if policy == "fail" else self.cache.last_known(user)
        if known is not None:
            source = HistorySource.LAST_KNOWN
        elif policy == "nothing":
            source = HistorySource.NOTHING
            known = KnownHistory(Events.empty(), 0)
        else:
            self._metrics.store.degraded("failed", error.fault)
            raise error
        self._metrics.store.degraded(source, error.fault)
        events = known.events.coming_from(HistoryOrigin(source, error.fault))
        return StoredHistory(events, known.first_index, known.older_items)

    def remember(self, user: UserKey, ref: HistoryRef, history: UserHistory) -> None:
        """Cache the history of a request, so that later requests may send deltas.

        It is cached unfiltered, so that a delta has the same window as the full history.
        """
        if ref.events is not None or (ref.base is not None and ref.base != history.fingerprint):
            self.cache.remember(user, history.fingerprint, history.newest)

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> Written:
        """Append events durably, each in its place by time.

        Args:
            user: The user.
            events: Events in any order.
            key: Idempotency key; a second append with it has no effect.

        Raises:
            Unprocessable: there is no store, the key was used for other events, or features take
                too many bytes.
            Unavailable: the store was filled with other actions.
            StoreFailed: the store failed, or timed out, after which events may be stored.
        """
        if self.store is None:
            raise Unprocessable(
                "events: this instance has no history store (history_store.kind is none)"
            )
        await self._name_actions(self.store, int(events.actions.max(initial=-1)))
        done = await self.store.append(user, events, key)
        self._metrics.store.late_events.inc(done.num_late)
        return done

    async def write_many(self, batch: Sequence[Write]) -> Sequence[Written | NpuGrError]:
        """Write events of many users durably; each fails separately.

        Raises:
            Unprocessable: there is no store.
            Unavailable: it was filled with other actions.
            StoreFailed: the store failed for all users.
        """
        if self.store is None:
            raise Unprocessable(
                "events: this instance has no history store (history_store.kind is none)"
            )
        if not batch:
            return []
        await self._name_actions(
            self.store, max(int(one.events.actions.max(initial=-1)) for one in batch)
        )
        changed = {one.user for one in batch if one.mode is not Mode.APPEND}
        try:
            results = await self.store.write_many(batch)
            pairs = [
                (one.user, done)
                for one, done in zip(batch, results, strict=True)
                if isinstance(done, Written)
            ]
            changed &= {user for user, done in pairs if done.changes}
            self._metrics.store.late_events.inc(sum(done.num_late for _, done in pairs))
            return results
        finally:
            for user in changed:  # their cached histories may be outdated
                self.cache.forget(user)

    async def _name_actions(self, store: HistoryStore, last: int) -> None:
        """Record the names of actions up to `last` in the store, before an event uses them.

        Raises:
            Unavailable: the store has other names.
            StoreFailed: the store failed.
        """
        names = self._action_names()[: last + 1]
        if len(names) <= self._num_named:
            return
        stored = await store.name_actions(names)
        if changed := difference(stored[: len(names)], names):
            raise Unavailable(f"the history store was filled with other actions: {changed}")
        self._num_named = len(names)

    def knows(self, user: UserKey) -> bool:
        """Whether this process has cached data of the user; the store is not queried."""
        return self.cache.knows(user) or (self._of_users is not None and self._of_users.knows(user))

    async def erase(self, user: UserKey) -> bool:
        """Erase the user's history, here and in the store.

        Returns:
            Whether no byte is left in the store; see `HistoryStore.erase`.

        Raises:
            StoreFailed: the store failed, or timed out, after which it may still erase the user.
        """
        self._forget(user)
        if self.store is None:
            return True
        try:
            return await self.store.erase(user)
        finally:
            self._forget(user)  # a concurrent request may have read the store

    def _forget(self, user: UserKey) -> None:
        self._reads.num_erasures += 1
        self.cache.forget(user)
        if self._of_users is not None:
            self._of_users.forget(user)


def _brought(
    ref: HistoryRef, base: KnownHistory | None, policy: OnUnsorted
) -> StoredHistory | None:
    """Return the history in the request or its base; None if it is in the store."""
    if base is None:
        return None if ref.events is None else StoredHistory(ref.events, 0, NO_ITEMS)
    events = base.events
    if ref.events is not None:
        events = oldest_first(events + ref.events, policy, "history", len(events))
    return StoredHistory(events, base.first_index, base.older_items)
