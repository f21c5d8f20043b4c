"""The items that a ranker scores: trained ones, and new ones of the current catalogue.

    next version of the catalogue -> new items -> embeddings of features and codes -> spare rows of
    the table -> vocabulary, retrieval and catalogue change in one step of the event loop

A pass never sees a partial row: a row is written before it is referenced. An item that was
withdrawn and returns with other codes or features gets another row, and the old one is hidden, and
free when nothing can read it any more (`spare_rows.py`).

The embeddings of semantic-ID codes are those of the training, so codes are used only while the
catalogue has the same codes for the trained items.

`CoverageRule` measures the share of each source's items that the ranker knows. Unknown items have
no score. A few are new items; many mean that ranker and source were made from different data.

    start                                 rejected below `recommend.min_coverage`
    reload of models, catalogue, vectors  rejected below it, if coverage decreases
    added and withdrawn items, rollback   measured, never rejected
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.catalogue.records import Features
from npu_gr.catalogue.trie import I32
from npu_gr.catalogue.versions import Snapshot
from npu_gr.core.arrays import I64
from npu_gr.core.errors import CatalogueError, ConfigError, Unavailable
from npu_gr.core.feature_schema.encode import Encoded, FeatureEncoder
from npu_gr.core.feature_schema.values import name_of, plain_name
from npu_gr.core.text_format import quoted
from npu_gr.engine.queue import JobOrder
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.handlers.cascade_plan import POPULAR, RecommendConfig
from npu_gr.handlers.spare_rows import Content, SpareRows
from npu_gr.model.feature_rows import NewItems
from npu_gr.model.history_tokenizer import UNKNOWN, ItemVocabulary

log = logging.getLogger(__name__)

SAMPLED_ITEMS = 1000  # trained items whose codes are compared with the catalogue's
LEAST_EQUAL = 0.9  # minimum share of them with the codes of the training

Commit = Callable[[], None]
"""Publishes what was prepared; it neither fails nor waits."""

Follow = Callable[[Snapshot, bool], Awaitable[Commit]]
"""Prepares for a version of the catalogue, as `ScoredItems.follow` (snapshot, is_strict)."""


async def no_follower(_: Snapshot, __: bool) -> Commit:
    """Prepare nothing."""
    return lambda: None


class _Plan(NamedTuple):
    """The changes of the ranker's table for a version of the catalogue."""

    contents: list[Content]  # [n] of new items, in the order in which they get rows
    items: NewItems  # [n] inputs of their rows
    lacking: I64  # [m] places of those without a row
    num_untrained: int  # new items of the version, at least n
    withdrawn: I64  # ids to exclude from retrieval, ascending


