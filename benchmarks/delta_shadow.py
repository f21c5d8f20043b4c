"""`python -m benchmarks delta --only shadow`: what a shadow costs the ranks of the served ranker.

Runs with a shadow of a tenth of the users and without one take turns, in one process, at the same
rate and with the same arrivals. Which of them comes first changes with the turn.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.frame import Line, compared, tell
from npu_gr.core.errors import Unavailable

if TYPE_CHECKING:
    from benchmarks.delta import Asked, Run

SHADOW = "/v1/models/shadow"
P99 = 1 / 1.02  # target


def call(port: int, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Open, read or drop the shadow.

    Raises:
        Unavailable: It was rejected.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, SHADOW, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise Unavailable(f"bench: {method} {SHADOW}: {response.status}: {text[:200]!r}")
        found: dict[str, Any] = json.loads(text)
        return found
    finally:
        connection.close()


def turns(
    asked: Asked, shadow: Path, about: str, seconds: float, repeats: int, load: float
) -> Iterator[Line]:
    """Measure an instance whose prefixes are cached.

    Args:
        asked: The instance.
        shadow: Another checkpoint, of the same shape.
        about: Its size, for the lines.
        seconds: Length of a run.
        repeats: Number of turns.
        load: Share of the capacity that is asked.
    """
    pairs: list[tuple[Run, Run]] = []
    scored = 0
    for turn in range(repeats):
        rate = load * asked.capacity_per_s()
        found: dict[bool, Run] = {}
        for is_open in (True, False) if turn % 2 else (False, True):
            if is_open:
                call(asked.admin_port, "POST", {"path": str(shadow)})
            found[is_open] = asked.load(seconds, rate, asked.seed + turn)
            if is_open:
                scored += call(asked.admin_port, "GET")["scored"]
                call(asked.admin_port, "DELETE")
        pairs.append((found[True], found[False]))
        tell("delta", f"shadow: {pairs[-1][0]} without {pairs[-1][1]}, {scored} scored")
    ratios = sorted(alone.p99_ms / ours.p99_ms for ours, alone in pairs)
    yield compared(
        "delta",
        f"P99, shadow, {about}, {load:.0%} load, {scored} ranks scored twice, turns "
        f"{1 / ratios[-1]:.2f}x to {1 / ratios[0]:.2f}x",
        median(ours.p99_ms for ours, _ in pairs),
        "ms",
        "without a shadow",
        median(alone.p99_ms for _, alone in pairs),
        median(ratios),
        P99,
    )
