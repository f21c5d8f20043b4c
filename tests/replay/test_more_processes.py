"""A search whose own process is late starts more of them; Ctrl-C ends them all, and none is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from npu_gr.replay.files import write
from npu_gr.replay.log import QueryRecord
from tests.replay.fake import Fake, service

RATE = 100


def num_children(pid: int) -> int:
    return sum(len(file.read_text().split()) for file in Path(f"/proc/{pid}/task").glob("*/children"))


async def test_a_slow_client_gets_help_and_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    log = [QueryRecord(ts=i * 0.01, kind="rank", user_id=f"u{i}", candidates=[1, 2]) for i in range(1000)]
    write(tmp_path / "log.jsonl", log)
    player: asyncio.subprocess.Process | None = None
    slowed = asyncio.Event()

    async def slow(_fake: Fake, _body: dict[str, Any]) -> None:
        assert player is not None
        if not slowed.is_set():  # the fault: the only process stands still for a third of the step
            slowed.set()
            player.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            player.send_signal(signal.SIGCONT)

    async with service(slow) as fake, asyncio.timeout(120):
        words = ("replay", tmp_path / "log.jsonl", "--url", fake.url, "--search", RATE, 2 * RATE, "--step-seconds", 1)
        command = [sys.executable, "-m", "npu_gr", *map(str, words), "--no-signals", "--max-processes", "2", "--json"]
        pipe = asyncio.subprocess.PIPE
        player = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)
        assert player.stderr is not None
        while b"2 processes from here on" not in (line := await player.stderr.readline()):
            assert line, "it ended"
        # multiprocessing's tracker, and the first client: it is importing
        while num_children(player.pid) < 2:  # noqa: ASYNC110  (of another process)
            await asyncio.sleep(0.01)
        os.killpg(player.pid, signal.SIGINT)  # as a terminal does: to the search and to all its processes
        said, wrong = await player.communicate()
        assert (player.returncode, wrong.strip()) == (0, b"")
        while True:
            try:
                os.killpg(player.pid, 0)
            except ProcessLookupError:
                break
            await asyncio.sleep(0.05)
    study = json.loads(said)
    first, second = study["runs"]
    assert (first["was_late"], first["settings"]["processes"], first["interrupted"]) == (True, 1, False)
    assert (second["settings"]["processes"], second["interrupted"], second["settings"]["rate"]) == (2, True, RATE)
    assert study["search"]["ended"] == "interrupted"
