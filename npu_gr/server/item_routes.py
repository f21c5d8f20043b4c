"""`GET /v1/items`: the id, the name and the title of items, asked for by ids or by names."""

from __future__ import annotations

import numpy as np
from aiohttp import web

from npu_gr.core.errors import TooLarge, Unprocessable
from npu_gr.core.names import FIRST_HASHED, item_ids
from npu_gr.core.words import quoted
from npu_gr.server.codec.items import MOST_ITEMS, ItemOut
from npu_gr.server.responses import json_response
from npu_gr.server.service_protocol import ServiceProtocol


class ItemRoutes:
    """What raw ids mean, and what names are as raw ids."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/items", self._show)]

    async def _show(self, request: web.Request) -> web.Response:
        """Answer the ids, then the names, each in the order in which it was asked for."""
        asked = [_id(text) for text in _listed(request, "ids")]
        named = [*_listed(request, "names"), *request.query.getall("name", [])]
        if not 0 < (num := len(asked) + len(named)) <= MOST_ITEMS:
            raise (TooLarge if num else Unprocessable)(f"ids and names: {num} items, needs 1 to {MOST_ITEMS}")
        try:
            ids = np.concatenate((np.array(asked, np.int64), item_ids(named)))
        except ValueError as error:
            raise Unprocessable(f"names: {error}") from None
        known, titles = await self._service.items(ids)
        names = [*map(_known, known[: len(asked)]), *named]
        found = zip(ids.tolist(), names, titles, strict=True)
        return json_response([ItemOut(id=one, name=name, title=title) for one, name, title in found])


def _listed(request: web.Request, parameter: str) -> list[str]:
    """Split the values of a parameter, which may be given more than once, at their commas."""
    return [text for value in request.query.getall(parameter, []) for text in value.split(",")]


def _id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63):
        raise Unprocessable(f"ids: {quoted(text)} is no id: 0 to 2^63 - 1")
    return int(text)


def _known(name: str | int) -> str | int | None:
    return None if isinstance(name, int) and name >= FIRST_HASHED else name
