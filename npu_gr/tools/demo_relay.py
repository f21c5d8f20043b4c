"""The demo's last step: latency against the length of the history, with and without the relay.

MovieLens' histories have a hundred events, which a full inference reads in 2 ms, so a cached prefix
saves nothing there. This step serves one untrained ranker twice with the configuration that ships,
`relay.enabled` false and true. Each user comes `VISITS` times within a session and views a few
items after each rank, as in a feed; a signal leaves `SIGNAL_LEAD_S` before each rank, the time that
retrieval takes. Both services get the same requests at the same instants, at a rate of which a full
inference fills `LOAD` of the device. Weights do not change how long a pass takes. Admission and
brown-out work as they ship: ranks that they reject or truncate are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from npu_gr.core import shipped
from npu_gr.core.kinds import EVENTS, RANK
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, save
from npu_gr.replay.convert import ModelVocabulary
from npu_gr.replay.log import LoggedHistory, QueryRecord
from npu_gr.replay.page import COLOURS, figure, svg
from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.report import Report
from npu_gr.replay.run import replay
from npu_gr.tools.demo_instance import Instance, clear_store, fill, free_port, served

LENGTHS = (128, 512, 1024, 2048, 4096)  # events of a history
USERS = 25  # of each length
VISITS = 4  # ranks of a user
NEW_EVENTS = 5  # after each rank
CANDIDATES = 100  # of a rank
LOAD = 0.4  # share of the device that full inferences would fill
MOST_PER_S = 30.0  # ranks of short histories: HTTP, not the device, limits these
SIGNAL_LEAD_S = 0.1
MOST_S = 20.0  # of sending, for each length and service
NUM_ITEMS = 10_000
SHOWN_AT = 1_700_000_000  # unix seconds; histories end before
LEAST_FACTOR = 1.5  # latency without the relay over that with it, from which on it pays
MOST_LAG_MS = 20.0  # of P99 of the send lag; over it P99 of the latency says little
SIZE_IN = (17.0, 5.6)  # of the plot
IDLE_RANKS = 9  # one after the other, to measure a full inference
PROTECTED = (" 429", " 504")  # ends of the errors by which an instance protects its deadline


@dataclass(frozen=True, slots=True)
class LengthResult:
    """The same ranks of one length of history, without the relay and with it."""

    num_events: int
    rate_per_s: float
    without: Report
    with_relay: Report

    def factor(self, percentile: str) -> float:
        """Compute a percentile without the relay over the same with it."""
        return _ms(self.without, percentile) / _ms(self.with_relay, percentile)

    @property
    def num_protected(self) -> int:
        """Ranks that either service rejected, gave up, or answered from a part of the history."""
        return sum(
            report.outcomes.get("degraded", 0)
            + sum(n for name, n in report.errors.items() if _is_protected(name, RANK.name))
            for report in (self.without, self.with_relay)
        )

    @property
    def send_lag_ms(self) -> float:
        """P99 of how late the load generator sent, the later of both runs."""
        return max(report.lag_ms.get("p99", 0.0) for report in (self.without, self.with_relay))

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has."""
        return {
            "history_events": self.num_events,
            "rate_per_s": self.rate_per_s,
            "without_relay": self.without.as_dict(),
            "with_relay": self.with_relay.as_dict(),
        }


def _is_protected(error: str, kind: str = "") -> bool:
    return error.startswith(kind) and error.endswith(PROTECTED)


def _ms(report: Report, percentile: str) -> float:
    return report.latency_ms(RANK.name, percentile)


def make_ranker(folder: Path, longest: int) -> Checkpoint:
    """Write an untrained HSTU ranker of the shape of the demo's, which reads `longest` events."""
    torch.manual_seed(0)
    config = HSTUConfig(
        num_items=NUM_ITEMS,
        actions=("view",),
        tasks=("click",),
        max_history_tokens=longest + VISITS * NEW_EVENTS,
    )
    made = Checkpoint(
        model=HSTU(config).eval(),
        item_ids=np.arange(NUM_ITEMS, dtype=np.int64),
        name="untrained",
        action_values=(1.0,),
    )
    save(made, folder)
    return made


