"""The panels that every kind of request has, made from `core.kinds.KINDS`: a new kind gets them without a line here."""

from __future__ import annotations

from typing import Any

from npu_gr.core.kinds import Kind
from npu_gr.metrics.dashboards.panels import (
    SECONDS,
    Panel,
    Steps,
    mean,
    number,
    of,
    quantile,
    series,
    total,
)

IN_TIME_STEPS: Steps = ((None, "red"), (0.99, "orange"), (0.995, "green"))
BURN_STEPS: Steps = ((None, "green"), (1.0, "orange"), (6.0, "red"))
BUDGET_STEPS: Steps = ((None, "red"), (0.0, "orange"), (0.5, "green"))
OURS = 'sloth_service="npu_gr"'
GOOD = 'result="good"'


def of_kind(kind: Kind[Any, Any]) -> str:
    """The matcher that selects one kind of request."""
    return f'kind="{kind.name}"'


def latency(share: float, kind: Kind[Any, Any], by: str = "") -> str:
    """A quantile of the time from the first byte of a request to its answer; `by` = labels to keep apart."""
    return quantile(share, "request_duration_seconds", by, of_kind(kind))


def headline(kind: Kind[Any, Any], threshold_s: float) -> list[Panel]:
    """Six numbers: does this kind keep its promises now, and how much error budget is left?"""
    slos = f'sloth_slo=~"{kind.name}-.+"'
    asked = total("slo_requests_total", "", of_kind(kind))
    in_time = total("slo_requests_total", "", of_kind(kind), GOOD)
    title, plural = kind.title, kind.plural
    return [
        number(
            f"{title}: in time",
            f"Share of all {plural} that were answered within {threshold_s * 1e3:g} ms.",
            "percentunit",
            {"in time": f"{in_time} / {asked}"},
            steps=IN_TIME_STEPS,
        ),
        number(
            f"{title}: goodput",
            f"{plural.capitalize()} a second that were answered in time.",
            "reqps",
            {"goodput": in_time},
        ),
        number(f"{title}: P50", f"Half of the {plural} take less.", SECONDS, {"p50": latency(0.5, kind)}),
        number(f"{title}: P99", f"One in a hundred {plural} takes longer.", SECONDS, {"p99": latency(0.99, kind)}),
        number(
            f"{title}: burn rate",
            "1 = the error budget lasts exactly its 30 days. Shows the worse of the two promises.",
            "none",
            {"burn": f"max(slo:current_burn_rate:ratio{{{OURS}, {slos}}})"},
            steps=BURN_STEPS,
        ),
        number(
            f"{title}: error budget left",
            "Of 30 days, or of as long as there are data. Shows the worse of the two promises.",
            "percentunit",
            {"left": f"min(slo:period_error_budget_remaining:ratio{{{OURS}, {slos}}})"},
            steps=BUDGET_STEPS,
        ),
    ]


def over_time(kind: Kind[Any, Any]) -> list[Panel]:
    """Four plots: latency against the objective, rate and goodput, refusals, and where the time goes."""
    title, plural = kind.title, kind.plural
    return [
        series(
            f"{title} latency",
            "From the first byte to the answer, against the objective.",
            SECONDS,
            {
                **{f"p{percent}": latency(percent / 100, kind) for percent in (50, 95, 99)},
                "objective": f"max({of('slo_threshold_seconds', of_kind(kind))})",
            },
            width=6,
        ),
        series(
            f"{plural.capitalize()} by result",
            "good (the goodput): in time; slow: answered later; failed: refused for load, out of time, or broken.",
            "reqps",
            {"{{result}}": total("slo_requests_total", "result", of_kind(kind))},
            width=6,
            stacked=True,
        ),
        series(
            f"{plural.capitalize()} not admitted",
            "Why: overloaded 429, unavailable 503, out_of_time 504, abandoned by the caller, invalid, broken.",
            "reqps",
            {"{{verdict}}": total("admissions_total", "verdict", of_kind(kind), 'verdict!="admitted"')},
            width=6,
            stacked=True,
        ),
        series(
            f"{plural.capitalize()} by stage",
            f"Mean time of each stage: {', '.join((*kind.stages, 'door'))} (reading, parsing and writing).",
            SECONDS,
            {"{{stage}}": mean("stage_duration_seconds", "stage", of_kind(kind))},
            width=6,
            stacked=True,
        ),
    ]
