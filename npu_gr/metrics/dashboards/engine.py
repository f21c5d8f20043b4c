"""The dashboard *Engine and beams*: what the device does, and what each stage of retrieval and ranking finds."""

from __future__ import annotations

from typing import Any

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.dashboards.kinds import of_kind
from npu_gr.metrics.dashboards.panels import SECONDS, Panel, dashboard, mean, of, quantile, series, table, total


def engine_and_beams() -> dict[str, Any]:
    """Make the dashboard."""
    return dashboard(
        "npu-gr-engine",
        "npu_gr / Engine and beams",
        "What the device does, what its batches look like, and what the cascade, matching and the beam search find.",
        {
            "Device": _device(),
            "Ranking passes (ranks only)": _ranking(),
            "Cascade (recommends only)": _cascade(),
            "Matching (matches only)": _matching(),
            "Beams (generates only)": _beams(),
            "Process": _process(),
            "Front workers (server.workers)": _front_workers(),
        },
    )


def _device() -> list[Panel]:
    on_device = [kind for kind in KINDS.values() if {"queue", "device"} <= {*kind.stages}]
    return [
        series(
            "Device time by work",
            "Share of a second that the device thread works; 1 = it has no room left.",
            "percentunit",
            {"{{work}}": total("device_busy_seconds_total", "work")},
            stacked=True,
            top=1.0,
        ),
        series("Queue", "Jobs waiting for the device.", "short", {"{{instance}}": of("queue_depth")}),
        *(
            series(
                f"{kind.title}: wait and device",
                f"P99 of the time that {kind.plural} wait for the device, and of the time on it.",
                SECONDS,
                {
                    "{{stage}}": quantile(
                        0.99, "stage_duration_seconds", "stage", of_kind(kind), 'stage=~"queue|device"'
                    )
                },
            )
            for kind in on_device
        ),
    ]


def _ranking() -> list[Panel]:
    return [
        series(
            "Requests in a pass",
            "Ranks that shared one pass of the device.",
            "short",
            {"mean": mean("batch_requests"), "p99": quantile(0.99, "batch_requests")},
        ),
        series(
            "Rows in a pass",
            "New history tokens and candidates; passes are ragged, so no row is padding.",
            "short",
            {"mean": mean("batch_rows"), "p99": quantile(0.99, "batch_rows")},
        ),
        series(
            "Candidates of a rank",
            "Items that a rank scores.",
            "short",
            {"p50": quantile(0.5, "rank_candidates"), "p99": quantile(0.99, "rank_candidates")},
        ),
    ]


def _cascade() -> list[Panel]:
    return [
        series(
            "Stages that did not do their part",
            "The recommend was answered without them.",
            "reqps",
            {"{{stage}} {{result}}": total("recommend_stages_total", "stage, result", 'result!="ok"')},
        ),
        series(
            "P99 of a stage",
            "Stages that did their part. Sources run side by side.",
            SECONDS,
            {"{{stage}}": quantile(0.99, "recommend_stage_duration_seconds", "stage")},
        ),
        series(
            "Items recommended",
            "degraded: recommends that did without a stage.",
            "ops",
            {
                "items": total("recommended_items_total"),
                "degraded": total("recommend_duration_seconds_count", "", 'degraded="true"'),
            },
        ),
        series(
            "Items that the ranker does not know",
            "Found for recommends by that source; placed last without a score, or dropped.",
            "ops",
            {"{{source}}": total("recommend_unknown_items_total", "source")},
        ),
        series(
            "Share of a source's items that the ranker knows",
            "Under recommend.min_coverage the instance would not start.",
            "percentunit",
            {"{{instance}} {{source}}": of("catalogue_coverage_ratio")},
            top=1.0,
        ),
    ]


