"""User features that requests do not bring: fetched from a source through a bulkhead, and cached.

    cached and fresh? ─> a fetch is running? ─> breaker ─> place ─> the source
          │ remembered         │ join it                            └─ fails: last_known or nothing

A user's features are part of the prefix, so a signal and the rank after it should read the same
ones: fetched features are used for `fresh_s`. If they change in between, the fingerprint of the
prefix differs, so the rank is a miss and never reads a wrong prefix. No failure of the source fails
a request: the features are missing then, and the answer says so.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from npu_gr.core.errors import ConfigError, StoreFailed, StoreFault
from npu_gr.core.feature_schema.columns import OneRow, Value
from npu_gr.core.feature_schema.encode import as_column, has_value
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import UserFeaturesOrigin, UserFeaturesSource, UserKey
from npu_gr.core.logs import ThrottledLog
from npu_gr.core.text_format import cut
from npu_gr.history_store.bulkhead import Lane, StoreObserver
from npu_gr.history_store.store import FeatureStoreConfig

FEAST = "feast"


class FeatureSource(Protocol):
    """A source of user features. If it fails, it may raise any exception."""

    async def fetch(
        self, user: UserKey, names: Sequence[str], timeout_s: float
    ) -> Mapping[str, Any]:
        """Fetch the features of one user.

        Args:
            user: Tenant and user, as requests name them.
            names: List of the features that the model reads.
            timeout_s: Seconds after which the answer is ignored.

        Returns:
            Name -> a value as a request would bring it, or several. A feature that is absent, None
            or NaN is missing; other names are ignored.
        """
        ...


def open_source(config: FeatureStoreConfig) -> FeatureSource:
    """Make the source that the configuration names.

    Raises:
        ConfigError: there is no such source, or it does not take the arguments of `fetch`.
    """
    at = "feature_store"
    if config.entry == FEAST:
        from npu_gr.feature_store.user_features import FeastSource

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
    except Exception as error:  # an operator's own source may raise anything
        raise ConfigError(f"{at}: {config.entry!r}: {type(error).__name__}: {error}") from error
    function = fetch.func if isinstance(fetch, partial) else fetch
    return (
        AsyncSource(fetch)
        if inspect.iscoroutinefunction(function)
        else ThreadedSource(fetch, config.max_calls)
    )


class AsyncSource:
    """A coroutine function as a source. A call is cancelled at its time limit."""

    def __init__(self, fetch: Callable[..., Awaitable[Mapping[str, Any]]]) -> None:
        self._fetch = fetch

    async def fetch(
        self, user: UserKey, names: Sequence[str], timeout_s: float
    ) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fetch(user, names, timeout_s)
        except TimeoutError as error:
            raise StoreFailed(
                f"the feature source did not answer within {timeout_s} s", StoreFault.SLOW
            ) from error


class ThreadedSource:
    """A blocking function as a source. Each call has a daemon thread, so a hang blocks no exit."""

    def __init__(self, fetch: Callable[..., Mapping[str, Any]], max_threads: int) -> None:
        """Start no thread yet.

        Args:
            fetch: Blocking function, which several threads may call at a time.
            max_threads: Most threads.
        """
        self._fetch = fetch
        self._max_threads = max_threads
        self._num_threads = 0
        self._num_calls = 0  # calls that have not ended
        self._calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]]] = queue.SimpleQueue()

    async def fetch(
        self, user: UserKey, names: Sequence[str], timeout_s: float
    ) -> Mapping[str, Any]:
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
                # Converted, since an event loop takes no StopIteration and ends at a SystemExit.
                answer.set_exception(
                    StoreFailed(f"the feature source failed: {type(error).__name__}: {error}")
                )


class FeastSource:
    """Reads one row of a Feast online store per call. Thread-safe, and blocking.

    Source: Feast's Python SDK, https://docs.feast.dev.
    """

    def __init__(
        self,
        repo: str,
        features: Mapping[str, str],
        user_key: str = "user_id",
        tenant_key: str = "",
        user_is_number: bool = False,
    ) -> None:
        """Open the store of a repository.

        Args:
            repo: Folder with `feature_store.yaml`.
            features: Name of a feature of the model -> `VIEW:FEATURE` of Feast. Features of the
                model that are not listed are missing.
            user_key: Join key of the entity.
            tenant_key: Join key of the tenant; "" = the entity has none.
            user_is_number: True if the join key is an integer; a user whose name is no integer has
                no features.

        Raises:
            ConfigError: the package is missing, or the repository cannot be opened.
        """
        if bad := [ref for ref in features.values() if len(ref.split(":")) != 2]:
            raise ConfigError(f"feature_store.options.features: {bad[0]!r} is no VIEW:FEATURE")
        try:
            from feast import FeatureStore
        except ImportError as error:
            raise ConfigError(
                "feature_store.entry: feast needs pip install 'npu_gr[feast]'"
            ) from error
        try:
            self._store: Any = FeatureStore(repo_path=repo)
        except Exception as error:  # Feast may raise anything
            raise ConfigError(
                f"feature_store.options.repo: {repo}: {type(error).__name__}: {error}"
            ) from error
        self._refs = dict(features)
        self._user_key = user_key
        self._tenant_key = tenant_key
        self._user_is_number = user_is_number

    def fetch(self, user: UserKey, names: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
        """Read the newest values of a user; `timeout_s` is unused, as Feast has its own limits."""
        refs = {name: self._refs[name] for name in names if name in self._refs}
        if not refs or (self._user_is_number and not user.user.isdecimal()):
            return {}
        row: dict[str, Any] = {
            self._user_key: int(user.user) if self._user_is_number else user.user
        }
        if self._tenant_key:
            row[self._tenant_key] = user.tenant
        answer = self._store.get_online_features(
            features=list(refs.values()), entity_rows=[row], full_feature_names=True
        ).to_dict()
        # Full names, `VIEW__FEATURE`, since two views may have features of the same name.
        return {name: answer[ref.replace(":", "__")][0] for name, ref in refs.items()}


log = logging.getLogger(__name__)

FETCH = "fetch"
MAX_TEXT = 1024  # characters of a text value, as in a request
LOG_EVERY_S = 60.0  # shortest interval of warnings about values that do not fit the model


class SourceObserver(StoreObserver, Protocol):
    """Receives the results of calls and reads, for metrics."""

    def read(self, source: UserFeaturesSource) -> None:
        """Count a read of a user's features."""
        ...


