"""One client of a run, in this process or in one of its own: it plays its share of the users and sums up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from npu_gr.core.errors import DataError
from npu_gr.replay.answers import AnswerFile
from npu_gr.replay.files import QueryLog
from npu_gr.replay.log import QueryRecord
from npu_gr.replay.options import ReplayOptions
from npu_gr.replay.plan import Action, plan, share_of, user_of
from npu_gr.replay.player import PlayerOptions, play, soon
from npu_gr.replay.sample import Sample
from npu_gr.replay.tally import Tally

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
