"""`AsyncClient`: the asyncio client of the HTTP API."""

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
from npu_gr.core.item_rules import OrderRules
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
from npu_gr.server.schemas.lookups import FoundItemsOut, UserOut
from npu_gr.server.schemas.match import MatchBody, MatchOut
from npu_gr.server.schemas.media import JSON, MSGPACK
from npu_gr.server.schemas.rank import RankBody
from npu_gr.server.schemas.recommend import RecommendBody, RecommendOut
from npu_gr.server.schemas.signal import SignalBody, SignalOut

API_KEY = "NPU_GR_API_KEY"
MAX_USERS_BYTES = INGEST_BYTES - 1_024  # users of an ingest request; the rest: tenant and mode
MAX_QUERY = 6_000  # characters; proxies may limit the whole request line to 8,192
_LEAST_S = 1e-3  # time limit of a further request of a call whose time is over
_SIGNAL_AGAIN = AGAIN - {429}  # no retry of a rejected signal: it is only an optimisation


class _Models(msgspec.Struct, frozen=True):
    models: tuple[ModelInfo, ...]


class _Calls:
    """Sends requests with the client's defaults."""

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
        """Read the files; connections are opened by the first calls.

        Args:
            base_url: Base URL of an instance, a router or a gateway, with http:// or https://.
            api_key: API key to send. Default without `api_key_file`: environment variable
                NPU_GR_API_KEY.
            api_key_file: File with the key; it is read again when the key is rejected.
            tls: Certificates for https. None = the files that NPU_GR_CA, NPU_GR_CERT and
                NPU_GR_CERT_KEY name, or else the system's certificate authorities.
            tenant: Default tenant of all calls; "" = the key decides it.
            timeout_s: Default time limit of a call, retries included.
            max_connections: Largest number of open connections.
            max_attempts: Largest number of attempts per call.

        Raises:
            ConfigError: An argument or a file cannot be used; the message names it.
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
        """Send a request about one user; fields with default values are left out of its body."""
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
        """Send one of several requests of a call; `until_at` is on the loop's clock."""
        return await self._channel.send(
            call, max(until_at - asyncio.get_running_loop().time(), _LEAST_S)
        )

    def _user(self, user: Name, tenant: str | None) -> dict[str, Any]:
        return {"user_id": str(user), "tenant": self.tenant if tenant is None else tenant}

    def _time(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else _checked_timeout(timeout_s)


class AsyncClient(_Calls):
    """Calls one service: `async with AsyncClient("http://...") as client`.

    A client belongs to the event loop that opens it.

    `timeout_s` is the time limit of a call in seconds, retries included; None = the client's.
    `tenant` may be set with a key for all tenants, or without keys; None = the client's.

    Every method raises errors of `npu_gr.core.errors`: RequestError and its subclasses where the
    request is invalid (`error.field` names the field), Overloaded (`error.retry_after_s`),
    Unavailable, Unreachable, DeadlineExceeded, BadAnswer.
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
            user: Your id of the user.
            candidates: Items, as names or ids, [c].
            history: The user's behaviours; None = read the history store.
            base: Fingerprint in an earlier answer; `history` then has the events after it only.
            timestamp: Time at which the candidates are shown; None = now.
            top_k: Also return the best `top_k` candidates.
            unknown_items: "ignore" = candidates that the ranker does not know have no score;
                "reject" = the call fails with Unprocessable; None = as configured.
            features: Features of the user, the request and the candidates; None = all missing.
            fields: Item fields to return for the best candidates: "title".
            model_version: Version of the ranker; None = the current one.
        """
        names = listed(candidates, "candidates")
        ids = ids_of(candidates, "candidates")
        column = item_column(candidates, "candidates")
        body = RankBody(
            **self._user(user, tenant),
            candidates=column,
            history=history_body(history),
            base=base,
            timestamp=None if timestamp is None else second(timestamp, "timestamp"),
            top_k=top_k,
            unknown_items=unknown_items,
            features=feature_body(features, RankFeatures),
            fields=list(fields),
            model_version=model_version,
        )
        media = MSGPACK if isinstance(column, bytes) else JSON  # msgpack has ids in `top`
        return ranked(await self._ask(RANK.path, body, timeout_s, accept=media), names, ids)

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
        """Generate the best next items by semantic-ID beam search; scores are log-probabilities.

        Args:
            user, history, base, fields, model_version: See `rank`.
            num_items: Largest number of items.
            beam_width, normalise: Settings of the search; None = as configured.
            temperature: Divisor of the logits.
            exclude_seen: Leave out the items of the history; None = as configured.
            allow_items: Items to choose from; None = all.
            deny_items: Items to leave out.
            attributes: Attribute -> accepted values; an item must have one of them.
            catalogue_version: Version of the catalogue; None = the current one.
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
        exclude_seen: bool | None = None,
        allow_items: Names | None = None,
        deny_items: Names | None = None,
        attributes: Mapping[str, Sequence[bool | int | float | str]] | None = None,
        vectors_version: str | None = None,
        fields: Sequence[str] = (),
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> FoundItems[MatchOut]:
        """Retrieve the best items for a user by vectors.

        Args:
            user, allow_items, deny_items, attributes, fields: See `generate`.
            history: The user's behaviours in the target domain; None = read the history store.
            num_items: Largest number of items.
            exclude_seen: Leave out the user's items, those of the training data included; None = as
                configured.
            vectors_version: Version of the vectors; None = the current one.
        """
        body = MatchBody(
            **self._user(user, tenant),
            history=history_body(history),
            num_items=num_items,
            exclude_seen=exclude_seen,
            allow_items=optional_items(allow_items, "allow_items"),
            deny_items=optional_items(deny_items, "deny_items"),
            attributes={name: list(values) for name, values in (attributes or {}).items()},
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
        allow_items: Names | None = None,
        deny_items: Names | None = None,
        attributes: Mapping[str, Sequence[bool | int | float | str]] | None = None,
        shown_items: Names | None = None,
        rules: OrderRules | None = None,
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
        """Recommend items: retrieval and rank in one call.

        Args:
            user, history, base, timestamp, fields, model_version: See `rank`.
            num_items: Largest number of items.
            num_candidates: Largest number of ranked candidates; None = as configured.
            exclude_seen: Leave out the items of the history; None = as configured.
            unknown_items: Items that the ranker does not know: "last" = after all others, without
                a score; "drop" = left out; None = as configured.
            allow_items, deny_items, attributes: See `generate`.
            shown_items: Items shown lately, each as often as it was shown, for the rule `cap`.
            rules: Business rules in addition to the service's.
            context: Values for the service's hooks.
            sources: Subset of the configured sources; None = all.
            features: Features of the user and the request; None = all missing.
            order: "blended", "rank", "fused" or "retrieval" (without ranking); None = as
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
            allow_items=optional_items(allow_items, "allow_items"),
            deny_items=optional_items(deny_items, "deny_items"),
            attributes={name: list(values) for name, values in (attributes or {}).items()},
            shown_items=optional_items(shown_items, "shown_items"),
            rules=rules,
            timestamp=None if timestamp is None else second(timestamp, "timestamp"),
            context=dict(context or {}),
            sources=None if sources is None else list(sources),
            order=order,
            features=feature_body(features, RequestFeatures),
            fields=list(fields),
            format="columns",
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
        """Announce a rank, so that the service computes the history's prefix ahead of it.

        `relay` sends the signal and the rank.

        Args:
            user, history, base, model_version: See `rank`.
            num_candidates: Number of candidates of that rank; None = as configured.
            features: Features of the user; others are rejected.
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
        """Signal at once, and rank after retrieval: `async with client.relay(user) as relay`.

        Args:
            user, history, num_candidates, features, model_version: See `signal`.
            timeout_s: Time limit of the signal.
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
            user: Your id of the user.
            events: The new behaviours, oldest first.
            idempotency_key: Repeated calls for a user with the same key append once; None = a new
                key, so that the retries of this call append once.
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
        """Write behaviours of many users, in as few requests as possible.

        Args:
            events: User -> events, oldest first.
            mode: "append"; "merge" = add the events that the store lacks, in time order; "replace"
                = replace all events of these users.
            idempotency_key: Key for `mode="append"`, see `events`. With a key, a failed call may be
                repeated.

        Returns:
            User -> number of stored events, or the error of this user.

        Raises:
            TooLarge: The events of one user do not fit into a request; nothing was sent.
            Unprocessable: As for `events`; also if a user appears twice, as 7 and "7". Nothing was
                sent.
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
            raise BadAnswer(f"the answers have {len(results)} users, the call has {len(events)}")
        return dict(zip(events, results, strict=True))

    async def erase(
        self, user: Name, *, tenant: str | None = None, timeout_s: float | None = None
    ) -> tuple[str, ...]:
        """Erase all data of a user.

        Returns:
            Stores that still hold data and erase it later; usually empty.
        """
        tenant = self.tenant if tenant is None else tenant
        call = SafeCall(
            method=ERASE.method,
            path=ERASE.path.replace("{user_id}", _segment(user)) + _query(tenant=tenant),
            headers=placing_headers(str(user), tenant),
        )
        reply = await self._channel.send(call, self._time(timeout_s))
        return tuple(read(reply, EraseBody).pending) if reply.status == 202 else ()

    async def user(
        self,
        user: Name,
        *,
        num_events: int = 20,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> UserOut:
        """Look up what the user's instance knows: newest events, cached prefixes, versions.

        Args:
            num_events: Most events, 1 to 1,000.

        Raises:
            NotFound: It knows nothing of the user.
        """
        tenant = self.tenant if tenant is None else tenant
        path = f"/v1/users/{_segment(user)}{_query(num_events=num_events, tenant=tenant)}"
        call = SafeCall(method="GET", path=path, headers=placing_headers(str(user), tenant))
        return read(await self._channel.send(call, self._time(timeout_s)), UserOut)

    async def similar(
        self,
        item: Name,
        *,
        num_items: int = 10,
        attributes: Mapping[str, Sequence[bool | int | float | str]] | None = None,
        timeout_s: float | None = None,
    ) -> FoundItemsOut:
        """Find the items most like another one.

        Args:
            item: Name of the item.
            num_items: Most items, 1 to 1,000.
            attributes: Accepted values of each attribute.

        Raises:
            NotFound: Neither neighbours nor vectors know the item.
        """
        pairs = [
            f"{name}:{str(value).lower() if isinstance(value, bool) else value}"
            for name, values in (attributes or {}).items()
            for value in values
        ]
        query = _query(num_items=num_items) + "".join(
            f"&attribute={quote(pair, safe='')}" for pair in pairs
        )
        call = SafeCall(method="GET", path=f"/v1/items/{_segment(item)}/similar{query}")
        return read(await self._channel.send(call, self._time(timeout_s)), FoundItemsOut)

    async def trending(
        self,
        *,
        num_items: int = 10,
        window_s: float = 3600.0,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> FoundItemsOut:
        """Find the items with the most events of a tenant lately, else popular ones.

        Args:
            num_items: Most items, 1 to 1,000.
            window_s: Seconds up to now, at most 86,400.
        """
        tenant = self.tenant if tenant is None else tenant
        query = _query(num_items=num_items, window_s=window_s, tenant=tenant)
        call = SafeCall(method="GET", path=f"/v1/trending{query}")
        return read(await self._channel.send(call, self._time(timeout_s)), FoundItemsOut)

    async def items(
        self, names: Names = (), *, ids: Sequence[int] | I64 = (), timeout_s: float | None = None
    ) -> list[ItemOut]:
        """Look up ids, names and titles of items.

        Args:
            names: Your names of items.
            ids: Ids of items, as raw columns have them.

        Returns:
            The items of `ids`, then those of `names`.
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
        """List the served models, and those that drain."""
        reply = await self._channel.send(
            SafeCall(method="GET", path="/v1/models"), self._time(timeout_s)
        )
        return read(reply, _Models).models

    async def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether the service accepts requests. Raises Unreachable where nothing answers."""
        call = SafeCall(method="GET", path="/readyz", again=frozenset())
        try:
            await self._channel.send(call, self._time(timeout_s))
        except Unavailable as error:
            if isinstance(error, Unreachable):
                raise
            return False
        return True


def _segment(name: Name) -> str:
    """Encode a name for a path; dots, too: the name ".." must not become a path segment."""
    return quote(str(name), safe="").replace(".", "%2E")


def _query(**values: str | float) -> str:
    given = [f"{name}={quote(str(one), safe='')}" for name, one in values.items() if one != ""]
    return "?" + "&".join(given) if given else ""


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise Unprocessable(f"timeout_s: {timeout_s} is not a finite number of seconds above 0")
    return timeout_s
