"""A service on loopback that remembers what came and answers as a test's script says."""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

Script = Callable[["Fake", dict[str, Any]], Awaitable[web.Response | None]]


def ranked(body: dict[str, Any], **values: Any) -> web.Response:
    """A rank's answer: the score of a candidate is minus its id, so lower ids come first."""
    answer = {
        "outcome": "hbm_hit",
        "reason": "",
        "scores": {"click": [-float(item) for item in body["candidates"]]},
        "stages_s": {"device": 0.002},
        "prefix_tokens": 30,
        "history": {"num_tokens": 40, "fingerprint": "f"},
        "request_id": "r",
    }
    return web.json_response(answer | values)


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """The body with its raw columns as lists."""
    for name in body.keys() & {"history", "events"}:
        body[name] = {
            key: _read(value, "<i2" if key == "actions" else "<i8")
            for key, value in body[name].items()
        }
    for name in body.keys() & {"candidates", "allow_items", "deny_items"}:
        body[name] = _read(body[name])
    return body


def _read(raw: str, dtype: str = "<i8") -> list[int]:
    numbers: list[int] = np.frombuffer(b64decode(raw), dtype).tolist()
    return numbers


@dataclass
class Fake:
    """Every request that came, with its columns as lists, in the order of coming and of going."""

    script: Script
    url: str = ""
    came: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # kind, body
    came_at: list[float] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    went: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        """One request."""
        kind, body = request.match_info["kind"], plain(await request.json())
        self.came.append((kind, body))
        self.came_at.append(time.monotonic())
        self.headers.append(dict(request.headers))
        answer = await self.script(self, {"kind": kind} | body)
        self.went.append((kind, body))
        if answer is not None:
            return answer
        if kind == "rank":
            return ranked(body)
        if kind == "generate":
            return ranked({"candidates": []}, items=[7, 8], scores=[-1.0, -2.0])
        return web.json_response({}, status=202 if kind == "signal" else 200)

    def kinds(self) -> list[str]:
        """What came, in order."""
        return [kind for kind, _ in self.came]


async def at_once(_fake: Fake, _body: dict[str, Any]) -> None:
    """The script that answers well and at once."""


@asynccontextmanager
async def service(script: Script = at_once) -> AsyncIterator[Fake]:
    """A running fake; `fake.url` is where."""
    fake = Fake(script)
    app = web.Application()
    app.router.add_post("/v1/{kind:signal|rank|generate|events}", fake.handle)
    async with TestServer(app) as server:
        fake.url = str(server.make_url(""))
        yield fake
