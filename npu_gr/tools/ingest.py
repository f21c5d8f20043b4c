"""Where `npu-gr load` and `npu-gr kafka-ingest` write: the store of a configuration, or a service that has one.

An embedded store has one owner. If a service runs on it, events go through that service: POST
/v1/events/bulk.
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
from npu_gr.core.text_format import cut
from npu_gr.history_store.load import WritesMany
from npu_gr.history_store.open import open_store
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

EVENT_BYTES = 18  # of a raw event
USER_BYTES = 700  # of a user beside them, at most: an id, a key, and the names of the fields
PIECE_BYTES = 8192 * EVENT_BYTES  # of one user in a call
BUDGET_MS = 30_000  # that a call may take
TRIES_FIRST_S, TRIES_MOST_S = 0.1, 5.0  # between two tries where the answer does not say
_LATER = (408, 429, 503, 504)  # statuses that end by waiting
_TAKEN = (408, 429)  # of these nothing was begun
# of reading what we would not have written
_NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class EventModel(msgspec.Struct, frozen=True):
    """What a ranker reads of events."""

    actions: tuple[str, ...]  # names: the place of a name is the action
    features: tuple[Feature, ...] = ()


class _Models(msgspec.Struct, frozen=True):
    models: tuple[EventModel, ...]


class Target(NamedTuple):
    """Where events are written."""

    store: WritesMany
    model: EventModel
    about: str  # for people


class ServiceWriter:
    """Writes through the public address of an instance or a router. Event loop only."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        patience_s: float,
    ) -> None:
        """Call nobody yet.

        Args:
            http: with the headers and certificates of every call.
            url: of the address.
            patience_s: how long a call is tried again while the service has no room or is away.
        """
        self._http = http
        self._url = url.rstrip("/")
        self._patience_s = patience_s

    async def model(self) -> EventModel:
        """Ask once which actions and features the ranker has; none = it does not rank.

        Raises:
            ConfigError: the address is not one of ours, or does not let us in. Unavailable: nobody
                answers there.
        """
        body = await self._call("GET", "/v1/models", None, patience_s=0.0)
        try:
            models = msgspec.json.decode(body, type=_Models).models
        except _NOT_OURS as error:
            raise ConfigError(
                f"{self._url}: no service of npu_gr answers there: {cut(str(error), 200)}"
            ) from error
        return models[0] if models else EventModel(())

    async def write_many(self, batch: list[Write]) -> Sequence[Written | NpuGrError]:
        """Write behaviours of users of one tenant.

        What is called again because of a failure adds nothing twice.

        Raises:
            ConfigError: the service does not let us in. Unavailable: it was away or full for all of
                the patience, or something else answered.
        """
        results: list[Written | NpuGrError] = [Written(0, 0)] * len(batch)
        for places, writes in _calls(batch):
            for place, done in zip(places, await self._write(writes), strict=True):
                before = results[place]
                if isinstance(before, Written):
                    results[place] = done
                    if isinstance(done, Written):
                        added, filled = (
                            before.num_added + done.num_added,
                            before.num_filled + done.num_filled,
                        )
                        results[place] = Written(done.num_events, added, filled)
        return results

    async def _write(self, writes: list[Write]) -> list[Written | NpuGrError]:
        users = [
            UserEvents(
                user_id=one.user.user, events=_on_the_wire(one.events), idempotency_key=one.key
            )
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
                f"{self._url}: no answer of npu_gr's: {cut(str(error), 200)}"
            ) from error
        if len(written) != len(writes):
            raise Unavailable(
                f"{self._url}: the answer tells of {len(written)} users of {len(writes)}"
            )
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
        """Call, again and again while that can help; return the body of the answer."""
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
                        is_repeatable or answer.status in _TAKEN
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
) -> AsyncIterator[Target]:
    """Open where events are written, while the block runs.

    Args:
        config: its store, if `url` is None; if another process has that, the service at its
            address.
        url: of a service that is written through.
        api_key: for it, with the scopes `ingest` and `infer`.
        patience_s: see `ServiceWriter`.

    Raises:
        ConfigError: neither is there, or it cannot be used.
    """
    if url is None:
        if config is None:
            raise ConfigError("--config or --url: name where the events go")
        try:
            store = await open_store(config.history_store)
        except StoreInUse as error:
            url = url_of(config.server)
            log.warning("%s: writing through %s, where its service should be", error, url)
        else:
            if store is None:
                raise ConfigError(
                    "history_store.kind is none: there is no store to write into; name a "
                    "service with --url"
                )
            try:
                model = _model_of(config)
                if told := difference(await store.name_actions(model.actions), model.actions):
                    raise ConfigError(
                        f"history_store: the history store was filled with other actions: {told}"
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
        yield Target(writer, await writer.model(), url)


def url_of(server: ServerConfig) -> str:
    """The public address of an instance, as a process on the same machine calls it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # it is replaced  # noqa: S104  # nosec B104
    return str(
        URL.build(scheme="http" if server.tls is None else "https", host=host, port=server.port)
    ).rstrip("/")


def _model_of(config: Config) -> EventModel:
    from npu_gr.model.weights import load

    if config.checkpoint is None:
        raise ConfigError("checkpoint: the configuration names none, so the actions have no names")
    checkpoint = load(Path(config.checkpoint))
    return EventModel(checkpoint.action_names, checkpoint.model.config.features)


def _on_the_wire(events: Events) -> History:
    of_events = {
        name: column.astype(column.dtype.newbyteorder("<"))
        for name, column in events.features.given.items()
    }
    return History(
        items=events.items.astype("<i8").tobytes(),
        actions=events.actions.astype("<i2").tobytes(),
        timestamps=events.timestamps.astype("<i8").tobytes(),
        features={name: column.tobytes() for name, column in of_events.items()} or msgspec.UNSET,
    )


def _calls(batch: list[Write]) -> Iterator[tuple[list[int], list[Write]]]:
    """Cut writes into calls that the service accepts, in order: places in the batch, and what is written of them."""
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
    """Count the bytes of a raw event."""
    return EVENT_BYTES + sum(column[:1].nbytes for column in events.features.given.values())


def _feature_names_bytes(events: Events) -> int:
    return sum(len(name.encode()) + 8 for name in events.features.given)


def _pieces(one: Write) -> Iterator[Write]:
    """Cut a long history where its time goes on, so that a merge of each part adds what a merge of all would.

    Of a replacement the first part takes the place of what is there, and the others are merged into
    it.
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
    return Written(one.num_events or 0, one.num_added, one.num_filled)


def _rejected(url: str, status: int, data: bytes) -> NpuGrError:
    """Make the error of an answer that is none of ours, or a problem."""
    try:
        detail = str(msgspec.json.decode(data)["detail"])
    except (*_NOT_OURS, KeyError, TypeError):
        detail = cut(data.decode(errors="replace"))
    text = f"{url}: status {status}: {detail}"
    if status in _LATER or status >= 500:
        return Unavailable(text)
    return Unprocessable(text) if status in (400, 413, 422) else ConfigError(text)


def _wait_s(headers: Any, pause_s: float) -> float:
    """How long the service wants us to wait, and never less than our own pause."""
    try:
        asked_s = (
            float(headers[RETRY_AFTER_MS]) / 1e3
            if RETRY_AFTER_MS in headers
            else float(headers["Retry-After"])
        )
    except (KeyError, ValueError):
        return pause_s
    return max(pause_s, min(asked_s, 60.0))
