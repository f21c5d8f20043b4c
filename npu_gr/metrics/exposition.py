"""The text of `/metrics`, made one metric family at a time: the event loop serves requests in between.

The whole text takes milliseconds. Made in one piece, it would delay every request beside it by as
much.
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
    """Make the text and its content type.

    Args:
        metrics: of this instance.
        accept: the `Accept` header; a caller that accepts OpenMetrics gets it, with exemplars.
        names: of samples: only the families that have them. None at all = every family.
    """
    encode, content_type = choose_encoder(accept)
    metrics.refresh()
    if names:
        return encode(metrics.registry.restricted_registry(names)), content_type
    parts = []
    for family in metrics.registry.collect():
        parts.append(encode(_OneFamily(family)).removesuffix(_EOF))
        await asyncio.sleep(0)
    # in a thread, because it reads /proc; it brings the end mark of OpenMetrics
    parts.append(await asyncio.to_thread(encode, metrics.process.collector))
    return b"".join(parts), content_type
