"""Business rules of the operator, between retrieval and rank: a Python function that the configuration names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import Events, UserKey


class HookContext(NamedTuple):
    """What a hook gets beside the items."""

    user: UserKey
    history: Events
    context: Mapping[str, bool | int | float | str]  # of the request
    timestamp: int  # unix seconds at which the items are shown


Hook = Callable[[I64, HookContext], Any]
"""`hook(items, context)` gets the candidates, int64 [n], best first, and returns the items to rank: fewer, in another
order, or others. An `async def` runs on the event loop, a `def` in a thread. An exception degrades the answer."""


def load_hook(name: str) -> Hook:
    """Import the function that `package.module:function` names.

    Raises:
        ConfigError: there is no such function, or it does not take two arguments.
    """
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
        inspect.signature(hook).bind("items", "context")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"recommend.hook: {name!r}: {error}") from error
    found: Hook = hook
    return found


def as_items(returned: object) -> I64:
    """Read what a hook returned as item ids, int64 [n].

    Raises:
        TypeError: it is no row of integers.
    """
    items = np.asarray(returned)
    if items.ndim != 1 or (len(items) and items.dtype.kind not in "iu"):
        raise TypeError(f"needs a row of item ids, got {type(returned).__name__}")
    return items.astype(np.int64)
