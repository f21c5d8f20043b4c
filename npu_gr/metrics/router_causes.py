"""Alerts on the router. In its metrics `instance` is the router, and `backend` an instance behind it."""

from __future__ import annotations

from npu_gr.metrics.cause import Cause

_R = "npu_gr_router"
_FAILED = '{status=~"5.."}'
_SIGNALS = '{kind="signal"}'
_RANKS = '{kind="rank"}'


def _rate(name: str, matchers: str = "", by: str = "instance") -> str:
    return f"sum by ({by}) (rate({_R}_{name}{matchers}[5m]))"


ROUTER_CAUSES = (
    Cause(
        alert="NpuGrRouterDown",
        runbook="router-down",
        expr='up{job=~".*npu.gr.router"} == 0',  # npu_gr_router, or as the Prometheus operator names it
        wait="1m",
        page=True,
        summary="The router {{ $labels.instance }} does not answer Prometheus.",
    ),
    Cause(
        alert="NpuGrRouterPanic",
        runbook="router-panic",
        expr=f"{_R}_panic == 1",
        wait="1m",
        page=True,
        summary="So few instances are well that the router {{ $labels.instance }} does not believe their health.",
    ),
    Cause(
        alert="NpuGrRouterErrors",
        runbook="router-errors",
        expr=f"{_rate('requests_total', _FAILED)} > 0.01 * {_rate('requests_total')}",
        wait="5m",
        page=True,
        summary="The router {{ $labels.instance }} answers over 1 % of its requests with an error.",
    ),
    Cause(
        alert="NpuGrRouterConnectionsFull",
        runbook="router-connections-full",
        expr=(f"increase({_R}_refused_connections_total[5m]) > 0 or {_R}_connections > 0.9 * {_R}_max_connections"),
        wait="0m",
        page=True,
        summary="The router {{ $labels.instance }} has nearly as many connections as it accepts, or refuses some.",
    ),
    Cause(
        alert="NpuGrRouterKeysStale",
        runbook="router-keys-stale",
        expr=f"{_R}_api_keys_file_stale == 1",
        wait="1m",
        page=False,
        summary="The router {{ $labels.instance }} cannot use its key file, so revoked keys may still be in force.",
    ),
    Cause(
        alert="NpuGrRouterInstanceOut",
        runbook="router-instance-out",
        expr=f"{_R}_instance_up == 0 unless {_R}_instance_gone == 1",  # that may be planned; NpuGrInstanceDown tells
        wait="2m",
        page=False,
        summary="The router {{ $labels.instance }} gives {{ $labels.backend }}, which runs, no new work.",
    ),
    Cause(
        alert="NpuGrRouterSignalsRefused",
        runbook="router-signals-refused",
        expr=(f"{_rate('refused_total', _SIGNALS)} > 0.01 * {_rate('requests_total', _SIGNALS)}"),
        wait="5m",
        page=False,
        summary="The router {{ $labels.instance }} refuses over 1 % of the signals: those ranks find no prefix.",
    ),
    Cause(
        alert="NpuGrRouterSecondTries",
        runbook="router-second-tries",
        expr=f"{_rate('retries_total')} > 0.05 * {_rate('requests_total', _RANKS)}",
        wait="10m",
        page=False,
        summary="The router {{ $labels.instance }} sends over 5 % of the ranks to a second instance.",
    ),
    Cause(
        alert="NpuGrRouterSlow",
        runbook="router-slow",
        expr=" or ".join(
            f"histogram_quantile(0.99, {_rate(name, by='instance, le')}) > 0.01"
            for name in ("added_seconds_bucket", "event_loop_lag_seconds_bucket")
        ),
        wait="10m",
        page=False,
        summary="The router {{ $labels.instance }} adds over 10 ms to one request in a hundred.",
    ),
)