class ScoredItems:
    """The items that one version of the ranker scores. Event loop only."""

    def __init__(self, engine: RankEngine, vocabulary: ItemVocabulary) -> None:
        """Begin with the trained items.

        Args:
            engine: Engine of the ranker; its frozen table may have spare rows.
            vocabulary: Vocabulary of the training.
        """
        self._engine = engine
        self._config = engine.model.config
        self.spare = SpareRows(vocabulary, engine.model.items.num_rows - len(vocabulary))
        self.withdrawn: I64 = np.empty(0, np.int64)  # ids that a cascade must not return, ascending
        # rows to exclude from retrieval: theirs, and those that the vocabulary does not find
        self.hidden: I64 = self.withdrawn
        self.num_unscored = 0  # items of the catalogue without a row
        self._num_untrained = 0  # items of the catalogue that are not trained
        self._value_ids = [
            {plain_name(value): place for place, value in reversed([*enumerate(f.values)])}
            for f in self._config.item_features
        ]
        num_items = len(vocabulary.ids)
        sample = np.random.default_rng(0).choice(
            num_items, min(num_items, SAMPLED_ITEMS), replace=False, shuffle=False
        )
        self._sampled_ids = vocabulary.ids_of(sample)
        self._sampled_codes = (
            engine.model.codes.of_item[sample].cpu().numpy() if self._config.item_codes else None
        )

    @property
    def vocabulary(self) -> ItemVocabulary:
        """The current mapping of external item ids and rows."""
        return self.spare.vocabulary

    async def follow(self, snapshot: Snapshot, is_strict: bool) -> Commit:
        """Write rows for the new items of a version of the catalogue.

        Args:
            snapshot: The version to be published.
            is_strict: Raise if rows are too few or a feature is unknown; else the first items get
                the free rows, and unknown features are ignored.

        Returns:
            Function to call when the version is published; if it is not called, the next version
            overwrites the rows.

        Raises:
            CatalogueError: too few rows are free, or a feature is unknown; nothing was changed.
            Unavailable: requests still read the rows that it needs.
            DeviceError: the rows could not be written; nothing was changed.
        """
        plan = await asyncio.to_thread(self._plan, snapshot, self.vocabulary, is_strict)
        room = self.spare.room(plan.contents)
        count = min(len(plan.lacking), room)
        num_left = plan.num_untrained - len(plan.contents) + len(plan.lacking) - count
        is_more = plan.num_untrained > self._num_untrained
        if is_strict and num_left and is_more and self._config.scores_new_items:
            raise CatalogueError(
                f"{num_left + room} items need new rows of the ranker, but only {room} of "
                "service.spare_items are free; serve a ranker that was trained with these items, "
                "or increase service.spare_items and restart"
            )
        places = await self.spare.reserve(count, plan.contents)
        if is_strict and len(places) < count:
            raise Unavailable(
                "requests still read the rows of items that left the catalogue; repeat the change"
            )
        written = plan.lacking[: len(places)]
        if places:
            rows = np.array(places) + len(self.vocabulary.ids)
            await self._engine.scheduler.call(
                lambda: self._engine.weights.write_items(rows, plan.items.take(written)),
                float("inf"),
                order=JobOrder(0.0),
            )
        new = {plan.contents[at]: place for at, place in zip(written.tolist(), places, strict=True)}
        return lambda: self._show(snapshot.version, plan, new)

    def _show(self, version: str, plan: _Plan, new: dict[Content, int]) -> None:
        needed = [
            content if content in new or self.spare.has(content) else self.spare.known(content[0])
            for content in plan.contents
        ]
        self.spare.show(version, [content for content in needed if content is not None], new)
        self._num_untrained = plan.num_untrained
        num_lacking = len(plan.lacking) - len(new)
        self.num_unscored = plan.num_untrained - len(plan.contents) + num_lacking
        if self.num_unscored:
            why = (
                "no spare row is free (service.spare_items)"
                if self._config.scores_new_items
                else "it was trained without row dropout"
            )
            log.warning(
                "the ranker cannot score %d items of the catalogue, because %s",
                *(self.num_unscored, why),
            )
        self.withdrawn = plan.withdrawn
        made = self.vocabulary
        rows = made.rows(plan.withdrawn)
        every = np.arange(len(made.ids), len(made))
        out_of_use = every[made.rows(made.new_ids) != every]
        self.hidden = np.union1d(rows[rows != UNKNOWN], out_of_use)
        # last, since a device thread that finds a row looks it up in the vocabulary
        self._engine.num_rows = len(made)

    def _plan(self, snapshot: Snapshot, vocabulary: ItemVocabulary, is_strict: bool) -> _Plan:
        offered = snapshot.item_ids
        untrained = offered[vocabulary.trained_rows(offered) == UNKNOWN]
        gone = vocabulary.new_ids[~np.isin(vocabulary.new_ids, untrained)]
        withdrawn = np.union1d(snapshot.withdrawn_ids, gone)
        if not self._config.scores_new_items:
            return _Plan([], _NO_ITEMS, untrained[:0], len(untrained), withdrawn)
        has_row = vocabulary.rows(untrained) != UNKNOWN
        fresh = untrained[~has_row]
        most = self.spare.num_rows - int(np.count_nonzero(has_row))
        ids = np.concatenate([untrained[has_row], fresh[:most]])
        codes = self._codes(snapshot, ids)
        features = self._features(ids, snapshot.features, is_strict)
        values = self._values(ids, snapshot.features, is_strict)
        columns: list[npt.NDArray[Any]] = [codes, *features, *(() if values is None else values)]
        contents = [
            (item, _digest(b"".join(column[place].tobytes() for column in columns)))
            for place, item in enumerate(ids.tolist())
        ]
        lacking = np.flatnonzero([not self.spare.has(content) for content in contents])
        items = NewItems(tuple(features), codes, values)
        return _Plan(contents, items, lacking, len(untrained), withdrawn)

    def _codes(self, snapshot: Snapshot, items: I64) -> I32:
        """Return the codes of new items; none if the catalogue's differ from the ranker's."""
        none = np.tile(np.array(self._config.item_codes, np.int32), (len(items), 1))
        if self._sampled_codes is None or not len(items):
            return none
        trie = snapshot.trie
        if trie.num_levels != len(self._config.item_codes):
            log.warning(
                "new items are scored only by features: the catalogue's semantic IDs have %d "
                "codes, the ranker's %d",
                *(trie.num_levels, len(self._config.item_codes)),
            )
            return none
        leaves = trie.find(self._sampled_ids)
        there = leaves >= 0
        same = (trie.sid_of(leaves[there]) == self._sampled_codes[there]).all(1)
        if not len(same) or same.mean() < LEAST_EQUAL:
            log.warning(
                "new items are scored only by features: only %d of %d trained items have the codes "
                "of the training",
                *(int(same.sum()), len(same)),
            )
            return none
        # a code without a trained item counts as missing
        return np.minimum(trie.sid_of(trie.find(items)), none)

    def _features(self, items: I64, given: Mapping[int, Features], is_strict: bool) -> list[I64]:
        """Convert features to value ids, [n, max_values] each; unknown values are missing."""
        found = []
        for f, ids in zip(self._config.item_features, self._value_ids, strict=True):
            table = np.full((len(items), f.max_values), f.num_values)
            for row, item in enumerate(items.tolist()):
                values = given.get(item, {}).get(f.name, [])
                values = values if isinstance(values, list) else [values]
                if is_strict and len(values) > f.max_values:
                    raise CatalogueError(
                        f"item {item}: feature {quoted(f.name)}: {len(values)} values, the limit "
                        f"is {f.max_values}"
                    )
                names = (name_of(value, f.values) for value in values)
                known = [*dict.fromkeys(ids[name] for name in names if name in ids)][: f.max_values]
                table[row, : len(known)] = known
            found.append(table)
        return found

    def _values(self, items: I64, given: Mapping[int, Features], is_strict: bool) -> Encoded | None:
        """Encode the schema's features of items; None if the ranker has none.

        Raises:
            CatalogueError: a feature is unknown, or a value is invalid; only if `is_strict`.
        """
        schema = {f.name for f in self._config.features_of("item")}
        others = {f.name for f in self._config.item_features}
        if is_strict:
            for item in items.tolist():
                if unknown := given.get(item, {}).keys() - schema - others:
                    names = ", ".join(sorted(schema | others)) or "none"
                    raise CatalogueError(
                        f"item {item}: unknown feature {quoted(min(unknown))}; the ranker has "
                        f"{names}"
                    )
        if not schema:
            return None
        encoder = FeatureEncoder(self._config.features_of("item"))
        rows = []
        for item in items.tolist():
            own = {name: [value] for name, value in given.get(item, {}).items() if name in schema}
            try:
                rows.append(encoder.encode(own, 1))
            except ValueError as error:
                if is_strict:
                    raise CatalogueError(f"item {item}: feature {error}") from error
                log.warning(
                    "item %d is scored without features, because one is invalid: %s", item, error
                )
                rows.append(encoder.encode({}, 1))
        empty = encoder.encode({}, 0)
        return Encoded(*(np.concatenate(parts) for parts in zip(empty, *rows, strict=True)))


