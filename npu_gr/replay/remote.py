"""Call a running service's admin address: switch its recorder, change its shadow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from npu_gr.core.calling import calling_context, calling_headers
from npu_gr.core.errors import Unavailable
from npu_gr.core.served import ShadowInfo

PERIOD_S = 5.0  # between two status requests
RELOAD_S = 600.0  # limit of loading a model
SETTLE_S = 1.5  # longer than the recorder's FLUSH_S, until the file is complete


async def show_status(url: str, api_key: str | None) -> dict[str, Any]:
    """Return the recorder's status (`RecordStatus` as a dict).

    Raises:
        Unavailable: the service rejects the request or does not answer.
    """
    async with _session(url, api_key) as http:
        return await _call(http, "GET")


async def record_for(
    url: str,
    api_key: str | None,
    seconds: float,
    sample_ratio: float,
    stop: asyncio.Event,
    on_status: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Record for `seconds` or until `stop` is set, and return the status afterwards.

    The service gets the time limit too, so the recording ends even if this process dies.

    Args:
        url: Admin address of the service.
        api_key: Sent as a bearer token.
        seconds: Duration of the recording.
        sample_ratio: Share of the users, 0 to 1.
        stop: Ends the recording early when set.
        on_status: Callback with the status every `PERIOD_S`.

    Raises:
        Unavailable: the service rejects the request or does not answer.
    """
    order = {"sample_ratio": sample_ratio, "duration_s": seconds}
    loop = asyncio.get_running_loop()
    async with _session(url, api_key) as http:
        await _call(http, "POST", order)
        ends_at = loop.time() + seconds
        try:
            while (left_s := ends_at - loop.time()) > 0 and not stop.is_set():
                try:
                    await asyncio.wait_for(stop.wait(), min(left_s, PERIOD_S))
                except TimeoutError:
                    on_status(await _call(http, "GET"))
        finally:
            await _call(http, "DELETE")
        await asyncio.sleep(SETTLE_S)
        return await _call(http, "GET")


def _session(url: str, api_key: str | None, total_s: float = 10.0) -> aiohttp.ClientSession:
    headers = calling_headers(api_key)
    timeout = aiohttp.ClientTimeout(total=total_s)
    connector = aiohttp.TCPConnector(ssl=calling_context())
    return aiohttp.ClientSession(
        url.rstrip("/") + "/", headers=headers, timeout=timeout, connector=connector
    )


async def call_shadow(
    url: str, api_key: str | None, method: str, path: str, body: object
) -> ShadowInfo:
    """Call the route of the shadow, or one below it, and return its answer.

    Raises:
        Unavailable: the service rejects the request or does not answer.
    """
    async with _session(url, api_key, RELOAD_S) as http:
        found = await _call(http, method, body, f"v1/models/shadow{path}")
    return msgspec.convert(found, ShadowInfo)


async def call_rollback(url: str, api_key: str | None, path: str) -> dict[str, str]:
    """Let an instance serve the version before; return the version of each thing that serves now.

    Args:
        url: Admin address of the instance.
        api_key: Sent as a bearer token.
        path: Route of the rollback.

    Raises:
        Unavailable: the instance rejects the rollback or does not answer.
    """
    async with _session(url, api_key, RELOAD_S) as http:
        found = await _call(http, "POST", path=path.lstrip("/"))
    if "models" not in found:
        return {path.split("/")[2]: found["version"]}
    return {one["name"]: one["version"] for one in found["models"] if not one["is_draining"]}


async def _call(
    http: aiohttp.ClientSession, method: str, body: object = None, path: str = "debug/record"
) -> dict[str, Any]:
    try:
        async with http.request(method, path, json=body) as answer:
            found: dict[str, Any] = await answer.json(content_type=None)
            if not answer.ok:
                raise Unavailable(
                    f"the service answered {answer.status}: {found.get('detail', '')}"
                )
            return found
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(
            f"the service does not answer: {str(error) or type(error).__name__}"
        ) from error
