"""Behaviours of users: read for a request, remembered for deltas, appended, erased.

`PrefixHistoryCache` keeps histories that callers may continue by a delta, found by their
fingerprint, and those that were last read from the store. The newest of both kinds is the last
known history of its user, which stands in where the store fails. When the bytes exceed the
capacity, the least recently used history is evicted, of the tenants that have more than their share
(`core/shares.py`).

`Histories` reads what a request names: its own behaviours, a delta on remembered ones, or the
store.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import msgspec
import xxhash

from npu_gr.core.arrays import I64
from npu_gr.core.errors import (
    BadRequest,
    NpuGrError,
    StoreFailed,
    Unavailable,
    UnknownPrefix,
    Unprocessable,
)
from npu_gr.core.feature_schema.columns import OneRow
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import (
    FROM_STORE,
    Events,
    HistoryOrigin,
    HistoryRef,
    HistorySource,
    Mode,
    OnUnsorted,
    UserFeaturesOrigin,
    UserKey,
    Write,
    Written,
    oldest_first,
)
from npu_gr.core.names import difference
from npu_gr.core.shares import Account, Shares
from npu_gr.feature_store.user_features import UserFeatures
from npu_gr.history_store.store import FailurePolicy, HistoryStore, StoredHistory
from npu_gr.metrics.registry import Metrics


class KnownHistory(NamedTuple):
    """The newest events of a user, and the user's features as a request brought them."""

    events: Events
    first_index: int  # of the first of them, counted over everything the user ever did
    user_features: OneRow | None = None


STORED = ""  # in the place of a fingerprint: read from the store


