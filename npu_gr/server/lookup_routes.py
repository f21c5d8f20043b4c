"""Routes that look something up: a user, similar items, trending items."""

from __future__ import annotations

import math
from urllib.parse import unquote_to_bytes

from aiohttp import web

from npu_gr.core.errors import BadRequest, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.lifetime import deadline
from npu_gr.core.names import served_id
from npu_gr.core.served import LookedUpItems
from npu_gr.server.access_log import ServerCall
from npu_gr.server.http import json_response
from npu_gr.server.middleware import CALL, RequestLifecycle
from npu_gr.server.schemas.fields import MAX_NAME
from npu_gr.server.schemas.lookups import (
    MOST_FOUND,
    MOST_WINDOW_S,
    FoundItemOut,
    FoundItemsOut,
    PrefixOut,
    UserEventOut,
    UserOut,
)
from npu_gr.server.service_protocol import ServiceProtocol, require_ready


class LookupRoutes:
    """A user, similar items, and trending items, for the key of inferences."""

    def __init__(self, service: ServiceProtocol, lifecycle: RequestLifecycle) -> None:
        self._service = service
        self._lifecycle = lifecycle

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/users/{user_id:(?s:.+)}", self._user),
            web.get("/v1/items/{item_id:(?s:.+)}/similar", self._similar),
            web.get("/v1/trending", self._trending),
        ]

    async def _user(self, request: web.Request) -> web.Response:
        call = self._begun(request)
        user_id = _variable(request, "/v1/users/", "")
        asked = request.query.get("tenant", "")
        for name, text in (("user_id", user_id), ("tenant", asked)):
            if len(text) > MAX_NAME:
                raise Unprocessable(f"{name}: {len(text)} characters, the limit is {MAX_NAME}")
        user = UserKey(self._lifecycle.keys.tenant_of(call.key, asked), user_id)
        call.user = user
        num_events = _count(request, "num_events", 20)
        async with deadline(call.left_s()):
            found = await self._service.lookups.user(user, num_events)
        names = self._service.names
        events = found.events
        actions = names.actions(None)
        known = () if actions is None else actions.names
        titles = names.titles(events.items)
        listed = [
            UserEventOut(
                item=item,
                title=title,
                event=known[action] if 0 <= action < len(known) else action,
                timestamp=timestamp,
            )
            for item, title, action, timestamp in zip(
                names.items(events.items),
                titles,
                events.actions.tolist(),
                events.timestamps.tolist(),
                strict=True,
            )
        ]
        return json_response(
            UserOut(
                user_id=user.user,
                tenant=user.tenant,
                num_events=found.num_events,
                events=listed[::-1],
                prefixes=[PrefixOut(**one._asdict()) for one in found.prefixes],
                in_vectors=found.in_vectors,
                versions=self._service.kind_versions(),
            )
        )

    async def _similar(self, request: web.Request) -> web.Response:
        call = self._begun(request)
        try:
            name = _variable(request, "/v1/items/", "/similar")
            item = served_id(self._service.names, name)
        except ValueError as error:
            raise Unprocessable(f"item_id: {error}") from None
        num_items = _count(request, "num_items", 10)
        attributes = request.query.getall("attribute", [])
        async with deadline(call.left_s()):
            found = await self._service.lookups.similar(item, num_items, attributes)
        return self._found(found)

    async def _trending(self, request: web.Request) -> web.Response:
        call = self._begun(request)
        tenant = self._lifecycle.keys.tenant_of(call.key, request.query.get("tenant", ""))
        text = request.query.get("window_s", "3600")
        try:
            window_s = float(text)
        except ValueError:
            window_s = math.nan
        if not 0 < window_s <= MOST_WINDOW_S:
            raise Unprocessable(f"window_s: {text[:32]!r}; send seconds above 0, up to 86400")
        num_items = _count(request, "num_items", 10)
        async with deadline(call.left_s()):
            found = await self._service.lookups.trending(tenant, window_s, num_items)
        return self._found(found)

    def _begun(self, request: web.Request) -> ServerCall:
        """Return the call with its time limit, which other routes than those of kinds lack."""
        require_ready(self._service)
        call = request[CALL]
        self._lifecycle.limit(call)
        return call

    def _found(self, found: LookedUpItems) -> web.Response:
        names = self._service.names
        rows = zip(
            names.items(found.items), names.titles(found.items), found.scores.tolist(), strict=True
        )
        items = [
            FoundItemOut(item=item, title=title, score=None if math.isnan(score) else score)
            for item, title, score in rows
        ]
        return json_response(FoundItemsOut(basis=found.basis, items=items))


def _variable(request: web.Request, before: str, after: str) -> str:
    """Decode the variable of a path from the raw path, as the kinds do."""
    sent = request.raw_path.partition("?")[0]
    raw = sent[len(before) : len(sent) - len(after)]
    try:
        return unquote_to_bytes(raw.encode(errors="surrogateescape")).decode()
    except UnicodeDecodeError:
        raise BadRequest("the path is not UTF-8 after percent-decoding") from None


def _count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= MOST_FOUND):
        raise Unprocessable(f"{name}: {text[:32]!r}; send 1 to {MOST_FOUND}")
    return int(text)
