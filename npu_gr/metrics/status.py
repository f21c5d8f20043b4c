"""The status page and the API console: their HTML, and the Structs of the status page's JSON.

The status page is one HTML text that loads its JSON, a `StatusReport`, every two seconds, and
nothing else. The HTML contains no data, so it is served without an API key. If the server rejects
the request of the JSON, the page asks the reader for a key.

The API console is one HTML text too. It loads the OpenAPI document with the reader's key. A page of
the admin address may not send requests to the public address (same-origin policy), so for public
routes the console shows the `curl` command.
"""

from __future__ import annotations

from importlib import resources

import msgspec


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The objective of one kind of request, and its attainment."""

    kind: str  # a name in `core.kinds.KINDS`
    threshold_s: float
    objective_ratio: float  # share of the answered requests that must be within the threshold
    attainment_ratio: dict[str, float]  # window -> share of requests within the threshold
    budget_remaining_ratio: float  # since the start; below 0 = overspent
    good: int  # requests since the start, as are `slow` and `failed`
    slow: int
    failed: int
    per_s: float  # goodput over the last minute: requests per second within the threshold
    p50_s: float | None  # latency of recent requests; None = there were none
    p99_s: float | None


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of one memory tier."""

    name: str
    budget: int  # most bytes that the tier may hold
    entries: int  # prefixes that the tier holds
    states: dict[str, int]  # state -> bytes


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The recent answers to one tenant, or of one version of a model."""

    num: int
    per_s: float
    within_slo_ratio: float
    p99_s: float


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model: the one that serves, or one that still drains."""

    name: str
    version: str
    device: str
    is_draining: bool
    served: Served | None  # None = there are no recent answers


class SlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest recent requests of its kind."""

    age_s: float
    kind: str
    request_id: str
    trace_id: str
    status: int
    duration_s: float
    objective_s: float  # of its kind; `duration_s` over it is slow
    outcome: str | None
    reason: str | None
    stages_s: dict[str, float]


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of the status page, which hides empty parts."""

    name: str  # name of the process: "instance"
    ready: bool
    why_not: str  # the reason in words, if `ready` is false
    uptime_s: float
    versions: dict[str, str]
    goodput: list[Goodput] = []
    outcomes: dict[str, dict[str, int]] = {}  # kind -> outcome -> requests since the start
    tiers: list[TierStatus] = []
    queue: dict[str, float] = {}  # jobs that wait, requests in flight, and the limits of both
    late: dict[str, float] = {}  # thread or task that has not moved for too long -> seconds
    slow: list[SlowRequest] = []
    models: list[ModelStatus] = []
    tenants: dict[str, Served] = {}  # "" = requests without a tenant
    links: dict[str, str] = {}  # text -> path on this server


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src "
    "'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(endpoint: str) -> str:
    """Return the HTML of the status page; `endpoint` is the path of its JSON on this server."""
    text = resources.files("npu_gr.metrics").joinpath("status.html").read_text()
    return text.replace("{{endpoint}}", endpoint)


def console(endpoint: str, scheme: str, port: int) -> str:
    """Return the HTML of the API console.

    Args:
        endpoint: Path of the OpenAPI document on this server.
        scheme: Scheme of the public address, http or https.
        port: Port of the public address. Its host is that of the page, and the reader can change
            it.
    """
    text = resources.files("npu_gr.metrics").joinpath("console.html").read_text()
    for name, value in (("endpoint", endpoint), ("scheme", scheme), ("port", str(port))):
        text = text.replace("{{" + name + "}}", value)
    return text
