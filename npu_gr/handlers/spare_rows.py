"""Which new items have the spare rows of a ranker's table, and which rows are free.

    free ──> in use ──> waiting for its readers ──> free

A content is an item with the inputs of its vector; an item whose features change is another
content, on another row. A row is in use as long as its content belongs to the served version of the
catalogue or to the one that a rollback serves, or while the vocabulary finds it: an item that has
left the catalogue keeps its row, for histories, until another item needs it.

The readers of a row are the passes of requests, prefills and self-checks that have looked it up.
Each of them has tokens, and tokens have the vocabulary that they were made with. So a row is free
when every vocabulary is gone that is older than the first one without the row. Cached keys and
values are no readers: what they have of a row was computed from it, and the fingerprint of a prefix
has a digest of the contents that it read.

Invariants, checked by tests/handlers/test_spare_rows.py:
  R1  each row is free, in use by one content, or waiting: exactly one of the three
  R2  only free rows are written, so what a reader has looked up stays until it ends
"""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Collection, Mapping

import numpy as np

from npu_gr.model.history_tokenizer import ItemVocabulary
from npu_gr.model.weight_stamps import WeightStamps

WAIT_S = 10.0  # longest wait of a change for readers; requests end within their budget
_POLL_S = 0.1

Content = tuple[int, int]
"""An item id, and a digest of the inputs of its vector."""


class SpareRows:
    """The spare rows of one version of the ranker. Event loop only.

    Places count from 0; place p is row p behind the trained items.
    """

    def __init__(self, vocabulary: ItemVocabulary, num_rows: int) -> None:
        """Begin with free rows.

        Args:
            vocabulary: Vocabulary of the training.
            num_rows: Number of spare rows.
        """
        self.vocabulary = vocabulary  # immutable; replaced by a new one
        self.num_rows = num_rows
        self.num_available = num_rows  # rows that neither this version nor a rollback needs
        self._free = list(range(num_rows))  # ascending
        self._place: dict[Content, int] = {}  # rows in use
        self._waiting: dict[int, int] = {}  # place -> number of the first vocabulary without it
        # item -> digest of the content that the vocabulary finds; the longest gone come first
        self._known: dict[int, int] = {}
        self._version = ""  # of the catalogue
        self._needed: frozenset[Content] = frozenset()  # contents of this version
        self._previous: frozenset[Content] = frozenset()  # contents of the version before
        self._older: list[weakref.ref[ItemVocabulary]] = []

    @property
    def num_known(self) -> int:
        """Number of new items that the vocabulary finds."""
        return len(self._known)

    @property
    def num_free(self) -> int:
        """Number of rows without content and readers."""
        self._collect()
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Number of rows that wait for their readers."""
        return len(self._waiting)

    def has(self, content: Content) -> bool:
        """Whether a row has the content."""
        return content in self._place

    def known(self, item: int) -> Content | None:
        """Return the content of an item that the vocabulary finds; None if it finds none."""
        digest = self._known.get(item)
        return None if digest is None else (item, digest)

    def room(self, wanted: Collection[Content]) -> int:
        """Count the rows that `reserve` can get for a version with these contents."""
        return self.num_rows - len(self._retained(wanted))

    def _retained(self, wanted: Collection[Content]) -> set[Content]:
        """Return the contents with a row that this version or the next one needs."""
        return {*self._needed, *(content for content in wanted if content in self._place)}

    async def reserve(self, count: int, wanted: Collection[Content]) -> list[int]:
        """Find free rows, and wait for their readers if necessary.

        If too few are free, items that have left the catalogue lose theirs.

        Args:
            count: Number of rows, at most `room`.
            wanted: Contents of the next version of the catalogue.

        Returns:
            Places of free rows, which stay free until `show`; fewer than `count` if readers do not
            end within `WAIT_S`.
        """
        self._collect()
        lacking = count - len(self._free) - len(self._waiting)
        if lacking > 0:
            retained = self._retained(wanted)
            order = {item: place for place, item in enumerate(self._known)}
            unused = [content for content in self._place if content not in retained]
            # those that the vocabulary does not find come first
            unused.sort(key=lambda c: order[c[0]] if self.known(c[0]) == c else -1)
            self._leave(unused[:lacking])
            self._renew({})
        began_at = time.monotonic()
        search_s = _POLL_S
        self._collect()
        while len(self._free) < count and time.monotonic() < began_at + WAIT_S:
            await asyncio.sleep(_POLL_S)
            # A request may have left its tokens in a cycle. A full collection stops every request,
            # so there are few: after .1, .2, .4, ... s.
            if time.monotonic() >= began_at + search_s:
                gc.collect()
                search_s *= 2
            self._collect()
        return self._free[:count]

    def show(self, version: str, needed: Collection[Content], new: Mapping[Content, int]) -> None:
        """Make the vocabulary find the contents of a version of the catalogue.

        Args:
            version: The version.
            needed: Its contents that have a row.
            new: Those of them that were written, with their places, results of `reserve`.
        """
        known = dict(self._known)
        taken = set(new.values())
        self._free = [place for place in self._free if place not in taken]
        self._place |= new
        if version != self._version:
            self._version, self._previous = version, self._needed
        self._needed = frozenset(needed)
        self._previous &= self._place.keys()
        for item, digest in needed:
            self._known.pop(item, None)  # to the end
            self._known[item] = digest
        retained = self._needed | self._previous
        unused = [c for c in self._place if c not in retained and self.known(c[0]) != c]
        self._leave(unused)
        if new or unused or known != self._known:
            self._renew(new)
        self.num_available = self.num_rows - len(retained)

    def _leave(self, contents: Collection[Content]) -> None:
        """Take contents from their rows, which wait for their readers from now on."""
        for content in contents:
            self._waiting[self._place.pop(content)] = self.vocabulary.number + 1
            if self.known(content[0]) == content:
                del self._known[content[0]]

    def _renew(self, new: Mapping[Content, int]) -> None:
        """Replace the vocabulary by one that finds what is known now."""
        old = self.vocabulary
        places = [self._place[content] for content in self._known.items()]
        length = max([len(old.new_ids), *(place + 1 for place in new.values())])
        ids, stamps = np.zeros((2, length), np.int64)
        ids[: len(old.new_ids)], stamps[: len(old.new_ids)] = old.new_ids, old.stamps
        for (item, digest), place in new.items():
            ids[place], stamps[place] = item, digest
        self._replace(old.with_new(ids, stamps, np.array(places, np.int64)))

    def stamp(self, weights: WeightStamps) -> None:
        """Let the vocabulary say which deltas have changed the weights."""
        self._replace(self.vocabulary.with_weights(weights))

    def _replace(self, vocabulary: ItemVocabulary) -> None:
        self._older.append(weakref.ref(self.vocabulary))
        self.vocabulary = vocabulary

    def _collect(self) -> None:
        """Free the rows whose readers have ended."""
        alive = [older for ref in self._older if (older := ref()) is not None]  # ascending
        self._older = [weakref.ref(older) for older in alive]
        oldest = alive[0].number if alive else self.vocabulary.number
        freed = [place for place, number in self._waiting.items() if number <= oldest]
        for place in freed:
            del self._waiting[place]
        if freed:
            self._free = sorted(self._free + freed)
