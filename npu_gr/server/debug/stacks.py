"""Stacks of all threads and asyncio tasks, sampled profiles, and the files of a debug bundle.

The signal `SIGUSR1` logs the stacks. `faulthandler`'s C handler writes to a pipe, and a thread that
reads the pipe makes the text, so it works while the event loop is blocked.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import logging
import os
import platform
import resource
import signal
import sys
import tarfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path, PurePath
from types import CodeType, FrameType
from typing import Any

import msgspec

from npu_gr import __version__
from npu_gr.core.errors import Overloaded
from npu_gr.core.secret import redacted

log = logging.getLogger(__name__)

MOST_DEPTH = 100  # awaits shown of one task
MOST_NAMES = 5  # names shown of tasks with the same stack
_GATHER_S = 0.05  # wait for the rest: the handler writes one signal in several pieces


def all_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stacks of all threads, then those of the loop's tasks; equal stacks once.

    May be called from any thread. `loop` None = threads only.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: dict[str, list[str]] = defaultdict(list)
    for ident, frame in sys._current_frames().items():
        threads["".join(traceback.format_stack(frame))].append(
            names.get(ident, f"not Python's ({ident})")
        )
    tasks: dict[str, list[str]] = defaultdict(list)
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        tasks[_awaited_by(task)].append(task.get_name())
    return "\n".join([*_listed("thread", threads), *_listed("task", tasks)])


async def own_stacks() -> str:
    """Return the stacks of this process and of the running loop's tasks."""
    return await asyncio.to_thread(all_stacks, asyncio.get_running_loop())


def _listed(what: str, by_stack: dict[str, list[str]]) -> Iterator[str]:
    for stack, names in sorted(by_stack.items(), key=lambda pair: (len(pair[1]), pair[1])):
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        plural = "s" if len(names) > 1 else ""
        yield f"{len(names)} {what}{plural}: {', '.join(sorted(names)[:MOST_NAMES])}{more}\n{stack}"


def _awaited_by(task: asyncio.Task[Any]) -> str:
    """Follow a task's awaits to the innermost one; `Task.print_stack` shows the outermost only."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(lines) < MOST_DEPTH:
        frame = _first(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            lines.append(f"  waits for {type(awaited).__name__}\n")
            break
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}\n')
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return "".join(lines)


def _first(of: object, *names: str) -> Any:
    return next((value for name in names if (value := getattr(of, name, None)) is not None), None)


@contextmanager
def logged_on_signal(loops: list[asyncio.AbstractEventLoop]) -> Iterator[None]:
    """Log all stacks at every SIGUSR1 while the block runs.

    Args:
        loops: The tasks of its first loop are logged; the loop may be appended later.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # the signal handler must not block on a full pipe
    thread = threading.Thread(
        target=_log_when_written, args=(reader, loops), name="stacks", daemon=True
    )
    thread.start()
    faulthandler.register(signal.SIGUSR1, file=writer, all_threads=False)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        # a late signal must not kill the process: the default action would
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.close(writer)
        thread.join()


def _log_when_written(reader: int, loops: list[asyncio.AbstractEventLoop]) -> None:
    while os.read(reader, 65536):
        time.sleep(_GATHER_S)
        os.set_blocking(reader, False)
        try:
            os.read(reader, 65536)
        except BlockingIOError:
            pass  # the pipe is empty
        finally:
            os.set_blocking(reader, True)
        log.warning("stacks at SIGUSR1:\n%s", all_stacks(loops[0] if loops else None))
    os.close(reader)


PERIOD_S = 0.01  # time between two samples; below 1 % of a core with twenty threads
MIN_S = 1
MAX_S = 60


class Profiler:
    """Takes one profile at a time."""

    def __init__(self) -> None:
        self._is_running = False

    async def profile(self, seconds: float) -> str:
        """Sample all threads for some seconds; cancelling ends it early.

        Raises:
            Overloaded: Another profile is being taken.
        """
        if self._is_running:
            raise Overloaded("another profile is being taken; try again later", retry_after_s=MAX_S)
        self._is_running = True
        stop = threading.Event()
        try:
            return await asyncio.to_thread(folded_stacks, seconds, stop)
        finally:
            stop.set()
            self._is_running = False


def folded_stacks(seconds: float, stop: threading.Event) -> str:
    """Sample all other threads for some seconds or until `stop` is set.

    Returns:
        Folded stacks, "thread;outer;...;inner count" per line, the most frequent first.
    """
    seen: Counter[tuple[int, tuple[CodeType, ...]]] = Counter()
    own = threading.get_ident()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at and not stop.wait(PERIOD_S):
        seen.update(
            (ident, _codes(frame)) for ident, frame in sys._current_frames().items() if ident != own
        )
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = Counter[str]()
    for (ident, codes), count in seen.items():
        lines[";".join([names.get(ident, "ended"), *map(_name, codes)])] += count
    return "".join(f"{line} {count}\n" for line, count in lines.most_common())


def _codes(frame: FrameType | None) -> tuple[CodeType, ...]:
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return tuple(reversed(codes))


def _name(code: CodeType) -> str:
    path = PurePath(code.co_filename)
    return f"{code.co_qualname} ({path.parent.name}/{path.name})".replace(";", ",")


# prefixes of environment variables without secrets
_VARIABLES = ("OMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "PYTHON", "ASCEND_", "CUDA_")
_CGROUP_FILES = (
    "cpu.max",
    "cpu.stat",
    "memory.max",
    "memory.current",
    "memory.events",
    "memory.pressure",
)


def make_archive(texts: Mapping[str, str], folder: str) -> bytes:
    """Make a .tar.gz archive, with credentials redacted.

    Args:
        texts: File name -> text.
        folder: Folder of the files within the archive.
    """
    out = io.BytesIO()
    now_at = time.time()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in texts.items():
            data = redacted(text).encode(errors="backslashreplace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(data)
            entry.mtime = now_at
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def environment() -> str:
    """Describe the interpreter, packages, limits and machine as JSON.

    Reads files, so it must not run on the event loop.
    """
    facts: dict[str, Any] = {
        "npu_gr": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "time_unix_s": time.time(),
        "pid": os.getpid(),
        "num_cpus": os.cpu_count(),
        "usable_cpus": sorted(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "num_threads": threading.active_count(),
        "num_descriptors": len(os.listdir("/proc/self/fd"))
        if Path("/proc/self/fd").is_dir()
        else None,
        "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "gc": {
            "stats": gc.get_stats(),
            "frozen": gc.get_freeze_count(),
            "thresholds": gc.get_threshold(),
        },
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)
        },
        "cgroup": {
            name: text for name in _CGROUP_FILES if (text := _text(Path("/sys/fs/cgroup", name)))
        },
        "packages": dict(
            sorted((one.name, one.version) for one in metadata.distributions() if one.name)
        ),
    }
    return msgspec.json.format(msgspec.json.encode(facts)).decode()


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
