"""Prometheus rules for every kind of request: recordings under Sloth's names, burn-rate alerts, alerts on causes.

Source: the names, labels and groups are those that Sloth generates (github.com/slok/sloth,
examples/_gen/getting-started.yml), so Sloth's public dashboards work with these rules. The windows and factors are
those of The Site Reliability Workbook, chapter 5. Two things differ from Sloth:

- A window without traffic records no sample: a division by zero would spoil the average over 30 days.
- A burn-rate alert needs `MIN_REQUESTS` in its long window: one failure in a quiet night must wake nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.cause import Cause
from npu_gr.metrics.router_causes import ROUTER_CAUSES
from npu_gr.metrics.slo import Objective, Promise

SERVICE = "npu_gr"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
PERIOD_DAYS = 30
MIN_REQUESTS = 100
RUNBOOKS = "docs/runbooks"

Rule = dict[str, Any]


class Burn(NamedTuple):
    """Fire while the error budget burns over `factor` times as fast as it may, in the short and in the long window."""

    short: str
    long: str
    factor: float


FAST = (Burn("5m", "1h", 14.4), Burn("30m", "6h", 6.0))  # spends 2 % of the budget in an hour, or 5 % in six hours
SLOW = (Burn("2h", "1d", 3.0), Burn("6h", "3d", 1.0))  # spends 10 % of it in a day, or in three days


CAUSES = (
    Cause(
        alert="NpuGrInstanceDown",
        runbook="instance-down",
        expr='up{job="npu_gr"} == 0',
        wait="1m",
        page=True,
        summary="{{ $labels.instance }} does not answer Prometheus.",
    ),
    Cause(
        alert="NpuGrInstanceNotReady",
        runbook="instance-not-ready",
        expr="npu_gr_ready == 0",
        wait="5m",
        page=True,
        summary="{{ $labels.instance }} is up but accepts no work.",
    ),
    Cause(
        alert="NpuGrFrontWorkerDies",
        runbook="front-worker-dies",
        expr="increase(npu_gr_front_worker_starts_total[15m]) > 0",
        wait="0m",
        page=False,
        summary="A front worker of {{ $labels.instance }} was started again: the requests that it had were lost.",
    ),
    Cause(
        alert="NpuGrScoresDrift",
        runbook="scores-drift",
        expr="increase(npu_gr_selfcheck_failures_total[15m]) > 0",
        wait="0m",
        page=True,
        summary="Scores of {{ $labels.instance }} from cached KV differ from scores without it: answers may be wrong.",
    ),
    Cause(
        alert="NpuGrTierOverBudget",
        runbook="tier-over-budget",
        expr=(
            'sum by (instance, tier) (npu_gr_kv_bytes{state=~"live|reserved"})'
            " > sum by (instance, tier) (npu_gr_kv_budget_bytes)"
        ),
        wait="0m",
        page=True,
        summary="Tier {{ $labels.tier }} of {{ $labels.instance }} holds more than its budget: an invariant is broken.",
    ),
    Cause(
        alert="NpuGrShedding",
        runbook="shedding",
        expr=(
            'sum by (instance) (rate(npu_gr_admissions_total{verdict="overloaded"}[5m]))'
            " > 0.01 * sum by (instance) (rate(npu_gr_admissions_total[5m]))"
        ),
        wait="5m",
        page=False,
        summary="{{ $labels.instance }} refuses over 1 % of its requests for load.",
    ),
    Cause(
        alert="NpuGrPrefixesWasted",
        runbook="prefixes-wasted",
        expr=(
            "sum by (instance) (rate(npu_gr_prefill_wasted_total[30m]))"
            " > 0.3 * (sum by (instance)"
            ' (rate(npu_gr_signal_verdicts_total{verdict=~"preinfer|extend|reload"}[30m])) > 0)'
        ),
        wait="30m",
        page=False,
        summary="{{ $labels.instance }} evicts over 30 % of the prefixes that signals make before a rank reads them.",
    ),
    Cause(
        alert="NpuGrRelayErrors",
        runbook="relay-errors",
        expr="sum by (instance, where) (rate(npu_gr_relay_errors_total[10m])) > 0.1",
        wait="10m",
        page=False,
        summary="{{ $labels.instance }}: {{ $labels.where }} of cached KV fails; requests are answered without it.",
    ),
    Cause(
        alert="NpuGrRedisUnreachable",
        runbook="store-failing",
        expr='max by (instance) (avg_over_time(npu_gr_store_breaker_open{store="redis"}[2m])) > 0.5',
        wait="1m",
        page=True,
        summary="{{ $labels.instance }} gets no answers from Redis; histories and appends are refused or degraded.",
    ),
    Cause(
        alert="NpuGrStoreBreakerOpen",
        runbook="store-failing",
        expr='max by (instance, lane) (avg_over_time(npu_gr_store_breaker_open{store="embedded"}[2m])) > 0.5',
        wait="1m",
        page=True,
        summary="The history store of {{ $labels.instance }} fails: its {{ $labels.lane }} are refused at once.",
    ),
    Cause(
        alert="NpuGrStoreFailing",
        runbook="store-failing",
        expr=(
            'sum by (instance) (rate(npu_gr_store_calls_total{result!~"ok|entry_corrupt"}[5m]))'
            " > 0.01 * sum by (instance) (rate(npu_gr_store_calls_total[5m]))"
        ),
        wait="5m",
        page=False,
        summary="Over 1 % of the calls of the history store of {{ $labels.instance }} fail.",
    ),
    Cause(
        alert="NpuGrStoreDiskFull",
        runbook="store-disk",
        expr='sum by (instance) (increase(npu_gr_store_calls_total{result="disk_full"}[5m])) > 0',
        wait="0m",
        page=True,
        summary="The disk of the history store of {{ $labels.instance }} is full: appends and erasures fail.",
    ),
    Cause(
        alert="NpuGrStoreDiskNearlyFull",
        runbook="store-disk",
        expr="npu_gr_store_disk_free_bytes < 0.1 * npu_gr_store_disk_bytes",
        wait="5m",
        page=False,
        summary="The disk of the history store of {{ $labels.instance }} has less than 10 % left.",
    ),
    Cause(
        alert="NpuGrStoreCorrupt",
        runbook="store-corrupt",
        expr=(
            'sum by (instance) (increase(npu_gr_store_calls_total{result="entry_corrupt"}[15m])) > 0'
            " or sum by (instance) (npu_gr_store_damaged_places) > 0"
        ),
        wait="0m",
        page=False,
        summary="The history store of {{ $labels.instance }} has damaged entries; their users are answered without.",
    ),
    Cause(
        alert="NpuGrFeatureSourceFailing",
        runbook="feature-source-failing",
        expr=(
            'sum by (instance) (rate(npu_gr_user_features_total{source=~"last_known|nothing"}[5m]))'
            " > 0.01 * sum by (instance) (rate(npu_gr_user_features_total[5m]))"
        ),
        wait="5m",
        page=False,
        summary="Over 1 % of the users of {{ $labels.instance }} have old features, or none: their source fails.",
    ),
    Cause(
        alert="NpuGrErasureUnfinished",
        runbook="erasure-unfinished",
        expr="max by (instance, place) (npu_gr_erasure_pending_seconds) > 21600",
        wait="10m",
        page=False,
        summary="{{ $labels.instance }}: its {{ $labels.place }} hold bytes of a user who was erased 6 hours ago.",
    ),
    Cause(
        alert="NpuGrHistoryDegraded",
        runbook="store-failing",
        expr=(
            "sum by (instance) (rate(npu_gr_history_degraded_total[5m]))"
            ' > 0.01 * sum by (instance) (rate(npu_gr_store_calls_total{operation="read"}[5m]))'
        ),
        wait="5m",
        page=False,
        summary="Over 1 % of the histories that {{ $labels.instance }} reads are old ones, empty, or refused.",
    ),
    Cause(
        alert="NpuGrEventLoopBlocked",
        runbook="event-loop-blocked",
        expr=(
            "histogram_quantile(0.99, sum by (instance, le) (rate(npu_gr_event_loop_lag_seconds_bucket[10m]))) > 0.025"
            " or sum by (instance) (increase(npu_gr_event_loop_freezes_total[15m])) > 0"
            " or sum by (instance) (increase(npu_gr_router_event_loop_freezes_total[15m])) > 0"
        ),
        wait="2m",
        page=False,
        summary=(
            "The event loop of {{ $labels.instance }} stood still for over 250 ms, or is over 25 ms late for a"
            " hundredth of the time."
        ),
    ),
    Cause(
        alert="NpuGrLogLinesDropped",
        runbook="log-lines-dropped",
        expr=(
            "sum by (instance, stream) (increase(npu_gr_log_lines_dropped_total[10m])) > 0"
            " or sum by (instance, stream) (increase(npu_gr_router_log_lines_dropped_total[10m])) > 0"
        ),
        wait="2m",
        page=False,
        summary="{{ $labels.instance }} drops log lines: nobody reads {{ $labels.stream }}, or its disk is full.",
    ),
    Cause(
        alert="NpuGrReloadRefused",
        runbook="reload-refused",
        expr="npu_gr_last_reload_successful == 0",
        wait="1m",
        page=False,
        summary="{{ $labels.instance }} refused its last reload of the {{ $labels.what }}: what was before goes on.",
    ),
    Cause(
        alert="NpuGrApiKeysFileStale",
        runbook="api-keys",
        expr="npu_gr_api_keys_file_stale == 1",
        wait="1m",
        page=False,
        summary="{{ $labels.instance }} cannot use its key file: older keys stay in force, nothing can be revoked.",
    ),
    Cause(
        alert="NpuGrNoApiKeys",
        runbook="api-keys",
        expr=("npu_gr_api_keys == 0 and on (instance) sum by (instance) (rate(npu_gr_api_keys_refused_total[5m])) > 0"),
        wait="1m",
        page=True,
        summary="{{ $labels.instance }} has no API key in force, so it refuses every request.",
    ),
    Cause(
        alert="NpuGrCertificateExpires",
        runbook="certificate-expires",
        expr="npu_gr_tls_certificate_expires_at_seconds - time() < 14 * 86400",
        wait="15m",
        page=False,
        summary="The {{ $labels.of }} certificate of {{ $labels.instance }} expires within 14 days.",
    ),
    Cause(
        alert="NpuGrCatalogueOld",
        runbook="catalogue-old",
        expr="npu_gr_catalogue_age_seconds > 7 * 86400",
        wait="1h",
        page=False,
        summary="The catalogue of {{ $labels.instance }} was published over a week ago.",
    ),
)


def rules(objectives: Iterable[Objective], runbooks: str = RUNBOOKS) -> dict[str, list[dict[str, Any]]]:
    """Build the content of a Prometheus rule file.

    Args:
        objectives: one for each kind of request in `KINDS`.
        runbooks: folder of the runbook pages, a path or a URL.
    """
    groups = []
    for objective in objectives:
        for promise in Promise:
            groups += _slo_groups(objective, promise, runbooks)
    causes = [_cause(cause, runbooks) for cause in (*CAUSES, *ROUTER_CAUSES)]
    return {"groups": [*groups, {"name": "npu_gr-causes", "rules": causes}]}


def _slo_groups(objective: Objective, promise: Promise, runbooks: str) -> list[dict[str, Any]]:
    kind = objective.kind
    name = f"{kind}-{promise.value}"
    slo_id = f"{SERVICE}-{name}"
    labels = {"sloth_id": slo_id, "sloth_service": SERVICE, "sloth_slo": name}
    return [
        {"name": f"sloth-slo-sli-recordings-{slo_id}", "rules": _errors(kind, promise, labels)},
        {"name": f"sloth-slo-meta-recordings-{slo_id}", "rules": _meta(objective.ratio(promise), labels)},
        {"name": f"sloth-slo-alerts-{slo_id}", "rules": _alerts(objective, promise, labels, runbooks)},
    ]


def _errors(kind: str, promise: Promise, labels: dict[str, str]) -> list[Rule]:
    """Record the share of requests that broke the promise, over each window."""
    bad, all_ = ('result="slow"', 'result=~"good|slow"') if promise is Promise.LATENCY else ('result="failed"', "")

    def rate(results: str, window: str) -> str:
        matchers = ",".join(filter(None, (f'kind="{kind}"', results)))
        return f"sum(rate(npu_gr_slo_requests_total{{{matchers}}}[{window}]))"

    recorded = [
        {
            "record": f"slo:sli_error:ratio_rate{window}",
            "expr": f"{rate(bad, window)}\n/\n({rate(all_, window)} > 0)",
            "labels": {**labels, "sloth_window": window},
        }
        for window in WINDOWS
    ]
    five = f"slo:sli_error:ratio_rate5m{_selector(labels)}"
    period = f"{PERIOD_DAYS}d"
    recorded.append(
        {
            "record": f"slo:sli_error:ratio_rate{period}",
            "expr": f"sum_over_time({five}[{period}])\n/ ignoring (sloth_window)\ncount_over_time({five}[{period}])",
            "labels": {**labels, "sloth_window": period},
        }
    )
    return recorded


def _meta(ratio: float, labels: dict[str, str]) -> list[Rule]:
    """Record the objective, its error budget, and how fast that burns."""
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
    recorded: list[Rule] = [{"record": name, "expr": expr, "labels": labels} for name, expr in exprs.items()]
    about = {"sloth_mode": "npu-gr-dashboards", "sloth_spec": "prometheus/v1", "sloth_version": "npu_gr"}
    return [*recorded, {"record": "sloth_slo_info", "expr": "vector(1)", "labels": {**labels, **about}}]


def _alerts(objective: Objective, promise: Promise, labels: dict[str, str], runbooks: str) -> list[Rule]:
    """A fast burn pages if the kind wakes somebody; every other burn opens a ticket."""
    kind = KINDS[objective.kind]
    budget = f"(1-{objective.ratio(promise)!r})"
    plural = kind.plural.capitalize()
    broken = f"later than {objective.threshold_s * 1e3:g} ms" if promise is Promise.LATENCY else "not answered"

    def alert(speed: str, burns: tuple[Burn, ...], severity: str, how: str) -> Rule:
        return _alert(
            f"NpuGr{kind.title}{promise.value.title()}{speed}Burn",
            "\nor ignoring (sloth_window)\n".join(_burning(burn, budget, kind.name, labels) for burn in burns),
            severity,
            f"{plural} are {broken} so often that the error budget of {PERIOD_DAYS} days burns {how}.",
            f"{runbooks}/{kind.name}-{promise.value}.md",
        )

    return [
        alert("Fast", FAST, "page" if kind.wakes_somebody else "ticket", "much too fast"),
        alert("Slow", SLOW, "ticket", "too fast"),
    ]


def _burning(burn: Burn, budget: str, kind: str, labels: dict[str, str]) -> str:
    def over(window: str) -> str:
        return f"slo:sli_error:ratio_rate{window}{_selector(labels)} > {burn.factor:g} * {budget}"

    enough = f'sum(increase(npu_gr_slo_requests_total{{kind="{kind}"}}[{burn.long}])) > {MIN_REQUESTS}'
    return f"(({over(burn.short)}) and ignoring (sloth_window) ({over(burn.long)}) and on () ({enough}))"


def _cause(cause: Cause, runbooks: str) -> Rule:
    severity = "page" if cause.page else "ticket"
    return _alert(cause.alert, cause.expr, severity, cause.summary, f"{runbooks}/{cause.runbook}.md", cause.wait)


def _alert(name: str, expr: str, severity: str, summary: str, runbook: str, wait: str | None = None) -> Rule:
    rule: Rule = {"alert": name, "expr": expr}
    if wait is not None:
        rule["for"] = wait
    rule["labels"] = {"severity": severity, "sloth_severity": severity} if wait is None else {"severity": severity}
    rule["annotations"] = {"summary": summary, "runbook_url": runbook}
    return rule


def _selector(labels: dict[str, str]) -> str:
    return "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
