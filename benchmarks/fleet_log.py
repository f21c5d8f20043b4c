"""Memory of a training by the size of its log, for `fleet`: events as arrays, and in mapped files.

A process of its own reads the dataset, as `npu-gr train rank` does, and takes some steps; its peak
of anonymous memory counts (the kernel gives pages of files back when memory is short). Bytes an
event are the difference between a log and one of four times its events.
"""

from __future__ import annotations

import multiprocessing
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import torch

from benchmarks.frame import Line, compared, tell
from benchmarks.prepare import LOG
from npu_gr.core.errors import Unavailable
from npu_gr.dataset import prepare, read_dataset
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.options import TrainOptions, choose_tasks
from npu_gr.train.steps import TrainingProgress
from npu_gr.train.store_events import store

TIMES = 4  # as many events in the larger log
STEPS = 5
SAMPLE_EVENTS = 50_000
FEWER = 10.0  # target: bytes an event as arrays / in files
POLL_S = 0.005


def lines(folder: Path, num_events: int, seed: int) -> Iterator[Line]:
    """Yield the bytes an event of both ways.

    Args:
        folder: Folder for the datasets.
        num_events: Events of the smaller log.
        seed: Seed of the logs.

    Raises:
        Unavailable: a training ended early.
    """
    sizes = (num_events, TIMES * num_events)
    peaks: dict[bool, list[float]] = {False: [], True: []}
    counts = []
    for size in sizes:
        tell("fleet", f"prepares {size:,} events")
        path = folder / f"{size}.parquet"
        with duckdb.connect() as con:
            con.execute(f"COPY ({LOG.format(rows=size, seed=seed)}) TO '{path}' (FORMAT PARQUET)")
        data = prepare(path, folder / f"{size}").dataset
        counts.append(int(data.manifest["events"]))
        for in_files in peaks:
            peaks[in_files].append(_peak_bytes(data.folder, in_files))
    more = counts[1] - counts[0]
    arrays, files = ((high - low) / more for low, high in (peaks[False], peaks[True]))
    case = f"train rank of {counts[0]:,} and {counts[1]:,} events"
    yield compared(
        "fleet", f"{case}, in files", files, "bytes an event", "as arrays", arrays,
        arrays / max(files, 1e-9), FEWER,
    )  # fmt: skip
    yield compared(
        "fleet", f"{case}, in files: the larger one", peaks[True][1] / 1e6, "MB", "as arrays",
        peaks[False][1] / 1e6, peaks[False][1] / peaks[True][1],
    )  # fmt: skip


def _peak_bytes(data: Path, in_files: bool) -> float:
    """Train some steps in a process of its own; return its peak of anonymous memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(data, in_files, theirs))
    child.start()
    theirs.close()
    try:
        return float(ours.recv())
    except EOFError as error:
        raise Unavailable("bench fleet: a training ended early") from error
    finally:
        child.join()


class _Enough(Exception):
    """All steps are taken."""


def _train(data: Path, in_files: bool, answer: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            peak[0] = max(peak[0], _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    steps = iter(range(STEPS - 1))

    def show(_: TrainingProgress) -> None:
        if next(steps, None) is None:
            raise _Enough

    dataset = read_dataset(data)
    whole: InteractionLog | None = None
    if in_files:
        files = store(dataset, [], data.with_name(f"{data.name}.files"), SAMPLE_EVENTS)
        whole = files.split("user-time")
        log = files.sample(whole, 0)[0]
    else:
        log = build_log(dataset.interactions(), [], "user-time")
    try:
        fit(log, [], choose_tasks(log).tasks, TrainOptions(), [], "rank", show, whole=whole)
    except _Enough:
        ended.set()
        thread.join()
        answer.send(peak[0])


def _anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