class _Holding(Account):
    """What one tenant has of the cache, in bytes."""

    __slots__ = ("used",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # the least recently used first; see `_use`
        self.used: OrderedDict[tuple[UserKey, str], int] = OrderedDict()


class PrefixHistoryCache:
    """Holds at most `capacity_bytes` of events. Every operation is O(1) in the number of users."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity_bytes = capacity_bytes
        self._shares: Shares[_Holding] = Shares(_Holding, clock)
        self._numbers = itertools.count()
        self._histories: dict[tuple[UserKey, str], tuple[KnownHistory, _Holding]] = {}
        self._by_user: dict[UserKey, dict[str, None]] = {}  # user -> fingerprints, the newest last
        self.bytes_used = 0

    def remember(self, user: UserKey, fingerprint: str, history: KnownHistory) -> None:
        """Keep a copy of a history; one that alone exceeds the capacity is not kept.

        Args:
            user: whose history it is.
            fingerprint: what a delta names as its base.
            history: its newest events.
        """
        key = (user, fingerprint)
        if key in self._histories:
            self._use(key)
            known = self._by_user[user]
            known[fingerprint] = known.pop(fingerprint)
            return
        self._keep(key, history)

    def remember_stored(self, user: UserKey, stored: StoredHistory) -> None:
        """Keep a copy of what the store has of a user, in the place of what it had before."""
        key = (user, STORED)
        if key in self._histories:
            ends_at = stored.first_index + len(stored.events)
            known, _ = self._histories[key]
            if known.first_index + len(known.events) == ends_at and len(known.events) >= len(
                stored.events
            ):
                self._use(key)  # nothing new
                self._by_user[user][STORED] = self._by_user[user].pop(STORED)
                return
            self._drop(key)
        self._keep(key, KnownHistory(*stored))

    def last_known(self, user: UserKey) -> KnownHistory | None:
        """The newest history of a user that is cached; None if none is."""
        if user not in self._by_user:
            return None
        return self._use((user, next(reversed(self._by_user[user]))))

    def knows(self, user: UserKey) -> bool:
        """Whether anything of the user is cached."""
        return user in self._by_user

    def find(self, user: UserKey, fingerprint: str) -> KnownHistory | None:
        """The history with this fingerprint; None if it is not cached (any more)."""
        key = (user, fingerprint)
        return self._use(key) if key in self._histories else None

    def resize(self, capacity_bytes: int, tenant_weights: Mapping[str, float]) -> None:
        """Change the capacity and the weights of tenants (all others have 1), and evict what is over the capacity."""
        self._capacity_bytes = capacity_bytes
        self._shares.weights = tenant_weights
        self._evict()

    def forget(self, user: UserKey) -> None:
        """Drop everything of one user."""
        for fingerprint in list(self._by_user.get(user, ())):
            self._drop((user, fingerprint))

    def _keep(self, key: tuple[UserKey, str], history: KnownHistory) -> None:
        events = history.events
        size = _bytes(history)
        if size > self._capacity_bytes:
            return
        user, fingerprint = key
        holding = self._shares.asking(user.tenant)
        self._histories[key] = history._replace(events=events.copy()), holding
        self._use(key)
        self._by_user.setdefault(user, {})[fingerprint] = None
        holding.held += size
        self.bytes_used += size
        self._evict()

    def _use(self, key: tuple[UserKey, str]) -> KnownHistory:
        """Make a history the most recently used.

        Of two, the one with the smaller number was used less recently.
        """
        history, holding = self._histories[key]
        holding.used[key] = next(self._numbers)
        holding.used.move_to_end(key)
        self._shares.asked(holding)
        return history

    def _evict(self) -> None:
        """Drop the least recently used histories of the tenants over their share until the rest fits."""
        while self.bytes_used > self._capacity_bytes:
            ratios = self._shares.ratios()
            over = [
                one
                for one in self._shares.accounts
                if self._shares.is_over(one, ratios, self._capacity_bytes)
            ]
            # all together are over: so one at least is
            oldest = (next(iter(holding.used.items())) for holding in over)
            self._drop(min(oldest, key=lambda used: used[1])[0])

    def _drop(self, key: tuple[UserKey, str]) -> None:
        user, fingerprint = key
        history, holding = self._histories.pop(key)
        del holding.used[key]
        holding.held -= _bytes(history)
        self.bytes_used -= _bytes(history)
        known = self._by_user[user]
        known.pop(fingerprint, None)
        if not known:
            del self._by_user[user]


def _bytes(history: KnownHistory) -> int:
    of_user = 100 * len(history.user_features or ())
    return history.events.nbytes + of_user + 512  # and the objects around them


class UserHistory(msgspec.Struct, frozen=True, eq=False):
    """The behaviours of a request, however they came: given, by a delta, from the store."""

    events: Events  # oldest first, with those that no model knows
    first_index: int  # of the first of them in the user's whole history
    # as many as the models in service read: all that a delta needs to be continued
    newest: KnownHistory
    fingerprint: str  # of the newest; equal histories have equal ones, whatever way they came
    user_features: OneRow | None = None
    # of the user's features, where they were asked for
    features_origin: UserFeaturesOrigin | None = None

    @classmethod
    def of(
        cls,
        events: Events,
        first_index: int,
        window_events: int,
        user_features: OneRow | None = None,
        features_origin: UserFeaturesOrigin | None = None,
    ) -> UserHistory:
        """Name a history by its newest events.

        Args:
            events: oldest first.
            first_index: of the first of them in the user's whole history.
            window_events: the newest ones that the models in service have room for.
            user_features: which are a part of the prefix.
            features_origin: where they came from, if no request brought them. A delta on this
                history asks again for those whose source failed.
        """
        beyond = max(0, len(events) - window_events)
        is_degraded = features_origin is not None and features_origin.fault is not None
        kept = None if is_degraded else user_features
        newest = KnownHistory(events[beyond:] if beyond else events, first_index + beyond, kept)
        fingerprint = newest.events.fingerprint(newest.first_index)
        if user_features:
            of_user = msgspec.msgpack.encode(sorted(user_features.items()))
            fingerprint = xxhash.xxh3_128_hexdigest(fingerprint.encode() + of_user)
        return cls(events, first_index, newest, fingerprint, user_features, features_origin)

    @property
    def plain_fingerprint(self) -> str:
        """`Events.fingerprint` of all its events without features, where its own is the same; "" elsewhere."""
        is_whole = self.newest.events is self.events and not self.newest.first_index
        return (
            self.fingerprint
            if is_whole and not (self.user_features or self.events.features)
            else ""
        )


class Histories:
    """Behaviours of users: read for a request, remembered for deltas, appended, erased.

    Event loop only.
    """

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
    ) -> None:
        """Read nothing yet.

        Args:
            store: holds behaviours between requests; None = requests bring their own.
            cache: histories that later requests may continue by a delta, and that stand in where
                the store fails.
            cut_step_tokens: a window's start moves in steps of this, so this many events are read
                before it.
            on_failure: what a request gets whose history cannot be read.
            metrics: where degraded reads are counted.
            action_names: of the ranker in service; none = nobody says what the numbers of actions
                mean.
            on_unsorted: what becomes of rows that run backwards in time.
            of_users: features of users that requests do not bring; None = they are missing.
        """
        self.store = store
        self.cache = cache
        self._cut_step_tokens = cut_step_tokens
        self._on_failure = on_failure
        self._metrics = metrics
        self._action_names = action_names
        self.on_unsorted = on_unsorted
        self._of_users = of_users
        self._num_named = 0  # actions that the store is known to have under our names
        self._num_erasures = 0  # begun or ended

    def reconfigure(
        self,
        cache_bytes: int,
        cut_step_tokens: int,
        tenant_weights: Mapping[str, float],
        on_unsorted: OnUnsorted,
    ) -> None:
        """Apply other settings from now on; what is remembered stays as far as it fits."""
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
    ) -> UserHistory:
        """Read the behaviours that a request names, and the user's features where neither it nor its base has any.

        Args:
            user: whose they are.
            ref: where they are.
            window_events: the newest ones that the models in service have room for.
            while_waiting: entered while the store is read, and features are fetched.
            reads: features of users that the model reads; None = they do not matter.

        Raises:
            UnknownPrefix: a delta continues a prefix that is not known here.
            Unprocessable: a delta begins before its base ends, and that is to be rejected.
            BadRequest: the request brings no history, and there is no store.
            StoreFailed: the store failed, and the configuration has nothing to put in its place.
        """
        base = None if ref.base is None else self.cache.find(user, ref.base)
        if ref.base is not None and base is None:
            raise UnknownPrefix("base: unknown here or forgotten; send the whole history")
        given = (
            base.user_features
            if base is not None and ref.user_features is None
            else ref.user_features
        )
        known = self._brought(ref, base)
        found = fetching = None
        if given is None and reads and self._of_users is not None:
            found = self._of_users.remembered(user, reads)
            if found is None:
                # while the store is read
                fetching = asyncio.ensure_future(self._of_users.fetch(user, reads))
        if known is None or fetching is not None:
            with while_waiting():
                known = await self._stored(user, window_events) if known is None else known
                found = found if fetching is None else await fetching
        values, origin = (given, None) if found is None else found
        return UserHistory.of(known.events, known.first_index, window_events, values, origin)

    def _brought(self, ref: HistoryRef, base: KnownHistory | None) -> StoredHistory | None:
        """Find the behaviours that a request brings or that its base remembers; None = the store has them."""
        if base is None:
            return None if ref.events is None else StoredHistory(ref.events, 0)
        if ref.events is None:
            return StoredHistory(base.events, base.first_index)
        events = oldest_first(
            base.events + ref.events, self.on_unsorted, "history", base=len(base.events)
        )
        return StoredHistory(events, base.first_index)

    async def _stored(self, user: UserKey, window_events: int) -> StoredHistory:
        if self.store is None:
            raise BadRequest("history: missing, and this instance has no history store")
        try:
            return await self._read_stored(self.store, user, window_events + self._cut_step_tokens)
        except StoreFailed as error:
            return self._degraded(user, error, self._on_failure)

    async def read_items(self, user: UserKey, ref: HistoryRef, max_events: int) -> I64:
        """Read the items of a history for a job that can do without one: what cannot be read is empty.

        Returns:
            [n] external ids, oldest first.
        """
        if ref.events is not None:
            return ref.events.items
        if self.store is None:
            return Events.empty().items
        try:
            stored = await self._read_stored(self.store, user, max_events)
        except StoreFailed as error:
            stored = self._degraded(user, error, "nothing")
        return stored.events.items

    async def _read_stored(self, store: HistoryStore, user: UserKey, last: int) -> StoredHistory:
        num_erasures = self._num_erasures
        stored = await store.read(user, last)
        # what is being erased is not remembered
        if self._on_failure != "fail" and num_erasures == self._num_erasures:
            self.cache.remember_stored(user, stored)
        return StoredHistory(stored.events.coming_from(FROM_STORE), stored.first_index)

    def _degraded(self, user: UserKey, error: StoreFailed, policy: FailurePolicy) -> StoredHistory:
        """Put something in the place of a history that cannot be read, or raise the error."""
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
        return StoredHistory(
            known.events.coming_from(HistoryOrigin(source, error.fault)), known.first_index
        )

    def remember(self, user: UserKey, ref: HistoryRef, history: UserHistory) -> None:
        """Keep the behaviours that a request brought, so that a later request may send a delta on them.

        As they came: what the model in service lacks or cuts counts in the window of every later
        request, so that a delta reads what the whole history reads.
        """
        if ref.events is not None or (ref.base is not None and ref.base != history.fingerprint):
            self.cache.remember(user, history.fingerprint, history.newest)

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> int:
        """Append behaviours durably.

        Args:
            user: whose they are.
            events: oldest first.
            key: idempotency key: a second append with it appends nothing.

        Returns:
            How many the store now holds for the user.

        Raises:
            Unprocessable: there is no store, the key was used for other events, or their features
                take too many bytes.
            Unavailable: the store was filled with other actions.
            StoreFailed: the store failed, or did not answer in time; then the events may be stored,
                or will be.
        """
        if self.store is None:
            raise Unprocessable(
                "events: this instance has no history store (history_store.kind is none)"
            )
        await self._name_actions(self.store, int(events.actions.max(initial=-1)))
        return await self.store.append(user, events, key)

    async def write_many(self, batch: Sequence[Write]) -> Sequence[Written | NpuGrError]:
        """Write behaviours of many users durably; each fails alone.

        Raises:
            Unprocessable: there is no store. Unavailable: it was filled with other actions.
            StoreFailed: it has written nobody.
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
            pairs = zip(batch, results, strict=True)
            changed &= {
                one.user for one, done in pairs if isinstance(done, Written) and done.changes
            }
            return results
        finally:
            for user in changed:  # what is remembered of them may have been replaced
                self.cache.forget(user)

    async def _name_actions(self, store: HistoryStore, last: int) -> None:
        """Let the store remember what the numbers up to `last` mean, before an event uses them.

        Raises:
            Unavailable: they mean something else there. StoreFailed: the store failed.
        """
        names = self._action_names()[: last + 1]
        if len(names) <= self._num_named:
            return
        kept = await store.name_actions(names)
        if told := difference(kept[: len(names)], names):
            raise Unavailable(f"the history store was filled with other actions: {told}")
        self._num_named = len(names)

    def knows(self, user: UserKey) -> bool:
        """Whether this process remembers behaviours or features of the user.

        The store is not asked.
        """
        return self.cache.knows(user) or (self._of_users is not None and self._of_users.knows(user))

    async def erase(self, user: UserKey) -> bool:
        """Forget the user's behaviours, here and in the store.

        Returns:
            Whether no byte of them is left in the store; see `HistoryStore.erase`.

        Raises:
            StoreFailed: the store failed, or did not answer in time; then it may have forgotten the
                user, or will.
        """
        self._forget(user)
        if self.store is None:
            return True
        try:
            return await self.store.erase(user)
        finally:
            self._forget(user)  # a request that came meanwhile may have read the store

    def _forget(self, user: UserKey) -> None:
        self._num_erasures += 1
        self.cache.forget(user)
        if self._of_users is not None:
            self._of_users.forget(user)
