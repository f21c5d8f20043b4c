"""Keeps the recordings of an instance free of erased users: runs `purge.py` in a process of its own, and counts.

Another process, because to read gigabytes in a thread would delay every request of this one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from npu_gr.core.errors import DataError
from npu_gr.replay import erased
from npu_gr.replay.purge import HELD

log = logging.getLogger(__name__)

EVERY_S = 3600.0  # from the end of a run to the next: each reads all files
LIMIT_S = 3600.0  # of a run


class Purger:
    """One thread, which waits for the process. Start it, and `close` it.

    Args:
        folder: of the recordings; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.erased_at: float | None = None  # unix seconds of the oldest erasure whose records are there; from anywhere
        self.runs: Counter[str] = Counter()  # by their result: ok, held, failed
        self._wake = threading.Event()
        self._stopping = False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="recordings-purge", daemon=True)

    def start(self) -> None:
        """Begin with what is listed already."""
        self._thread.start()

    def listed(self, at: float) -> None:
        """Say that a user was added to the list at this time."""
        if self.erased_at is None:
            self.erased_at = at
        self._wake.set()

    def close(self) -> None:
        """End a run that has begun; the next start continues."""
        self._stopping = True
        self._wake.set()
        if (process := self._process) is not None:
            process.terminate()
        self._thread.join()

    def _run(self) -> None:
        next_at = time.monotonic()
        self._look()
        while not self._stopping:
            if self.erased_at is None:
                self._wake.wait()
            else:
                self._wake.wait(max(0.0, next_at - time.monotonic()))
            self._wake.clear()
            if self._stopping or self.erased_at is None or time.monotonic() < next_at:
                continue
            result, why = self._purge()
            self._look()
            if not self._stopping:
                self.runs[result] += 1
                if result == "failed":
                    log.error("recordings in %s hold erased users; it is tried again: %s", self._folder, why)
            next_at = time.monotonic() + EVERY_S

    def _purge(self) -> tuple[str, str]:
        """Run the process; return its result, and why it failed."""
        command = [sys.executable, "-P", "-m", "npu_gr.replay.purge", str(self._folder)]
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            process = subprocess.Popen(  # noqa: S603  (ourselves, with our own paths)
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
        except OSError as error:
            return "failed", str(error)
        with process:
            self._process = process
            if self._stopping:
                process.terminate()
            try:
                _, said = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return "failed", f"not done within {LIMIT_S:g} s"
            finally:
                self._process = None
        result = {0: "ok", HELD: "held"}.get(process.returncode, "failed")
        return result, said[-500:]

    def _look(self) -> None:
        """Read the list again."""
        try:
            until = erased.read(self._folder).until
        except DataError as error:
            log.error("recordings: %s", error)
            self.erased_at = self.erased_at or time.time()
            return
        self.erased_at = min(until.values(), default=None)
