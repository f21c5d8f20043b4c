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
NOT_ANSWERED = (  # what the panel shows, in words, and its verdicts; refusals for load have a panel of their own
    ("out of time", "504: the budget ran out before the work did.", "out_of_time"),
    (
        "errors of ours",
        "unavailable: 503, starting, draining, or a dependency is down. broken: another 5xx.",
        "unavailable|broken",
    ),
    (
        "faults of the caller",
        "invalid: a 4xx that the caller has to mend. abandoned: the caller hung up. impossible: it granted less than"
        " half of the objective. over_rate: its API key was over its rate.",
        "invalid|abandoned|impossible|over_rate",
    ),
)


def of_kind(kind: Kind[Any, Any]) -> str:
    """The matcher that selects one kind of request."""
    return f'kind="{kind.name}"'


def latency(share: float, kind: Kind[Any, Any], by: str = "") -> str:
    """A quantile of the answered requests' time from the last byte to the answer; `by` = labels to keep apart."""
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
        number(f"{title}: P50", f"Half of the answered {plural} take less.", SECONDS, {"p50": latency(0.5, kind)}),
        number(
            f"{title}: P99",
            f"One in a hundred answered {plural} takes longer.",
            SECONDS,
            {"p99": latency(0.99, kind)},
        ),
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
    """Plots: the answered requests' latency against the objective, where it goes, and all that was not answered."""
    title, plural = kind.title, kind.plural
    return [
        series(
            f"{title} latency",
            f"Answered {plural} only: from the last byte to the answer, against the objective.",
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
            f"{plural.capitalize()} by stage",
            f"Mean time of each stage: {', '.join((*kind.stages, 'door'))} (reading, parsing and writing).",
            SECONDS,
            {"{{stage}}": mean("stage_duration_seconds", "stage", of_kind(kind))},
            width=6,
            stacked=True,
        ),
        *([] if kind.label is None else [p99_by_label(kind, width=6)]),
        series(
            f"{plural.capitalize()} refused for load",
            "429, by reason.",
            "reqps",
            {"{{reason}}": total("refusals_total", "reason", of_kind(kind))},
            width=6,
            stacked=True,
        ),
        *(
            series(
                f"{plural.capitalize()}: {name}",
                text,
                "reqps",
                {"{{verdict}}": total("admissions_total", "verdict", of_kind(kind), f'verdict=~"{verdicts}"')},
                width=6,
                stacked=True,
            )
            for name, text, verdicts in NOT_ANSWERED
        ),
    ]


def p99_by_label(kind: Kind[Any, Any], width: int = 8) -> Panel:
    """The P99 of a kind whose answers differ by a label, e.g. by how they got their prefix; `width` of 24 columns."""
    assert kind.label is not None
    return series(
        f"{kind.title} P99 by {kind.label}",
        f"Answered {kind.plural}: time in the service, without reading the request and writing the answer.",
        SECONDS,
        {f"{{{{{kind.label}}}}}": quantile(0.99, f"{kind.name}_duration_seconds", kind.label)},
        width=width,
    )
