"""What the service knows: of a user, of items like another one, and of items that trend now."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import NotFound, Unprocessable
from npu_gr.core.history import Events, UserKey
from npu_gr.core.served import KnownUser, LookedUpItems, PrefixPlace
from npu_gr.core.text_format import quoted
from npu_gr.handlers.cascade_plan import Denied
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.item_filters import ItemFilters
from npu_gr.handlers.match import MatchVersion, ServedVectors
from npu_gr.handlers.served_catalogue import Query
from npu_gr.handlers.versions import Versions
from npu_gr.model.history_tokenizer import UNKNOWN

BUCKET_S = 900  # events are counted by quarters of an hour
KEPT_S = 86_400  # for a day
MOST_COUNTS = 200_000  # of all tenants and quarters together, about 20 MB


class RecentItems:
    """Counts the events of each item that this process took, by tenant. Event loop only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Start with no events."""
        self._clock = clock
        self._counts: dict[tuple[str, int], Counter[int]] = {}  # (tenant, quarter) -> counts
        self._size = 0

    def add(self, tenant: str, events: Events) -> None:
        """Count events that happened within a day; older ones are a history that is loaded."""
        now_at = self._clock()
        is_recent = (events.timestamps > now_at - KEPT_S) & (events.timestamps <= now_at + BUCKET_S)
        quarters = events.timestamps[is_recent] // BUCKET_S
        for item, quarter in zip(events.items[is_recent].tolist(), quarters.tolist(), strict=True):
            counts = self._counts.setdefault((tenant, quarter), Counter())
            self._size += item not in counts
            counts[item] += 1
        if self._size > MOST_COUNTS or len(self._counts) > KEPT_S // BUCKET_S:
            self._forget(now_at)

    def _forget(self, now_at: float) -> None:
        """Drop what is over a day old, and more of the oldest where there is too much."""
        for key in sorted(self._counts, key=lambda key: key[1]):
            if self._size <= MOST_COUNTS and key[1] >= (now_at - KEPT_S) // BUCKET_S:
                break
            self._size -= len(self._counts.pop(key))

    def counts(self, tenant: str, window_s: float) -> Counter[int]:
        """Return the events of each item in the quarters that the window reaches into."""
        first = (self._clock() - window_s) // BUCKET_S
        total: Counter[int] = Counter()
        for (owner, quarter), counts in self._counts.items():
            if owner == tenant and quarter >= first:
                total.update(counts)
        return total


class Lookups:
    """Answers what is known, without a pass on the device. Event loop only."""

    def __init__(
        self,
        versions: Versions,
        histories: Histories,
        vectors: ServedVectors | None,
        filters: ItemFilters,
        recent: RecentItems,
        popular: Callable[[], I64],
    ) -> None:
        """Store the parts; `popular` returns the configured list of popular items."""
        self._versions = versions
        self._histories = histories
        self._vectors = vectors
        self._filters = filters
        self._recent = recent
        self._popular = popular
        self._searching = asyncio.Lock()  # one pass over all vectors at a time

    async def user(self, user: UserKey, num_events: int) -> KnownUser:
        """Return what is known of a user.

        Raises:
            NotFound: nothing is.
            StoreFailed: the history store failed.
        """
        events, first = Events.empty(), 0
        if self._histories.store is not None:
            stored = await self._histories.store.read(user, num_events)
            events, first = stored.events, stored.first_index
        elif (cached := self._histories.cache.last_known(user)) is not None:
            beyond = max(0, len(cached.events) - num_events)
            events, first = cached.events[beyond:], cached.first_index + beyond
        prefixes = []
        for model in self._versions.all():
            pool, dram = model.relay.tiers
            has_dram = dram is not None and dram.knows(user)
            is_coming = bool(model.relay.prefills.table.of(user))
            if pool.knows(user) or has_dram or is_coming:
                tier = "hbm" if pool.knows(user) else "dram" if has_dram else "on_its_way"
                prefixes.append(PrefixPlace(model.model.name, model.version, tier))
        in_vectors = self._vectors is not None and self._vectors.knows(user)
        if not (len(events) or first or prefixes or in_vectors):
            raise NotFound("user_id: this instance knows nothing of the user")
        return KnownUser(first + len(events), events, tuple(prefixes), in_vectors)

    def example_user(self) -> UserKey | None:
        """Return a user that the service knows, for the console; None if it knows none."""
        user = self._histories.cache.newest_user()
        if user is None and self._vectors is not None:
            user = next(iter(self._vectors.current.matcher.vectors.user_keys), None)
        return user

    async def similar(self, item: int, num_items: int, pairs: Sequence[str]) -> LookedUpItems:
        """Find the items most like another one, by the ranker's neighbours, else by the vectors.

        Args:
            item: External id.
            num_items: Most items to find.
            pairs: Attributes that the items must have, as `name:value`.

        Raises:
            NotFound: neither knows the item.
            Unprocessable: an attribute does not exist, or a value has another type.
        """
        columns = self._filters.snapshot().attributes if pairs else {}
        kinds = {name: column.dtype.kind for name, column in columns.items()}
        denied = await self._denied(_query(pairs, kinds), np.array([item]))
        if self._versions.rankers is not None:
            ranking = self._versions.ranker()
            rows = ranking.vocabulary.rows(np.array([item]))
            if ranking.blend_sum is not None and rows[0] != UNKNOWN:
                room = len(ranking.vocabulary)
                most = room if denied.allowed is not None else num_items + len(denied.ids)
                found = ranking.blend_sum.nearest(rows, most)
                if len(found):
                    ids = denied.left(ranking.vocabulary.ids_of(found))[:num_items]
                    return LookedUpItems("neighbours", ids, np.full(len(ids), np.nan, np.float32))
        if self._vectors is not None:
            async with self._searching:
                by_vector = await asyncio.to_thread(
                    _nearest, self._vectors.current, item, num_items, denied
                )
            if by_vector is not None:
                return by_vector
        raise NotFound("item_id: neither neighbours nor vectors know the item")

    async def trending(self, tenant: str, window_s: float, num_items: int) -> LookedUpItems:
        """Find the items with the most events in a window, else the popular ones."""
        denied = await self._denied({}, None)
        counted = self._recent.counts(tenant, window_s).most_common()
        if counted:
            ids, counts = map(np.array, zip(*counted, strict=True))
            is_left = ~denied.bans(ids)
            scores = counts[is_left][:num_items].astype(np.float32)
            return LookedUpItems("events", ids[is_left][:num_items], scores)
        ids = denied.left(self._popular())[:num_items]
        basis = "popular" if len(ids) else "nothing"
        return LookedUpItems(basis, ids, np.full(len(ids), np.nan, np.float32))

    async def _denied(self, attributes: Query, others: I64 | None) -> Denied:
        """Return what must not be found: withdrawn items, and those without the attributes."""
        parts = [] if others is None else [others]
        if self._versions.rankers is not None:
            parts.append(self._versions.ranker().items.withdrawn)
        if self._versions.generators is not None:
            parts.append(self._filters.snapshot().withdrawn_ids)
        passing = await self._filters.passing(None, None, attributes)
        return Denied(np.concatenate(parts) if parts else None, None, passing.allow)


def _nearest(
    version: MatchVersion, item: int, num_items: int, denied: Denied
) -> LookedUpItems | None:
    """Find the items with the largest cosine to an item; None if the vectors lack the item."""
    vectors = version.matcher.vectors
    rows = version.matcher.rows(np.array([item]))
    if not len(rows):
        return None
    wanted = vectors.items[rows[0]]
    lengths = np.linalg.norm(vectors.items, axis=1) * np.linalg.norm(wanted)
    scores = vectors.items @ wanted / np.maximum(lengths, np.finfo(np.float32).tiny)
    best = np.argsort(-scores, kind="stable")
    ids = vectors.item_ids[best]
    is_left = ~denied.bans(ids)
    return LookedUpItems(
        "vectors", ids[is_left][:num_items], scores[best][is_left][:num_items].astype(np.float32)
    )


def _query(pairs: Sequence[str], kinds: Mapping[str, str]) -> Query:
    """Read filters `name:value` of a URL; `kinds` has numpy's kind of each column.

    Raises:
        Unprocessable: a filter has no colon, or a value is not of the attribute's type.
    """
    query: dict[str, tuple[bool | int | float | str, ...]] = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        if not colon:
            raise Unprocessable("attribute: expected name:value")
        value: bool | int | float | str = text
        try:
            match kinds.get(name):
                case "b":
                    value = {"true": True, "false": False}[text.lower()]
                case "i":
                    value = int(text)
                case "f":
                    value = float(text)
                case _:
                    pass
        except (KeyError, ValueError):
            detail = f"attribute: the value of {quoted(name)} is of another type"
            raise Unprocessable(detail) from None
        query[name] = (*query.get(name, ()), value)
    return query
