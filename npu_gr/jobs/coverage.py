"""How many of the items that a cascade retrieves its ranker knows. Too few, and what was to come into service does not.

An item that the ranker does not know has no score. A few are new ones; many mean that ranker and source were made from
other data, which nothing else would show.

    start                                 refused below `recommend.min_coverage`
    reload of models, catalogue, vectors  refused below it, if the ranker knows more of the source now
    items that come and go, rollback      measured, and never refused
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.model.history_tokens import UNKNOWN, ItemVocabulary

log = logging.getLogger(__name__)


class Coverage(NamedTuple):
    """How many items of a source the ranker knows."""

    num_known: int
    num_items: int

    @property
    def ratio(self) -> float:
        """The share that it knows; of no items it knows all."""
        return self.num_known / self.num_items if self.num_items else 1.0

    @classmethod
    def of(cls, vocabulary: ItemVocabulary, item_ids: I64) -> Coverage:
        """Count the items, [n] external ids, that a ranker was trained with; new ones tell nothing of its data."""
        return cls(int(np.count_nonzero(vocabulary.trained_rows(item_ids) != UNKNOWN)), len(item_ids))


Items = Callable[[], I64]
"""Lists external ids, [n]. Called in a thread: ten million take a second."""

Before = Callable[[Items], Awaitable[None]]
"""Awaited with the items of a source's new version before it comes into service; if it raises, the version does not."""


async def anything(_: Items) -> None:
    """Raise nothing."""


Measured = Mapping[str, Coverage]
"""By source."""


class CoverageRule:
    """The coverage of each source, and the limit under it. Event loop only.

    Hold `changing` from `check` or `measure` to `accept`, so that ranker and sources change one after the other.
    """

    def __init__(
        self,
        min_ratio: float,
        vocabulary: Callable[[], ItemVocabulary],
        items: Mapping[str, Items],
        limited: Collection[str],
        on_measured: Callable[[str, float], None],
    ) -> None:
        """Measure nothing yet.

        Args:
            min_ratio: `recommend.min_coverage`.
            vocabulary: of the ranker in service.
            items: source -> what it may find now.
            limited: the sources that the limit is for; the others are measured alone.
            on_measured: told each source and its ratio.
        """
        self._min_ratio = min_ratio
        self._vocabulary = vocabulary
        self._items = dict(items)
        self._limited = tuple(limited)
        self._on_measured = on_measured
        self._now: dict[str, Coverage] = {}
        self.changing = asyncio.Lock()

    async def start(self) -> None:
        """Measure what is to come into service, and log what the ranker does not know.

        Raises:
            ConfigError: the ranker knows too few items of a source.
        """
        async with self.changing:
            measured = await self.check()
            self.accept(measured)
        for name, (num_known, num_items) in measured.items():
            if num_known < num_items:
                log.warning("recommend: the ranker knows %d of the %d items of %s", num_known, num_items, name)

    async def check(
        self, vocabulary: ItemVocabulary | None = None, items: Mapping[str, Items] | None = None
    ) -> Measured:
        """Measure what would be if a ranker or a source were replaced.

        Args:
            vocabulary: of the new ranker; None = the one in service.
            items: of each source that is new.

        Raises:
            ConfigError: the ranker would know too few items of a source, and fewer than it knows now.
        """
        measured = await self.measure(vocabulary, items)
        for name, new in measured.items():
            now = self._now.get(name)
            is_worse = now is None or new.ratio < now.ratio
            if name in self._limited and new.ratio < self._min_ratio and is_worse:
                raise ConfigError(
                    f"recommend: the ranker knows {new.num_known} of the {new.num_items} items of {name} "
                    f"({int(100 * new.ratio)} %); recommend.min_coverage is {self._min_ratio:g}"
                )
        return measured

    async def measure(
        self, vocabulary: ItemVocabulary | None = None, items: Mapping[str, Items] | None = None
    ) -> Measured:
        """Measure as `check` does, without a limit. A new ranker concerns every source, a new source itself alone."""
        new = items or {}
        names = new if new and vocabulary is None else self._items
        listed = {name: new.get(name, self._items[name]) for name in names if name in self._items}
        if not listed:
            return {}
        known = self._vocabulary() if vocabulary is None else vocabulary
        return await asyncio.to_thread(lambda: {name: Coverage.of(known, items()) for name, items in listed.items()})

    def accept(self, measured: Measured) -> None:
        """Take what was measured for what is in service."""
        self._now.update(measured)
        for name, coverage in measured.items():
            self._on_measured(name, coverage.ratio)

    @asynccontextmanager
    async def replacing(self, source: str, *, is_limited: bool = True) -> AsyncIterator[Before]:
        """Replace a source in the block, which awaits what it gets with the new items. That raises as `check` does.

        Args:
            source: its name; one that the cascade does not ask is not measured.
            is_limited: False = only measure.
        """
        measured: Measured = {}

        async def before(items: Items) -> None:
            nonlocal measured
            measured = await (self.check if is_limited else self.measure)(items={source: items})

        async with self.changing:
            yield before
            self.accept(measured)

    def now(self, source: str) -> Coverage:
        """Return what was accepted last."""
        return self._now[source]
