"""The dashboard *Relay and memory tiers*: are prefixes there when their ranks come, and what does that cost?"""

from __future__ import annotations

from typing import Any

from npu_gr.core.kinds import RANK
from npu_gr.metrics.dashboards.kinds import of_kind, p99_by_label
from npu_gr.metrics.dashboards.panels import SECONDS, Panel, dashboard, mean, number, of, quantile, series, total

HITS = 'outcome=~"hbm_hit|joined|dram_hit"'
HBM = 'tier=~".*hbm"'
HELD = 'state=~"live|reserved"'


def relay_and_tiers() -> dict[str, Any]:
    """Make the dashboard."""
    return dashboard(
        "npu-gr-relay",
        "npu_gr / Relay and memory tiers",
        "Whether prefixes are there when their ranks come, and what holding them costs. The first row shows ranks "
        "only, by intent: signals pre-infer for them. Prompts of generates are on the dashboard Engine and beams.",
        {"Prefixes of ranks": _prefixes(), "Memory tiers": _tiers()},
    )


def _prefixes() -> list[Panel]:
    found = total("rank_outcomes_total", "", HITS)
    wasted = total("prefill_wasted_total", "", of_kind(RANK))
    made = total("signal_verdicts_total", "", 'verdict=~"preinfer|extend|reload"')  # each puts a prefix into HBM
    return [
        number(
            "Ranks that found their prefix",
            "In HBM, in production, or in DRAM.",
            "percentunit",
            {"found": f"{found} / {total('rank_outcomes_total')}"},
            width=6,
        ),
        number(
            "History tokens from cached KV",
            "Share of the history tokens of ranks that were not computed again.",
            "percentunit",
            {"cached": f"{total('prefix_tokens_total')} / {total('history_tokens_total')}"},
            width=6,
        ),
        number(
            "Wasted pre-infers",
            "Share of the prefixes that signals compute, extend or copy back that leave HBM before a rank reads them.",
            "percentunit",
            {"wasted": f"{wasted} / {made}"},
            width=6,
            steps=((None, "green"), (0.1, "orange"), (0.3, "red")),
        ),
        number(
            "Relay errors",
            "Failures of prefills, reloads, spills and reads; the requests were answered without cached KV.",
            "ops",
            {"errors": total("relay_errors_total")},
            width=6,
            steps=((None, "green"), (1e-9, "red")),
        ),
        series(
            "Ranks by outcome",
            "How ranks got their prefix.",
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
            "What the trigger decided.",
            "reqps",
            {"{{verdict}}": f"{total('signal_verdicts_total', 'verdict')} > 0"},
            stacked=True,
        ),
        p99_by_label(RANK),
        series(
            "Wait of a prefix for its rank",
            "From production to first use. Where it comes near T_life, prefixes expire unread.",
            SECONDS,
            {
                "p50": quantile(0.5, "prefix_wait_seconds"),
                "p99": quantile(0.99, "prefix_wait_seconds"),
                "signal to rank p99": f"max({of('t_life_p99_seconds', of_kind(RANK))})",
                "T_life": f"max({of('t_life_seconds')})",
            },
        ),
        series(
            "Self-check drift",
            "Difference of scores with cached KV from scores without it, in standard deviations of the logits.",
            "sci",
            {"mean": mean("drift_ratio"), "p99": quantile(0.99, "drift_ratio")},
        ),
    ]


def _tiers() -> list[Panel]:
    return [
        series(
            "HBM bytes by state",
            "live and reserved bytes together never pass the budget.",
            "bytes",
            {"{{tier}} {{state}}": f"sum by (tier, state) ({of('kv_bytes', HBM)})"},
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
            "Bytes over the time that the device needed for them.",
            "Bps",
            {
                "{{direction}}": f"{total('copy_bytes_total', 'direction')} / "
                f"({total('copy_duration_seconds_sum', 'direction')} > 0)"
            },
        ),
        series(
            "Copies waiting for the device",
            "P99 before a reload or a spill begins.",
            SECONDS,
            {"{{direction}}": quantile(0.99, "copy_queue_seconds", "direction")},
        ),
        series(
            "Prefixes on their way",
            "prefill and reload fill HBM, spill fills DRAM.",
            "short",
            {"{{kind}} {{work}}": f"sum by (kind, work) ({of('producers_in_flight')})"},
        ),
    ]
