"""Bytes of the memory tiers while a replay runs, read from the service's /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.replay.report import TierBytes

PERIOD_S = 1.0
MAX_POINTS = 240  # then every other one is dropped and the period doubles
TIMEOUT_S = 2.0


def tier_bytes(text: str) -> dict[str, float]:
    """`"hbm live": bytes` of every tier and state in an exposition. Raises ValueError where it cannot be read."""
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name == "npu_gr_kv_bytes":
            for sample in family.samples:
                found[f"{sample.labels['tier']} {sample.labels['state']}"] = sample.value
    return found


async def watch_tiers(url: str, api_key: str | None, found: list[TierBytes]) -> None:
    """Append to `found` until cancelled; a service that shows no tiers is asked no more."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    began_at, period_s = time.monotonic(), PERIOD_S
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(url.rstrip("/") + "/", headers=headers, timeout=timeout) as http:
        while True:
            at_s = time.monotonic() - began_at
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):  # overloaded now is worth asking again
                async with http.get("metrics") as answer:
                    try:
                        tiers = tier_bytes(await answer.text()) if answer.ok else {}
                    except ValueError:
                        return
                    if not tiers:
                        return
                    found.append(TierBytes(at_s=at_s, bytes=tiers))
            if len(found) >= MAX_POINTS:
                del found[1::2]
                period_s *= 2
            await asyncio.sleep(period_s)
