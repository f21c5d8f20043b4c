"""`AsyncClient`: what a service does, as coroutines of a program that calls it."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

import msgspec

from npu_gr.client.channel import AGAIN, ApiKey, Channel, Reply, SafeCall
from npu_gr.client.relay import AsyncRelayCall
from npu_gr.client.wire import (
    Behaviours,
    Features,
    FoundItems,
    Name,
    Names,
    Ranked,
    Time,
    checked_key,
    feature_body,
    found,
    given,
    history_body,
    ids_of,
    item_column,
    listed,
    optional_items,
    packed_users,
    parts,
    ranked,
    read,
    second,
)
from npu_gr.core.arrays import I64
from npu_gr.core.calling import calling_files, placing_headers
from npu_gr.core.errors import BadAnswer, Unavailable, Unprocessable, Unreachable
from npu_gr.core.kinds import ERASE, EVENTS, GENERATE, INGEST, MATCH, RANK, RECOMMEND, SIGNAL
from npu_gr.core.request import Normalise, OrderName, SourceName
from npu_gr.core.served import ModelInfo
from npu_gr.core.tls import ClientTlsConfig
from npu_gr.server.schemas.erase import EraseBody
from npu_gr.server.schemas.events import IDEMPOTENCY_KEY, EventsBody, EventsOut
from npu_gr.server.schemas.fields import (
    MOST_ITEMS,
    ItemOut,
    RankFeatures,
    RequestFeatures,
    SignalFeatures,
    UserBody,
)
from npu_gr.server.schemas.generate import GenerateBody, GenerateOut
from npu_gr.server.schemas.ingest import INGEST_BYTES, MOST_USERS, IngestOut, UserWritten
from npu_gr.server.schemas.match import MatchBody, MatchOut
from npu_gr.server.schemas.media import JSON, MSGPACK
from npu_gr.server.schemas.rank import RankBody
from npu_gr.server.schemas.recommend import RecommendBody, RecommendOut
from npu_gr.server.schemas.signal import SignalBody, SignalOut

API_KEY = "NPU_GR_API_KEY"
MAX_USERS_BYTES = INGEST_BYTES - 1_024  # of an ingest, beside its tenant and mode
MAX_QUERY = 6_000  # characters; a proxy may take 8,192 for the whole line
_LEAST_S = 1e-3  # for the next of several requests of a call, whose time is over
_SIGNAL_AGAIN = AGAIN - {429}  # an optimisation: who is rejected it does without


class _Models(msgspec.Struct, frozen=True):
    models: tuple[ModelInfo, ...]


class _Calls:
    """How calls are sent: to whom, with which defaults, by when."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        api_key: str | None = None,
        api_key_file: Path | None = None,
        tls: ClientTlsConfig | None = None,
        tenant: str = "",
        timeout_s: float = 1.0,
        max_connections: int = 100,
        max_attempts: int = 3,
    ) -> None:
        """Read the files; connect to nobody yet.

        Args:
            base_url: of an instance, a router or a gateway.
            api_key: that calls show. Without it and without a file: of the environment,
                NPU_GR_API_KEY.
            api_key_file: holds the key, and is read again when the key is rejected.
            tls: for https. None = what NPU_GR_CA, NPU_GR_CERT and NPU_GR_CERT_KEY name, or whom the
                system trusts.
            tenant: of all users, where the key does not say it.
            timeout_s: of a call.
            max_connections: at once.
            max_attempts: of a call.

        Raises:
            ConfigError: names what cannot be used.
        """
        if api_key is None and api_key_file is None:
            api_key = os.environ.get(API_KEY) or None
        self.tenant = tenant
        self.timeout_s = _checked_timeout(timeout_s)
        self._channel = Channel(
            base_url,
            ApiKey(api_key, api_key_file),
            tls or calling_files(),
            max_connections,
            max_attempts,
        )

    async def __aenter__(self) -> Self:
        await self._channel.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def _ask(
        self,
        path: str,
        body: UserBody,
        timeout_s: float | None,
        *,
        accept: str = JSON,
        headers: Mapping[str, str] | None = None,
        again: frozenset[int] = AGAIN,
    ) -> Reply:
        """Send a request about one user; what was not given is left out of its body."""
        named = placing_headers(str(body.user_id), body.tenant)
        call = SafeCall(
            path=path,
            body=msgspec.msgpack.encode(given(body)),
            accept=accept,
            headers={"Content-Type": MSGPACK, **named, **(headers or {})},
            again=again,
        )
        return await self._channel.send(call, self._time(timeout_s))

    async def _send_until(self, call: SafeCall, until_at: float) -> Reply:
        """Send one of several requests of a call, whose deadline is an instant of the loop's clock."""
        return await self._channel.send(
            call, max(until_at - asyncio.get_running_loop().time(), _LEAST_S)
        )

    def _user(self, user: Name, tenant: str | None) -> dict[str, Any]:
        return {"user_id": str(user), "tenant": self.tenant if tenant is None else tenant}

    def _time(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else _checked_timeout(timeout_s)


class AsyncClient(_Calls):
    """Calls one service: `async with AsyncClient("http://...") as client`.

    Belongs to the event loop that opens it.

    Every method takes `timeout_s`, for all of the call with its retries; None = the client's. Every
    method raises the errors of `npu_gr.core.errors`: RequestError and what is below it (the
    caller's fault; `error.field` names the field), Overloaded (`error.retry_after_s`), Unavailable
    and Unreachable, DeadlineExceeded, BadAnswer.

    `tenant` is only for a key of every tenant, or a service without keys; None = the client's.
    """

    async def rank(
        self,
        user: Name,
        candidates: Names,
        *,
        history: Behaviours | None = None,
        base: str | None = None,
        timestamp: Time | None = None,
        top_k: int | None = None,
        unknown_items: Literal["ignore", "reject"] | None = None,
        features: Features | None = None,
        fields: Sequence[str] = (),
        model_version: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Ranked:
        """Score candidates for a user.

        Args:
            user: as the company knows the user.
            candidates: [c] items.
            history: the user's behaviours; None = the history store has them.
            base: the fingerprint of an earlier answer, which `history` continues.
            timestamp: when the candidates are shown; None = now.
            top_k: answer the best so many, too.
            unknown_items: candidates that the ranker does not know have no score, or the rank
                fails; None = as the instance has it.
            features: of the user, the request and the candidates; None = all are missing.
            fields: what to say of them beside their names: "title".
            model_version: None = the current one.
        """
        names = listed(candidates, "candidates")
        ids = ids_of(candidates, "candidates")
        body = RankBody(
            **self._user(user, tenant),
            candidates=item_column(ids, "candidates"),
            history=history_body(history),
            base=base,
            timestamp=None if timestamp is None else second(timestamp, "timestamp"),
            top_k=top_k,
            unknown_items=unknown_items,
            features=feature_body(features, RankFeatures),
            fields=list(fields),
            model_version=model_version,
        )
        return ranked(await self._ask(RANK.path, body, timeout_s, accept=MSGPACK), names, ids)

    async def generate(
        self,
        user: Name,
        *,
        history: Behaviours | None = None,
        base: str | None = None,
        num_items: int = 50,
        beam_width: int | None = None,
        normalise: Normalise | None = None,
        temperature: float = 1.0,
        exclude_seen: bool | None = None,
        allow_items: Names | None = None,
        deny_items: Names | None = None,
        attributes: Mapping[str, Sequence[bool | int | float | str]] | None = None,
        catalogue_version: str | None = None,
        fields: Sequence[str] = (),
        model_version: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> FoundItems[GenerateOut]:
        """Find the best items after a history, by semantic-ID beam search.

        Args:
            user, history, base, fields, model_version: as of `rank`.
            num_items: at most.
            beam_width, normalise, temperature: of the search; None = the service's; scores are
                log-probabilities.
            exclude_seen: leave out the items of the history; None = as the service is configured.
            allow_items: only these; None = all.
            deny_items: none of these.
            attributes: name -> values of which an item has one.
            catalogue_version: None = the current one.
        """
        body = GenerateBody(
            **self._user(user, tenant),
            history=history_body(history),
            base=base,
            num_items=num_items,
            beam_width=beam_width,
            normalise=normalise,
            temperature=temperature,
            exclude_seen=exclude_seen,
            allow_items=optional_items(allow_items, "allow_items"),
            deny_items=optional_items(deny_items, "deny_items"),
            attributes={name: list(values) for name, values in (attributes or {}).items()},
            catalogue_version=catalogue_version,
            fields=list(fields),
            model_version=model_version,
        )
        return found(await self._ask(GENERATE.path, body, timeout_s), GenerateOut)

    async def match(
        self,
        user: Name,
        *,
        history: Behaviours | None = None,
        num_items: int = 50,
        exclude_seen: bool = True,
        allow_items: Names | None = None,
        deny_items: Names | None = None,
        vectors_version: str | None = None,
        fields: Sequence[str] = (),
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> FoundItems[MatchOut]:
        """Find the best items for a user, by vectors.

        Args:
            user, allow_items, deny_items, fields: as of `generate`.
            history: in the target domain; None = the history store has it.
            num_items: at most.
            exclude_seen: leave out the items of the history, and of the training data.
            vectors_version: None = the current one.
        """
        body = MatchBody(
            **self._user(user, tenant),
            history=history_body(history),
            num_items=num_items,
            exclude_seen=exclude_seen,
            allow_items=optional_items(allow_items, "allow_items"),
            deny_items=optional_items(deny_items, "deny_items"),
            vectors_version=vectors_version,
            fields=list(fields),
        )
        return found(await self._ask(MATCH.path, body, timeout_s), MatchOut)

    async def recommend(
        self,
        user: Name,
        *,
        history: Behaviours | None = None,
        base: str | None = None,
        num_items: int = 10,
        num_candidates: int | None = None,
        exclude_seen: bool | None = None,
        unknown_items: Literal["last", "drop"] | None = None,
        deny_items: Names | None = None,
        timestamp: Time | None = None,
        context: Mapping[str, bool | int | float | str] | None = None,
        sources: Sequence[SourceName] | None = None,
        order: OrderName | None = None,
        features: Features | None = None,
        fields: Sequence[str] = (),
        model_version: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> FoundItems[RecommendOut]:
        """Find what to show a user: retrieval and rank in one.

        Args:
            user, history, base, timestamp, fields, model_version: as of `rank`.
            num_items: at most.
            num_candidates: ranked at most; None = as the service is configured.
            exclude_seen: leave out the items of the history; None = as the service is configured.
            unknown_items: that the ranker does not know come last, without a score, or are dropped;
                None = as the service is configured.
            deny_items: none of these.
            context: for the service's hook.
            sources: only these of the configured ones; None = all.
            features: of the user and the request; None = all are missing.
            order: blended, rank, fused or retrieval (nothing is ranked); None = as the service is
                configured.
        """
        body = RecommendBody(
            **self._user(user, tenant),
            history=history_body(history),
            base=base,
            num_items=num_items,
            num_candidates=num_candidates,
            exclude_seen=exclude_seen,
            unknown_items=unknown_items,
            deny_items=optional_items(deny_items, "deny_items"),
            timestamp=None if timestamp is None else second(timestamp, "timestamp"),
            context=dict(context or {}),
            sources=None if sources is None else list(sources),
            order=order,
            features=feature_body(features, RequestFeatures),
            fields=list(fields),
            model_version=model_version,
        )
        return found(await self._ask(RECOMMEND.path, body, timeout_s), RecommendOut)

    async def signal(
        self,
        user: Name,
        *,
        history: Behaviours | None = None,
        base: str | None = None,
        num_candidates: int | None = None,
        features: Features | None = None,
        model_version: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> SignalOut:
        """Say that a rank for the user will come. `relay` does this, and ranks.

        Args:
            user, history, base, model_version: as of `rank`.
            num_candidates: of that rank; None = as the service is configured.
            features: of the user.
        """
        body = SignalBody(
            **self._user(user, tenant),
            history=history_body(history),
            base=base,
            num_candidates=num_candidates,
            features=feature_body(features, SignalFeatures),
            model_version=model_version,
        )
        return read(await self._ask(SIGNAL.path, body, timeout_s, again=_SIGNAL_AGAIN), SignalOut)

    def relay(
        self,
        user: Name,
        *,
        history: Behaviours | None = None,
        num_candidates: int | None = None,
        features: Features | None = None,
        model_version: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncRelayCall:
        """Signal at once, and rank when retrieval is done: `async with client.relay(user) as relay`.

        Args:
            user, history, num_candidates, features, model_version: as of `signal`.
            timeout_s: of the signal.
        """
        of_both: dict[str, Any] = {"model_version": model_version, "tenant": tenant}
        signal = partial(
            self.signal,
            user,
            history=history,
            num_candidates=num_candidates,
            features=features,
            timeout_s=timeout_s,
            **of_both,
        )
        return AsyncRelayCall(
            signal, partial(self.rank, user, **of_both), history, features, self.timeout_s
        )

    async def events(
        self,
        user: Name,
        events: Behaviours,
        *,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> EventsOut:
        """Append behaviours of one user to the history store; they are durable when this returns.

        Args:
            user: as the company knows the user.
            events: oldest first.
            idempotency_key: events that come with one key of a user are appended once; None = a key
                of this call, so that its own retries append once.
        """
        body = EventsBody(**self._user(user, tenant), events=events.on_the_wire("events"))
        key = {IDEMPOTENCY_KEY: checked_key(idempotency_key)}
        return read(await self._ask(EVENTS.path, body, timeout_s, headers=key), EventsOut)

    async def ingest(
        self,
        events: Mapping[Name, Behaviours],
        *,
        mode: Literal["append", "merge", "replace"] = "append",
        idempotency_key: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[Name, UserWritten]:
        """Write behaviours of many users, in as few requests as they fit in.

        Args:
            events: user -> events, oldest first.
            mode: append them; merge: add only those that are not there, in time order; replace all
                that is there.
            idempotency_key: for append, as of `events`. With one, the same call may be made again
                after it failed.

        Returns:
            User -> how many events the store keeps now, or why nothing was written.

        Raises:
            TooLarge: the events of one user do not fit into a request; nothing was sent.
            Unprocessable: beside what `events` rejects, one user under two names: 7 and "7";
                nothing was sent.
        """
        if mode == "append" or idempotency_key is not None:
            idempotency_key = checked_key(idempotency_key)
        users = packed_users(events, idempotency_key, MAX_USERS_BYTES)
        about = {"tenant": self.tenant if tenant is None else tenant, "mode": mode}
        until_at = asyncio.get_running_loop().time() + self._time(timeout_s)
        results: list[UserWritten] = []
        for part in parts(users, MOST_USERS, MAX_USERS_BYTES):
            body = msgspec.msgpack.encode({**about, "users": [msgspec.Raw(one) for one in part]})
            call = SafeCall(path=INGEST.path, body=body, headers={"Content-Type": MSGPACK})
            results += read(await self._send_until(call, until_at), IngestOut).users
        if len(results) != len(events):
            raise BadAnswer(f"the answers tell of {len(results)} users of {len(events)}")
        return dict(zip(events, results, strict=True))

    async def erase(
        self, user: Name, *, tenant: str | None = None, timeout_s: float | None = None
    ) -> tuple[str, ...]:
        """Forget a user.

        Returns:
            Places that still hold something of the user for a while; mostly none.
        """
        tenant = self.tenant if tenant is None else tenant
        # a user called ".." must not become a step in the path
        path = ERASE.path.replace("{user_id}", quote(str(user), safe="").replace(".", "%2E"))
        query = f"?tenant={quote(tenant, safe='')}" if tenant else ""
        call = SafeCall(
            method=ERASE.method, path=path + query, headers=placing_headers(str(user), tenant)
        )
        reply = await self._channel.send(call, self._time(timeout_s))
        return tuple(read(reply, EraseBody).pending) if reply.status == 202 else ()

    async def items(
        self, names: Names = (), *, ids: Sequence[int] | I64 = (), timeout_s: float | None = None
    ) -> list[ItemOut]:
        """Ask for the ids, names and titles of items, by ids or by names.

        Args:
            names: as the company writes them.
            ids: as raw columns have them.

        Returns:
            Of each id, then of each name.
        """
        asked = [f"ids={one}" for one in ids] + [
            f"name={quote(str(one), safe='')}" for one in listed(names, "names")
        ]
        until_at = asyncio.get_running_loop().time() + self._time(timeout_s)
        found: list[ItemOut] = []
        for part in parts(asked, MOST_ITEMS, MAX_QUERY):
            call = SafeCall(method="GET", path=f"/v1/items?{'&'.join(part)}")
            found += read(await self._send_until(call, until_at), list[ItemOut])
        return found

    async def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """List the models in service, and those that drain."""
        reply = await self._channel.send(
            SafeCall(method="GET", path="/v1/models"), self._time(timeout_s)
        )
        return read(reply, _Models).models

    async def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether the service takes requests now. Raises Unreachable where there is none."""
        call = SafeCall(method="GET", path="/readyz", again=frozenset())
        try:
            await self._channel.send(call, self._time(timeout_s))
        except Unavailable as error:
            if isinstance(error, Unreachable):
                raise
            return False
        return True


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise Unprocessable(f"timeout_s: {timeout_s}: a finite time over 0")
    return timeout_s
