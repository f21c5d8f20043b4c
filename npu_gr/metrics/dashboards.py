"""The Grafana dashboards, as `npu-gr dashboards` writes them: SLO, relay and tiers, engine and beams, fleet.

What is on disk is what this file makes (a test compares), every metric named here is in the catalogue, and every
expression is run against a real Prometheus that scraped a real service.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from npu_gr.metrics.panels import bars, dashboard, mean, number, of, quantile, rate, series, table, total
from npu_gr.metrics.rules import RUNBOOKS, rules
from npu_gr.metrics.slo import Objective

MS = "s"  # Grafana scales seconds to ms by itself
GOOD_FROM = ((None, "red"), (0.99, "orange"), (0.995, "green"))
LEFT_FROM = ((None, "red"), (0.0, "orange"), (0.5, "green"))
BURN_FROM = ((None, "green"), (1.0, "orange"), (6.0, "red"))
RANK, HBM, HELD = 'kind="rank"', 'tier="hbm"', 'state=~"live|reserved"'
ZERO_IS_GOOD = ((None, "green"), (1e-9, "red"))


def _slo(objectives: Sequence[Objective]) -> dict[str, Any]:
    rank = next(o for o in objectives if o.kind == "rank")
    in_time = 'result="good"'
    mine, ours = 'sloth_service="npu_gr"', 'sloth_slo=~"rank-.+"'
    return dashboard(
        "npu-gr-slo",
        "npu_gr / SLO overview",
        "What the callers get: answers in time, the error budgets, and how fast they burn.",
        {
            "Ranks against their objective": [
                number(
                    "In time",
                    f"Share of all ranks that were answered within {rank.threshold_s * 1e3:g} ms.",
                    "percentunit",
                    {"in time": f"{total('slo_requests_total', '', RANK, in_time)} / {_ranks('')}"},
                    steps=GOOD_FROM,
                ),
                number(
                    "Goodput",
                    "Ranks a second that were answered in time.",
                    "reqps",
                    {"goodput": total("slo_requests_total", "", 'kind="rank"', in_time)},
                ),
                number("P50", "Half of the ranks take less.", MS, {"p50": _latency(0.5, "rank")}),
                number("P99", "One rank in a hundred takes more.", MS, {"p99": _latency(0.99, "rank")}),
                number(
                    "Burn rate",
                    "1 = the error budget lasts exactly its 30 days; the worse of both promises.",
                    "none",
                    {"burn": f"max(slo:current_burn_rate:ratio{{{mine}, {ours}}})"},
                    steps=BURN_FROM,
                ),
                number(
                    "Error budget left",
                    "Of 30 days, or of as long as there are data; the worse of both promises.",
                    "percentunit",
                    {"left": f"min(slo:period_error_budget_remaining:ratio{{{mine}, {ours}}})"},
                    steps=LEFT_FROM,
                ),
            ],
            "Latency and load": [
                series(
                    "Rank latency",
                    "From the first byte to the answer.",
                    MS,
                    {
                        **{f"p{percent}": _latency(percent / 100, "rank") for percent in (50, 95, 99)},
                        "objective": f"max({of('slo_threshold_seconds', RANK)})",
                    },
                ),
                series(
                    "P99 by kind",
                    "Of everything that has an objective.",
                    MS,
                    {"{{kind}}": quantile(0.99, "request_duration_seconds", "kind")},
                ),
                series(
                    "Requests by result",
                    "good: in time; slow: answered later; failed: refused for load, out of time, broken.",
                    "reqps",
                    {"{{kind}} {{result}}": f"{total('slo_requests_total', 'kind, result')} > 0"},
                    stacked=True,
                ),
                series(
                    "Where a rank's time goes",
                    "Mean of each stage; door: reading, parsing and writing.",
                    MS,
                    {"{{stage}}": mean("stage_duration_seconds", "stage", 'kind="rank"')},
                    stacked=True,
                ),
                series(
                    "Admission",
                    "How requests get through the door.",
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
            ],
            "Error budgets (recording rules under Sloth's names)": [
                series(
                    "Burn rate",
                    "Above 14.4 for an hour, or 6 for six hours, somebody is paged.",
                    "none",
                    {"{{sloth_slo}}": f"slo:current_burn_rate:ratio{{{mine}}}"},
                    limit=6.0,
                ),
                bars(
                    "Error budget left",
                    "Of 30 days, or of as long as there are data.",
                    "percentunit",
                    {"{{sloth_slo}}": f"slo:period_error_budget_remaining:ratio{{{mine}}}"},
                    steps=LEFT_FROM,
                ),
                series(
                    "Errors of the rank promises",
                    "Share of requests over the windows that the alerts look at.",
                    "percentunit",
                    {
                        f"{{{{sloth_slo}}}} {window}": f"slo:sli_error:ratio_rate{window}{{{mine}, {ours}}}"
                        for window in ("5m", "1h", "6h")
                    },
                ),
                series(
                    "Attainment by instance",
                    "Computed by each instance itself, over its last five minutes.",
                    "percentunit",
                    {"{{instance}} {{slo}}": of("slo_attainment_ratio", 'kind="rank"', 'window="5m"')},
                    width=12,
                    top=1.0,
                ),
                series(
                    "Error budget left by instance",
                    "Since each instance started.",
                    "percentunit",
                    {"{{instance}} {{slo}}": of("slo_budget_remaining_ratio", 'kind="rank"')},
                    width=12,
                    top=1.0,
                ),
            ],
        },
    )


def _latency(share: float, kind: str) -> str:
    return quantile(share, "request_duration_seconds", "", f'kind="{kind}"')


def _relay() -> dict[str, Any]:
    hits = 'outcome=~"hbm_hit|joined|dram_hit"'
    wasted = total("prefill_wasted_total")
    preinfers = total("signal_verdicts_total", "", 'verdict="preinfer"')
    return dashboard(
        "npu-gr-relay",
        "npu_gr / Relay and memory tiers",
        "Whether prefixes are there when their ranks come, and what holding them costs.",
        {
            "Prefixes": [
                number(
                    "Ranks that found their prefix",
                    "In HBM, in production, or in DRAM.",
                    "percentunit",
                    {"found": f"{total('rank_outcomes_total', '', hits)} / {total('rank_outcomes_total')}"},
                    width=6,
                ),
                number(
                    "History tokens from cached KV",
                    "Not computed again.",
                    "percentunit",
                    {"cached": f"{total('prefix_tokens_total')} / {total('history_tokens_total')}"},
                    width=6,
                ),
                number(
                    "Wasted pre-infers",
                    "Prefixes evicted before anybody read them, of those produced.",
                    "percentunit",
                    {"wasted": f"{wasted} / {preinfers}"},
                    width=6,
                    steps=((None, "green"), (0.1, "orange"), (0.3, "red")),
                ),
                number(
                    "Relay errors",
                    "Failures that ranks did without.",
                    "ops",
                    {"errors": total("relay_errors_total")},
                    width=6,
                    steps=ZERO_IS_GOOD,
                ),
                series(
                    "Ranks by outcome",
                    "How they got their prefix.",
                    "reqps",
                    {"{{outcome}}": total("rank_outcomes_total", "outcome")},
                    stacked=True,
                ),
                series(
                    "Why not from HBM",
                    "The reason of every other outcome.",
                    "reqps",
                    {"{{outcome}}: {{reason}}": total("rank_outcomes_total", "outcome, reason", 'outcome!="hbm_hit"')},
                    stacked=True,
                ),
                series(
                    "Signals by verdict",
                    "What the trigger said.",
                    "reqps",
                    {"{{verdict}}": f"{total('signal_verdicts_total', 'verdict')} > 0"},
                    stacked=True,
                ),
                series(
                    "Rank P99 by outcome",
                    "In the service, behind the door.",
                    MS,
                    {"{{outcome}}": quantile(0.99, "rank_duration_seconds", "outcome")},
                ),
                series(
                    "Wait of a prefix for its rank",
                    "From production to first use. Nearing T_life (dashed), prefixes expire unread.",
                    MS,
                    {
                        "p50": quantile(0.5, "prefix_wait_seconds"),
                        "p99": quantile(0.99, "prefix_wait_seconds"),
                        "signal to rank p99": f"max({of('t_life_p99_seconds', RANK)})",
                        "T_life": f"max({of('t_life_seconds')})",
                    },
                ),
                series(
                    "Self-check drift",
                    "Cached against cold scores, in standard deviations of the logits.",
                    "sci",
                    {"p99": quantile(0.99, "drift_ratio")},
                ),
            ],
            "Memory tiers": [
                series(
                    "HBM bytes by state",
                    "live and reserved never pass the budget.",
                    "bytes",
                    {"{{state}}": f"sum by (state) ({of('kv_bytes', HBM)})"},
                    stacked=True,
                ),
                series(
                    "Live and reserved share of the budget",
                    "By tier.",
                    "percentunit",
                    {"{{tier}}": f"sum by (tier) ({of('kv_bytes', HELD)}) / sum by (tier) ({of('kv_budget_bytes')})"},
                    top=1.0,
                ),
                series("Prefixes held", "By tier.", "short", {"{{tier}}": f"sum by (tier) ({of('kv_entries')})"}),
                series(
                    "Reload and spill bandwidth",
                    "Bytes over the device's time for them.",
                    "Bps",
                    {
                        "{{direction}}": f"{total('copy_bytes_total', 'direction')} / "
                        f"({total('copy_duration_seconds_sum', 'direction')} > 0)"
                    },
                ),
                series(
                    "Copies waiting for the device",
                    "P99 before a reload or spill begins.",
                    MS,
                    {"{{direction}}": quantile(0.99, "copy_queue_seconds", "direction")},
                ),
                series(
                    "Prefixes on their way",
                    "prefill and reload into HBM, spill into DRAM.",
                    "short",
                    {"{{kind}} {{work}}": f"sum by (kind, work) ({of('producers_in_flight')})"},
                ),
            ],
        },
    )


def _engine() -> dict[str, Any]:
    return dashboard(
        "npu-gr-engine",
        "npu_gr / Engine and beams",
        "What the device does, what its batches look like, what the beam search finds.",
        {
            "Device": [
                series(
                    "Device time by work",
                    "Share of a second that the device thread works; 1 = it has no room left.",
                    "percentunit",
                    {"{{work}}": total("device_busy_seconds_total", "work")},
                    stacked=True,
                    top=1.0,
                ),
                series("Queue", "Jobs waiting for the device.", "short", {"{{instance}}": of("queue_depth")}),
                series(
                    "Wait and work of a rank",
                    "P99 of the two stages on the device.",
                    MS,
                    {
                        "{{stage}}": quantile(
                            0.99, "stage_duration_seconds", "stage", 'kind="rank"', 'stage=~"queue|device"'
                        )
                    },
                ),
                series(
                    "Requests in a pass",
                    "Ranks that shared one.",
                    "short",
                    {"mean": mean("batch_requests"), "p99": quantile(0.99, "batch_requests")},
                ),
                series(
                    "Rows in a pass",
                    "New history tokens and candidates; passes are ragged, so none is padding.",
                    "short",
                    {"mean": mean("batch_rows"), "p99": quantile(0.99, "batch_rows")},
                ),
                series(
                    "Candidates of a rank",
                    "What it is asked to score.",
                    "short",
                    {"p50": quantile(0.5, "rank_candidates"), "p99": quantile(0.99, "rank_candidates")},
                ),
            ],
            "Cascade": [
                series(
                    "Recommend latency",
                    "From the first byte to the answer.",
                    MS,
                    {"p50": _latency(0.5, "recommend"), "p99": _latency(0.99, "recommend")},
                ),
                series(
                    "Recommends by stage",
                    "Mean time of each part, one after the other.",
                    MS,
                    {"{{stage}}": mean("stage_duration_seconds", "stage", 'kind="recommend"')},
                    stacked=True,
                ),
                series(
                    "Stages that did not do their part",
                    "The answer was given without them.",
                    "reqps",
                    {"{{stage}} {{result}}": total("recommend_stages_total", "stage, result", 'result!="ok"')},
                ),
                series(
                    "P99 of a stage",
                    "Sources run side by side.",
                    MS,
                    {"{{stage}}": quantile(0.99, "recommend_stage_duration_seconds", "stage")},
                ),
                series(
                    "Items recommended",
                    "And recommends that did without a stage.",
                    "ops",
                    {
                        "items": total("recommended_items_total"),
                        "degraded": total("recommend_duration_seconds_count", "", 'degraded="true"'),
                    },
                ),
            ],
            "Beams": [
                series(
                    "Generate latency",
                    "From the first byte to the answer.",
                    MS,
                    {"p50": _latency(0.5, "generate"), "p99": _latency(0.99, "generate")},
                ),
                series(
                    "Beams of a search",
                    "Its width.",
                    "short",
                    {"mean": mean("generate_beam_width"), "p99": quantile(0.99, "generate_beam_width")},
                ),
                series(
                    "Items generated",
                    "exhausted: answers with fewer than were asked for.",
                    "ops",
                    {"items": total("generated_items_total"), "exhausted": total("generate_exhausted_total")},
                ),
                series(
                    "Generates by outcome",
                    "How they got their prompt's KV.",
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
                    "That can be generated.",
                    "short",
                    {"{{instance}}": of("catalogue_items")},
                    width=12,
                ),
                table("Catalogue versions", "By instance.", of("catalogue_info")),
            ],
            "Process": [
                series(
                    "Event-loop lag",
                    "How long a callback waits for its turn.",
                    MS,
                    {"p50": quantile(0.5, "event_loop_lag_seconds"), "p99": quantile(0.99, "event_loop_lag_seconds")},
                ),
                series(
                    "Garbage collector",
                    "Share of the time that it stops everything.",
                    "percentunit",
                    {"generation {{generation}}": total("gc_pause_seconds_sum", "generation")},
                ),
                series(
                    "Unknown items",
                    "That the catalogue of the ranker lacks.",
                    "ops",
                    {"{{where}}": total("unknown_items_total", "where")},
                ),
            ],
        },
    )


def _fleet() -> dict[str, Any]:
    process = '{job=~"$job", instance=~"$instance"}'
    return dashboard(
        "npu-gr-fleet",
        "npu_gr / Fleet and router",
        "The instances side by side: who is up, who serves what, who is slower than the others.",
        {
            "Instances": [
                number("Up", "Instances that Prometheus reaches.", "none", {"up": f"sum(up{process})"}, width=6),
                number("Ready", "Instances that take work.", "none", {"ready": f"sum({of('ready')})"}, width=6),
                number("Ranks", "Of all.", "reqps", {"ranks": _ranks("")}, width=6),
                number(
                    "Most loaded to mean",
                    "1 = all instances get the same number of ranks.",
                    "none",
                    {"imbalance": f"max({_ranks('instance')}) / avg({_ranks('instance')})"},
                    width=6,
                    steps=((None, "green"), (1.5, "orange"), (2.0, "red")),
                ),
                table("What runs", "Version, model and device of each instance.", of("build_info"), width=24),
                series("Ranks by instance", "Answered or not.", "reqps", {"{{instance}}": _ranks("instance")}),
                series(
                    "Rank P99 by instance",
                    "From the first byte to the answer.",
                    MS,
                    {"{{instance}}": quantile(0.99, "request_duration_seconds", "instance", 'kind="rank"')},
                ),
                series(
                    "Prefixes found by instance",
                    "Falls where users come to another instance than before.",
                    "percentunit",
                    {
                        "{{instance}}": total("rank_outcomes_total", "instance", 'outcome=~"hbm_hit|joined|dram_hit"')
                        + f" / {total('rank_outcomes_total', 'instance')}"
                    },
                    top=1.0,
                ),
                series("Requests in flight", "At the door.", "short", {"{{instance}}": of("requests_in_flight")}),
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
                    {"{{instance}}": f"rate(process_cpu_seconds_total{process}[$__rate_interval])"},
                ),
                series(
                    "Memory",
                    "Resident, with the tiers.",
                    "bytes",
                    {"{{instance}}": f"process_resident_memory_bytes{process}"},
                ),
                series(
                    "Open files",
                    "Connections too.",
                    "short",
                    {"{{instance}}": f"process_open_fds{process}"},
                ),
                series(
                    "Shed and late",
                    "Requests refused for load, and those whose time ran out.",
                    "reqps",
                    {
                        "{{instance}} {{verdict}}": rate(
                            "admissions_total", 'kind="rank"', 'verdict=~"overloaded|out_of_time"'
                        )
                    },
                ),
                table("Effective limits", "By instance.", of("limit"), width=24),
            ],
            "Router": [
                series(
                    "Requests by status",
                    "As the router answered them.",
                    "reqps",
                    {"{{kind}} {{status}}": _routed("requests_total", "kind, status")},
                    stacked=True,
                ),
                series(
                    "P99 through the router",
                    "From a request's first byte to the last of its answer.",
                    MS,
                    {"{{kind}}": f"histogram_quantile(0.99, {_routed('request_duration_seconds_bucket', 'kind, le')})"},
                ),
                series(
                    "Placement",
                    "What decided where a request goes: its user's place on the ring, or something else.",
                    "reqps",
                    {"{{how}}": _routed("placed_total", "how")},
                    stacked=True,
                ),
                series(
                    "Retries and refusals",
                    "Ranks sent to the successor, and requests that never reached an instance.",
                    "reqps",
                    {f"{what}: {{{{why}}}}": _routed(f"{what}_total", "why") for what in ("retries", "refused")},
                ),
                series(
                    "Instances taken out",
                    "By what they had done.",
                    "ops",
                    {"{{why}}": _routed("instance_opened_total", "why")},
                ),
                series(
                    "In the router",
                    "Connections of clients, and requests.",
                    "short",
                    {"connections": "sum(npu_gr_router_connections)", "requests": "sum(npu_gr_router_in_flight)"},
                ),
            ],
        },
    )


def _routed(name: str, by: str) -> str:
    """Rates of a router's metric: it is a job of its own, so the dashboard's variables do not select it."""
    return f"sum by ({by}) (rate(npu_gr_router_{name}[$__rate_interval]))"


def _ranks(by: str) -> str:
    return total("slo_requests_total", by, 'kind="rank"')


def dashboards(objectives: Sequence[Objective]) -> dict[str, dict[str, Any]]:
    """File name -> dashboard."""
    return {
        "slo.json": _slo(objectives),
        "relay.json": _relay(),
        "engine.json": _engine(),
        "fleet.json": _fleet(),
    }


def files(objectives: Sequence[Objective], runbooks: str = RUNBOOKS) -> dict[str, str]:
    """File name -> content: the dashboards and `rules.yml`."""
    texts = {name: json.dumps(board, indent=1) + "\n" for name, board in dashboards(objectives).items()}
    head = "# Written by `npu-gr dashboards`: change the objectives or npu_gr/metrics/rules.py, not this file.\n"
    return {**texts, "rules.yml": head + yaml.safe_dump(rules(objectives, runbooks), sort_keys=False, width=120)}


def write(folder: Path, objectives: Sequence[Objective], runbooks: str = RUNBOOKS) -> list[Path]:
    """Write all files into a folder; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files(objectives, runbooks).items():
        path = folder / name
        path.write_text(text)
        paths.append(path)
    return paths
