"""The processes of an instance with front workers: `npu-gr serve` starts the supervisor, and that starts this module.

python -m npu_gr.cli.front engine FD LEVEL CONFIG [KEY=VALUE ...]
python -m npu_gr.cli.front worker FD LEVEL NUMBER
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from npu_gr.core.errors import NpuGrError
from npu_gr.core.logs import close_logs, set_up_logs
from npu_gr.core.process import set_up_process

_PR_SET_PDEATHSIG = 1  # of prctl(2)
BAD_CONFIGURATION = 2


def supervise(config_path: Path, overrides: tuple[str, ...]) -> int:
    """Run an instance with front workers until SIGTERM. Returns the exit code.

    Args:
        config_path: of the instance.
        overrides: `section.key=value`.

    Raises:
        ConfigError: the section `server` cannot be used.
    """
    from npu_gr.front.plan import read_server
    from npu_gr.front.supervisor import Processes, Supervisor

    level = _level()

    def command(*words: object) -> list[str]:
        return [sys.executable, "-m", "npu_gr.cli.front", *map(str, words)]

    plan = Processes(
        engine=lambda fd: command("engine", fd, level, config_path, *overrides),
        worker=lambda number, fd: command("worker", fd, level, number),
        server=read_server(config_path, overrides),
    )

    async def run() -> int:
        return await Supervisor(plan).run()

    return asyncio.run(run())


def _level() -> str:
    import logging

    return logging.getLevelName(logging.getLogger().level)


def _engine(control: socket.socket, config_path: str, *overrides: str) -> Callable[[], Awaitable[int]]:
    from npu_gr.service.config import load
    from npu_gr.service.engine import run_engine

    path = Path(config_path)
    config = load(path, overrides)

    async def work() -> int:
        await run_engine(config, lambda: load(path, overrides), control)
        return 0

    return work


def _worker(control: socket.socket, number: str) -> Callable[[], Awaitable[int]]:
    from npu_gr.front.worker.run import run_worker
    from npu_gr.server.access_log import lines_to_stdout

    lines_to_stdout()
    return lambda: run_worker(int(number), control)


def main(role: str, fd: str, level: str, *words: str) -> int:
    """Be the engine or a worker. Returns the exit code.

    Args:
        role: "engine" or "worker".
        fd: descriptor of the control socket.
        level: of the log.
        words: the configuration of the engine, or the number of the worker.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor gets them, and says what to do
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    set_up_process()
    set_up_logs(level)
    control = socket.socket(fileno=int(fd))
    try:
        return _run(_engine(control, *words) if role == "engine" else _worker(control, *words))
    except NpuGrError as error:
        close_logs()
        os.write(2, f"npu-gr: {error}\n".encode())
        return BAD_CONFIGURATION


def _run(work: Callable[[], Awaitable[int]]) -> int:
    import uvloop

    from npu_gr.core.garbage import freeze_imports
    from npu_gr.server.debug.stacks import logged_on_signal

    loops: list[asyncio.AbstractEventLoop] = []

    async def known() -> int:
        loops.append(asyncio.get_running_loop())
        return await work()

    freeze_imports()
    with logged_on_signal(loops):
        return uvloop.run(known())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
