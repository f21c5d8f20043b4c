"""`npu-gr demo`: the three commands on MovieLens-100K, their models under traffic, and the relay.

    npu-gr prepare ml-100k.inter --items ml-100k.item --out .demo/data
    npu-gr train all .demo/data --out .demo
    npu-gr serve --config .demo/serve.yaml

Training makes two models of each kind (`npu_gr/train/site/make.py`): one that has not seen the
newest events, to be measured, and one of all events, to be served. So the demo serves twice:

    .demo/evaluated.yaml  the newest fifth of each user's events is replayed as traffic, in slices
                          of at most `SLICE`: one rank mixes the items of a slice with items drawn
                          from the catalogue; after its answer the slice's events are sent. It
                          measures time alone, without labels: the models know most of these events.
                          Then the cascade is asked for the last event of some users, which no model
                          has seen: the generator was trained on all but the last two, the others on
                          all but the last
    .demo/serve.yaml      films by title for a few users: what the third command answers

Last it measures what the relay saves where histories are long (`npu_gr/tools/demo_relay.py`).

MovieLens' own stamps are poor arrivals (half of the ratings share the previous rating's second), so
arrivals are Poisson; order, users and histories are real.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.kinds import RANK
from npu_gr.core.progress import heartbeat, time_left
from npu_gr.dataset.build import prepare
from npu_gr.dataset.files import Dataset, is_dataset, read_dataset
from npu_gr.dataset.summary import summary
from npu_gr.history_store.interactions import Interactions, movielens_100k
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.replay.convert import ModelVocabulary, from_ratings
from npu_gr.replay.files import write
from npu_gr.replay.log import QueryRecord
from npu_gr.replay.page import page
from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.report import Report, Study
from npu_gr.replay.run import ReplayProgress, replay
from npu_gr.replay.tally import HITS
from npu_gr.tools.demo_instance import Instance, clear_store, fill, free_port, served
from npu_gr.tools.demo_relay import LengthResult, conclusion, measure, plot, table
from npu_gr.tools.evaluate import EvaluationClient, ServiceEvaluation, evaluate
from npu_gr.train.cascade import EVALUATED_USERS, next_events
from npu_gr.train.data import to_train_on
from npu_gr.train.options import curl, serve
from npu_gr.train.site.folder import asked_at, examples, known_user, recommend
from npu_gr.train.site.make import train_command, train_site
from npu_gr.train.site.report import SiteReport

SLICE = 20  # held-out events of a request
CANDIDATES = 100  # of a rank
RATE_PER_S = 30.0
SIGNAL_LEAD_S = 0.05
HBM_BYTES = 8_388_608  # only a few dozen users fit, so that the DRAM tier has work to do
SHOWN_USERS = 3
SHOWN_ITEMS = 5


@dataclass(frozen=True, slots=True)
class MadeDemo:
    """The site on disk, and the events behind it."""

    folder: Path
    dataset: Dataset
    log: Interactions
    site: SiteReport


@dataclass(frozen=True, slots=True)
class PreparedDemo:
    """Everything to serve the evaluated models and send them the held-out traffic."""

    made: MadeDemo
    instance: Instance
    records: list[QueryRecord]
    history: Interactions  # the events before the traffic


# of `--quick`: films to look at after two minutes, not figures to quote
QUICK = (
    "rank.epochs=2",
    "rank.test_users=300",
    "generate.epochs=2",
    "generate.validate_every=2",
    "generate.test_users=300",
    "retrieve.test_users=300",
    "selection_users=100",
)


def make(
    folder: Path,
    console: Console,
    overrides: Sequence[str],
    num_threads: int,
    *,
    is_quick: bool = False,
) -> MadeDemo:
    """Run the first two commands; what they have made before is reused.

    Args:
        folder: The site's folder.
        console: Output for people.
        overrides: `section.key=value` of training options, as `train all --set` takes them.
        num_threads: Threads of all trainings together.
        is_quick: Whether to train as little as shows anything.

    Raises:
        ConfigError, DataError: says what the demo needs and does not find.
    """
    source = movielens_100k()
    items = source.with_suffix(".item")
    data = folder / "data"
    words = ["npu-gr", "prepare", str(source), "--items", str(items), "--out", str(data)]
    preset, num_steps = ("quick", 3) if is_quick else ("full", 5)
    overrides = [*(QUICK if is_quick else ()), *overrides]
    heading(console, 1, "read the log of MovieLens-100K (5 seconds)", num_steps)
    console.print(f"$ {shlex.join(words)}", soft_wrap=True)
    if is_dataset(data):
        console.print(f"reusing {data}")
    else:
        console.print(
            summary(prepare(source, data, items=items).manifest, data),
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    took = "1 to 2 minutes" if is_quick else "3 to 6 minutes"
    heading(console, 2, f"train three models and evaluate them ({took})", num_steps)
    console.print(
        f"$ {train_command(data, folder, preset, overrides, num_threads)}", soft_wrap=True
    )
    dataset = read_dataset(data)
    site = train_site(data, folder, overrides, num_threads, console, preset)
    return MadeDemo(folder, dataset, dataset.interactions(), site)


async def run(
    made: MadeDemo, console: Console, limit: int | None = None, longest: int | None = None
) -> Report:
    """Measure the evaluated models, show what the served ones recommend, measure the relay, sum up.

    Args:
        made: The site.
        console: Output for people.
        limit: Most records to replay; None = all.
        longest: Users, as in `prepare_traffic`. Not None: the same traffic is replayed without the
            relay too, in the place of the last step.

    Raises:
        ConfigError, DataError: as `prepare_traffic`.
        Unavailable: a service did not start, or did not stop cleanly.
    """
    heading(console, 3, "replay the newest events of each user as traffic (1 to 2 minutes)")
    prepared = await prepare_traffic(made, console, free_port(), free_port(), longest)
    without = None
    if longest is not None:
        async with served(prepared.instance, "relay.enabled=false") as url:
            without = await replayed(prepared, url, limit, console)
        await refill(prepared)
    async with served(prepared.instance) as url:
        found = await replayed(prepared, url, limit, console)
        console.print(found.render())
        with heartbeat(
            console.print, "asking for the last event of users, which no model has seen"
        ):
            evaluation = await evaluated(url, prepared.instance.admin_url, made.log)
        console.print(evaluation.table())
    heading(console, 4, "recommend films to three users (10 seconds)")
    await recommended(made, console)
    by_length: list[LengthResult] = []
    if longest is None:
        heading(console, 5, "long histories, with and without the relay (about a minute)")
        with heartbeat(console.print, "replaying the same ranks without and with the relay"):
            by_length = await measure(made.folder / "relay", console)
        console.print(table(by_length))
    results = {
        "cascade": evaluation.as_dict(),
        "without_relay": without and without.as_dict(),
        "by_length": [result.as_dict() for result in by_length],
    }
    text = json.dumps(found.as_dict() | results, indent=2)
    (made.folder / "replay.json").write_text(f"{text}\n")
    first = plot(by_length) if by_length else ""
    (made.folder / "report.html").write_text(
        page(Study(runs=[found]), "npu-gr demo: MovieLens-100K", first)
    )
    objective = prepared.instance.config.slo.latency_ratio
    for line in sum_up(made, found, without, evaluation, by_length, objective):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return found


async def run_quick(made: MadeDemo, console: Console) -> None:
    """Show what the served models recommend, and how to go on.

    Raises:
        Unavailable: the service did not start, or did not stop cleanly.
    """
    heading(console, 3, "recommend films to three users (10 seconds)", 3)
    await recommended(made, console)
    found = examples(made.log, made.dataset.names)
    console.print(
        f"Serve it yourself: {serve(made.folder / 'serve.yaml')}\nthen: "
        f"{curl('/v1/recommend', known_user(found))}\nThese models were trained for a minute; "
        "npu-gr demo trains them as long as the data needs, and measures.",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


async def recommended(made: MadeDemo, console: Console) -> None:
    """Serve the site with the history of all users, and print films for a few of them."""
    ports = [f"server.port={free_port()}", f"server.admin_port={free_port()}"]
    instance = Instance(made.folder / "serve.yaml", ports, made.folder / "service.log")
    await fill(instance.config, made.log)
    console.print(f"$ npu-gr serve --config {instance.config_path}", soft_wrap=True)
    async with served(instance) as url:
        await show(url, made.log, made.dataset.names, console)


def heading(console: Console, step: int, what: str, num_steps: int = 5) -> None:
    """Print which step begins and how long it takes on two free cores."""
    console.print(f"\nStep {step} of {num_steps}: {what}", style="bold", highlight=False)


async def replayed(prepared: PreparedDemo, url: str, limit: int | None, console: Console) -> Report:
    """Replay the traffic; a pipe and a terminal get a line of progress every 10 s."""
    began_at = time.monotonic()
    with heartbeat(console.print) as progress:

        def show(now: ReplayProgress) -> None:
            left = time_left(now.read_ratio, 1.0, time.monotonic() - began_at)
            progress.status = f"replayed {now.read_ratio:.0%} of the traffic, {left}"

        return await replay(prepared.records, options(prepared, url, limit), show=show)


async def prepare_traffic(
    made: MadeDemo, console: Console, port: int, admin_port: int, longest: int | None = None
) -> PreparedDemo:
    """Make traffic of the held-out events, and fill a new history store with the events before.

    Args:
        made: The site.
        console: Output for people.
        port, admin_port: Ports of the service.
        longest: Number of users, those with the longest histories; None = all.

    Raises:
        ConfigError, DataError: the site cannot be served.
    """
    trained = to_train_on(made.log.users, made.log.timestamps, "user-time")
    checkpoint = load_checkpoint(made.folder / "ranker" / "evaluated")
    vocabulary = ModelVocabulary(
        item_ids=checkpoint.item_ids, action_values=checkpoint.action_values
    )
    made_of = from_ratings(
        made.log[~trained], vocabulary, slice_events=SLICE, num_candidates=CANDIDATES
    )
    users = None if longest is None else longest_users(made.log[trained], longest)
    records = [
        msgspec.structs.replace(record, labels={})
        for record in made_of
        if users is None or record.user_id in users
    ]
    write(made.folder / "traffic.jsonl.gz", records)
    overrides = [
        f"history_store.path={made.folder / 'replayed.db'}",
        f"server.port={port}",
        f"server.admin_port={admin_port}",
        f"kv_cache.hbm_bytes={HBM_BYTES}",
    ]
    instance = Instance(made.folder / "evaluated.yaml", overrides, made.folder / "service.log")
    prepared = PreparedDemo(made, instance, records, made.log[trained])
    await refill(prepared)
    num_users = len({record.user_id for record in records})
    console.print(
        f"replaying {sum(record.kind == RANK.name for record in records)} ranks of "
        f"{num_users} users"
    )
    return prepared


def longest_users(history: Interactions, num: int) -> set[str]:
    """Name the users with the most events, of equal ones the first."""
    counts = np.bincount(history.users, minlength=len(history.user_names))
    return {history.user_names[user] for user in np.argsort(-counts, kind="stable")[:num]}


async def refill(prepared: PreparedDemo) -> None:
    """Fill a new history store with the events before the traffic; a replay has changed the old."""
    config = prepared.instance.config
    await asyncio.to_thread(clear_store, Path(config.history_store.path))
    await fill(config, prepared.history)


def options(
    prepared: PreparedDemo, url: str, limit: int | None = None, seed: int = 0
) -> ReplayOptions:
    """Choose how the traffic is replayed; the service's objective of a rank counts as the SLO.

    Args:
        prepared: The traffic.
        url: Base URL of the service.
        limit: Most records to replay; None = all.
        seed: Seed of the Poisson arrivals.
    """
    return ReplayOptions(
        base_url=url,
        rate=RATE_PER_S,
        signal_lead_s=SIGNAL_LEAD_S,
        slo_s=prepared.instance.config.slo.objective_s("rank"),
        limit=limit,
        seed=seed,
    )


async def evaluated(url: str, admin_url: str, log: Interactions) -> ServiceEvaluation:
    """Ask the evaluated models for the last event of some users, which no model has seen.

    Args:
        url, admin_url: Base URLs of their service.
        log: All events.
    """
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    return await evaluate(
        url, admin_url, next_events(log, known, EVALUATED_USERS), np.unique(log.items).tolist()
    )


async def show(url: str, log: Interactions, names: ItemNames, console: Console) -> None:
    """Print what a service recommends to a few users whose histories are in its store.

    Args:
        url: Base URL of the service.
        log: All events.
        names: Titles of the items.
        console: Output for people.
    """
    counts = np.bincount(log.users, minlength=len(log.user_names))
    users = np.argsort(counts, kind="stable")[len(counts) // 4 :: max(1, len(counts) // 4)][
        :SHOWN_USERS
    ]
    async with EvaluationClient(url) as client:
        for user in users.tolist():
            own = log[log.users == user]
            body = recommend(log.user_names[user], asked_at(log), fields=["title"])
            answer, _ = await client.post("/v1/recommend", body)
            console.print(_user_table(log.user_names[user], own, names, answer))


def _user_table(user: str, own: Interactions, names: ItemNames, answer: dict[str, Any]) -> Table:
    """Lay out what one user watched, what is recommended, and how long it took."""
    last = own[-SHOWN_ITEMS:]
    watched = [
        f"{title or item} ({value:g})"
        for item, title, value in zip(
            last.items, names.titles(last.items), last.values, strict=True
        )
    ]
    offered = [
        title or str(item) for item, title in zip(answer["items"], answer["titles"], strict=True)
    ]
    table = Table("watched last (stars)", "recommended", title=f"user {user}, {len(own)} films")
    for row in range(max(len(watched), len(offered))):
        table.add_row(
            *(texts[row] if row < len(texts) else "" for texts in (watched[::-1], offered))
        )
    table.caption = (
        f"{answer['num_candidates']} candidates found and ranked in "
        f"{sum(answer['stages_s'].values()) * 1e3:.0f} ms"
    )
    return table


def sum_up(
    made: MadeDemo,
    found: Report,
    without: Report | None,
    evaluation: ServiceEvaluation,
    by_length: Sequence[LengthResult],
    latency_ratio: float,
) -> list[str]:
    """Sum a demo up in about ten lines.

    Args:
        made: The site.
        found: The replayed traffic.
        without: The same, replayed without the relay; None = it was not.
        evaluation: The quality of the cascade.
        by_length: What the relay saves, by length of history; empty = not measured.
        latency_ratio: Share of the ranks that must be answered within the objective.
    """
    folder = made.folder
    hits = sum(found.hit_ratio(hit) for hit in HITS)
    met = "met" if found.attainment_ratio >= latency_ratio else "MISSED"
    late = (
        "; the load generator was late, so these times are partly its own" if found.was_late else ""
    )
    ways = evaluation.as_dict()["ways"]
    others = ", ".join(
        f"{way} alone {row['hr_at_10']:.3f}" for way, row in ways.items() if way != "recommend"
    )
    relay = [f"relay     {line}" for line in conclusion(by_length)] if by_length else []
    if without is not None:
        relay = [f"relay     without it {_times(without)}{_device_times(found, without)}"]
    return [
        "",
        f"trained   {', '.join(made.site.parts)} on {made.site.num_events:,} events of "
        f"{made.site.num_users:,} users",
        f"latency   {_times(found)}: {found.attainment_ratio:.1%} of {found.num_ranks} ranks "
        f"within {found.slo_s * 1e3:g} ms (objective {latency_ratio:.0%}: {met}){late}",
        f"cache     {hits:.1%} of the ranks found the user's KV ready; "
        f"{found.prefix_tokens_ratio:.1%} of the history tokens were read from it",
        f"quality   HR@10 of the last event of {len(evaluation.ranks['rank'])} users, which no "
        f"model had seen: recommend {ways['recommend']['hr_at_10']:.3f}; {others}",
        *relay,
        f"report    {folder / 'report.html'} has the plots, {folder / 'README.md'} more calls",
        f"serve     {serve(folder / 'serve.yaml')}",
        f"ask       {curl('/v1/recommend', known_user(examples(made.log, made.dataset.names)))}",
    ]


def _times(report: Report) -> str:
    return (
        f"P50 {report.latency_ms('rank', 'p50'):.1f} ms, P99 "
        f"{report.latency_ms('rank', 'p99'):.1f} ms"
    )


def _device_times(found: Report, without: Report) -> str:
    """Write the device's share of both latencies, which is what the relay saves."""
    ours, other = (report.stages_p50_ms.get("device") for report in (found, without))
    if ours is None or other is None:
        return ""
    return f"; P50 of a rank on the device {ours:.1f} ms, without the relay {other:.1f} ms"
