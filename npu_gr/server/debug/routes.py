"""Debug routes: stacks, a profile, a bundle for a bug report, the runbooks.

Instances and the router's admin application have them; each adds its own files to the bundle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from npu_gr.core import shipped
from npu_gr.core.errors import BadRequest, ConfigError, NotFound
from npu_gr.core.logs import newest_lines
from npu_gr.core.text_format import quoted
from npu_gr.metrics.rules import RUNBOOKS
from npu_gr.server.debug.stacks import MAX_S, MIN_S, environment, make_archive

DEFAULT_S = 10.0


class DebugRoutes:
    """The routes under /debug that instances and routers share."""

    def __init__(
        self,
        own_texts: Callable[[], Awaitable[Mapping[str, str]]],
        stacks: Callable[[], Awaitable[str]],
        profile: Callable[[float], Awaitable[str]],
    ) -> None:
        """Set the sources.

        Args:
            own_texts: Maps file names of the bundle to the texts of this process.
            stacks: Returns the stacks of all threads and tasks.
            profile: Returns a profile over a number of seconds.
        """
        self._own_texts = own_texts
        self._all_stacks = stacks
        self._take_profile = profile

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/debug/stacks", self._stacks),
            web.get("/debug/profile", self._profile),
            web.get("/debug/bundle", self._bundle),
            web.get("/debug/runbooks", self._runbooks),
        ]

    async def _stacks(self, _: web.Request) -> web.Response:
        return web.Response(text=await self._all_stacks())

    async def _profile(self, request: web.Request) -> web.Response:
        given = request.query.get("seconds", str(DEFAULT_S))
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not MIN_S <= seconds <= MAX_S:
            raise BadRequest(f"seconds: {given[:32]!r} is not a number from {MIN_S} to {MAX_S}")
        return web.Response(text=await self._take_profile(seconds))

    async def _bundle(self, _: web.Request) -> web.Response:
        texts = {
            **await self._own_texts(),
            "stacks.txt": await self._all_stacks(),
            "log.txt": "".join(f"{line}\n" for line in newest_lines()),
            "environment.json": await asyncio.to_thread(environment),
        }
        name = time.strftime("npu_gr-%Y%m%dT%H%M%SZ", time.gmtime())
        body = await asyncio.to_thread(make_archive, texts, name)
        headers = {"Content-Disposition": f'attachment; filename="{name}.tar.gz"'}
        return web.Response(body=body, content_type="application/gzip", headers=headers)

    async def _runbooks(self, request: web.Request) -> web.Response:
        return web.Response(text=await asyncio.to_thread(_runbook, request.query.get("name")))


def _runbook(name: str | None) -> str:
    """Read a runbook; None = list the names. Raises NotFound for unknown names."""
    try:
        pages = {page.stem: page for page in sorted(shipped.path(RUNBOOKS).glob("*.md"))}
    except ConfigError as error:
        raise NotFound(str(error)) from error
    if name is None:
        return "".join(f"{one}\n" for one in pages)
    if name not in pages:
        raise NotFound(f"name: there is no runbook {quoted(name)}; /debug/runbooks lists the names")
    return pages[name].read_text()
