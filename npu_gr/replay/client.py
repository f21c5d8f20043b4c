"""One client of a run, in this process or in one of its own: the plan, its share of the users, the player, the sums."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from npu_gr.core.errors import DataError
from npu_gr.replay.answers import AnswerFile
from npu_gr.replay.log import Log, Record
from npu_gr.replay.options import ReplayOptions
from npu_gr.replay.plan import Action, plan, share_of, user_of
from npu_gr.replay.player import PlayerOptions, Sample, play
from npu_gr.replay.tally import Tally

TELL_S = 0.25  # between two messages of a client process


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one client does."""

    log: Path | tuple[Record, ...]
    options: ReplayOptions
    share: int = 0  # of options.processes
    answers: Path | None = None
    keep_scores: bool = True


class Client:
    """Plays its part once; everything it has found so far can be read at any time."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._log = Log(part.log, part.options.bad_lines) if isinstance(part.log, Path) else None
        self.tally = Tally(part.options.slo_s, part.options.warmup_s)
        self.num_planned = self.num_done = 0
        self.last_number = -1  # of the records read

    @property
    def bad_lines(self) -> tuple[int, list[str]]:
        """How many lines of the log were no records, and the first of them."""
        return (self._log.num_bad, self._log.bad) if self._log else (0, [])

    @property
    def read_ratio(self) -> float:
        """Of the log, for progress bars."""
        part = self._part
        if self._log:
            return self._log.read_ratio
        return (self.last_number + 1) / max(len(part.log), 1) if isinstance(part.log, tuple) else 0.0

    async def run(self, start_s: float | None = None) -> None:
        """Play. Cancelling stops it at once; raises DataError for what `Log` refuses."""
        options, part = self._part.options, self._part
        target = PlayerOptions(
            url=options.base_url,
            deadline_ms=options.timeout_s * 1e3,
            api_key=options.api_key,
            closed=_slots(options.closed, part.share, options.processes),
            histories=options.histories,
        )
        async with contextlib.AsyncExitStack() as stack:
            note: Callable[[Sample], None] = lambda _sample: None  # noqa: E731
            if part.answers is not None:
                note = (await stack.enter_async_context(AnswerFile(part.answers, part.keep_scores))).add

            def over(sample: Sample) -> None:
                self.num_done += 1
                self.tally.add(sample)
                note(sample)

            await play(self._actions(), target, over, start_s)

    def _actions(self) -> Iterator[Action]:
        records: Iterable[Record] = self._log if self._log else self._part.log  # type: ignore[assignment]
        options, share = self._part.options, self._part.share
        for action in plan(records, options):
            self.num_planned += 1
            self.last_number = max(self.last_number, action.number)
            if options.processes == 1 or share_of(user_of(action.record), options.processes) == share:
                yield action


def _slots(closed: int | None, share: int, processes: int) -> int | None:
    """A client's share of the requests in flight; every client has at least one."""
    return None if closed is None else max(1, closed // processes + (share < closed % processes))


def work(pipe: Connection, part: Part) -> None:
    """The main function of a client process.

    It sends "ready", receives the start's instant, sends its progress, and at the end, or when it receives anything
    more, a result; or the text of a DataError.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which tells us
    asyncio.run(_work(pipe, part))


async def _work(pipe: Connection, part: Part) -> None:
    loop = asyncio.get_running_loop()
    client = Client(part)
    pipe.send(("ready", None))
    playing = asyncio.create_task(client.run(await asyncio.to_thread(pipe.recv)))
    loop.add_reader(pipe.fileno(), playing.cancel)  # anything, also the parent's end
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
    if isinstance(failure, Exception) and not isinstance(failure, DataError):
        raise failure
    interrupted = isinstance(failure, asyncio.CancelledError)
    result = client.tally, client.num_planned, client.last_number, client.bad_lines, interrupted
    with contextlib.suppress(OSError, EOFError):
        pipe.send(("error", str(failure)) if isinstance(failure, DataError) else ("result", result))
        pipe.recv()  # stay until the other end is closed: it waits for news of all its clients


def monotonic_start_s(lead_s: float) -> float:
    """An instant that every process of this machine agrees on."""
    return time.monotonic() + lead_s
