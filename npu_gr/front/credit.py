"""How an instance is shared by the doors of its front workers. Numbers in, decision out.

By Little's law so many calls of a kind may be inside the instance as its window says. While the workers want no more
than that, none has a bound. Otherwise each gets the part that its callers are due:

    part of a worker = sum over the tenants: the tenant's part by weight x the worker's part of the tenant's requests

So a worker whose callers wait gets more than one whose callers do not, and a tenant does not gain by connecting to
many workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST = 4  # calls of a kind, whatever else is wanted: a worker that begins to want has them before it has said so


class WorkerDemand(NamedTuple):
    """What the callers of one worker want: requests that wait or are inside."""

    kinds: Mapping[str, int]
    tenants: Mapping[str, int]


def slots(
    workers: Sequence[WorkerDemand], windows: Mapping[str, int], weights: Mapping[str, float]
) -> list[dict[str, int]]:
    """Say how many calls each worker may have inside: kind -> calls for each of them; {} = no bound.

    Args:
        workers: what each wants.
        windows: calls of a kind that the instance may have inside where there are no others.
        weights: of tenants; all others have 1.
    """
    asked = sum(num / windows[kind] for one in workers for kind, num in one.kinds.items())
    if asked <= 1.0 or sum(any(one.kinds.values()) for one in workers) < 2:
        return [{} for _ in workers]
    parts = _parts([one.tenants for one in workers], weights)
    return [{kind: max(LEAST, math.ceil(part * window)) for kind, window in windows.items()} for part in parts]


def _parts(workers: Sequence[Mapping[str, int]], weights: Mapping[str, float]) -> list[float]:
    """The part of each worker; together they are 1."""
    totals: dict[str, int] = {}
    for tenants in workers:
        for name, num in tenants.items():
            totals[name] = totals.get(name, 0) + num
    weight = {name: weights.get(name, 1.0) for name, num in totals.items() if num}
    if not weight:
        return [1.0 / len(workers)] * len(workers)
    all_weight = sum(weight.values())
    return [
        sum(weight[name] / all_weight * num / totals[name] for name, num in tenants.items() if num)
        for tenants in workers
    ]