_NO_ITEMS = NewItems((), np.empty((0, 0), np.int32))


def _digest(inputs: bytes) -> int:
    """Hash the inputs of a row to a signed 64-bit integer."""
    return int.from_bytes(xxhash.xxh3_64_digest(inputs), "little", signed=True)


class Coverage(NamedTuple):
    """The number of a source's items that the ranker knows."""

    num_known: int
    num_items: int

    @property
    def ratio(self) -> float:
        """Share of known items; 1 without items."""
        return self.num_known / self.num_items if self.num_items else 1.0

    @classmethod
    def of(cls, vocabulary: ItemVocabulary, item_ids: I64) -> Coverage:
        """Count the items, [n] external ids, that a ranker was trained with, without new ones."""
        return cls(
            int(np.count_nonzero(vocabulary.trained_rows(item_ids) != UNKNOWN)), len(item_ids)
        )


Items = Callable[[], I64]
"""Returns external ids [n]. Called in a thread, since ten million take a second."""

Before = Callable[[Items], Awaitable[None]]
"""Awaited with the items of a source's new version before it is published; an error prevents it."""


async def accept_any(_: Items) -> None:
    """Accept all items."""


Measured = Mapping[str, Coverage]
"""Source -> coverage."""


class CoverageRule:
    """The coverage of each source, and its minimum. Event loop only.

    Hold `changing` from `check` or `measure` to `accept`, so that changes are serialised.
    """

    def __init__(
        self,
        config: RecommendConfig | None,
        vocabulary: Callable[[], ItemVocabulary],
        items: Mapping[str, Items],
        on_measured: Callable[[str, float], None],
    ) -> None:
        """Store the parts.

        Args:
            config: Sources, which have the minimum, and the minimum; None = there is no cascade.
            vocabulary: Returns the vocabulary of the current ranker.
            items: Each source that can be configured, and the popular items -> the current items.
            on_measured: Callback with a source and its coverage; NaN = it is no source any more.
        """
        self._config = config
        self._vocabulary = vocabulary
        self._items = dict(items)
        self._on_measured = on_measured
        self._now: dict[str, Coverage] = {}
        self.changing = asyncio.Lock()

    async def start(self) -> None:
        """Check all sources at start, and log those with unknown items.

        Raises:
            ConfigError: the coverage of a source is too low.
        """
        async with self.changing:
            measured = await self.check()
            self.accept(measured)
        for name, (num_known, num_items) in measured.items():
            if num_known < num_items:
                log.warning(
                    "recommend: the ranker knows %d of the %d items of %s",
                    num_known,
                    num_items,
                    name,
                )

    async def check(
        self,
        vocabulary: ItemVocabulary | None = None,
        items: Mapping[str, Items] | None = None,
        config: RecommendConfig | None = None,
    ) -> Measured:
        """Measure the coverage after a replacement of the ranker, of sources or of the section.

        Args:
            vocabulary: Vocabulary of the new ranker; None for the current one.
            items: Items of new versions of sources.
            config: The new section; None for the current one.

        Raises:
            ConfigError: the coverage of a source would be too low, and lower than now.
        """
        measured = await self.measure(vocabulary, items, config)
        limits = config or self._config
        for name, new in measured.items():
            now = self._now.get(name)
            is_worse = now is None or new.ratio < now.ratio
            is_limited = limits is not None and name in limits.sources
            if limits is not None and is_limited and new.ratio < limits.min_coverage and is_worse:
                raise ConfigError(
                    f"recommend: the ranker knows {new.num_known} of the {new.num_items} items of "
                    f"{name} ({int(100 * new.ratio)} %); recommend.min_coverage is "
                    f"{limits.min_coverage:g}"
                )
        return measured

    async def measure(
        self,
        vocabulary: ItemVocabulary | None = None,
        items: Mapping[str, Items] | None = None,
        config: RecommendConfig | None = None,
    ) -> Measured:
        """Measure as `check` does, without the minimum.

        A new ranker or section affects all sources, a new version of a source only that source.
        """
        new = items or {}
        if (used := config or self._config) is None:
            return {}
        names = {*used.sources} if used.popular is None else {*used.sources, POPULAR}
        only = self._items if config or vocabulary or not new else new
        listed = {
            name: new.get(name, items)
            for name, items in self._items.items()
            if name in names and name in only
        }
        if not listed:
            return {}
        known = self._vocabulary() if vocabulary is None else vocabulary
        return await asyncio.to_thread(
            lambda: {name: Coverage.of(known, items()) for name, items in listed.items()}
        )

    def accept(self, measured: Measured, config: RecommendConfig | None = None) -> None:
        """Record a measurement as the current coverage, and a new section as the current one."""
        if config is not None:
            self._config = config
            for name in self._now.keys() - measured.keys():
                del self._now[name]
                self._on_measured(name, math.nan)
        self._now.update(measured)
        for name, coverage in measured.items():
            self._on_measured(name, coverage.ratio)

    @asynccontextmanager
    async def replacing(self, source: str, *, is_limited: bool = True) -> AsyncIterator[Before]:
        """Replace a source in the block; yields a check for the new items, which must be awaited.

        Args:
            source: Name of the source; ignored if the cascade does not use it.
            is_limited: Whether the check enforces the minimum.
        """
        measured: Measured = {}

        async def before(items: Items) -> None:
            nonlocal measured
            measured = await (self.check if is_limited else self.measure)(items={source: items})

        async with self.changing:
            yield before
            self.accept(measured)

    def now(self, source: str) -> Coverage:
        """Return the current coverage of a source."""
        return self._now[source]
