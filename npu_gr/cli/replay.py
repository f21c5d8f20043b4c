"""npu-gr replay [run | compare | convert] and npu-gr record.

Commands import what they need when they run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from npu_gr.cli.options import API_KEY, AS_JSON, FILE, RunByDefault, run_async
from npu_gr.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from npu_gr.core.names import ActionNames
    from npu_gr.replay.plan import ReplayOptions
    from npu_gr.replay.run import ReplayProgress


@click.group(cls=RunByDefault, short_help="Replay a query log, compare runs, convert logs.")
def replay() -> None:
    """Replay a query LOG (`run`, the default command), compare two runs, or convert logs."""


@replay.command("run", short_help="Replay a query log open loop.")
@click.argument("log", type=FILE)
@click.option("--url", "base_url", default="http://127.0.0.1:8080", show_default=True)
@click.option(
    "--speed",
    "speeds",
    multiple=True,
    type=float,
    help="Seconds of the log per second; repeatable, for a sweep.  [1]",
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=float,
    help="Ranks a second instead of the log's times; repeatable, for a sweep.",
)
@click.option(
    "--arrival", default="poisson", show_default=True, type=click.Choice(["poisson", "constant"])
)
@click.option(
    "--closed",
    type=int,
    help="Closed loop: keep this number of requests in flight, without arrival times.",
)
@click.option(
    "--signal-lead-ms",
    type=float,
    help="Time between a signal and its rank, where the log has no signal.  [50]",
)
@click.option(
    "--rank-delay-ms",
    type=float,
    help="Signal at the log's time, and rank after this delay (median).",
)
@click.option("--rank-delay-p99-ms", type=float, help="P99 of --rank-delay-ms, log-normal.")
@click.option("--no-signals", is_flag=True, help="Send only the signals in the log.")
@click.option(
    "--histories",
    default="logged",
    show_default=True,
    type=click.Choice(["logged", "whole", "delta"]),
)
@click.option("--start", "start_s", default=0.0, help="Skip the first seconds of the log.")
@click.option(
    "--limit", type=click.IntRange(1), help="Replay this number of records, oldest first."
)
@click.option(
    "--sample-users", default=1.0, show_default=True, help="Replay this fraction of the users."
)
@click.option("--duration", "duration_s", type=float, help="Send for this number of seconds.")
@click.option(
    "--warmup",
    "warmup_s",
    default=0.0,
    show_default=True,
    help="Leave the first seconds out of the report.",
)
@click.option("--timeout-ms", default=1000.0, show_default=True)
@click.option("--slo-ms", default=50.0, show_default=True)
@click.option("--bad-lines", default="fail", show_default=True, type=click.Choice(["fail", "skip"]))
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--checkpoint",
    type=FILE,
    help="Checkpoint of the ranker; needed to compare answers with the log's, or with a "
    "recording, where items have names that are no numbers.",
)
@click.option("--out", type=FILE, help="Folder for report.json, report.html and answers.jsonl.gz.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
@API_KEY
def run_command(log: Path, out: Path | None, as_json: bool, **given: Any) -> None:
    """Replay a query LOG open loop; latency counts from the intended time of each request.

    Ctrl-C ends the run and prints the report. The exit code is 1 if a run got only errors.
    """
    from rich.console import Console

    from npu_gr.replay.page import page
    from npu_gr.replay.report import Study
    from npu_gr.replay.run import check_listening, replay, stop_on_interrupt

    runs = _options(given)

    async def work() -> Study:
        await check_listening(runs[0].base_url)
        if out is not None:
            await asyncio.to_thread(_make, out)
        found = []
        with stop_on_interrupt() as stop, _progress() as show:
            for place, options in enumerate(runs, 1):
                show.begin(f"run {place}")
                name = "answers.jsonl.gz" if place == 1 else f"answers-{place}.jsonl.gz"
                answers = None if out is None else out / name
                found.append(await replay(log, options, stop=stop, show=show, answers=answers))
                if stop.is_set():
                    break
        return Study(runs=found)

    study = run_async(work)
    if out is not None:
        (out / "report.json").write_text(study.to_json() + "\n")
        (out / "report.html").write_text(page(study, f"Replay of {log.name}"))
        click.echo(f"report in {out}", err=True)
    if as_json:
        click.echo(study.to_json())
    else:
        Console(width=max(110, Console().width)).print(study.render())
    if failed := [run for run in study.runs if run.has_failed]:
        errors = ", ".join(f"{count} x {error}" for error, count in failed[0].errors.items())
        click.echo(f"error: nothing was answered: {errors}", err=True)
        sys.exit(1)


def _options(given: dict[str, Any]) -> list[ReplayOptions]:
    """Make the options of each run from those of the command line."""
    from npu_gr.replay.plan import ReplayOptions

    checkpoint = given.pop("checkpoint")
    speeds = given.pop("speeds")
    rates = given.pop("rates")
    lead_ms = given.pop("signal_lead_ms")
    no_signals = given.pop("no_signals")
    delay_ms = given.pop("rank_delay_ms")
    delay_p99_ms = given.pop("rank_delay_p99_ms")
    if lead_ms is None and delay_ms is None and not no_signals:
        lead_ms = 50.0
    if speeds and rates:
        raise ConfigError("--speed and --rate exclude each other; give one of them")

    def seconds(ms: float | None) -> float | None:
        return None if ms is None else ms * 1e-3

    common = {
        "item_key": b"" if checkpoint is None else _item_key(checkpoint),
        "timeout_s": given.pop("timeout_ms") * 1e-3,
        "slo_s": given.pop("slo_ms") * 1e-3,
        "signal_lead_s": seconds(lead_ms),
        "rank_delay_s": seconds(delay_ms),
        "rank_delay_p99_s": seconds(delay_p99_ms),
        **given,
    }
    each = [{"rate": rate} for rate in rates] or [{"speed": speed} for speed in speeds or (1.0,)]
    try:
        return [ReplayOptions(**common, **one) for one in each]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error


@contextmanager
def _progress() -> Iterator[Any]:
    """Show a progress bar of the log on stderr while the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(file=sys.stderr), transient=True) as bars:

        class ShowProgress:
            """Updates the bar at every call; `begin` starts a new bar."""

            def begin(self, name: str) -> None:
                self._task = bars.add_task(name, total=1.0, text="")

            def __call__(self, progress: ReplayProgress) -> None:
                text = f"{progress.num_done} answered, {progress.num_good} ranks within the SLO"
                bars.update(self._task, completed=progress.read_ratio, text=text)

        yield ShowProgress()


