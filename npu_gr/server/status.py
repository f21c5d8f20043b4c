"""The data behind an instance's operator routes: status page, metrics, stacks, profiles."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from npu_gr import __version__
from npu_gr.core.errors import NotFound
from npu_gr.core.kinds import KINDS, RANK, Kind
from npu_gr.core.secret import redacted
from npu_gr.metrics.exposition import expose
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.requests import WINDOWS_S
from npu_gr.metrics.slo import Counts, Share
from npu_gr.metrics.status import (
    Goodput,
    ModelStatus,
    Served,
    SlowRequest,
    StatusReport,
    TierStatus,
)
from npu_gr.server.access_log import AccessLine, RecentRequests
from npu_gr.server.debug.stacks import Profiler, own_stacks
from npu_gr.server.service_protocol import ServiceProtocol

LINKS = {
    "metrics": "/metrics",
    "configuration": "/debug/config",
    "API": "/debug/console",
    "runbooks": "/debug/runbooks",
}


async def status(
    service: ServiceProtocol, metrics: Metrics, newest: RecentRequests, uptime_s: float
) -> StatusReport:
    """Gather the data of the status page.

    Args:
        service: Gives readiness and versions.
        metrics: Gives the counts since the start and over the last windows.
        newest: Gives exact percentiles and the slowest requests.
        uptime_s: Seconds since the service started.
    """
    ready, why_not = service.is_ready()
    recent = metrics.requests.recent
    return StatusReport(
        name="instance",
        ready=ready,
        why_not=why_not,
        uptime_s=uptime_s,
        versions=await _versions(service),
        goodput=[_goodput(name, metrics, newest) for name in KINDS if _is_shown(metrics, name)],
        outcomes=metrics.requests.outcomes(),
        tiers=[
            TierStatus(
                name=name,
                budget=reads["budget"](),
                entries=reads["entries"](),
                states={
                    state: read()
                    for state, read in reads.items()
                    if state not in ("budget", "entries")
                },
            )
            for name, reads in metrics.relay.tiers.items()
        ],
        queue=dict(metrics.waiting()),
        late={name: one.age_s for name, one in metrics.health.late().items() if one is not None},
        slow=_slowest(metrics, newest),
        models=_models(service, metrics),
        tenants={
            tenant: _served(share)
            for tenant, share in recent.shares(lambda one: one.tenant).items()
        },
        links=LINKS,
    )


def _models(service: ServiceProtocol, metrics: Metrics) -> list[ModelStatus]:
    shares = metrics.requests.recent.shares(lambda one: one.version)
    return [
        ModelStatus(
            name=model.name,
            version=model.version,
            device=model.device,
            is_draining=model.is_draining,
            served=_served(shares[model.version]) if model.version in shares else None,
        )
        for model in service.models()
    ]


def _served(share: Share) -> Served:
    return Served(**share._asdict())


def _slowest(metrics: Metrics, newest: RecentRequests) -> list[SlowRequest]:
    """List the slowest requests of each kind: those first that took most of their objective."""
    objectives = metrics.requests.objectives
    slow = [
        _slow(KINDS[name], line, objectives[name].threshold_s) for name, line in newest.slowest()
    ]
    return sorted(slow, key=lambda one: -one.duration_s / one.objective_s)


def _slow(kind: Kind[Any, Any], line: AccessLine, objective_s: float) -> SlowRequest:
    """Describe a slow request by its outcome, else its verdict, its kind's label or its error."""
    fields = line.answer_fields
    named = (fields.get(name) for name in ("outcome", "verdict", kind.label) if name)
    return SlowRequest(
        age_s=max(time.time() - line.time_s, 0.0),
        kind=kind.name,
        request_id=line.request_id,
        trace_id=line.trace_id,
        status=line.status,
        duration_s=line.duration_s,
        objective_s=objective_s,
        outcome=next((value for value in named if isinstance(value, str)), line.error),
        reason=fields.get("reason"),
        stages_s=dict(line.stages_s),
    )


