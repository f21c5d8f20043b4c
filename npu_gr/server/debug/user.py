"""POST /debug/user: which memory of this process knows a user. For `npu-gr erase-check`; it says yes or no, no more."""

from __future__ import annotations

from aiohttp import web

from npu_gr.server.admission.middleware import BODY
from npu_gr.server.codec.fields import UserBody
from npu_gr.server.codec.media import decode
from npu_gr.server.responses import json_response
from npu_gr.server.service_protocol import ServiceProtocol


class UserRoutes:
    """One route. The user is in the body: a path would be in the logs of every proxy."""

    def __init__(self, service: ServiceProtocol) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/debug/user", self._known)]

    async def _known(self, request: web.Request) -> web.Response:
        body = decode(request[BODY], request.content_type, UserBody)
        return json_response({"places": await self._service.knows(body.user)})
