"""The last lines of `npu-gr demo`: what was made, whether it is fast and good enough, and what to type next."""

from __future__ import annotations

from pathlib import Path

from npu_gr.catalogue.names import ItemNames
from npu_gr.features.interactions import Interactions
from npu_gr.replay.report import Report
from npu_gr.replay.tally import HITS
from npu_gr.tools.evaluate_service import ServiceEvaluation
from npu_gr.train.next_command import curl, serve
from npu_gr.train.site.examples import examples, known_user
from npu_gr.train.site.report import SiteReport


def sum_up(
    folder: Path,
    site: SiteReport,
    found: Report,
    without: Report,
    evaluation: ServiceEvaluation,
    log: Interactions,
    names: ItemNames,
    latency_ratio: float,
) -> list[str]:
    """Sum a demo up in about ten lines.

    Args:
        folder: of the demo.
        site: what was trained.
        found: of the replayed traffic.
        without: of a part of it, replayed without the relay.
        evaluation: of the cascade.
        log: all events.
        names: of the items.
        latency_ratio: share of the ranks that should be in time.
    """
    hits = sum(found.hit_ratio(hit) for hit in HITS)
    kept = "kept" if found.attainment_ratio >= latency_ratio else "MISSED"
    late = "; the load generator was late, so these times are partly its own" if found.was_late else ""
    ways = evaluation.as_dict()["ways"]
    others = ", ".join(f"{way} alone {row['hr_at_10']:.3f}" for way, row in ways.items() if way != "recommend")
    return [
        "",
        f"trained   {', '.join(site.parts)} on {site.num_events:,} events of {site.num_users:,} users",
        f"in time   {found.attainment_ratio:.1%} of {found.num_ranks} ranks within {found.slo_s * 1e3:g} ms; "
        f"objective {latency_ratio:.0%}: {kept}{late}",
        f"latency   {_times(found)}; without the relay {_times(without)} (the first {without.num_ranks} of them)",
        f"relay     {hits:.1%} of the ranks found the user's KV ready, {found.prefix_tokens_ratio:.1%} of the history "
        f"tokens were read from it{_device_times(found, without)}",
        f"quality   HR@10 of the last event of {len(evaluation.ranks['rank'])} users: recommend "
        f"{ways['recommend']['hr_at_10']:.3f}; {others} (evaluated models, which had not seen it)",
        f"          {evaluation.why}",
        f"left      {folder}: models of all events, {folder / 'serve.yaml'}; {folder / 'report.html'} has the plots",
        f"serve     {serve(folder / 'serve.yaml')}",
        f"ask       {curl('/v1/recommend', known_user(examples(log, names)))}",
        f"more      {folder / 'README.md'} has calls for a new user and a new item; "
        "long histories, where the relay pays: npu-gr demo --longest 100, python -m benchmarks relay",
    ]


def _times(report: Report) -> str:
    return f"P50 {report.latency_ms('rank', 'p50'):.1f} ms, P99 {report.latency_ms('rank', 'p99'):.1f} ms"


def _device_times(found: Report, without: Report) -> str:
    """What the relay spares the device: its share of a latency that other work is a part of."""
    ours, other = (report.stages_p50_ms.get("device") for report in (found, without))
    if ours is None or other is None:
        return ""
    return f"; P50 of a rank on the device {ours:.1f} ms, without the relay {other:.1f} ms"
