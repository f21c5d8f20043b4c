"""The status page: the Structs of its JSON, and its HTML.

The page is one HTML text. It loads nothing but its JSON, a `StatusReport`, every two seconds. It
holds no data of its own, so it is served without an API key; it asks the reader for a key when the
server rejects the JSON.

The API console is such a text, too. It reads the OpenAPI document with the reader's key. Browsers
may not call the public address from a page of the admin address, so for its routes the page makes
the `curl` call.
"""

from __future__ import annotations

from importlib import resources

import msgspec


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of request keeps its objective."""

    kind: str  # a name in `core.kinds.KINDS`
    threshold_s: float
    objective_ratio: float  # share of the answered requests that must be in time
    attainment_ratio: dict[str, float]  # window -> share of requests answered in time
    budget_remaining_ratio: float  # since the start; below 0 = overspent
    good: int  # requests since the start; `slow` and `failed` too
    slow: int
    failed: int
    per_s: float  # requests answered in time, a second, over the last minute
    p50_s: float | None  # of the newest requests; None = there were none
    p99_s: float | None


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of one memory tier."""

    name: str
    budget: int  # bytes that it may hold
    entries: int  # prefixes that it holds
    states: dict[str, int]  # state -> bytes


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest answers of one tenant, or of one version of a model, were."""

    num: int
    per_s: float
    within_slo_ratio: float
    p99_s: float


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model: the one that serves, or one that drains beside it."""

    name: str
    version: str
    device: str
    is_draining: bool
    served: Served | None  # None = it answered nothing lately


class SlowRequest(msgspec.Struct, frozen=True, kw_only=True):
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


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole JSON. The page does not show an empty part."""

    name: str  # of the process: "instance"
    ready: bool
    why_not: str  # in words, where `ready` is false
    uptime_s: float
    versions: dict[str, str]
    goodput: list[Goodput] = []
    outcomes: dict[str, dict[str, int]] = {}  # kind -> outcome -> requests since the start
    tiers: list[TierStatus] = []
    queue: dict[str, float] = {}  # jobs that wait, requests in flight, and the limits of both
    slow: list[SlowRequest] = []
    models: list[ModelStatus] = []
    tenants: dict[str, Served] = {}  # "" = requests that name none
    links: dict[str, str] = {}  # words -> path on this server


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src "
    "'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(endpoint: str) -> str:
    """Make the page; `endpoint` is the path of its JSON on the same server."""
    text = resources.files("npu_gr.metrics").joinpath("status.html").read_text()
    return text.replace("{{endpoint}}", endpoint)


def console(endpoint: str, scheme: str, port: int) -> str:
    """Make the page.

    Args:
        endpoint: path of the OpenAPI document on the same server.
        scheme: http or https, of the public address.
        port: of the public address, which has the host of the page unless its reader says
            otherwise.
    """
    text = resources.files("npu_gr.metrics").joinpath("console.html").read_text()
    for name, value in (("endpoint", endpoint), ("scheme", scheme), ("port", str(port))):
        text = text.replace("{{" + name + "}}", value)
    return text