def histories(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Interactions:
    """Draw the histories of `USERS` users of each length; user names begin with the length."""
    random = np.random.default_rng(seed)
    names = [f"{length}-{user}" for length in lengths for user in range(USERS)]
    counts = np.repeat(lengths, USERS)
    users = np.repeat(np.arange(len(names), dtype=np.int32), counts)
    total = int(counts.sum())
    times = SHOWN_AT - 86_400 * 30 + random.integers(0, 86_400 * 29, total)
    order = np.argsort(times, kind="stable")
    items = random.integers(0, NUM_ITEMS, total)
    return Interactions(users[order], items[order], np.ones(total), times[order], names)


def traffic(length: int, vocabulary: ModelVocabulary, seed: int = 0) -> list[QueryRecord]:
    """Ranks of the users of one length in a random order, after each the events that follow it."""
    random = np.random.default_rng([seed, length])
    records = []
    for number, user in enumerate(random.permutation(np.repeat(np.arange(USERS), VISITS))):
        at = SHOWN_AT + number
        about: dict[str, Any] = {"ts": float(at), "user_id": f"{length}-{user}"}
        shown = random.choice(NUM_ITEMS, CANDIDATES, replace=False).tolist()
        records.append(QueryRecord(kind=RANK.name, candidates=shown, timestamp=at, **about))
        viewed = Interactions(
            np.zeros(NEW_EVENTS, np.int32),
            random.integers(0, NUM_ITEMS, NEW_EVENTS),
            np.ones(NEW_EVENTS),
            np.full(NEW_EVENTS, at),
            [],
        )
        events = LoggedHistory.of(vocabulary.events(viewed))
        records.append(QueryRecord(kind=EVENTS.name, events=events, **about))
    return records


async def measure(
    folder: Path, console: Console, lengths: Sequence[int] = LENGTHS
) -> list[LengthResult]:
    """Serve the ranker without the relay and with it, and send both the same requests in turns.

    Args:
        folder: Folder for the ranker, and for the history store and the log of each service.
        console: Output for people, a line for each length.
        lengths: Numbers of events in a history, ascending.

    Raises:
        Unavailable: a service did not start, or did not stop cleanly.
    """
    checkpoint = await asyncio.to_thread(make_ranker, folder / "ranker", lengths[-1])
    vocabulary = ModelVocabulary(
        item_ids=checkpoint.item_ids, action_values=checkpoint.action_values
    )
    events = histories(lengths)
    results = []
    async with AsyncExitStack() as services:
        urls = []
        instances = [_instance(folder, name) for name in ("without", "with")]
        slo_s = instances[0].config.slo.objective_s("rank")
        for instance in instances:
            await asyncio.to_thread(clear_store, Path(instance.config.history_store.path))
            await fill(instance.config, events)
            urls.append(await services.enter_async_context(served(instance)))
        for length in lengths:
            requests = traffic(length, vocabulary)
            rate_per_s = min(MOST_PER_S, LOAD / await _full_s(urls[0], requests))
            without = await replay(requests, _options(urls[0], rate_per_s, slo_s))
            with_relay = await replay(requests, _options(urls[1], rate_per_s, slo_s, SIGNAL_LEAD_S))
            results.append(LengthResult(length, rate_per_s, without, with_relay))
            console.print(
                f"histories of {length:,} events, {rate_per_s:.1f} ranks/s: P50 and P99 "
                f"{_ms(without, 'p50'):.0f} and {_ms(without, 'p99'):.0f} ms without the relay, "
                f"{_ms(with_relay, 'p50'):.0f} and {_ms(with_relay, 'p99'):.0f} ms with it",
                highlight=False,
            )
    return results


def _instance(folder: Path, name: str) -> Instance:
    overrides = [
        f"checkpoint={folder / 'ranker'}",
        f"history_store.path={folder / f'history-{name}.db'}",
        f"server.port={free_port()}",
        f"server.admin_port={free_port()}",
        f"relay.enabled={str(name == 'with').lower()}",
    ]
    return Instance(shipped.path("configs/cpu.yaml"), overrides, folder / f"service-{name}.log")


def _options(
    url: str, rate_per_s: float, slo_s: float, signal_lead_s: float | None = None
) -> ReplayOptions:
    return ReplayOptions(
        base_url=url,
        rate=rate_per_s,
        slo_s=slo_s,
        signal_lead_s=signal_lead_s,
        duration_s=MOST_S,
    )


async def _full_s(url: str, records: Sequence[QueryRecord]) -> float:
    """Measure the median of a full inference on an idle service, in seconds."""
    ranks = [record for record in records if record.kind == RANK.name][:IDLE_RANKS]
    found = await replay(ranks, ReplayOptions(base_url=url, closed=1))
    return found.latency_ms(RANK.name, "p50") * 1e-3


def table(results: Sequence[LengthResult]) -> Table:
    """Lay the results out for a terminal."""
    made = Table(
        *("events", "ranks", "ranks/s", "P50 without", "P50 with", "factor"),
        *("P99 without", "P99 with", "factor"),
        *("in SLO without", "with"),
        title="Latency of a rank in ms by the length of the history, without and with the relay",
    )
    for result in results:
        cells = [f"{result.num_events:,}", f"{result.with_relay.num_ranks}"]
        cells.append(f"{result.rate_per_s:.1f}")
        for percentile in ("p50", "p99"):
            both = (result.without, result.with_relay)
            cells += [f"{_ms(report, percentile):.1f}" for report in both]
            cells.append(f"{result.factor(percentile):.1f}x")
        cells += [f"{r.attainment_ratio:.0%}" for r in (result.without, result.with_relay)]
        made.add_row(*cells)
    return made


def conclusion(results: Sequence[LengthResult]) -> list[str]:
    """Say from which length of history on the relay pays, and what to do below it.

    By P99; by P50 where other work kept the machine from sending on time.
    """
    runs = [report for result in results for report in (result.without, result.with_relay)]
    failed = sum(
        count for report in runs for name, count in report.errors.items() if not _is_protected(name)
    )
    if failed:
        return [f"{failed} requests failed, so this is no comparison: see the services' logs."]
    lag_ms = max(result.send_lag_ms for result in results)
    percentile = "p99" if lag_ms <= MOST_LAG_MS else "p50"
    lines = []
    if percentile == "p50":
        lines.append(
            f"Other work on this machine made requests leave up to {lag_ms:.0f} ms late, which P99 "
            "contains; so this compares P50."
        )
    pays_from = None
    for result in reversed(results):
        if result.factor(percentile) < LEAST_FACTOR:
            break
        pays_from = result
    if pays_from is None:
        return [
            *lines,
            "The relay does not pay at any of these lengths on this machine: "
            "leave relay.enabled false.",
        ]
    longest = results[-1]
    lines.append(
        f"The relay pays from {pays_from.num_events:,} events on: with histories of "
        f"{longest.num_events:,} events {percentile.upper()} is "
        f"{_ms(longest.with_relay, percentile):.1f} ms with it and "
        f"{_ms(longest.without, percentile):.1f} ms without it "
        f"({longest.factor(percentile):.1f}x)."
    )
    attained = [run.attainment_ratio for run in (longest.with_relay, longest.without)]
    if attained[0] != attained[1]:
        lines.append(
            f"{attained[0]:.0%} instead of {attained[1]:.0%} of these ranks are answered within "
            f"{longest.without.slo_s * 1e3:.0f} ms."
        )
    if longest.num_protected:
        lines.append(
            f"Of these {longest.without.num_ranks + longest.with_relay.num_ranks} ranks the "
            f"services rejected or truncated {longest.num_protected}; "
            "the times are of the answered ones."
        )
    if pays_from is not results[0]:
        lines.append(
            f"Below about {pays_from.num_events:,} events a full inference is as fast: "
            "leave relay.enabled false."
        )
    return lines


def plot(results: Sequence[LengthResult]) -> str:
    """Draw P99 and P50 against the length of the history, as HTML."""
    lengths = [result.num_events for result in results]

    def draw(axes: Any) -> None:
        for percentile, dashes in (("p99", "-"), ("p50", "--")):
            for colour, name, reports in (
                (COLOURS[1], "without the relay", [result.without for result in results]),
                (COLOURS[0], "with the relay", [result.with_relay for result in results]),
            ):
                times = [_ms(report, percentile) for report in reports]
                label = f"{percentile.upper()} {name}"
                axes.plot(lengths, times, dashes, color=colour, lw=2.2, marker="o", label=label)

    drawn = svg(draw, "events in the history", "ms from the due time", log="x", size_in=SIZE_IN)
    return figure("Latency of a rank against the length of the history", drawn)
