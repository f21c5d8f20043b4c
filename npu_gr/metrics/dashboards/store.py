"""The dashboard *History store*: does it answer, does its disk last, and who is answered without it?"""

from __future__ import annotations

from typing import Any

from npu_gr.metrics.dashboards.panels import SECONDS, Panel, dashboard, number, of, quantile, series, total

FAILED = 'result!~"ok|entry_corrupt"'


def history_store() -> dict[str, Any]:
    """Make the dashboard."""
    return dashboard(
        "npu-gr-store",
        "npu_gr / History store",
        "Whether the history store answers, in what time, and what stands in for it where it does not.",
        {"Now": _now(), "Calls": _calls(), "Bulkhead and disk": _bulkhead(), "Features of users": _of_users()},
    )


def _now() -> list[Panel]:
    alarm = ((None, "green"), (1e-9, "red"))
    return [
        number(
            "Store calls that failed",
            "Calls a second that failed, were too slow, found no place or met an open breaker.",
            "ops",
            {"failed": total("store_calls_total", "", FAILED)},
            width=6,
            steps=alarm,
        ),
        number(
            "Store breaker open",
            "1 while calls of a lane fail at once.",
            "none",
            {"{{store}} {{lane}}": f"max by (store, lane) ({of('store_breaker_open')})"},
            width=6,
            steps=alarm,
        ),
        number(
            "Degraded histories",
            "Requests a second that were answered from an older history or none, or refused, because the store failed.",
            "ops",
            {"degraded": total("history_degraded_total")},
            width=6,
            steps=alarm,
        ),
        number(
            "Damaged entries",
            "Calls a second that met an entry whose checksum is wrong, and damage that the check at the start found.",
            "none",
            {
                "met": total("store_calls_total", "", 'result="entry_corrupt"'),
                "at the start": f"sum({of('store_damaged_places')})",
            },
            width=6,
            steps=alarm,
        ),
    ]


def _calls() -> list[Panel]:
    return [
        series(
            "Store calls by result",
            "Calls a second.",
            "ops",
            {"{{operation}} {{result}}": total("store_calls_total", "operation, result")},
        ),
        series(
            "Store latency P99",
            "As callers wait: a call that is given up counts its time limit.",
            SECONDS,
            {"{{operation}}": quantile(0.99, "store_call_duration_seconds", "operation")},
        ),
        series(
            "Degraded histories by source",
            "last_known: what the instance last knew; nothing: no behaviours; failed: 503.",
            "ops",
            {"{{source}} {{fault}}": total("history_degraded_total", "source, fault")},
        ),
    ]


def _bulkhead() -> list[Panel]:
    return [
        series(
            "Store calls in flight",
            "Calls that the store has not ended; at features.max_calls further ones wait.",
            "short",
            {"{{lane}}": f"sum by (lane) ({of('store_calls_in_flight')})"},
        ),
        series(
            "Store calls waiting",
            "Calls that wait for a place.",
            "short",
            {"{{lane}}": f"sum by (lane) ({of('store_calls_waiting')})"},
        ),
        series(
            "Store disk free",
            "Left on the file system of the embedded store.",
            "bytes",
            {"free": f"min({of('store_disk_free_bytes')})"},
        ),
        series(
            "Erasures not at their end",
            "Age of the oldest erasure whose bytes a file still holds. Nothing finds the user meanwhile.",
            SECONDS,
            {"{{place}}": f"max by (place) ({of('erasure_pending_seconds')})"},
        ),
        series(
            "Erasures: removing of bytes",
            "Runs a second: ok; held by a reader or by the file that is being written; failed.",
            "ops",
            {"{{place}} {{result}}": total("erasure_runs_total", "place, result")},
        ),
    ]


def _of_users() -> list[Panel]:
    return [
        series(
            "Features of users by source",
            "Of users whose features no request brought. last_known, nothing: the source failed.",
            "ops",
            {"{{source}}": total("user_features_total", "source")},
        ),
        series(
            "Fetches by result",
            "Calls a second of the source of users' features.",
            "ops",
            {"{{result}}": total("feature_source_calls_total", "result")},
        ),
        series(
            "Fetch latency P99",
            "As callers wait: a call that is given up counts its time limit.",
            SECONDS,
            {"p99": quantile(0.99, "feature_source_call_duration_seconds")},
        ),
        series(
            "Fetches in flight",
            "Calls that the source has not ended, and those that wait for a place; 1 while the breaker is open.",
            "short",
            {
                "in flight": f"sum({of('feature_source_calls_in_flight')})",
                "waiting": f"sum({of('feature_source_calls_waiting')})",
                "breaker open": f"max({of('feature_source_breaker_open')})",
            },
        ),
    ]
