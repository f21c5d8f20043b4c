"""The dashboard *Fleet and router*: the instances side by side, and the router in front of them."""

from __future__ import annotations

from typing import Any

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.dashboards.kinds import latency
from npu_gr.metrics.dashboards.panels import SECONDS, WINDOW, Panel, dashboard, number, of, rate, series, table, total
from npu_gr.metrics.dashboards.relay import HITS

PROCESS = '{job=~"$job", instance=~"$instance"}'


def fleet_and_router() -> dict[str, Any]:
    """Make the dashboard."""
    return dashboard(
        "npu-gr-fleet",
        "npu_gr / Fleet and router",
        "The instances side by side: which are up, what each serves, which are slower than the others. Imbalance and "
        "prefixes are those of ranks only: the instance that gets a rank decides whether it finds its prefix.",
        {
            "Instances": _instances(),
            "P99 by instance, every kind": _latencies(),
            "Resources": _resources(),
            "Router": _router(),
        },
    )


def _ranks(by: str) -> str:
    return total("slo_requests_total", by, 'kind="rank"')


def _instances() -> list[Panel]:
    prefixes_found = f"{total('rank_outcomes_total', 'instance', HITS)} / {total('rank_outcomes_total', 'instance')}"
    return [
        number("Up", "Instances that Prometheus reaches.", "none", {"up": f"sum(up{PROCESS})"}, width=6),
        number("Ready", "Instances that accept work.", "none", {"ready": f"sum({of('ready')})"}, width=6),
        number(
            "Requests",
            "Of every kind, by all instances.",
            "reqps",
            {"requests": total("slo_requests_total")},
            width=6,
        ),
        number(
            "Most loaded to mean",
            "Ranks only. 1 = all instances get the same number of ranks.",
            "none",
            {"imbalance": f"max({_ranks('instance')}) / avg({_ranks('instance')})"},
            width=6,
            steps=((None, "green"), (1.5, "orange"), (2.0, "red")),
        ),
        number(
            "Refused reloads",
            "Things whose last reload was refused: what served before goes on.",
            "none",
            {"refused": f"sum(1 - {of('last_reload_successful')})"},
            width=6,
            steps=((None, "green"), (1.0, "red")),
        ),
        series(
            "Age of what serves",
            "Since the start, or since the last reload that took effect.",
            "s",
            {"{{instance}} {{what}}": f"time() - {of('last_reload_success_timestamp_seconds')}"},
            width=18,
        ),
        series(
            "Requests refused for their key",
            "No key, a wrong or expired one, another scope or tenant, over its rate.",
            "reqps",
            {"{{reason}}": total("api_keys_refused_total", "reason")},
        ),
        series(
            "Certificates",
            "Time until the certificate in force expires; new ones are followed without a restart.",
            "s",
            {"{{instance}} {{of}}": f"{of('tls_certificate_expires_at_seconds')} - time()"},
        ),
        table("What runs", "Version, model and device of each instance.", of("build_info"), width=24),
        series(
            "Requests by instance",
            "Of every kind, answered or not.",
            "reqps",
            {"{{instance}} {{kind}}": f"{total('slo_requests_total', 'instance, kind')} > 0"},
        ),
        series(
            "Prefixes found by instance",
            "Ranks only. The share falls where users come to another instance than before.",
            "percentunit",
            {"{{instance}}": prefixes_found},
            top=1.0,
        ),
        series(
            "Shed and late",
            "Requests refused for load, and those whose time ran out.",
            "reqps",
            {"{{instance}} {{kind}} {{verdict}}": rate("admissions_total", 'verdict=~"overloaded|out_of_time"')},
        ),
    ]


def _latencies() -> list[Panel]:
    return [
        series(
            f"{kind.title} P99 by instance",
            f"Answered {kind.plural} only: from the last byte to the answer.",
            SECONDS,
            {"{{instance}}": latency(0.99, kind, "instance")},
            width=6,
        )
        for kind in KINDS.values()
    ]


