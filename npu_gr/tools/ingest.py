"""Targets of `npu-gr load` and `npu-gr kafka-ingest`: a history store, or a service that has one.

An embedded store has one owner process. While a service owns it, events go through that service
(POST /v1/events/bulk).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
from yarl import URL

from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.core.calling import calling_context, calling_headers
from npu_gr.core.errors import (
    ConfigError,
    NpuGrError,
    StoreFailed,
    StoreInUse,
    Unavailable,
    Unprocessable,
)
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import Events, Mode, Write, Written
from npu_gr.core.names import difference
from npu_gr.core.names import item_id as id_of_name
from npu_gr.core.text_format import cut
from npu_gr.history_store.load import WritesMany
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import check_item_key
from npu_gr.server.config import ServerConfig
from npu_gr.server.http import RETRY_AFTER_MS
from npu_gr.server.schemas.fields import History
from npu_gr.server.schemas.ingest import (
    INGEST_BYTES,
    MOST_USERS,
    IngestBody,
    IngestOut,
    UserEvents,
    UserWritten,
)
from npu_gr.server.schemas.media import JSON, MSGPACK
from npu_gr.service.config import Config

log = logging.getLogger(__name__)

EVENT_BYTES = 18  # per raw event
USER_BYTES = 700  # at most per user: id, key and field names
PIECE_BYTES = 8192 * EVENT_BYTES  # per user in a call
BUDGET_MS = 30_000  # of a call
TRIES_FIRST_S, TRIES_MOST_S = 0.1, 5.0  # backoff if the answer has no Retry-After
_ANY = "?"  # a name, by whose id keys are compared
_OTHER_KEY = (
    "the ids of its items have another key than those of the log; load the dataset that the models "
    "were trained on, or one that was prepared with --like it"
)
_LATER = (408, 429, 503, 504)  # statuses that are worth a retry
_NOT_BEGUN = (408, 429)  # statuses after which no event was written
# errors of decoding an answer that is not ours
_NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class EventModel(msgspec.Struct, frozen=True):
    """Actions and features of a ranker's events."""

    actions: tuple[str, ...]  # names by action index
    features: tuple[Feature, ...] = ()
    item_key: bytes = b""  # key of the items' ids; empty = none, or known to the service only


class _Item(msgspec.Struct, frozen=True):
    id: int


class _Models(msgspec.Struct, frozen=True):
    models: tuple[EventModel, ...]


class Target(NamedTuple):
    """A destination of events."""

    store: WritesMany
    model: EventModel
    about: str  # for messages


