"""Command lines of `npu-gr`, each in a process of its own that need not load torch first.

A process loads everything once and forks for each command, which takes milliseconds instead of two
seconds.

    python -m tests.cli.forked       reads a JSON list of words a line, and answers each with a
                                     line of [exit code, stdout, stderr]
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache

MODULES = ("npu_gr.cli.main", "npu_gr.service.app", "torch")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `npu-gr` with these words, as a shell would."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(words) + "\n")
    server.stdin.flush()
    code, out, err = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(words, code, out, err)


@cache
def _server() -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one, whose end closes its input."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cli.forked"], stdin=pipe, stdout=pipe, text=True
    )


def _serve() -> None:
    for name in MODULES:
        __import__(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            if not (child := os.fork()):
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                _run(json.loads(line))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        sys.stdout.write(json.dumps([code, *texts]) + "\n")
        sys.stdout.flush()


def _run(words: Sequence[str]) -> None:
    """Be `python -m npu_gr WORDS`, and end."""
    sys.argv = ["npu-gr", *words]
    try:
        runpy.run_module("npu_gr", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (Python's own last resort)
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