@replay.command("compare", short_help="Compare two runs of a log, score by score.")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--slo-ms", default=50.0, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Seed of the bootstrap.")
@click.option(
    "--max-drift",
    type=float,
    help="Exit 1 if a score differs by more than this, in standard deviations of its request.",
)
@click.option(
    "--max-p99-ratio",
    type=float,
    help="Exit 1 if P99 of B / P99 of A is significantly (95 %) above this.",
)
@AS_JSON
def compare_command(
    a: Path,
    b: Path,
    slo_ms: float,
    seed: int,
    max_drift: float | None,
    max_p99_ratio: float | None,
    as_json: bool,
) -> None:
    """Compare runs A and B of a log: folders of `replay --out`, answer files, or recorded logs."""
    import msgspec
    from rich.console import Console

    from npu_gr.replay.compare import compare

    found = compare(a, b, slo_ms * 1e-3, seed)
    if as_json:
        click.echo(msgspec.json.encode(found.as_dict()))
    else:
        Console(width=max(110, Console().width)).print(found.render())
    drift = found.drift
    p99 = next(row for row in found.ratios if row.name == "P99 ms")
    if max_drift is not None and not (drift.num_with_values and drift.max_drift <= max_drift):
        click.echo(
            f"npu-gr: drift {drift.max_drift:.3e} is above --max-drift {max_drift:g}", err=True
        )
        sys.exit(1)
    if max_p99_ratio is not None and not p99.low <= max_p99_ratio:
        click.echo(
            f"npu-gr: P99 ratio {p99.ratio:.3f} (at least {p99.low:.3f}) is above "
            f"--max-p99-ratio {max_p99_ratio:g}",
            err=True,
        )
        sys.exit(1)


@replay.group("convert", short_help="Make query logs from other data.")
def convert() -> None:
    """Make query logs from other data."""


