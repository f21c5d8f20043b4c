"""What an instance says on its status page."""

from __future__ import annotations

import time
from contextlib import suppress

from npu_gr import __version__
from npu_gr.core.errors import NotFound
from npu_gr.metrics.registry import WINDOWS_S, Metrics
from npu_gr.metrics.slo import Counts
from npu_gr.metrics.status import Goodput, SlowRequest, StatusReport, TierStatus
from npu_gr.server.access_log import Journal
from npu_gr.server.service_protocol import Door

RECENT_S, NUM_SLOW = 900.0, 10


def status(door: Door, metrics: Metrics, journal: Journal, uptime_s: float) -> StatusReport:
    """Everything of this moment."""
    ready, why_not = door.is_ready()
    return StatusReport(
        name="instance",
        ready=ready,
        why_not=why_not,
        uptime_s=uptime_s,
        versions=_versions(door),
        goodput=[_goodput(kind, metrics, journal, uptime_s) for kind in metrics.objectives if _asked(metrics, kind)],
        outcomes={kind: metrics.outcomes(kind) for kind in ("rank", "generate")},
        tiers=[
            TierStatus(
                name=name,
                budget=reads["budget"](),
                entries=reads["entries"](),
                states={state: read() for state, read in reads.items() if state not in ("budget", "entries")},
            )
            for name, reads in metrics.tiers.items()
        ],
        queue=metrics.queue(),
        slow=[
            SlowRequest(
                age_s=max(time.time() - line.time_s, 0.0),
                kind=kind,
                request_id=line.request_id,
                trace_id=line.trace_id,
                status=line.status,
                duration_s=line.duration_s,
                outcome=line.outcome or line.verdict or line.error,
                reason=line.reason,
                stages_s=line.stages_s,
            )
            for kind, line in journal.slowest(NUM_SLOW, RECENT_S)
        ],
    )


def _versions(door: Door) -> dict[str, str]:
    models = door.models()
    versions = {"npu_gr": __version__} | {model.name: model.version for model in models}
    versions |= {"device": models[0].device} if models else {}
    with suppress(NotFound):  # it does not generate
        versions["catalogue"] = door.catalogue().version
    return versions


def _asked(metrics: Metrics, kind: str) -> bool:
    return kind == "rank" or sum(metrics.rolling[kind].total) > 0


def _goodput(kind: str, metrics: Metrics, journal: Journal, uptime_s: float) -> Goodput:
    objective, total = metrics.objectives[kind], metrics.rolling[kind].total
    over = {name: metrics.over(kind, window_s) for name, window_s in WINDOWS_S.items()}
    p50_s, p99_s = journal.percentiles_s(kind) or (None, None)
    window_s = min(WINDOWS_S["5m"], max(uptime_s, 1.0))
    return Goodput(
        kind=kind,
        threshold_s=objective.threshold_s,
        objective_ratio=objective.latency_ratio,
        attainment_ratio={name: _in_time(counts) for name, counts in over.items()},
        budget_remaining_ratio=1.0 - (1.0 - _in_time(total)) / (1.0 - objective.latency_ratio),
        good=total.good,
        slow=total.slow,
        failed=total.failed,
        per_s=over["5m"].good / window_s,
        p50_s=p50_s,
        p99_s=p99_s,
    )


def _in_time(counts: Counts) -> float:
    """The share of all requests that were answered in time: an instance that refuses is no better than a slow one."""
    return counts.good / sum(counts) if sum(counts) else 1.0
