"""A replay from log to report: read, plan, play, sum up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from npu_gr.errors import DataError
from npu_gr.replay.log import Record, read
from npu_gr.replay.options import ReplayOptions
from npu_gr.replay.plan import Action, plan
from npu_gr.replay.player import PlayerOptions, PlayInterrupted, play
from npu_gr.replay.report import Report, report


async def replay(log: Path | Iterable[Record], options: ReplayOptions, *, stop: asyncio.Event | None = None) -> Report:
    """Play the log against a running service; when `stop` is set, end and report what was answered so far.

    Raises:
        DataError: the log cannot be read, or has nothing to send.
    """
    actions = await asyncio.to_thread(_prepare, log, options)
    target = PlayerOptions(url=options.base_url, deadline_ms=options.timeout_s * 1e3, api_key=options.api_key)
    playing = asyncio.create_task(play(actions, target))
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        playing.cancel()
        stopping.cancel()
        await asyncio.gather(playing, stopping, return_exceptions=True)
    settings = msgspec.to_builtins(options)
    del settings["api_key"]
    try:
        return report(playing.result(), options.slo_s, settings)
    except PlayInterrupted as cut:
        return report(cut.samples, options.slo_s, settings, interrupted=True)


def _prepare(log: Path | Iterable[Record], options: ReplayOptions) -> list[Action]:
    actions = plan(read(log) if isinstance(log, Path) else log, options)
    if not actions:
        raise DataError(f"{log if isinstance(log, Path) else 'log'}: no records to replay")
    return actions


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