async def _versions(service: ServiceProtocol) -> dict[str, str]:
    models = service.models()
    versions = {"npu_gr": __version__} | {model.name: model.version for model in models}
    versions |= {"device": models[0].device} if models else {}
    with suppress(NotFound):  # it does not generate
        versions["catalogue"] = (await service.catalogue.info()).version
    return versions


def _is_shown(metrics: Metrics, kind: str) -> bool:
    """Whether a kind has had requests; always true for the rank, so a new page has a row."""
    return kind == RANK.name or sum(metrics.requests.rolling[kind].total) > 0


def _goodput(kind: str, metrics: Metrics, newest: RecentRequests) -> Goodput:
    objective = metrics.requests.objectives[kind]
    total = metrics.requests.rolling[kind].total
    over = {name: metrics.requests.over(kind, window_s) for name, window_s in WINDOWS_S.items()}
    p50_s, p99_s = newest.percentiles_s(kind) or (None, None)
    return Goodput(
        kind=kind,
        threshold_s=objective.threshold_s,
        objective_ratio=objective.latency_ratio,
        attainment_ratio={name: _within_slo(counts) for name, counts in over.items()},
        budget_remaining_ratio=1.0 - (1.0 - _within_slo(total)) / (1.0 - objective.latency_ratio),
        good=total.good,
        slow=total.slow,
        failed=total.failed,
        per_s=metrics.requests.good_per_s(kind),
        p50_s=p50_s,
        p99_s=p99_s,
    )


def _within_slo(counts: Counts) -> float:
    """Return the fraction of requests answered within the SLO; a rejected one counts as slow."""
    return counts.good / sum(counts) if sum(counts) else 1.0


class DebugViews(Protocol):
    """What the operator routes show."""

    async def exposition(self, accept: str, names: Sequence[str]) -> tuple[bytes, str]:
        """Return the body of `/metrics` and its content type; see `npu_gr.metrics.exposition`."""
        ...

    async def status(self) -> StatusReport:
        """Return the data of the status page."""
        ...

    async def stacks(self) -> str:
        """Return the stacks of all threads and tasks."""
        ...

    async def profile(self, seconds: float) -> str:
        """Return a sampled profile of all threads, as folded stacks.

        Raises Overloaded while another profile is being taken.
        """
        ...

    async def bundle_texts(self) -> dict[str, str]:
        """Map file names of the debug bundle to the texts that the instance contributes."""
        ...


class OwnDebugViews:
    """The views of this process."""

    def __init__(self, service: ServiceProtocol, metrics: Metrics, newest: RecentRequests) -> None:
        """Start the uptime.

        Args:
            service: Gives readiness, versions and configuration.
            metrics: Metrics of the instance.
            newest: Gives exact percentiles and the slowest requests.
        """
        self._service = service
        self._metrics = metrics
        self._newest = newest
        self._began_at = time.monotonic()
        self._profiler = Profiler()

    async def exposition(self, accept: str, names: Sequence[str] = ()) -> tuple[bytes, str]:
        return await expose(self._metrics, accept, names)

    async def status(self) -> StatusReport:
        return await status(
            self._service, self._metrics, self._newest, time.monotonic() - self._began_at
        )

    async def stacks(self) -> str:
        return await own_stacks()

    async def profile(self, seconds: float) -> str:
        return await self._profiler.profile(seconds)

    async def bundle_texts(self) -> dict[str, str]:
        exposition, _ = await expose(self._metrics, "")
        return {
            "config.json": config_text(await self._service.effective_config()),
            "status.json": msgspec.json.encode(await self.status()).decode(),
            "metrics.txt": exposition.decode(),
            "requests.jsonl": "".join(f"{line}\n" for line in self._newest.lines()),
        }


def config_text(table: dict[str, Any]) -> str:
    """Return a configuration as JSON, without credentials."""
    return redacted(msgspec.json.encode(table).decode())
