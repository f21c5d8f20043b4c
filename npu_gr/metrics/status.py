"""What the status page shows, as Structs, and the page itself. An instance and the router fill the same ones.

The page is one HTML text that loads nothing but its JSON: a `Status`, asked for every two seconds. It holds no data
of its own, so it may be served without a key; it asks for one when the JSON is refused.
"""

from __future__ import annotations

from importlib import resources

import msgspec


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request against its objective."""

    kind: str
    threshold_s: float
    objective_ratio: float  # of the answered ones in time
    attainment_ratio: dict[str, float]  # window -> share of requests answered in time
    budget_remaining_ratio: float  # since the start; below 0 = overspent
    good: int  # since the start, as slow and failed
    slow: int
    failed: int
    per_s: float  # answered in time, over the last five minutes
    p50_s: float | None  # of the newest requests; None = there were none
    p99_s: float | None


class TierBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One memory tier."""

    name: str
    budget: int
    entries: int
    states: dict[str, int]  # state -> bytes


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest of the newest requests."""

    age_s: float
    kind: str
    request_id: str
    trace_id: str
    status: int
    duration_s: float
    outcome: str | None
    reason: str | None
    stages_s: dict[str, float]


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A backend as the router sees it."""

    name: str
    state: str
    requests: int
    in_flight: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at once. What is empty is not shown."""

    name: str  # what this is: "instance", "router"
    ready: bool
    why_not: str
    uptime_s: float
    versions: dict[str, str]
    goodput: list[Goodput] = []
    outcomes: dict[str, dict[str, int]] = {}  # kind -> outcome -> requests since the start
    tiers: list[TierBytes] = []
    queue: dict[str, float] = {}  # jobs waiting, requests in flight, their limits
    slow: list[Slow] = []
    instances: list[Instance] = []


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(endpoint: str) -> str:
    """The page over a JSON `endpoint`, a path of the same server."""
    text = resources.files("npu_gr.metrics").joinpath("status.html").read_text()
    return text.replace("{{endpoint}}", endpoint)
