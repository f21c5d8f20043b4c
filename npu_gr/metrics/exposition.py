"""Write the text of `/metrics`, one metric family at a time.

The whole text takes milliseconds. Written at once, it would delay the requests that the event loop
serves by as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from npu_gr.metrics.registry import Metrics

_EOF = b"# EOF\n"


class _OneFamily(Collector):
    """A registry that holds one metric family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


async def expose(metrics: Metrics, accept: str, names: Sequence[str] = ()) -> tuple[bytes, str]:
    """Return the text and its content type.

    Args:
        metrics: Metrics of this instance.
        accept: `Accept` header; a client that accepts OpenMetrics gets it, with exemplars.
        names: Sample names; only families with one of them are written. Empty = all families.
    """
    encode, content_type = choose_encoder(accept)
    metrics.refresh()
    if names:
        return encode(metrics.registry.restricted_registry(names)), content_type
    parts = []
    for family in metrics.registry.collect():
        parts.append(encode(_OneFamily(family)).removesuffix(_EOF))
        await asyncio.sleep(0)
    # in a thread, because it reads /proc; its text ends with the EOF mark of OpenMetrics
    parts.append(await asyncio.to_thread(encode, metrics.process.collector))
    return b"".join(parts), content_type
