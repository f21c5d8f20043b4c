"""`grpc.health.v1.Health`: whether new work is welcome, for probes, Envoy and clients' load balancing. No key."""

from __future__ import annotations

import asyncio
from typing import Any

from npu_gr.core.errors import NotFound
from npu_gr.core.words import quoted
from npu_gr.server.rpc.calls import Calls, RpcCall
from npu_gr.server.rpc.messages import HEALTH, INFERENCE, OURS, message

LOOK_S = 0.25  # between two looks for a change
_SERVICES = ("", INFERENCE, OURS, HEALTH)
SERVING, NOT_SERVING = 1, 2
SERVICE_UNKNOWN = 3


class HealthService:
    """The calls of the service."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._service = calls.shared.service

    async def check(self, call: RpcCall, body: bytes) -> bytes:
        """Answer with the status. Raises NotFound where there is no such service."""
        name = await self._asked(call, body)
        if name not in _SERVICES:
            raise NotFound(f"service: {quoted(name)} is not here; {', '.join(_SERVICES[1:])} are")
        return _written(self._status())

    async def watch(self, call: RpcCall, body: bytes, context: Any) -> None:
        """Write the status now, and again whenever it changes, until the caller leaves."""
        is_known = await self._asked(call, body) in _SERVICES
        last = None
        while True:
            status = self._status() if is_known else SERVICE_UNKNOWN
            if status != last:
                await context.write(_written(status))
                last = status
            await asyncio.sleep(LOOK_S)

    async def _asked(self, call: RpcCall, body: bytes) -> str:
        asked = await self._calls.decoded(call, message("grpc.health.v1.HealthCheckRequest"), body)
        name: str = asked.service
        return name

    def _status(self) -> int:
        return SERVING if self._service.is_ready()[0] else NOT_SERVING


def _written(status: int) -> bytes:
    made: bytes = message("grpc.health.v1.HealthCheckResponse")(status=status).SerializeToString()
    return made
