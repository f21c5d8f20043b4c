"""Ask a service for held-out events, as its clients do: with the configured options alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from npu_gr.core.kinds import RECOMMEND
from npu_gr.core.names import answered_ids
from npu_gr.tools.demo_instance import Instance, free_port, served
from npu_gr.tools.evaluate import EvaluationClient
from npu_gr.train.cascade import MISSED, TOP, NextEventCase
from npu_gr.train.metrics import F64

TENANT = "evaluate-served"
ATTEMPTS = 5  # of a request that the service truncated, because the machine was busy


def served_ranks(config: Path, overrides: Sequence[str], cases: Sequence[NextEventCase]) -> F64:
    """Start a service, and return the rank of each case's item in `recommend`, from 0; inf = none.

    Args:
        config: Configuration of the service.
        overrides: `section.key=value` of that configuration.
        cases: Histories, and the item that follows each.

    Raises:
        Unavailable: The service did not start, or a request failed.
    """
    return asyncio.run(_ranks(config, overrides, cases)) if cases else np.empty(0)


async def _ranks(config: Path, overrides: Sequence[str], cases: Sequence[NextEventCase]) -> F64:
    with TemporaryDirectory(prefix="npu-gr-served-") as scratch:
        own = [
            f"server.port={free_port()}",
            f"server.admin_port={free_port()}",
            f"history_store.path={Path(scratch) / 'history.db'}",
        ]
        instance = Instance(config, [*overrides, *own], Path(scratch) / "service.log")
        ranks = np.full(len(cases), MISSED)
        async with served(instance) as url, EvaluationClient(url) as client:
            for row, case in enumerate(cases):
                body = case.body(TENANT) | {"num_items": TOP, "timestamp": case.happened_at}
                answer, _took_s = await client.post(RECOMMEND.path, body)
                for _ in range(ATTEMPTS - 1):
                    if answer["degraded"]:
                        answer, _took_s = await client.post(RECOMMEND.path, body)
                items = answered_ids(answer["items"], case.item_key).tolist()
                if case.target in items:
                    ranks[row] = items.index(case.target)
        return ranks
