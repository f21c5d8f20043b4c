"""Run several trainings at once, each in a process of its own.

A small model's training cannot use two cores well, so two trainings at once are faster than one
after the other. A child ends with its parent, which a signal may end without a word.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

from npu_gr.core.errors import DataError, NpuGrError
from npu_gr.core.process import set_up_process
from npu_gr.train.steps import TrainingProgress

R = TypeVar("R")

Show = Callable[[TrainingProgress], None]


class Training(NamedTuple, Generic[R]):
    """One training, which can be pickled."""

    name: str
    work: Callable[[Show], R]  # its argument is the callback for its progress


class _Done(NamedTuple, Generic[R]):
    result: R


@dataclass(slots=True)
class _Child(Generic[R]):
    name: str
    process: BaseProcess
    pipe: Connection
    results: list[R] = field(default_factory=list)


def side_by_side(
    trainings: Sequence[Training[R]],
    num_threads: int,
    show: Show,
    done: Callable[[str, R], None] = lambda *_: None,
) -> None:
    """Run all trainings, at most one per thread at once.

    Args:
        trainings: Trainings in the order in which they start; put the longest first.
        num_threads: Threads of all running trainings together.
        show: Callback with the progress of any training, in this process.
        done: Callback with the name and the result of each finished training, in this process.

    Raises:
        NpuGrError: the first error of a training. The others were stopped.
        DataError: a process ended without a result.
    """
    waiting = list(trainings)
    at_once = max(1, min(len(trainings), num_threads))
    running: dict[Connection, _Child[R]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                child = _started(waiting.pop(0), max(1, num_threads // at_once))
                running[child.pipe] = child
            for pipe in wait(list(running)):
                child = running[pipe]  # type: ignore[index]
                if not _receive(child, show):
                    del running[child.pipe]
                    done(child.name, _result(child))
    finally:
        for child in running.values():
            child.process.terminate()
        for child in running.values():
            child.process.join()


def _started(training: Training[R], num_threads: int) -> _Child[R]:
    # torch runs threads, which do not survive a fork
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(
        target=_main, args=(training.work, num_threads, there), name=training.name, daemon=True
    )
    process.start()
    there.close()
    return _Child(training.name, process, here)


def _receive(child: _Child[R], show: Show) -> bool:
    """Receive one message from a child, and handle it; False = the child closed its pipe.

    Raises:
        NpuGrError: the child raised it.
    """
    try:
        message: Any = child.pipe.recv()
    except EOFError:
        return False
    if isinstance(message, NpuGrError):
        raise message
    if isinstance(message, _Done):
        child.results.append(message.result)
    else:
        show(message)
    return True


def _result(child: _Child[R]) -> R:
    child.process.join()
    if not child.results:
        code = child.process.exitcode
        why = (
            "was killed, probably because the machine ran out of memory"
            if code == -signal.SIGKILL
            else f"ended with code {code}"
        )
        raise DataError(f"{child.name}: the process of the training {why}")
    return child.results[0]


def _main(work: Callable[[Show], R], num_threads: int, pipe: Connection) -> None:
    # Ctrl-C reaches the parent too, which terminates this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_up_process()
    import torch

    torch.set_num_threads(num_threads)
    try:
        pipe.send(_Done(work(pipe.send)))
    except NpuGrError as error:
        pipe.send(error)
    except BrokenPipeError:
        pass  # the parent has ended


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # also out of minutes without a step, such as those of a baseline
