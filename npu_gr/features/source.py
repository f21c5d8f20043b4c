"""`FeatureSource`: what says the features of a user that a request does not bring. A feature store, or any function."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import msgspec

from npu_gr.core.errors import ConfigError, StoreFailed, StoreFault
from npu_gr.core.history import UserKey
from npu_gr.core.settings import Count, Seconds, SecondsOrZero

FEAST = "feast"

Option = bool | int | float | str | list[str] | dict[str, str]


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the features of users come from that requests do not bring."""

    entry: str  # feast, or package.module:name of a function or a class
    options: dict[str, Option] = {}  # keyword arguments: of the class, of feast, of each call of the function
    timeout_s: Seconds = 0.01  # of one call, the wait for its place included
    max_calls: Count = 32  # at once; as many threads where the source is no coroutine
    max_queue: Count = 1024  # that wait for their turn; the next one fails at once
    max_failures: Count = 5  # in a row; then calls fail at once, but for one every `retry_s`
    retry_s: Seconds = 0.05
    fresh_s: SecondsOrZero = 30.0  # so long a user's features serve his requests; a signal's serve the rank after it
    stale_s: SecondsOrZero = 3600.0  # so old ones still stand in where the source fails; 0 = none do
    max_users: Count = 100_000  # whose features are remembered


class FeatureSource(Protocol):
    """Says features of users. A source that fails raises whatever it likes."""

    async def fetch(self, user: UserKey, names: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
        """Fetch the features of one user.

        Args:
            user: tenant and user, as requests name them.
            names: of the features that the model reads.
            timeout_s: after which nobody waits for the answer.

        Returns:
            Name -> a value as a request would bring it, or several. None, NaN and what is not there are missing; names
            that were not asked for are passed over.
        """
        ...


def open_source(config: SourceConfig) -> FeatureSource:
    """Make the source that the configuration names.

    Raises:
        ConfigError: there is none of that name, or it does not take what it would be called with.
    """
    at = "features.source"
    if config.entry == FEAST:
        from npu_gr.features.feast_source import FeastSource

        entry: Any = FeastSource
    else:
        module, _, name = config.entry.partition(":")
        try:
            entry = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{at}.entry: {config.entry!r}: {error}") from error
    try:
        made: Any = entry(**config.options) if inspect.isclass(entry) else None
        fetch = partial(entry, **config.options) if made is None else made.fetch
        inspect.signature(fetch).bind(UserKey("", ""), (), config.timeout_s)
    except ConfigError:
        raise
    except Exception as error:  # theirs may raise anything
        raise ConfigError(f"{at}: {config.entry!r}: {type(error).__name__}: {error}") from error
    whole = fetch.func if isinstance(fetch, partial) else fetch
    return AsyncSource(fetch) if inspect.iscoroutinefunction(whole) else ThreadedSource(fetch, config.max_calls)


class AsyncSource:
    """A coroutine function as a source. A call that nobody waits for any more is cancelled."""

    def __init__(self, fetch: Callable[..., Awaitable[Mapping[str, Any]]]) -> None:
        self._fetch = fetch

    async def fetch(self, user: UserKey, names: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fetch(user, names, timeout_s)
        except TimeoutError as error:
            raise StoreFailed(f"the feature source was not done within {timeout_s} s", StoreFault.SLOW) from error


class ThreadedSource:
    """A function that blocks as a source: each call has a thread, and one that hangs does not hold the process up."""

    def __init__(self, fetch: Callable[..., Mapping[str, Any]], max_threads: int) -> None:
        """Start no thread yet.

        Args:
            fetch: is called by several threads at once.
            max_threads: of them.
        """
        self._fetch = fetch
        self._max_threads = max_threads
        self._num_threads = 0
        self._num_calls = 0  # that have not ended
        self._calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]]] = queue.SimpleQueue()

    async def fetch(self, user: UserKey, names: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
        self._num_calls += 1
        if self._num_threads < min(self._num_calls, self._max_threads):
            self._num_threads += 1
            threading.Thread(target=self._work, name="npu_gr-features", daemon=True).start()
        answer: Future[Mapping[str, Any]] = Future()
        self._calls.put((answer, (user, names, timeout_s)))
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._num_calls -= 1

    def _work(self) -> None:
        while True:
            answer, arguments = self._calls.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(self._fetch(*arguments))
            except BaseException as error:  # noqa: BLE001  (the thread outlives every call)
                # an error of ours: an event loop takes no StopIteration, and ends at a SystemExit
                answer.set_exception(StoreFailed(f"the feature source failed: {type(error).__name__}: {error}"))
