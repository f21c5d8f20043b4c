"""Make the Prometheus rules: SLO recordings, burn-rate alerts, and the alerts of `causes.yml`.

Source: names, labels and groups are those that Sloth generates (github.com/slok/sloth,
examples/_gen/getting-started.yml), so Sloth's public dashboards work with these rules. Windows and
factors are those of The Site Reliability Workbook, chapter 5. Two things differ from Sloth:

- A window without traffic records no sample, because a division by zero would spoil the average
  over 30 days.
- A burn-rate alert needs `MIN_REQUESTS` in its long window, so that one failed request in a quiet
  night pages no one. Rare kinds, as erasures, need `MIN_BAD` bad ones instead: for the slow
  alert in its long window; for the fast one in six hours, and every request of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any, NamedTuple

import yaml

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.slo import Objective, Promise

SERVICE = "npu_gr"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
PERIOD_DAYS = 30
MIN_REQUESTS = 100
MIN_BAD = 5
RUNBOOKS = "docs/runbooks"

Rule = dict[str, Any]


class Burn(NamedTuple):
    """An alert condition: the burn rate is above `factor` in the short and in the long window."""

    short: str
    long: str
    factor: float


# 2 % of the budget in an hour, or 5 % in six hours
FAST = (Burn("5m", "1h", 14.4), Burn("30m", "6h", 6.0))
# 10 % of the budget in a day, or in three days
SLOW = (Burn("2h", "1d", 3.0), Burn("6h", "3d", 1.0))
RARE_WINDOW = "6h"  # all requests of a rare kind were bad for so long


def rules(
    objectives: Iterable[Objective], runbooks: str = RUNBOOKS
) -> dict[str, list[dict[str, Any]]]:
    """Build the content of a Prometheus rule file.

    Args:
        objectives: One objective for each kind of request in `KINDS`.
        runbooks: Folder of the runbook pages, a path or a URL.
    """
    groups = []
    for objective in objectives:
        for promise in Promise:
            groups += _slo_groups(objective, promise, runbooks)
    causes = yaml.safe_load(resources.files("npu_gr.metrics").joinpath("causes.yml").read_text())
    return {
        "groups": [
            *groups,
            {"name": "npu_gr-causes", "rules": [_cause(cause, runbooks) for cause in causes]},
        ]
    }


def _slo_groups(objective: Objective, promise: Promise, runbooks: str) -> list[dict[str, Any]]:
    kind = objective.kind
    name = f"{kind}-{promise.value}"
    slo_id = f"{SERVICE}-{name}"
    labels = {"sloth_id": slo_id, "sloth_service": SERVICE, "sloth_slo": name}
    return [
        {"name": f"sloth-slo-sli-recordings-{slo_id}", "rules": _errors(kind, promise, labels)},
        {
            "name": f"sloth-slo-meta-recordings-{slo_id}",
            "rules": _meta(objective.ratio(promise), labels),
        },
        {
            "name": f"sloth-slo-alerts-{slo_id}",
            "rules": _alerts(objective, promise, labels, runbooks),
        },
    ]


def _errors(kind: str, promise: Promise, labels: dict[str, str]) -> list[Rule]:
    """Record the share of requests that broke the promise, over each window."""
    bad, all_ = _series(kind, promise)
    recorded = [
        {
            "record": f"slo:sli_error:ratio_rate{window}",
            "expr": f"sum(rate({bad}[{window}]))\n/\n(sum(rate({all_}[{window}])) > 0)",
            "labels": {**labels, "sloth_window": window},
        }
        for window in WINDOWS
    ]
    five = f"slo:sli_error:ratio_rate5m{_selector(labels)}"
    period = f"{PERIOD_DAYS}d"
    recorded.append(
        {
            "record": f"slo:sli_error:ratio_rate{period}",
            "expr": f"sum_over_time({five}[{period}])\n/ ignoring "
            f"(sloth_window)\ncount_over_time({five}[{period}])",
            "labels": {**labels, "sloth_window": period},
        }
    )
    return recorded


def _series(kind: str, promise: Promise) -> tuple[str, str]:
    """Return the selectors of the requests that broke a promise, and of all that it is about."""
    of_kind = f'npu_gr_slo_requests_total{{kind="{kind}"'
    if promise is Promise.LATENCY:
        return f'{of_kind},result="slow"}}', f'{of_kind},result=~"good|slow"}}'
    return f'{of_kind},result="failed"}}', f"{of_kind}}}"


def _meta(ratio: float, labels: dict[str, str]) -> list[Rule]:
    """Record the objective, its error budget, and the burn rate."""
    selector = _selector(labels)
    matched = "/ on(sloth_id, sloth_slo, sloth_service) group_left"
    burn = f"{matched}\nslo:error_budget:ratio{selector}"
    exprs = {
        "slo:objective:ratio": f"vector({ratio!r})",
        "slo:error_budget:ratio": f"vector(1-{ratio!r})",
        "slo:time_period:days": f"vector({PERIOD_DAYS})",
        "slo:current_burn_rate:ratio": f"slo:sli_error:ratio_rate5m{selector}\n{burn}",
        "slo:period_burn_rate:ratio": f"slo:sli_error:ratio_rate{PERIOD_DAYS}d{selector}\n{burn}",
        "slo:period_error_budget_remaining:ratio": f"1 - slo:period_burn_rate:ratio{selector}",
    }
    recorded: list[Rule] = [
        {"record": name, "expr": expr, "labels": labels} for name, expr in exprs.items()
    ]
    about = {
        "sloth_mode": "npu-gr-dashboards",
        "sloth_spec": "prometheus/v1",
        "sloth_version": "npu_gr",
    }
    return [
        *recorded,
        {"record": "sloth_slo_info", "expr": "vector(1)", "labels": {**labels, **about}},
    ]


def _alerts(
    objective: Objective, promise: Promise, labels: dict[str, str], runbooks: str
) -> list[Rule]:
    """Alert on fast and slow burn: a page for a fast burn of kinds that page, else a ticket."""
    kind = KINDS[objective.kind]
    budget = f"(1-{objective.ratio(promise)!r})"
    plural = kind.plural.capitalize()
    broken = (
        f"later than {objective.threshold_s * 1e3:g} ms"
        if promise is Promise.LATENCY
        else "not answered"
    )

    bad, _ = _series(kind.name, promise)
    total = f'npu_gr_slo_requests_total{{kind="{kind.name}"}}'

    def over(window: str, most: str) -> str:
        return f"slo:sli_error:ratio_rate{window}{_selector(labels)} > {most}"

    def num(series: str, window: str, least: int) -> str:
        # `increase` of whole numbers is not whole: it extrapolates
        return f"sum(increase({series}[{window}])) > {least - 0.5:g}"

    def burning(burn: Burn, *, is_rare: bool) -> str:
        most = f"{burn.factor:g} * {budget}"
        enough = num(total, burn.long, MIN_REQUESTS + 1)
        enough += f" or {num(bad, burn.long, MIN_BAD)}" if is_rare else ""
        return (
            f"(({over(burn.short, most)}) and ignoring (sloth_window) "
            f"({over(burn.long, most)}) and on () ({enough}))"
        )

    # A rare kind has no requests in most short windows: an alert on them would come and go.
    all_bad = f"(({over(RARE_WINDOW, '0.999')}) and on () ({num(bad, RARE_WINDOW, MIN_BAD)}))"
    fast = [*(burning(burn, is_rare=False) for burn in FAST), all_bad]
    slow = [burning(burn, is_rare=True) for burn in SLOW]

    def alert(speed: str, conditions: list[str], severity: str, how: str) -> Rule:
        return _alert(
            f"NpuGr{kind.title}{promise.value.title()}{speed}Burn",
            "\nor ignoring (sloth_window)\n".join(conditions),
            severity,
            f"{plural} are {broken} so often that the error budget of {PERIOD_DAYS} days burns "
            f"{how}.",
            f"{runbooks}/{kind.name}-{promise.value}.md",
        )

    return [
        alert("Fast", fast, "page" if kind.pages_on_fast_burn else "ticket", "much too fast"),
        alert("Slow", slow, "ticket", "too fast"),
    ]


def _cause(cause: dict[str, str], runbooks: str) -> Rule:
    page = f"{runbooks}/{cause['runbook']}.md"
    return _alert(
        cause["alert"], cause["expr"], cause["severity"], cause["summary"], page, cause["for"]
    )


def _alert(
    name: str, expr: str, severity: str, summary: str, runbook: str, wait: str | None = None
) -> Rule:
    rule: Rule = {"alert": name, "expr": expr}
    if wait is not None:
        rule["for"] = wait
    rule["labels"] = (
        {"severity": severity, "sloth_severity": severity}
        if wait is None
        else {"severity": severity}
    )
    rule["annotations"] = {"summary": summary, "runbook_url": runbook}
    return rule


def _selector(labels: dict[str, str]) -> str:
    return "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