def _matching() -> list[Panel]:
    return [
        series(
            "Matches by basis",
            "What the vector of the user came from.",
            "reqps",
            {"{{basis}}": total("match_duration_seconds_count", "basis")},
            stacked=True,
        ),
        series(
            "Matches in a pass",
            "Matches that shared one pass over the items.",
            "short",
            {"mean": mean("match_pass_requests"), "p99": quantile(0.99, "match_pass_requests")},
        ),
        series("Items matched", "All answers together.", "ops", {"items": total("matched_items_total")}),
    ]


def _beams() -> list[Panel]:
    return [
        series(
            "Beams of a search",
            "The beam width of generates.",
            "short",
            {"mean": mean("generate_beam_width"), "p99": quantile(0.99, "generate_beam_width")},
        ),
        series(
            "Items generated",
            "exhausted: answers with fewer items than the caller wanted.",
            "ops",
            {"items": total("generated_items_total"), "exhausted": total("generate_exhausted_total")},
        ),
        series(
            "Generates by outcome",
            "How generates got the KV of their prompt.",
            "reqps",
            {"{{outcome}}": total("generate_outcomes_total", "outcome")},
            stacked=True,
        ),
        series(
            "Valid paths",
            "Semantic-ID paths of one, two, ... codes in the catalogue.",
            "short",
            {"{{level}} codes": f"max by (level) ({of('catalogue_valid_paths')})"},
        ),
        series(
            "Age of the catalogue",
            "Since its version was published.",
            "s",
            {"{{instance}}": of("catalogue_age_seconds")},
        ),
        series(
            "Items of the catalogue",
            "Items that can be generated.",
            "short",
            {"{{instance}}": of("catalogue_items")},
        ),
        table("Catalogue versions", "By instance.", of("catalogue_info"), width=24),
    ]


def _process() -> list[Panel]:
    return [
        series(
            "Event-loop lag",
            "How late the loop comes to what is due, of all instants alike.",
            SECONDS,
            {"p50": quantile(0.5, "event_loop_lag_seconds"), "p99": quantile(0.99, "event_loop_lag_seconds")},
        ),
        series(
            "Standstills and lost log lines",
            "Times that the event loop stood still for over 250 ms, and log lines that nobody took.",
            "ops",
            {
                "standstills": total("event_loop_freezes_total"),
                "lines dropped, {{stream}}": total("log_lines_dropped_total", "stream"),
            },
        ),
        series(
            "Garbage collector",
            "Share of the time for which it stops the process.",
            "percentunit",
            {"generation {{generation}}": total("gc_pause_seconds_sum", "generation")},
        ),
        series(
            "Missing features",
            "Features of the ranker that a rank had nowhere, by what they are of; it read them as missing.",
            "ops",
            {"{{of}}": total("missing_features_total", "of")},
        ),
        series(
            "Unknown items",
            "Items of requests that the ranker has no row for: candidates have no score, events are left out.",
            "ops",
            {"{{where}}": total("unknown_items_total", "where")},
        ),
        series(
            "New items",
            "Items of the catalogue that the ranker was not trained with, and the rows that are left for more.",
            "short",
            {"{{instance}} {{state}}": of("new_items"), "{{instance}} rows left": of("spare_item_rows")},
        ),
    ]


def _front_workers() -> list[Panel]:
    return [
        series(
            "Front workers: starts",
            "Times that a worker was started; more than once means that one died.",
            "short",
            {"{{instance}}, worker {{worker}}": of("front_worker_starts_total")},
        ),
        series(
            "Front workers: loop lag",
            "How late the newest timer of each worker's event loop was.",
            SECONDS,
            {"{{instance}}, worker {{worker}}": of("front_worker_loop_lag_seconds")},
        ),
        series(
            "Front workers: memory",
            "Resident bytes of each worker.",
            "bytes",
            {"{{instance}}, worker {{worker}}": of("front_worker_resident_bytes")},
        ),
        series(
            "Front workers: CPU",
            "Cores that each worker takes.",
            "short",
            {"worker {{worker}}": total("front_worker_cpu_seconds_total", "worker")},
        ),
    ]
