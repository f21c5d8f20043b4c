"""A replay from log to report: one client here, or several in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.calling import calling_context, calling_headers
from npu_gr.core.errors import ConfigError, DataError, Unavailable
from npu_gr.replay.compare import AnswerFile
from npu_gr.replay.files import QueryLog
from npu_gr.replay.log import QueryRecord
from npu_gr.replay.plan import Action, ReplayOptions, plan, share_of, user_of
from npu_gr.replay.player import PlayerOptions, play, soon
from npu_gr.replay.report import Report, TierSample, summarise
from npu_gr.replay.requests import Sample
from npu_gr.replay.tally import Tally

METRIC = "npu_gr_kv_bytes"
PERIOD_S = 1.0
MAX_POINTS = 240  # then every other sample is dropped, and the period doubles
TIMEOUT_S = 2.0


def tier_bytes(text: str) -> dict[str, float]:
    """Bytes of every tier and state in a Prometheus exposition: {"hbm live": bytes}.

    Only the lines of this metric are parsed: all of them take 60 ms, in which the load generator sends nothing.

    Raises:
        ValueError: a line of the metric is no sample.
    """
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(f"{METRIC}{{"))
    found = {}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            found[f"{sample.labels['tier']} {sample.labels['state']}"] = sample.value
    return found


async def watch_tiers(url: str | None, api_key: str | None, found: list[TierSample]) -> None:
    """Sample the tiers until cancelled, or until the service shows none.

    Args:
        url: the admin address; None = there is nothing to watch.
        api_key: sent as a bearer token.
        found: the samples are appended to it.
    """
    if url is None:
        return
    headers = calling_headers(api_key)
    began_at = time.monotonic()
    period_s = PERIOD_S
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(ssl=calling_context())
    async with aiohttp.ClientSession(
        url.rstrip("/") + "/", headers=headers, timeout=timeout, connector=connector
    ) as http:
        while True:
            taken_at = time.monotonic() - began_at
            # a service that is overloaded now may answer the next time
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with http.get("metrics", params={"name[]": METRIC}) as answer:
                    try:
                        tiers = tier_bytes(await answer.text()) if answer.ok else {}
                    except ValueError:
                        return
                    if not tiers:
                        return
                    found.append(TierSample(taken_at=taken_at, bytes=tiers))
            if len(found) >= MAX_POINTS:
                del found[1::2]
                period_s *= 2
            await asyncio.sleep(period_s)


# ---- one client

TELL_S = 0.25  # from one progress message of a client process to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientJob:
    """What one client of a run does."""

    log: Path | tuple[QueryRecord, ...]
    options: ReplayOptions
    share: int = 0  # which part of the users it plays, of `options.processes`
    answers: Path | None = None  # the file for its answers
    keep_scores: bool = True


class ReplayClient:
    """Does its job once; everything it has found so far can be read at any time."""

    def __init__(self, job: ClientJob) -> None:
        self._job = job
        self._log = QueryLog(job.log, job.options.bad_lines) if isinstance(job.log, Path) else None
        self.tally = Tally(job.options.slo_s, job.options.warmup_s)
        self.num_planned = 0
        self.num_done = 0
        self.last_number = -1  # of the records read

    @property
    def bad_lines(self) -> tuple[int, list[str]]:
        """How many lines of the log were no records, and the first of them."""
        return (self._log.num_bad, self._log.bad) if self._log else (0, [])

    @property
    def read_ratio(self) -> float:
        """The share of the log that has been read, for progress bars."""
        job = self._job
        if self._log:
            return self._log.read_ratio
        return (self.last_number + 1) / max(len(job.log), 1) if isinstance(job.log, tuple) else 0.0

    async def run(self, begin: Callable[[], Awaitable[float]] = soon) -> None:
        """Play. Cancelling stops it at once.

        Args:
            begin: as `player.play` has it.

        Raises:
            DataError: the log cannot be read, see `QueryLog`.
        """
        job = self._job
        options = job.options
        target = PlayerOptions(
            url=options.base_url,
            deadline_ms=options.timeout_s * 1e3,
            api_key=options.api_key,
            closed=_slots(options.closed, job.share, options.processes),
            histories=options.histories,
        )
        async with contextlib.AsyncExitStack() as stack:
            note: Callable[[Sample], None] = lambda _sample: None  # noqa: E731
            if job.answers is not None:
                note = (await stack.enter_async_context(AnswerFile(job.answers, job.keep_scores))).add

            def over(sample: Sample) -> None:
                self.num_done += 1
                self.tally.add(sample)
                note(sample)

            await play(self._actions(), target, over, begin)

    def _actions(self) -> Iterator[Action]:
        job = self._job
        options = job.options
        if isinstance(job.log, Path):
            assert self._log is not None
            records: Iterable[QueryRecord] = self._log
        else:
            records = job.log
        for action in plan(records, options):
            self.num_planned += 1
            self.last_number = max(self.last_number, action.number)
            if options.processes == 1 or share_of(user_of(action.record), options.processes) == job.share:
                yield action


def _slots(closed: int | None, share: int, processes: int) -> int | None:
    """A client's share of the `closed` requests in flight; every client has at least one."""
    return None if closed is None else max(1, closed // processes + (share < closed % processes))


def work(pipe: Connection, job: ClientJob) -> None:
    """The main function of a client process.

    Messages are (word, value):

        client                parent
        "ready"         ->                             its first requests are encoded
                        <-    the instant to start at
        "progress"      ->                             every `TELL_S`
                        <-    anything, or its end     stop early
        "result"        ->                             or "error" with the text of a DataError
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which tells us
    asyncio.run(_work(pipe, job))


async def _work(pipe: Connection, job: ClientJob) -> None:
    loop = asyncio.get_running_loop()
    client = ReplayClient(job)

    async def begin() -> float:
        pipe.send(("ready", None))
        start_at: float = await asyncio.to_thread(pipe.recv)
        loop.add_reader(pipe.fileno(), playing.cancel)  # any message, and the parent's end too
        return start_at

    playing = asyncio.create_task(client.run(begin))
    try:
        while not playing.done():
            await asyncio.wait([playing], timeout=TELL_S)
            pipe.send(("progress", (client.num_done, client.tally.num_within_slo, client.read_ratio)))
    except OSError:
        return  # nobody is listening any more
    finally:
        loop.remove_reader(pipe.fileno())
        playing.cancel()
        failure = (await asyncio.gather(playing, return_exceptions=True))[0]
    if isinstance(failure, EOFError | ConnectionError):  # nor before it began
        return
    if isinstance(failure, Exception) and not isinstance(failure, DataError):
        raise failure
    interrupted = isinstance(failure, asyncio.CancelledError)
    result = client.tally, client.num_planned, client.last_number, client.bad_lines, interrupted
    with contextlib.suppress(OSError, EOFError):
        pipe.send(("error", str(failure)) if isinstance(failure, DataError) else ("result", result))
        pipe.recv()  # stay until the other end is closed: it waits for news of all its clients


# ---- the run

START_S = 0.2  # from the last client process that is ready to the first due time


class Progress(NamedTuple):
    """How far a run is."""

    num_done: int  # requests
    num_good: int  # within the SLO
    read_ratio: float  # of the log


class RunResult(NamedTuple):
    """What one client, or all clients together, found in a run."""

    tally: Tally
    num_planned: int
    last_number: int  # of the records read
    bad_lines: tuple[int, list[str]]  # how many there are, and the reasons of the first
    interrupted: bool


Show = Callable[[Progress], None]


async def replay(
    log: Path | Iterable[QueryRecord],
    options: ReplayOptions,
    *,
    stop: asyncio.Event | None = None,
    show: Show = lambda _progress: None,
    answers: Path | None = None,
    keep_scores: bool = True,
) -> Report:
    """Play the log against a running service; when `stop` is set, end and report what was answered so far.

    Args:
        log: a file; or records, which several processes cannot share.
        options: where to, how fast, for how long.
        stop: set it to end the run early; None = it ends with the log.
        show: called a few times a second.
        answers: the file that `answers.AnswerFile` writes; None = none.
        keep_scores: write every score into it; otherwise digests only.

    Raises:
        DataError: the log cannot be read, or has nothing to send. ConfigError: options that do not go together.
    """
    return (await replay_from(log, options, stop, show, answers, keep_scores))[0]


async def replay_from(
    log: Path | Iterable[QueryRecord],
    options: ReplayOptions,
    stop: asyncio.Event | None = None,
    show: Show = lambda _progress: None,
    answers: Path | None = None,
    keep_scores: bool = True,
) -> tuple[Report, int]:
    """Replay as `replay` does, with its arguments.

    Returns:
        The report, and the number of the first record that was not read.

    Raises:
        DataError, ConfigError: as `replay`.
    """
    source = log if isinstance(log, Path) else tuple(sorted(log, key=attrgetter("ts")))
    job = ClientJob(log=source, options=options, answers=answers, keep_scores=keep_scores)
    if options.processes > 1 and not isinstance(source, Path):
        raise ConfigError("processes: several need a log in a file")
    tiers: list[TierSample] = []
    watching = asyncio.create_task(watch_tiers(options.admin_url, options.api_key, tiers))
    try:
        run = _here if options.processes == 1 else _apart
        played = await run(job, stop or asyncio.Event(), show)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    if not played.num_planned and not played.interrupted:
        raise DataError(f"{log if isinstance(log, Path) else 'log'}: no records to replay")
    settings = msgspec.to_builtins(options)
    del settings["api_key"]
    num_bad, bad = played.bad_lines
    report = summarise(played.tally, settings, played.interrupted, tiers, bad, num_bad)
    return report, played.last_number + 1


async def _here(job: ClientJob, stop: asyncio.Event, show: Show) -> RunResult:
    client = ReplayClient(job)
    playing = asyncio.create_task(client.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        while not playing.done() and not stopping.done():
            await asyncio.wait({playing, stopping}, timeout=TELL_S, return_when=asyncio.FIRST_COMPLETED)
            show(Progress(client.num_done, client.tally.num_within_slo, client.read_ratio))
    finally:
        interrupted = playing.cancel()
        stopping.cancel()
        failure, _ = await asyncio.gather(playing, stopping, return_exceptions=True)
    if isinstance(failure, Exception):
        raise failure
    return RunResult(client.tally, client.num_planned, client.last_number, client.bad_lines, interrupted)


async def _apart(job: ClientJob, stop: asyncio.Event, show: Show) -> RunResult:
    """Play in processes. Every client reads the whole log and plays its users; all begin at the same instant."""
    count = job.options.processes
    async with _processes(job, count) as pipes:
        found: list[RunResult] = []
        ready = set[Connection]()
        is_told_to_stop = False
        progress = dict.fromkeys(pipes, Progress(0, 0, 0.0))
        while len(found) < count:
            for pipe, (word, value) in await asyncio.to_thread(_messages, pipes):
                match word:
                    case "ready":
                        ready.add(pipe)
                        if len(ready) == count:
                            start_at = time.monotonic() + START_S  # one clock for all processes of this machine
                            for each in pipes:
                                each.send(start_at)
                    case "progress":
                        progress[pipe] = Progress(*value)
                        done, good, ratio = zip(*progress.values(), strict=True)
                        show(Progress(sum(done), sum(good), min(ratio)))
                    case "result":
                        found.append(RunResult(*value))
                    case _:
                        raise DataError(value)
            if stop.is_set() and len(ready) == count and not is_told_to_stop:
                is_told_to_stop = True
                for pipe in pipes:
                    with contextlib.suppress(OSError):  # this client may be over
                        pipe.send("stop")
    if job.answers is not None:
        await asyncio.to_thread(_join, job.answers, count)
    total = found[0].tally
    for other in found[1:]:
        total.merge(other.tally)
    return found[0]._replace(
        last_number=max(each.last_number for each in found), interrupted=any(each.interrupted for each in found)
    )


def _messages(pipes: list[Connection]) -> list[tuple[Connection, tuple[str, Any]]]:
    """What the clients have said by now; waits up to `TELL_S` for the first message.

    Raises:
        Unavailable: a client process has died.
    """
    found = []
    for pipe in wait([pipe for pipe in pipes if not pipe.closed], TELL_S):
        assert isinstance(pipe, Connection)
        try:
            message = pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise Unavailable("a client process of the replay died") from error
        found.append((pipe, message))
    return found


@asynccontextmanager
async def _processes(job: ClientJob, count: int) -> AsyncIterator[list[Connection]]:
    spawn = get_context("spawn")  # a fork would copy this loop and its threads
    pipes = []
    processes = []
    try:
        for share in range(count):
            ours, theirs = spawn.Pipe()
            answers = None if job.answers is None else _of_client(job.answers, share)
            process = spawn.Process(
                target=work, args=(theirs, dataclasses.replace(job, share=share, answers=answers)), daemon=True
            )
            await asyncio.to_thread(_start, process)
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()  # a client that still plays stops
        for process in processes:
            await asyncio.to_thread(process.join)


def _start(process: SpawnProcess) -> None:
    """Start it deaf to Ctrl-C, which a terminal sends to every process of the group; `work` keeps it so."""
    resource_tracker.ensure_running()  # by the first start otherwise, which lifts the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _of_client(answers: Path, share: int) -> Path:
    return answers.with_name(f"{answers.name}.{share}")


def _join(answers: Path, count: int) -> None:
    """Join the clients' files into one. Gzip files one after the other are a gzip file."""
    with answers.open("wb") as whole:
        for share in range(count):
            path = _of_client(answers, share)
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    whole.write(chunk)
            path.unlink()


@contextmanager
def stop_on_interrupt() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets, for `replay`; a second one interrupts as usual. Main thread only."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
