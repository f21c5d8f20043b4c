"""Bytes of the memory tiers while a replay runs, read from /metrics of the instance's admin address."""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.calling import calling_context, calling_headers
from npu_gr.replay.report import TierSample

METRIC = "npu_gr_kv_bytes"
PERIOD_S = 1.0
MAX_POINTS = 240  # then every other sample is dropped, and the period doubles
TIMEOUT_S = 2.0


def tier_bytes(text: str) -> dict[str, float]:
    """Bytes of every tier and state in a Prometheus exposition: {"hbm live": bytes}.

    Only the lines of this metric are parsed: all of them take 60 ms, in which the load generator sends nothing.

    Raises:
        ValueError: a line of the metric is no sample.
    """
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(f"{METRIC}{{"))
    found = {}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            found[f"{sample.labels['tier']} {sample.labels['state']}"] = sample.value
    return found


async def watch_tiers(url: str | None, api_key: str | None, found: list[TierSample]) -> None:
    """Sample the tiers until cancelled, or until the service shows none.

    Args:
        url: the admin address; None = there is nothing to watch.
        api_key: sent as a bearer token.
        found: the samples are appended to it.
    """
    if url is None:
        return
    headers = calling_headers(api_key)
    began_at = time.monotonic()
    period_s = PERIOD_S
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(ssl=calling_context())
    async with aiohttp.ClientSession(
        url.rstrip("/") + "/", headers=headers, timeout=timeout, connector=connector
    ) as http:
        while True:
            taken_at = time.monotonic() - began_at
            # a service that is overloaded now may answer the next time
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with http.get("metrics", params={"name[]": METRIC}) as answer:
                    try:
                        tiers = tier_bytes(await answer.text()) if answer.ok else {}
                    except ValueError:
                        return
                    if not tiers:
                        return
                    found.append(TierSample(taken_at=taken_at, bytes=tiers))
            if len(found) >= MAX_POINTS:
                del found[1::2]
                period_s *= 2
            await asyncio.sleep(period_s)
