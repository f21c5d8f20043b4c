"""A replay from log to report: one client here, or several in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from npu_gr.core.errors import ConfigError, DataError, Unavailable
from npu_gr.replay.client import TELL_S, Client, Part, monotonic_start_s, work
from npu_gr.replay.log import Record
from npu_gr.replay.options import ReplayOptions
from npu_gr.replay.report import Report, TierBytes, summarise
from npu_gr.replay.scrape import watch_tiers
from npu_gr.replay.tally import Tally

START_S = 1.0  # for client processes to read and encode their first requests


class Progress(NamedTuple):
    """How far a run is."""

    num_done: int
    num_good: int  # within the SLO
    read_ratio: float  # of the log


class Played(NamedTuple):
    """What the clients of a run found."""

    tally: Tally
    num_planned: int
    last_number: int  # of the records read
    bad_lines: tuple[int, list[str]]
    interrupted: bool


Show = Callable[[Progress], None]


async def replay(
    log: Path | Iterable[Record],
    options: ReplayOptions,
    *,
    stop: asyncio.Event | None = None,
    show: Show = lambda _progress: None,
    answers: Path | None = None,
    keep_scores: bool = True,
) -> Report:
    """Play the log against a running service; when `stop` is set, end and report what was answered so far.

    Args:
        log: a file, or records that several processes cannot share.
        show: called a few times a second.
        answers: file for `answers.AnswerFile`.
        keep_scores: with every score, or else digests only.

    Raises:
        DataError: the log cannot be read, or has nothing to send. ConfigError: options that do not go together.
    """
    return (await replay_from(log, options, stop, show, answers, keep_scores))[0]


async def replay_from(
    log: Path | Iterable[Record],
    options: ReplayOptions,
    stop: asyncio.Event | None = None,
    show: Show = lambda _progress: None,
    answers: Path | None = None,
    keep_scores: bool = True,
) -> tuple[Report, int]:
    """As `replay`; also the number of the first record that was not read."""
    source = log if isinstance(log, Path) else tuple(sorted(log, key=attrgetter("ts")))
    part = Part(log=source, options=options, answers=answers, keep_scores=keep_scores)
    if options.processes > 1 and not isinstance(source, Path):
        raise ConfigError("processes: several need a log in a file")
    tiers: list[TierBytes] = []
    watching = asyncio.create_task(watch_tiers(options.base_url, options.api_key, tiers))
    try:
        run = _here if options.processes == 1 else _apart
        played = await run(part, stop or asyncio.Event(), show)
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


async def _here(part: Part, stop: asyncio.Event, show: Show) -> Played:
    client = Client(part)
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
    return Played(client.tally, client.num_planned, client.last_number, client.bad_lines, interrupted)


async def _apart(part: Part, stop: asyncio.Event, show: Show) -> Played:
    """Every client reads the whole log and plays its users; they begin at the same instant."""
    count = part.options.processes
    async with _processes(part, count) as pipes:
        found: list[Played] = []
        ready, told = set[Connection](), False
        progress = dict.fromkeys(pipes, Progress(0, 0, 0.0))
        while len(found) < count:
            for pipe, (word, value) in await asyncio.to_thread(_messages, pipes):
                match word:
                    case "ready":
                        ready.add(pipe)
                        if len(ready) == count:
                            start_s = monotonic_start_s(START_S)
                            for each in pipes:
                                each.send(start_s)
                    case "progress":
                        progress[pipe] = Progress(*value)
                        done, good, ratio = zip(*progress.values(), strict=True)
                        show(Progress(sum(done), sum(good), min(ratio)))
                    case "result":
                        found.append(Played(*value))
                    case _:
                        raise DataError(value)
            if stop.is_set() and len(ready) == count and not told:
                told = True
                for pipe in pipes:
                    with contextlib.suppress(OSError):  # it may be over
                        pipe.send("stop")
    if part.answers is not None:
        await asyncio.to_thread(_join, part.answers, count)
    total = found[0].tally
    for other in found[1:]:
        total.merge(other.tally)
    return found[0]._replace(
        last_number=max(each.last_number for each in found), interrupted=any(each.interrupted for each in found)
    )


def _messages(pipes: list[Connection]) -> list[tuple[Connection, tuple[str, Any]]]:
    """What the clients have said by now; waits a little for the first. Raises Unavailable where one has died."""
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
async def _processes(part: Part, count: int) -> AsyncIterator[list[Connection]]:
    spawn = get_context("spawn")  # a fork would copy this loop and its threads
    pipes, processes = [], []
    try:
        for share in range(count):
            ours, theirs = spawn.Pipe()
            answers = None if part.answers is None else _of_client(part.answers, share)
            its_part = Part(
                log=part.log, options=part.options, share=share, answers=answers, keep_scores=part.keep_scores
            )
            process = spawn.Process(target=work, args=(theirs, its_part), daemon=True)
            await asyncio.to_thread(process.start)
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()  # a client that still plays stops
        for process in processes:
            await asyncio.to_thread(process.join)


def _of_client(answers: Path, share: int) -> Path:
    return answers.with_name(f"{answers.name}.{share}")


def _join(answers: Path, count: int) -> None:
    """One file of the clients' (packed files joined are a packed file)."""
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
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
