"""Memory and speed of a training by the size of its log, for `fleet`: arrays, and mapped files.

A process of its own reads the dataset, as `npu-gr train rank` and `npu-gr train generate` do, and
takes some steps; its peak of anonymous memory counts (the kernel gives pages of files back when
memory is short). Bytes an event are the difference between a log and one of four times its events.
Blocks and the pairs of items that are counted are few, so that these logs are beyond both, as those
that need files are. The files are cached.
"""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import duckdb
import torch

from benchmarks.frame import Line, compared, tell
from benchmarks.prepare import LOG
from npu_gr.core.errors import Unavailable
from npu_gr.dataset import prepare, read_dataset
from npu_gr.history_store.interactions import Interactions
from npu_gr.train import data, epochs
from npu_gr.train.data import build_log
from npu_gr.train.generate import codes
from npu_gr.train.generate.train import GenerateOptions, train_generator
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.options import TrainOptions, choose_tasks
from npu_gr.train.steps import TrainingProgress
from npu_gr.train.store_events import store
from npu_gr.train.stored_log import StoredLog

TIMES = 4  # as many events in the larger log
TIMED = 150_000  # most events that are trained on; of a smaller log, all
BLOCK_EVENTS = 50_000
MOST_PAIRS = 500_000
SAMPLE_EVENTS = 50_000
FEWER = 10.0  # target: bytes an event as arrays / in files
AS_FAST = 0.95  # target: events a CPU second from files / from arrays
POLL_S = 0.005

Show = Callable[[TrainingProgress], None]


class _Found(NamedTuple):
    peak_bytes: float
    events_cpu_s: float


def lines(folder: Path, num_events: int, seed: int) -> Iterator[Line]:
    """Yield the bytes an event and the speed of both ways, for each model.

    Args:
        folder: Folder for the datasets.
        num_events: Events of the smaller log.
        seed: Seed of the logs.

    Raises:
        Unavailable: a training ended early.
    """
    made = []
    for size in (num_events, TIMES * num_events):
        tell("fleet", f"prepares {size:,} events")
        path = folder / f"{size}.parquet"
        with duckdb.connect() as con:
            con.execute(f"COPY ({LOG.format(rows=size, seed=seed)}) TO '{path}' (FORMAT PARQUET)")
        made.append(prepare(path, folder / f"{size}").dataset)
    counts = [int(one.manifest["events"]) for one in made]
    for name in TRAININGS:
        tell("fleet", f"{name} of {counts[0]:,} and {counts[1]:,} events")
        arrays, files = (
            [_measured(name, one.folder, min(TIMED, num_events), in_files) for one in made]
            for in_files in (False, True)
        )
        flat, per_event = (
            (high.peak_bytes - low.peak_bytes) / (counts[1] - counts[0])
            for low, high in (files, arrays)
        )
        case = f"{name} of {counts[0]:,} and {counts[1]:,} events, in files"
        yield compared(
            "fleet", case, flat, "bytes an event", "as arrays", per_event,
            per_event / max(flat, 1e-9), FEWER,
        )  # fmt: skip
        peaks = [one[1].peak_bytes / 1e6 for one in (files, arrays)]
        yield compared(
            "fleet", f"{case}: the larger one", peaks[0], "MB", "as arrays", peaks[1],
            peaks[1] / peaks[0],
        )  # fmt: skip
        rates = [one[1].events_cpu_s for one in (files, arrays)]
        yield compared(
            "fleet", f"{case}: the larger one", rates[0], "events a CPU second", "as arrays",
            rates[1], rates[0] / rates[1], AS_FAST,
        )  # fmt: skip


def _measured(name: str, folder: Path, timed: int, in_files: bool) -> _Found:
    """Train on some events in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(name, folder, timed, in_files, theirs))
    child.start()
    theirs.close()
    try:
        return _Found(*ours.recv())
    except EOFError as error:
        raise Unavailable(f"bench fleet: {name}: a training ended early") from error
    finally:
        child.join()


class _Enough(Exception):
    """All steps are taken."""


def _train(
    name: str,
    folder: Path,
    timed: int,
    in_files: bool,
    answer: multiprocessing.connection.Connection,
) -> None:
    torch.set_num_threads(1)
    data.BLOCK_EVENTS, codes.MOST_PAIRS = BLOCK_EVENTS, MOST_PAIRS
    epochs.epoch.__defaults__ = (BLOCK_EVENTS, BLOCK_EVENTS // 16)
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            peak[0] = max(peak[0], _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    began: list[tuple[float, int]] = []  # CPU seconds, and events before

    def show(step: TrainingProgress) -> None:
        if not step.num_events:
            return
        began.append((time.process_time(), step.num_events))
        if step.num_events >= timed:
            raise _Enough

    dataset = read_dataset(folder)
    log: Interactions | StoredLog = (
        store(dataset, [], folder.with_name(f"{folder.name}.files"), SAMPLE_EVENTS)
        if in_files
        else dataset.interactions()
    )
    try:
        TRAININGS[name](log, show)
    except _Enough:
        ended.set()
        thread.join()
        (first_at, first), (last_at, last) = began[0], began[-1]
        answer.send((peak[0], (last - first) / (last_at - first_at)))


def _rank(log: Interactions | StoredLog, show: Show) -> None:
    whole = None
    if isinstance(log, StoredLog):
        whole = log.split("leave-one-out")
        part = log.sample(whole, 0)[0]
    else:
        part = build_log(log, [], "leave-one-out")
    fit(part, [], choose_tasks(part).tasks, TrainOptions(), [], "rank", show, whole=whole)


def _generate(log: Interactions | StoredLog, show: Show) -> None:
    train_generator(log, [], GenerateOptions(code_count=(256, 256)), None, show)


TRAININGS: dict[str, Callable[[Interactions | StoredLog, Show], None]] = {
    "train rank": _rank,
    "train generate": _generate,
}


def _anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
