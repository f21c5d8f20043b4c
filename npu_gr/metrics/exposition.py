"""What `/metrics` answers, made a family at a time: the event loop serves requests in between.

The whole text takes milliseconds, which in one piece would be in every percentile of the requests beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from npu_gr.metrics.registry import Metrics

_EOF = b"# EOF\n"


class _One(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


async def expose(metrics: Metrics, accept: str) -> tuple[bytes, str]:
    """The text and its content type: OpenMetrics, with exemplars, for whoever accepts it."""
    encode, content_type = choose_encoder(accept)
    metrics.refresh()
    parts = []
    for family in metrics.registry.collect():
        parts.append(encode(_One(family)).removesuffix(_EOF))
        await asyncio.sleep(0)
    # in a thread, because it reads files; it brings the end mark, if the format has one
    parts.append(await asyncio.to_thread(encode, metrics.process.collector))
    return b"".join(parts), content_type
