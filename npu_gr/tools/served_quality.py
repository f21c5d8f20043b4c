"""Ask a service for held-out events, as its clients do: with the configured options alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from npu_gr.core.kinds import RECOMMEND
from npu_gr.core.names import answered_ids
from npu_gr.tools.demo_instance import Instance, free_port, served
from npu_gr.tools.evaluate import EvaluationClient
from npu_gr.train.cascade import TOP, NextEventCase

TENANT = "evaluate-served"
ATTEMPTS = 5  # of a request that the service truncated, because the machine was busy


def served_hit_ratio(
    config: Path, overrides: Sequence[str], cases: Sequence[NextEventCase]
) -> float:
    """Start a service, and return HR@10 of its `recommend` for the cases.

    Args:
        config: Configuration of the service.
        overrides: `section.key=value` of that configuration.
        cases: Histories, and the item that follows each.

    Raises:
        Unavailable: The service did not start, or a request failed.
    """
    return asyncio.run(_hit_ratio(config, overrides, cases))


async def _hit_ratio(
    config: Path, overrides: Sequence[str], cases: Sequence[NextEventCase]
) -> float:
    with TemporaryDirectory(prefix="npu-gr-served-") as scratch:
        own = [
            f"server.port={free_port()}",
            f"server.admin_port={free_port()}",
            f"history_store.path={Path(scratch) / 'history.db'}",
        ]
        instance = Instance(config, [*overrides, *own], Path(scratch) / "service.log")
        num_hits = 0
        async with served(instance) as url, EvaluationClient(url) as client:
            for case in cases:
                body = case.body(TENANT) | {"num_items": TOP, "timestamp": case.happened_at}
                answer, _took_s = await client.post(RECOMMEND.path, body)
                for _ in range(ATTEMPTS - 1):
                    if answer["degraded"]:
                        answer, _took_s = await client.post(RECOMMEND.path, body)
                items = answered_ids(answer["items"], case.item_key)
                num_hits += case.target in items.tolist()
        return num_hits / max(1, len(cases))
