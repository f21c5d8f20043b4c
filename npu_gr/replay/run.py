"""Replay a log against a service, and report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from npu_gr.core.errors import DataError, Unavailable
from npu_gr.replay.answers import AnswerFile, AnswerLine
from npu_gr.replay.files import QueryLog
from npu_gr.replay.log import SCORED, QueryRecord, digest, raw
from npu_gr.replay.plan import Action, ReplayOptions, plan
from npu_gr.replay.player import play
from npu_gr.replay.report import Report, summarise
from npu_gr.replay.requests import Sample
from npu_gr.replay.tally import Tally

CONNECT_S = 3.0
SHOW_S = 0.25  # between calls of `show`


class ReplayProgress(NamedTuple):
    """The progress of a run."""

    num_done: int  # requests
    num_good: int  # within the SLO
    read_ratio: float  # of the log


async def check_listening(url: str) -> None:
    """Connect to a service once, before a log is read and sent.

    Raises:
        Unavailable: Nothing accepts a connection at the URL within `CONNECT_S`.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError) as error:
        why = str(error) or f"after {CONNECT_S:g} s"
        raise Unavailable(
            f"{url}: no connection ({why}); start the service with npu-gr serve, or name it with "
            "--url"
        ) from error
    writer.close()


async def replay(
    log: Path | Iterable[QueryRecord],
    options: ReplayOptions,
    *,
    stop: asyncio.Event | None = None,
    show: Callable[[ReplayProgress], None] = lambda _progress: None,
    answers: Path | None = None,
) -> Report:
    """Replay a log against a running service.

    Args:
        log: A file, or records.
        options: Service, speed and duration.
        stop: Ends the run early when set; the report then has the answers so far.
        show: Callback for the progress, a few times per second.
        answers: Output file of `answers.AnswerFile`, if any.

    Raises:
        DataError: the log cannot be read, or has no records to send.
    """
    run = _Run(log, options)
    playing = asyncio.create_task(run.play(answers))
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        while not playing.done() and not stopping.done():
            await asyncio.wait(
                {playing, stopping}, timeout=SHOW_S, return_when=asyncio.FIRST_COMPLETED
            )
            show(ReplayProgress(run.num_done, run.tally.num_within_slo, run.read_ratio))
    finally:
        interrupted = playing.cancel()
        stopping.cancel()
        failure, _ = await asyncio.gather(playing, stopping, return_exceptions=True)
    if isinstance(failure, Exception):
        raise failure
    if not run.num_planned and not interrupted:
        raise DataError(f"{log if isinstance(log, Path) else 'log'}: no records to replay")
    settings = msgspec.to_builtins(options)
    del settings["api_key"], settings["item_key"]
    num_bad, bad = run.bad_lines
    return summarise(run.tally, settings, interrupted, bad, num_bad)


class _Run:
    """A run; its counts can be read while it runs."""

    def __init__(self, log: Path | Iterable[QueryRecord], options: ReplayOptions) -> None:
        self._options = options
        self._log: QueryLog | tuple[QueryRecord, ...]
        if isinstance(log, Path):
            self._log = QueryLog(log, options.bad_lines)
        else:
            self._log = tuple(sorted(log, key=attrgetter("ts")))
        self.tally = Tally(options.slo_s, options.warmup_s)
        self.num_planned = 0
        self.num_done = 0
        self._last_number = -1  # of the last record read

    @property
    def bad_lines(self) -> tuple[int, list[str]]:
        """Number of bad lines in the log, and reasons of the first ones."""
        return (self._log.num_bad, self._log.bad) if isinstance(self._log, QueryLog) else (0, [])

    @property
    def read_ratio(self) -> float:
        """Share of the log that has been read."""
        if isinstance(self._log, QueryLog):
            return self._log.read_ratio
        return (self._last_number + 1) / max(len(self._log), 1)

    async def play(self, answers: Path | None) -> None:
        """Send all requests. Cancelling stops it at once.

        Raises:
            DataError: the log cannot be read.
        """
        async with contextlib.AsyncExitStack() as stack:
            file = None
            if answers is not None:
                file = await stack.enter_async_context(AnswerFile(answers))

            def over(sample: Sample) -> None:
                self.num_done += 1
                self.tally.add(sample)
                if file is not None and sample.record.kind in SCORED:
                    file.add(line_of(sample))

            await play(self._actions(), self._options, over)

    def _actions(self) -> Iterator[Action]:
        for action in plan(self._log, self._options):
            self.num_planned += 1
            self._last_number = max(self._last_number, action.number)
            yield action


@contextmanager
def stop_on_interrupt() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; a second one interrupts as usual.

    Main thread only.
    """
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


def line_of(sample: Sample) -> AnswerLine:
    """Make the line of a sample whose kind has scores."""
    common = AnswerLine(
        number=sample.number,
        kind=sample.record.kind,
        due_at=round(sample.due_at, 6),
        latency_ms=round(sample.latency_s * 1e3, 4),
    )
    answer = sample.answer
    if answer is None:
        return msgspec.structs.replace(common, error=sample.error)
    items = answer.get("items", [])
    return msgspec.structs.replace(
        common,
        outcome=answer["outcome"],
        model_version=answer.get("model_version", ""),
        digest=digest(answer["scores"], items),
        scores={task: raw(values) for task, values in answer["scores"].items()},
        items=items,
    )
