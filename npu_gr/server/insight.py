"""What operators see of an instance: its metrics, its status, its stacks, a profile, the texts of a bundle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from npu_gr.core.redact import redacted
from npu_gr.metrics.exposition import expose
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.status import StatusReport
from npu_gr.server.debug.profile import Profiler
from npu_gr.server.debug.stacks import own_stacks
from npu_gr.server.newest import NewestRequests
from npu_gr.server.service_protocol import ServiceProtocol
from npu_gr.server.status import status


class Insight(Protocol):
    """What the routes for operators ask."""

    async def exposition(self, accept: str, names: Sequence[str]) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its content type, as `npu_gr.metrics.exposition.expose` makes them."""
        ...

    async def status(self) -> StatusReport:
        """Return what the status page shows at this moment."""
        ...

    async def stacks(self) -> str:
        """Return what all threads and tasks do."""
        ...

    async def profile(self, seconds: float) -> str:
        """Return where the threads spend their time. Raises Overloaded while another profile is being taken."""
        ...

    async def bundle_texts(self) -> dict[str, str]:
        """Return the instance's own files of a bundle, by name."""
        ...


class OwnInsight:
    """Of this process."""

    def __init__(self, service: ServiceProtocol, metrics: Metrics, newest: NewestRequests) -> None:
        """Look at nothing yet.

        Args:
            service: asked whether it is ready, and for its versions and its configuration.
            metrics: of the instance.
            newest: requests, for exact percentiles and the slowest ones.
        """
        self._service = service
        self._metrics = metrics
        self._newest = newest
        self._began_at = time.monotonic()
        self._profiler = Profiler()

    async def exposition(self, accept: str, names: Sequence[str] = ()) -> tuple[bytes, str]:
        return await expose(self._metrics, accept, names)

    async def status(self) -> StatusReport:
        return await status(self._service, self._metrics, self._newest, time.monotonic() - self._began_at)

    async def stacks(self) -> str:
        return await own_stacks()

    async def profile(self, seconds: float) -> str:
        return await self._profiler.profile(seconds)

    async def bundle_texts(self) -> dict[str, str]:
        exposition, _ = await expose(self._metrics, "")
        return {
            "config.json": config_text(await self._service.effective_config()),
            "status.json": msgspec.json.encode(await self.status()).decode(),
            "metrics.txt": exposition.decode(),
            "requests.jsonl": "".join(f"{line}\n" for line in self._newest.lines()),
        }


def config_text(table: dict[str, Any]) -> str:
    """Write a configuration in force as JSON, without credentials."""
    return redacted(msgspec.json.encode(table).decode())