class ServiceWriter:
    """Writes through the public address of an instance or a router. Event loop only."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        patience_s: float,
    ) -> None:
        """Prepare a writer; it makes no call yet.

        Args:
            http: Session with the headers and certificates of all calls.
            url: Base URL of an instance or a router.
            patience_s: Time during which a call is retried while the service is overloaded or
                unreachable.
        """
        self._http = http
        self._url = url.rstrip("/")
        self._patience_s = patience_s

    async def model(self) -> EventModel:
        """Request the actions and features of the ranker once; no actions if there is no ranker.

        Raises:
            ConfigError: the address is not a service of npu_gr, or rejects the key.
            Unavailable: it does not answer.
        """
        body = await self._call("GET", "/v1/models", None, patience_s=0.0)
        try:
            models = msgspec.json.decode(body, type=_Models).models
        except _NOT_OURS as error:
            raise ConfigError(
                f"{self._url}: not a service of npu_gr: {cut(str(error), 200)}"
            ) from error
        return models[0] if models else EventModel(())

    async def item_id(self, name: str) -> int:
        """Request the id of a name; errors as of `model`."""
        path = str(URL("/v1/items").with_query(name=name))
        body = await self._call("GET", path, None, patience_s=0.0)
        try:
            return msgspec.json.decode(body, type=list[_Item])[0].id
        except (*_NOT_OURS, IndexError) as error:
            raise ConfigError(f"{self._url}: not a service of npu_gr") from error

    async def write_many(self, batch: list[Write]) -> Sequence[Written | NpuGrError]:
        """Write events of users of one tenant; a retry adds nothing twice.

        Raises:
            ConfigError: the service rejects the key.
            Unavailable: it was unreachable or overloaded for `patience_s`, or another service
                answered.
        """
        results: list[Written | NpuGrError] = [Written(0, 0)] * len(batch)
        for places, writes in _calls(batch):
            for place, done in zip(places, await self._write(writes), strict=True):
                before = results[place]
                if isinstance(before, Written):
                    results[place] = done
                    if isinstance(done, Written):
                        counts = zip(before[1:], done[1:], strict=True)
                        results[place] = Written(done.num_events, *map(sum, counts))
        return results

    async def _write(self, writes: list[Write]) -> list[Written | NpuGrError]:
        users = [
            UserEvents(user_id=one.user.user, events=_on_the_wire(one), idempotency_key=one.key)
            for one in writes
        ]
        first = writes[0]
        body = msgspec.msgpack.encode(
            IngestBody(users=users, tenant=first.user.tenant, mode=first.mode)
        )
        is_repeatable = first.mode is not Mode.APPEND or all(one.key is not None for one in writes)
        answer = await self._call("POST", "/v1/events/bulk", body, is_repeatable=is_repeatable)
        try:
            written = msgspec.json.decode(answer, type=IngestOut).users
        except _NOT_OURS as error:
            raise Unavailable(
                f"{self._url}: the answer is not of npu_gr: {cut(str(error), 200)}"
            ) from error
        if len(written) != len(writes):
            raise Unavailable(f"{self._url}: the answer has {len(written)} of {len(writes)} users")
        return [_result(one) for one in written]

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        is_repeatable: bool = True,
        patience_s: float | None = None,
    ) -> bytes:
        """Call with retries, and return the body of the answer."""
        until_at = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        pause_s = TRIES_FIRST_S
        headers = {"Accept": JSON, "X-Request-Timeout-Ms": str(BUDGET_MS)}
        if body is not None:
            headers["Content-Type"] = MSGPACK
        while True:
            wait_s = pause_s
            try:
                async with self._http.request(
                    method, self._url + path, data=body, headers=headers
                ) as answer:
                    data = await answer.read()
                    if answer.status == 200:
                        return data
                    error = _rejected(self._url, answer.status, data)
                    if answer.status not in _LATER or not (
                        is_repeatable or answer.status in _NOT_BEGUN
                    ):
                        raise error
                    wait_s = _wait_s(answer.headers, pause_s)
            except (aiohttp.ClientError, TimeoutError, OSError) as failure:
                error = Unavailable(
                    f"{self._url}: no answer: {str(failure) or type(failure).__name__}"
                )
                if not (is_repeatable or isinstance(failure, aiohttp.ClientConnectorError)):
                    raise error from failure
            if time.monotonic() + wait_s > until_at:
                raise error
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, TRIES_MOST_S)


@asynccontextmanager
async def open_target(
    config: Config | None,
    url: str | None,
    api_key: str | None,
    patience_s: float,
    item_key: bytes | None = None,
) -> AsyncIterator[Target]:
    """Open the destination of events for the block.

    Args:
        config: Configuration with the history store, if `url` is None. If another process owns the
            store, events go to the service at the configured address.
        url: Base URL of a service to write through.
        api_key: Key of that service with the scopes `ingest` and `infer`.
        patience_s: Time for retries of a call, see `ServiceWriter`.
        item_key: Key of the ids that will be written; None = they are computed by the model's.

    Raises:
        ConfigError: neither is given, the store or service cannot be used, or the ids of its items
            have another key.
    """
    if url is None:
        if config is None:
            raise ConfigError("give --config or --url, the destination of the events")
        try:
            store = await open_store(config.history_store)
        except StoreInUse as error:
            url = url_of(config.server)
            log.warning(
                "%s; writing through %s instead, the service of this configuration", error, url
            )
        else:
            if store is None:
                raise ConfigError(
                    "history_store.kind is none, so there is no store; name a service with --url"
                )
            try:
                model = _model_of(config)
                if item_key not in (None, model.item_key):
                    raise ConfigError(f"{config.checkpoint}: {_OTHER_KEY}")
                await check_item_key(store, model.item_key)
                if changed := difference(await store.name_actions(model.actions), model.actions):
                    raise ConfigError(
                        f"history_store: the history store was filled with other actions: {changed}"
                    )
                yield Target(store, model, f"the {config.history_store.kind} store")
            finally:
                await store.close()
            return
    connector = aiohttp.TCPConnector(ssl=calling_context())
    timeout = aiohttp.ClientTimeout(total=BUDGET_MS / 1e3 + 5, sock_connect=5.0)
    async with aiohttp.ClientSession(
        headers=calling_headers(api_key), connector=connector, timeout=timeout
    ) as http:
        writer = ServiceWriter(http, url, patience_s)
        if item_key is not None and await writer.item_id(_ANY) != id_of_name(_ANY, item_key):
            raise ConfigError(f"{url}: {_OTHER_KEY}")
        yield Target(writer, await writer.model(), url)


def url_of(server: ServerConfig) -> str:
    """Return the URL of an instance's public address for a process on the same machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # it is replaced  # noqa: S104  # nosec B104
    return str(
        URL.build(scheme="http" if server.tls is None else "https", host=host, port=server.port)
    ).rstrip("/")


