"""What the supervisor does about processes that misbehave; each is a few lines that say what a real one says."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from npu_gr.front import supervisor as module
from npu_gr.front.supervisor import Processes, Supervisor
from npu_gr.server.config import ServerConfig
from tests.serving import until

CHILD = """
import signal, socket, sys, time
import msgspec
signal.signal(signal.SIGTERM, signal.SIG_IGN)
control = socket.socket(fileno=int(sys.argv[1]))
def say(*words):
    control.send(msgspec.msgpack.encode(words))
def hear():
    data, fds, _, _ = socket.recv_fds(control, 65_536, 64)
    return msgspec.msgpack.decode(data)[0] if data else "stop"
"""
SERVES = 'while hear() != "stop": pass'


def command(*lines: str) -> Sequence[str]:
    return [sys.executable, "-c", "\n".join([CHILD, *lines])]


@asynccontextmanager
async def supervised(*engine: str) -> AsyncIterator[Supervisor]:
    """An instance with this engine and one worker that has nothing to do; at the end it is told to stop."""
    plan = Processes(
        engine=lambda fd: [*command(*engine), str(fd)],
        worker=lambda _number, fd: [*command('say("listening")', SERVES), str(fd)],
        server=ServerConfig(port=0, admin_port=0, workers=1, drain_grace_s=0.0),
    )
    listening = asyncio.Event()
    supervisor = Supervisor(plan)
    running = asyncio.create_task(supervisor.run(lambda _port, _admin: listening.set()))
    async with asyncio.timeout(60):
        await listening.wait()
        yield supervisor
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0


async def test_an_engine_that_hangs_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process lives, and the workers' health is well: but for this nobody would end it."""
    monkeypatch.setattr(module, "LOOK_S", 0.1)
    monkeypatch.setattr(module, "HUNG_S", 0.4)
    first = f"import pathlib\nmark = pathlib.Path({str(tmp_path / 'mark')!r})"
    hangs = 'if not mark.exists():\n    mark.touch()\n    say("ready")\n    time.sleep(1000)'
    lives = """
say("ready")
control.settimeout(0.01)
while True:
    say("alive")
    try:
        if hear() == "stop":
            break
    except TimeoutError:
        pass
"""
    async with supervised(first, hangs, "time.sleep(0.8)", lives) as supervisor:  # a start may take any time
        await until(lambda: supervisor._engine.starts > 1 and supervisor._engine.is_ready)
    assert "the engine is killed: it has said nothing for 0.4 s" in caplog.messages
    assert "the engine ended with code -9; it starts again in 0.1 s" in caplog.messages


async def test_a_stop_does_not_wait_for_an_engine_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that loads models reads no message yet, and has nothing to finish."""
    monkeypatch.setattr(module, "ENGINE_STOP_S", 0.5)
    first = f"import pathlib\nmark = pathlib.Path({str(tmp_path / 'mark')!r})"
    dies = 'if not mark.exists():\n    mark.touch()\n    say("ready")\n    time.sleep(0.5)\n    sys.exit(3)'
    async with supervised(first, dies, "time.sleep(1000)") as supervisor:
        await until(lambda: supervisor._engine.starts == 2)
    assert not any("has not stopped within" in message for message in caplog.messages)
