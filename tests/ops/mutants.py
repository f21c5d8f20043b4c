"""Run the fixed cases on a build of ops/ascendc/mutate.py, each mutant in its own process.

`python -m tests.ops.mutants LIBRARY` reads [[number, [op, ..]], ..] from its input, and writes a
line of JSON for each: "survived", or "fell: " and why. The processes are forks of one that has
everything imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.ops.ascend_emulator import Emulator
from tests.ops.fixed import FIXED

HANGS_S = 60.0  # of the processor: all fixed cases take seconds
STUCK_S = 900.0  # of wall time: the process is stuck


def verdict(library: Path, number: int, ops: Sequence[str]) -> str:
    """Run the cases of some ops with a mutant on; -1 = with none."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        _run(library, number, ops, writes)
    os.close(writes)
    with os.fdopen(reads, errors="replace") as pipe:
        error = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return "survived"
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return "fell: hangs"
    return "fell: " + (error or f"signal {-status}")[:120]


def _run(library: Path, number: int, ops: Sequence[str], writes: int) -> NoReturn:
    """Say why a case fails, and end this process."""
    signal.setitimer(signal.ITIMER_PROF, HANGS_S)
    signal.setitimer(signal.ITIMER_REAL, STUCK_S)
    try:
        ctypes.CDLL(str(library)).npu_gr_mutate(number)
        emulator = Emulator(library)
        for op in ops:
            for case in FIXED[op]:
                case.check(emulator)
    except BaseException as error:  # noqa: BLE001  (whatever it is, the mutant fell)
        os.write(writes, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for mutant, its_ops in json.load(sys.stdin):
        sys.stdout.write(json.dumps(verdict(Path(sys.argv[1]), mutant, its_ops)) + "\n")
        sys.stdout.flush()
