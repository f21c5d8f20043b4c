"""The dashboard *SLO overview*: what the callers get, for every kind of request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.dashboards.kinds import BUDGET_STEPS, GOOD, IN_TIME_STEPS, OURS, headline, over_time
from npu_gr.metrics.dashboards.panels import SECONDS, bars, dashboard, of, quantile, series, total
from npu_gr.metrics.slo import Objective


def slo_overview(objectives: Sequence[Objective]) -> dict[str, Any]:
    """Make the dashboard; each objective gives its kind a row."""
    rows = {
        "All kinds": [
            bars(
                "In time",
                "Share of all requests of a kind that were answered within its objective.",
                "percentunit",
                {"{{kind}}": f"{total('slo_requests_total', 'kind', GOOD)} / {total('slo_requests_total', 'kind')}"},
                steps=IN_TIME_STEPS,
            ),
            series(
                "Burn rate",
                "Of kinds that wake somebody: above 14.4 for an hour, or above 6 for six hours, pages.",
                "none",
                {"{{sloth_slo}}": f"slo:current_burn_rate:ratio{{{OURS}}}"},
                limit=6.0,
            ),
            bars(
                "Error budget left",
                "Of 30 days, or of as long as there are data.",
                "percentunit",
                {"{{sloth_slo}}": f"slo:period_error_budget_remaining:ratio{{{OURS}}}"},
                steps=BUDGET_STEPS,
            ),
            series(
                "P99 by kind",
                "Answered requests only: from the last byte to the answer.",
                SECONDS,
                {"{{kind}}": quantile(0.99, "request_duration_seconds", "kind")},
            ),
            series(
                "Goodput by kind",
                "Requests a second that were answered in time.",
                "reqps",
                {"{{kind}}": total("slo_requests_total", "kind", GOOD)},
                stacked=True,
            ),
            series(
                "Admission",
                "How requests of all kinds get through the door.",
                "reqps",
                {"{{verdict}}": total("admissions_total", "verdict")},
                stacked=True,
            ),
            series(
                "HTTP answers",
                "By status, all routes.",
                "reqps",
                {"{{code}}": total("requests_total", "code")},
                stacked=True,
            ),
            series(
                "Attainment by instance",
                "Each instance computes it over its last five minutes.",
                "percentunit",
                {"{{instance}} {{kind}} {{slo}}": of("slo_attainment_ratio", 'window="5m"')},
                top=1.0,
            ),
            series(
                "Error budget left by instance",
                "Since the start of each instance.",
                "percentunit",
                {"{{instance}} {{kind}} {{slo}}": of("slo_budget_remaining_ratio")},
                top=1.0,
            ),
        ]
    }
    for objective in objectives:
        kind = KINDS[objective.kind]
        limit = f"{objective.latency_ratio * 100:.4g} % within {objective.threshold_s * 1e3:g} ms"
        title = f"{kind.plural.capitalize()} ({kind.method} {kind.path}): {limit}"
        rows[title] = [*headline(kind, objective.threshold_s), *over_time(kind)]
    return dashboard(
        "npu-gr-slo",
        "npu_gr / SLO overview",
        "What the callers get: answers in time, the error budgets, and how fast they burn. Every kind has a row.",
        rows,
    )