def _resources() -> list[Panel]:
    return [
        series("Requests in flight", "Being served.", "short", {"{{instance}}": of("requests_in_flight")}),
        series(
            "At the door",
            "waiting: for a turn; inside: being served; outside: let in, but waiting for the history store.",
            "short",
            {"{{instance}} {{place}}": f"sum by (instance, place) ({of('door_requests')})"},
        ),
        series(
            "Connections held back",
            "Of callers that were refused. paused: they asked again at once, and are not read for a moment; lent: a "
            "native thread reads them, and refuses.",
            "short",
            {"{{instance}} paused": of("connections_paused"), "{{instance}} lent": of("connections_lent")},
        ),
        series(
            "Device busy",
            "Share of a second, all work.",
            "percentunit",
            {"{{instance}}": total("device_busy_seconds_total", "instance")},
            top=1.0,
        ),
        series(
            "CPU",
            "Cores that the process uses.",
            "none",
            {"{{instance}}": f"rate(process_cpu_seconds_total{PROCESS}[{WINDOW}])"},
        ),
        series(
            "Memory",
            "Resident bytes, the tiers included.",
            "bytes",
            {"{{instance}}": f"process_resident_memory_bytes{PROCESS}"},
        ),
        series(
            "Open files",
            "Connections included.",
            "short",
            {"{{instance}}": f"process_open_fds{PROCESS}"},
        ),
        table("Effective limits", "By instance.", of("limit"), width=24),
    ]


def _router() -> list[Panel]:
    """The router is a Prometheus job of its own, so the variables of the dashboard do not select its metrics."""
    ranks = f'sum(rate(npu_gr_router_requests_total{{kind="rank"}}[{WINDOW}]))'
    p99 = f"histogram_quantile(0.99, {_routed('request_duration_seconds_bucket', 'kind, le')})"
    return [
        series(
            "Requests by status",
            "As the router answered them.",
            "reqps",
            {"{{kind}} {{status}}": _routed("requests_total", "kind, status")},
            stacked=True,
        ),
        series(
            "P99 through the router",
            "From the first byte of a request to the last of its answer.",
            SECONDS,
            {"{{kind}}": p99},
        ),
        series(
            "Placement",
            "What decided where a request goes: the place of its user on the ring, or something else.",
            "reqps",
            {"{{how}}": _routed("placed_total", "how")},
            stacked=True,
        ),
        series(
            "Refused by the router",
            "Requests that never reached an instance.",
            "reqps",
            {"{{kind}}: {{why}}": _routed("refused_total", "kind, why")},
        ),
        series(
            "Second tries of ranks",
            "Share of the ranks that were sent to a second instance; late = beside a first try that had not answered.",
            "percentunit",
            {"{{why}}": f"{_routed('retries_total', 'why')} / on() group_left() ({ranks} > 0)"},
        ),
        series(
            "Failures of instances",
            "Requests that an instance did not answer, by cause.",
            "reqps",
            {"{{backend}}: {{why}}": _routed("instance_failures_total", "backend, why")},
        ),
        series(
            "Instances taken out",
            "By what they had done.",
            "ops",
            {"{{why}}": _routed("instance_opened_total", "why")},
        ),
        series(
            "Share of its users that an instance gets",
            "0 = out, below 1 = its users come back gradually.",
            "percentunit",
            {"{{backend}}": "min by (backend) (npu_gr_router_instance_share_ratio)"},
            top=1.0,
        ),
        number(
            "Instances out",
            "That get no new work, as a router sees them.",
            "none",
            {"out": "max(count by (instance) (npu_gr_router_instance_up == 0) or vector(0))"},
            steps=((None, "green"), (1.0, "orange")),
        ),
        number(
            "Panic",
            "1 = a router does not believe the instances' health, because too few are well.",
            "none",
            {"panic": "max(npu_gr_router_panic)"},
            steps=((None, "green"), (1.0, "red")),
        ),
        series(
            "P99 that the router adds",
            "forwarding: to a request, without the wait for its instance. waiting: how late its event loop is.",
            SECONDS,
            {
                part: f"histogram_quantile(0.99, {_routed(name + '_seconds_bucket', 'le')})"
                for part, name in (("forwarding", "added"), ("waiting", "event_loop_lag"))
            },
        ),
        series(
            "Refused for their key",
            "Requests of callers and operators, by what was wrong with the API key.",
            "reqps",
            {"{{reason}}": _routed("api_keys_refused_total", "reason")},
        ),
        series(
            "Bodies in the router",
            "Bytes that arrive, or are kept for a second try.",
            "bytes",
            {
                "bodies": "sum(npu_gr_router_kept_bytes)",
                "at most": "sum(npu_gr_router_max_kept_bytes)",
            },
        ),
        series(
            "In the router",
            "Connections of clients, and requests in flight.",
            "short",
            {
                "connections": "sum(npu_gr_router_connections)",
                "connections accepted at most": "sum(npu_gr_router_max_connections)",
                "requests": "sum(npu_gr_router_in_flight)",
            },
        ),
    ]


def _routed(name: str, by: str) -> str:
    return f"sum by ({by}) (rate(npu_gr_router_{name}[{WINDOW}]))"
