"""What the catalogue says about items: their attributes, and which of them a filter allows.

Generate, match and recommend read `allow_items`, `deny_items` and `attributes` the same way: an
item passes if it is in `allow_items` (or that is absent), has one of the values of each of the
`attributes`, and is not in `deny_items`. Attributes are those of the generator's catalogue, so an
item that it lacks has none. `generate` searches its catalogue with a mask; `match` and `recommend`
get a list of the items that pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.catalogue.filters import attribute_in
from npu_gr.catalogue.records import Column
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, Unprocessable
from npu_gr.core.item_rules import ItemRules, Selection
from npu_gr.core.names import item_ids
from npu_gr.core.text_format import quoted
from npu_gr.handlers.cascade_plan import each_once, is_in

if TYPE_CHECKING:  # check-config reads hooks without torch
    from npu_gr.catalogue.versions import Snapshot
    from npu_gr.handlers.served_catalogue import Query, ServedCatalogue

Mask = npt.NDArray[np.bool_]
NO_IDS: I64 = np.empty(0, np.int64)


class Passing(NamedTuple):
    """The items that pass a filter."""

    allow: I64 | None  # ids, ascending; None = all that are not denied
    deny: I64 | None


class ItemFilters:
    """Attributes and filters by the current catalogue. Event loop only."""

    def __init__(
        self,
        catalogue: Callable[[], ServedCatalogue | None],
        ids_of: Callable[[Sequence[str | int]], I64] = item_ids,
    ) -> None:
        """Store functions.

        Args:
            catalogue: Returns the catalogue of the current generator, if there is one.
            ids_of: Returns the ids of names in rules.
        """
        self._catalogue = catalogue
        self.ids_of = ids_of
        # of the configured rules, which cost a pass over the catalogue
        self._ruled: tuple[str, Selection, I64] | None = None
        self._withdrawn = "", NO_IDS  # of a version of the catalogue

    def snapshot(self) -> Snapshot:
        """Return the current version of the catalogue.

        Raises:
            Unprocessable: there is none.
        """
        if (catalogue := self._catalogue()) is None:
            raise Unprocessable(
                "attributes: this instance has no catalogue (section generate), so its items have "
                "no attributes"
            )
        with catalogue.pin() as (snapshot, _):
            return snapshot

    def withdrawn(self) -> I64:
        """Return the ids of withdrawn items, ascending; none without a catalogue."""
        if (catalogue := self._catalogue()) is None:
            return NO_IDS
        with catalogue.pin() as (snapshot, _):
            if self._withdrawn[0] != snapshot.version:
                self._withdrawn = snapshot.version, snapshot.withdrawn_ids
        return self._withdrawn[1]

    async def passing(
        self,
        allow: I64 | None,
        deny: I64 | None,
        attributes: Query,
        rules: ItemRules | None = None,
    ) -> Passing:
        """Combine the filter of a request with the rules that deny and allow items.

        Args:
            allow, deny, attributes: Fields of the request.
            rules: Configured rules.

        Raises:
            Unprocessable: an attribute does not exist, or a value has another type.
        """
        if attributes:
            queried = await asyncio.to_thread(_having, self.snapshot(), attributes)
            allow = queried if allow is None else queried[is_in(queried, each_once(allow))]
        if rules is not None and not rules.allow.is_empty:
            ruled = await self._selected(rules.allow)
            allow = ruled if allow is None else ruled[is_in(ruled, each_once(allow))]
        if rules is not None and not rules.deny.is_empty:
            denied = await self._selected(rules.deny)
            deny = denied if deny is None else np.concatenate([denied, deny])
        return Passing(None if allow is None else each_once(allow), deny)

    async def _selected(self, selection: Selection) -> I64:
        """Return the ids that a configured rule selects, ascending."""
        named = self.ids_of(selection.items) if selection.items else NO_IDS
        if not selection.attributes:
            return each_once(named)
        snapshot = self.snapshot()
        known = self._ruled
        if known is None or known[:2] != (snapshot.version, selection):
            # a version of the catalogue that lost the attribute has no such items
            there = {n: v for n, v in selection.attributes.items() if n in snapshot.attributes}
            having = NO_IDS
            if len(there) == len(selection.attributes):
                having = await asyncio.to_thread(_having, snapshot, there)
            known = self._ruled = snapshot.version, selection, having
        return each_once(np.concatenate([named, known[2]]))

    def columns(self, names: Iterable[str], ids: I64) -> dict[str, tuple[Column, Mask]]:
        """Return attributes of items: name -> values [n], and which of them are known [n].

        Raises:
            Unprocessable: there is no such attribute.
        """
        if not (wanted := list(names)):
            return {}  # without a catalogue, too
        found: dict[str, tuple[Column, Mask]] = {}
        snapshot = self.snapshot()
        places = snapshot.trie.places(ids)
        is_known = places >= 0
        for name in wanted:
            if name not in snapshot.attributes:
                there = ", ".join(snapshot.attributes) or "none"
                raise Unprocessable(f"rules: no attribute {quoted(name)}; there are {there}")
            found[name] = snapshot.attributes[name][places], is_known
        return found

    def check(self, rules: ItemRules) -> None:
        """Check the attributes and names of configured rules.

        Raises:
            ConfigError: an attribute does not exist, a value has another type, or a name is
                invalid; the message names the key.
        """
        selected: list[tuple[str, Selection]] = [("deny", rules.deny), ("allow", rules.allow)]
        selected += [(f"boost[{place}]", one) for place, one in enumerate(rules.boost)]
        selected += [("pin", Selection(items=tuple(one.item for one in rules.pin)))]
        selected += [("diversity", Selection(attributes={d.by: ()})) for d in rules.diversity]
        for key, selection in selected:
            try:
                self.ids_of(selection.items)
                for name, values in selection.attributes.items():
                    attribute_in(self.snapshot().attributes, name, values)
            except (Unprocessable, ValueError) as error:
                raise ConfigError(f"recommend.rules.{key}: {error}") from error


def _having(snapshot: Snapshot, query: Query) -> I64:
    """Return the ids of the items with the attributes, ascending; withdrawn ones are left out."""
    trie = snapshot.trie
    mask = np.ones(trie.num_items, np.bool_)
    for name, values in query.items():
        mask &= attribute_in(snapshot.attributes, name, values)
    if snapshot.available is not None:
        mask &= snapshot.available.allowed
    places = trie.by_id[mask[trie.by_id]]
    ids: I64 = trie.leaf_item[places]
    return ids
