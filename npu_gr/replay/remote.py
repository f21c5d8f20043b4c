"""Switching a running service's recorder from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from npu_gr.core.errors import Unavailable

PERIOD_S = 5.0
SETTLE_S = 1.5


async def show_status(url: str, api_key: str | None) -> dict[str, Any]:
    """How the recorder stands. Raises Unavailable, with what the service said."""
    async with _session(url, api_key) as http:
        return await _ask(http, "GET")


async def record_for(
    url: str,
    api_key: str | None,
    seconds: float,
    sample_ratio: float,
    stop: asyncio.Event,
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Record until `seconds` are over or `stop` is set; how it stands afterwards.

    The service ends the recording itself when the time is over, also if nobody is there any more to tell it.
    """
    order = {"sample_ratio": sample_ratio, "duration_s": seconds}
    loop = asyncio.get_running_loop()
    async with _session(url, api_key) as http:
        await _ask(http, "POST", order)
        ends_at = loop.time() + seconds
        try:
            while (left_s := ends_at - loop.time()) > 0 and not stop.is_set():
                try:
                    await asyncio.wait_for(stop.wait(), min(left_s, PERIOD_S))
                except TimeoutError:
                    tell(await _ask(http, "GET"))
        finally:
            await _ask(http, "DELETE")
        await asyncio.sleep(SETTLE_S)  # what is queued is written and the file gets its name
        return await _ask(http, "GET")


def _session(url: str, api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(url.rstrip("/") + "/", headers=headers, timeout=aiohttp.ClientTimeout(total=10))


async def _ask(http: aiohttp.ClientSession, method: str, body: object = None) -> dict[str, Any]:
    try:
        async with http.request(method, "debug/record", json=body) as answer:
            found: dict[str, Any] = await answer.json(content_type=None)
            if not answer.ok:
                raise Unavailable(f"the service answered {answer.status}: {found.get('detail', '')}")
            return found
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(f"the service cannot be asked: {str(error) or type(error).__name__}") from error