@convert.command("sql", short_help="Make a query log with a SQL query for DuckDB.")
@click.argument("query", type=FILE)
@click.option(
    "--out", required=True, type=FILE, help="Query log to write: .jsonl, .jsonl.gz or .jsonl.zst."
)
@click.option(
    "--checkpoint",
    type=FILE,
    help="Checkpoint of the ranker; needed if records name actions, or items that are no numbers.",
)
def convert_sql(query: Path, out: Path, checkpoint: Path | None) -> None:
    """Make a query log from the rows of QUERY, a file with SQL for DuckDB.

    DuckDB reads access logs, JSON lines, CSV, Parquet and databases. Each row is a request, and its
    columns are the fields of a record. docs/own-data.md has queries for nginx and Envoy.
    """
    from npu_gr.replay.convert import SqlSource
    from npu_gr.replay.files import in_time_order, write

    try:
        text = query.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{query}: {error}") from error
    of_model = () if checkpoint is None else (_actions(checkpoint), _item_key(checkpoint))
    source = SqlSource(text, *of_model)
    num_records = write(out, in_time_order(f"{query}: row", enumerate(source, 1)))
    kinds = ", ".join(f"{num} {kind}" for kind, num in source.kinds.most_common())
    click.echo(
        f"{num_records} records in {out}: {kinds}\n\nnext: npu-gr replay {out} --url "
        "http://127.0.0.1:8080"
    )


def _item_key(checkpoint: Path) -> bytes:
    from npu_gr.catalogue.names import EMPTY, ItemNames

    return (ItemNames.load(checkpoint) or EMPTY).key


def _actions(checkpoint: Path) -> ActionNames:
    from npu_gr.core.names import ActionNames
    from npu_gr.model.weights import load

    return ActionNames(load(checkpoint).action_names)


@click.command(short_help="Record a service's requests, or purge recordings.")
@click.option(
    "--url",
    default="http://127.0.0.1:8081",
    show_default=True,
    help="Admin URL of an instance.",
)
@click.option(
    "--seconds", default=600.0, show_default=True, type=click.FloatRange(min=0, min_open=True)
)
@click.option(
    "--sample",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Fraction of the users to record.",
)
@click.option("--status", is_flag=True, help="Only show the recorder's status.")
@click.option(
    "--purge",
    "folder",
    type=FILE,
    help="Instead remove the records of erased users from this folder.",
)
@API_KEY
def record(
    url: str, seconds: float, sample: float, status: bool, folder: Path | None, api_key: str | None
) -> None:
    """Record the requests of a running service into its `record.folder`; Ctrl-C stops early.

    The service needs a section `record` in its configuration, which also sets whether user ids are
    hashed.

    --purge may run while an instance writes into the folder. It is optional: readers skip the
    records of erased users at once, and instances remove them within hours. Exit code: 0 = all are
    removed, 1 = a file could not be rewritten, 2 = nothing could be done, 3 = a file that is being
    written may still hold some.
    """
    from npu_gr.replay.remote import record_for, show_status
    from npu_gr.replay.run import stop_on_interrupt

    if folder is not None:
        _purge(folder)

    def show(found: dict[str, Any]) -> None:
        counts = ", ".join(f"{found[name]} {name}" for name in ("written", "dropped", "failed"))
        click.echo(f"{'recording' if found['recording'] else 'not recording'}: {counts}", err=True)

    async def work() -> dict[str, Any]:
        if status:
            return await show_status(url, api_key)
        with stop_on_interrupt() as stop:
            return await record_for(url, api_key, seconds, sample, stop, show)

    found = run_async(work)
    show(found)
    for file in found["files"]:
        click.echo(file)


def _purge(folder: Path) -> NoReturn:
    from npu_gr.replay.purge import HELD, purge

    try:
        done = purge(folder)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error
    click.echo(
        f"{done.num_files} files read, {done.num_rewritten} rewritten: {done.num_removed} "
        f"records removed, {done.num_unreadable} invalid lines; {done.num_left} users are left"
    )
    for message in done.failed:
        click.echo(message, err=True)
    sys.exit(1 if done.failed else HELD if done.num_left else 0)