class FoundFeatures(NamedTuple):
    """The features of a user; None = they are missing."""

    values: OneRow | None
    origin: UserFeaturesOrigin


class _Row(NamedTuple):
    values: OneRow
    names: tuple[str, ...]  # features that were fetched
    fetched_at: float
    fault: StoreFault | None  # CORRUPT: some values did not fit the model


class UserFeatures:
    """Fetches and caches user features, behind a bulkhead. Event loop only."""

    def __init__(
        self,
        source: FeatureSource,
        config: FeatureStoreConfig,
        observer: SourceObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fetch nothing yet.

        Args:
            source: The source to call.
            config: Limits of its calls, and lifetimes of cached features.
            observer: Receives the results, for metrics.
            clock: Monotonic clock, in seconds.
        """
        self._source = source
        self._config = config
        self._observer = observer
        self._clock = clock
        self.lane = Lane("fetches", config, config.timeout_s, observer, clock, "the feature source")
        self._rows: OrderedDict[UserKey, _Row] = OrderedDict()  # the least recently used first
        self._running: dict[tuple[UserKey, tuple[str, ...]], asyncio.Task[FoundFeatures]] = {}
        self._num_forgotten = 0
        self._misfits = ThrottledLog(log, LOG_EVERY_S, clock)

    def remembered(self, user: UserKey, reads: Mapping[str, Feature]) -> FoundFeatures | None:
        """Look up cached features that are fresh; None = they must be fetched.

        Args:
            user: User of the features.
            reads: User features that the model reads, by name.
        """
        row = self._rows.get(user)
        if (
            row is None
            or row.names != tuple(reads)
            or self._clock() - row.fetched_at >= self._config.fresh_s
        ):
            return None
        self._rows.move_to_end(user)
        self._observer.read(UserFeaturesSource.REMEMBERED)
        return FoundFeatures(
            row.values, UserFeaturesOrigin(UserFeaturesSource.REMEMBERED, row.fault)
        )

    def fetch(self, user: UserKey, reads: Mapping[str, Feature]) -> Awaitable[FoundFeatures]:
        """Start to fetch the features of a user, or join a running fetch.

        The awaitable raises nothing.
        """
        key = (user, tuple(reads))
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.get_running_loop().create_task(
                self._fetch(user, reads, key[1])
            )
            task.add_done_callback(lambda done: self._ended(key, done))
        return self._joined(task)

    async def _joined(self, task: asyncio.Task[FoundFeatures]) -> FoundFeatures:
        found = await asyncio.shield(task)  # a cancelled request does not cancel it for others
        self._observer.read(found.origin.source)
        return found

    def _ended(
        self, key: tuple[UserKey, tuple[str, ...]], task: asyncio.Task[FoundFeatures]
    ) -> None:
        if self._running.get(key) is task:
            del self._running[key]

    async def _fetch(
        self, user: UserKey, reads: Mapping[str, Feature], names: tuple[str, ...]
    ) -> FoundFeatures:
        num_forgotten, began_at = self._num_forgotten, self._clock()
        timeout_s = self._config.timeout_s
        try:
            given = await self.lane.call(FETCH, lambda: self._source.fetch(user, names, timeout_s))
            values, bad = as_row(reads, given)
        except Exception as error:  # noqa: BLE001  (no failure of the source fails the request)
            fault = error.fault if isinstance(error, StoreFailed) else StoreFault.UNAVAILABLE
            return self._stand_in(user, names, fault)
        if bad:
            self._misfits.warning(
                "", f"the feature source returned a value that does not fit the model: {bad}"
            )
        row = _Row(values, names, began_at, StoreFault.CORRUPT if bad else None)
        if num_forgotten == self._num_forgotten:  # not cached if a user was erased meanwhile
            self._rows[user] = row
            self._rows.move_to_end(user)
            if len(self._rows) > self._config.max_users:
                self._rows.popitem(last=False)
        return FoundFeatures(values, UserFeaturesOrigin(UserFeaturesSource.SOURCE, row.fault))

    def _stand_in(self, user: UserKey, names: tuple[str, ...], fault: StoreFault) -> FoundFeatures:
        row = self._rows.get(user)
        if (
            row is not None
            and row.names == names
            and self._clock() - row.fetched_at <= self._config.stale_s
        ):
            return FoundFeatures(
                row.values, UserFeaturesOrigin(UserFeaturesSource.LAST_KNOWN, fault)
            )
        return FoundFeatures(None, UserFeaturesOrigin(UserFeaturesSource.NOTHING, fault))

    def knows(self, user: UserKey) -> bool:
        """Return whether features of the user are cached."""
        return user in self._rows

    def forget(self, user: UserKey) -> None:
        """Forget a user's cached features and running fetches."""
        self._num_forgotten += 1
        self._rows.pop(user, None)
        for key in [key for key in self._running if key[0] == user]:
            del self._running[key]

    async def close(self) -> None:
        """Cancel the calls that the source has not ended."""
        for task in (tasks := [*self._running.values(), *self.lane.tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def as_row(reads: Mapping[str, Feature], given: Mapping[str, Any]) -> tuple[OneRow, str]:
    """Convert the answer of a source to the form of a request.

    Returns:
        The values that fit the model, and what is wrong with one of the others; "" = nothing.

    Raises:
        TypeError: the answer is no mapping.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"a source must return a mapping, not {type(given).__name__}")
    row: dict[str, Value | tuple[Value, ...] | None] = {}
    bad = ""
    for name, feature in reads.items():
        value = _plain(given.get(name))
        if value is None or value == ():
            continue
        try:
            texts = [
                one
                for one in (value if isinstance(value, tuple) else (value,))
                if isinstance(one, str)
            ]
            if too_long := [one for one in texts if len(one) > MAX_TEXT]:
                raise ValueError(f"{name}: {len(too_long[0])} characters, the limit is {MAX_TEXT}")
            if has_value(as_column(feature, [value], 1)):
                row[name] = value
        except (ValueError, TypeError) as error:
            bad = cut(str(error), 200)
    return row, bad


def _plain(value: Any) -> Any:
    """Convert numpy values and lists to the form of a request; None = missing."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        several = tuple(one.item() if isinstance(one, np.generic) else one for one in value)
        return tuple(sorted(several, key=str)) if isinstance(value, set | frozenset) else several
    return None if isinstance(value, float) and value != value else value
