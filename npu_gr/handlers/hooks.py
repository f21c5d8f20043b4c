"""Hooks of a recommend: functions of the operator, before and after the rank."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import Events, UserKey
from npu_gr.core.lifetime import deadline
from npu_gr.handlers.cascade_plan import Shown, interleave
from npu_gr.handlers.item_filters import ItemFilters


class RankedItems:
    """The ranked candidates that `hook_after` gets, best first. n = candidates."""

    def __init__(
        self,
        shown: Shown,
        names: Callable[[I64], Sequence[str | int]],
        titles: Callable[[I64], Sequence[str | None]],
        filters: ItemFilters,
    ) -> None:
        """Store the items; names, titles and attributes are looked up when they are used."""
        self.ids = shown.items.copy()  # int64 [n]; the hook returns some of them, in its order
        self.scores = shown.scores.copy()  # float32 [n]; NaN = not ranked
        self._names = names
        self._titles = titles
        self._filters = filters

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def names(self) -> Sequence[str | int]:
        """The name of each item."""
        return self._names(self.ids)

    @property
    def titles(self) -> Sequence[str | None]:
        """The title of each item, None if it has none."""
        return self._titles(self.ids)

    def attribute(self, name: str) -> list[bool | int | float | str | None]:
        """Return an attribute of each item; None for an item that the catalogue lacks.

        Raises:
            Unprocessable: there is no such attribute.
        """
        column, is_known = self._filters.columns([name], self.ids)[name]
        pairs = zip(column.tolist(), is_known.tolist(), strict=True)
        return [value if known else None for value, known in pairs]


def reordered(shown: Shown, ids: I64) -> Shown:
    """Return the items that `hook_after` returned; one that was no candidate has no score."""
    ascending = np.argsort(shown.items)
    place = np.searchsorted(shown.items, ids, sorter=ascending).clip(max=len(shown.items) - 1)
    if not len(shown.items):
        return Shown(ids, np.full(len(ids), np.nan, np.float32))
    found = ascending[place]
    scores = np.where(shown.items[found] == ids, shown.scores[found], np.float32(np.nan))
    return Shown(ids, scores.astype(np.float32))


class HookContext(NamedTuple):
    """The second argument of a hook."""

    user: UserKey
    history: Events
    context: Mapping[str, bool | int | float | str]  # of the request
    timestamp: int  # unix seconds when the items are shown


Hook = Callable[[I64, HookContext], Any]
"""`hook(items, context)` gets the candidates, int64 [n], best first, and returns the items to rank.

An `async def` runs on the event loop, a `def` in a thread. An exception degrades the answer.
"""


HookAfter = Callable[[Any, HookContext], Any]
"""`hook_after(items, context)` gets all ranked candidates, `RankedItems` of `rules.py`.

It returns the ids to show, best first, and may leave items out and add others; the rules and the
number of items of the request apply to what it returns. It runs and fails as `Hook` does.
"""


def load_hook(key: str, name: str | None) -> Hook | None:
    """Import the function `package.module:function` of a setting; None if it is not set.

    Raises:
        ConfigError: the function does not exist, or does not take two arguments.
    """
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
        inspect.signature(hook).bind("items", "context")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"recommend.{key}: {name!r}: {error}") from error
    found: Hook = hook
    return found


def as_items(returned: object) -> I64:
    """Convert the result of a hook to item ids, int64 [n].

    Raises:
        TypeError: it is not a row of integers.
    """
    items = np.asarray(returned)
    if items.ndim != 1 or (len(items) and items.dtype.kind not in "iu"):
        raise TypeError(f"expected a row of item ids, got {type(returned).__name__}")
    return items.astype(np.int64)


async def call_hook(
    hook: Callable[[Any, HookContext], Any],
    given: object,
    context: HookContext,
    budget_s: float,
    threads: ThreadPoolExecutor,
) -> I64:
    """Call a hook within its time, and return its items without repeats.

    Raises:
        DeadlineExceeded: it takes longer; a thread goes on, and its result is dropped.
        Exception: whatever the hook raises.
    """
    async with deadline(budget_s):
        if inspect.iscoroutinefunction(hook):
            returned = await hook(given, context)
        else:
            loop = asyncio.get_running_loop()
            returned = await loop.run_in_executor(threads, hook, given, context)
    return interleave([as_items(returned)])[0]