def _model_of(config: Config) -> EventModel:
    from npu_gr.model.weights import load

    if config.checkpoint is None:
        raise ConfigError("checkpoint: not set, so the names of the actions are unknown")
    checkpoint = load(Path(config.checkpoint))
    names = ItemNames.load(Path(config.checkpoint)) or EMPTY
    return EventModel(checkpoint.action_names, checkpoint.model.config.features, names.key)


def _on_the_wire(write: Write) -> History:
    events = write.events
    of_events = {
        name: column.astype(column.dtype.newbyteorder("<"))
        for name, column in events.features.given.items()
    }
    return History(
        items=events.items.astype("<i8").tobytes() if write.items is None else [*write.items],
        actions=events.actions.astype("<i2").tobytes(),
        timestamps=events.timestamps.astype("<i8").tobytes(),
        features={name: column.tobytes() for name, column in of_events.items()} or msgspec.UNSET,
    )


def _calls(batch: list[Write]) -> Iterator[tuple[list[int], list[Write]]]:
    """Split writes into calls of accepted size: (indices in the batch, writes) each, in order."""
    most = INGEST_BYTES - USER_BYTES
    places: list[int] = []
    writes: list[Write] = []
    room = most
    for place, one in enumerate(batch):
        for piece in _pieces(one):
            size = (
                USER_BYTES
                + _feature_names_bytes(piece.events)
                + _event_bytes(piece.events) * len(piece.events)
            )
            if writes and (
                size > room or len(writes) == MOST_USERS or piece.mode is not writes[-1].mode
            ):
                yield places, writes
                places, writes = [], []
                room = most
            places.append(place)
            writes.append(piece)
            room -= size
    if writes:
        yield places, writes


def _event_bytes(events: Events) -> int:
    """Return the bytes of a raw event with its features."""
    return EVENT_BYTES + sum(column[:1].nbytes for column in events.features.given.values())


def _feature_names_bytes(events: Events) -> int:
    return sum(len(name.encode()) + 8 for name in events.features.given)


def _pieces(one: Write) -> Iterator[Write]:
    """Split a long history between different timestamps, so that merging the parts is exact.

    The first part of a replacement replaces the stored history, and the others are merged.
    """
    events, start = one.events, 0
    most = max(1, PIECE_BYTES // _event_bytes(events))
    while one.mode is not Mode.APPEND and len(events) - start > most:
        changes = np.flatnonzero(np.diff(events.timestamps[start : start + most + 1])) + 1
        if not len(changes):
            break
        end = start + int(changes[-1])
        yield one._replace(events=events[start:end], mode=Mode.MERGE if start else one.mode)
        start = end
    yield one._replace(events=events[start:], mode=Mode.MERGE if start else one.mode)


def _result(one: UserWritten) -> Written | NpuGrError:
    if one.error is not None:
        kind = StoreFailed if one.error.status >= 500 else Unprocessable
        return kind(one.error.detail)
    return Written(one.num_events or 0, one.num_added, one.num_filled, one.sorted_events)


def _rejected(url: str, status: int, data: bytes) -> NpuGrError:
    """Convert an answer that is not 200 to an error."""
    try:
        detail = str(msgspec.json.decode(data)["detail"])
    except (*_NOT_OURS, KeyError, TypeError):
        detail = cut(data.decode(errors="replace"))
    text = f"{url}: status {status}: {detail}"
    if status in _LATER or status >= 500:
        return Unavailable(text)
    return Unprocessable(text) if status in (400, 413, 422) else ConfigError(text)


def _wait_s(headers: Any, pause_s: float) -> float:
    """Return the time until the next try: that of the answer, but at least `pause_s`."""
    try:
        asked_s = (
            float(headers[RETRY_AFTER_MS]) / 1e3
            if RETRY_AFTER_MS in headers
            else float(headers["Retry-After"])
        )
    except (KeyError, ValueError):
        return pause_s
    return max(pause_s, min(asked_s, 60.0))
