"""The bench of front workers: what it reads, refuses and counts. Its times need a quiet machine."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from benchmarks import front
from benchmarks.door_servers import Traffic
from npu_gr.core.errors import ConfigError


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nonsense' is none of stub, model, bodies"):
        next(front.lines(front.FrontOptions(config=Path("configs/cpu.yaml"), parts=("nonsense",))))


def test_cpu_time_is_read_by_process_and_by_thread() -> None:
    """Work of another thread counts for the process, and not for the main thread."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    pid = os.getpid()
    main = front._cpu_s(pid, pid)
    whole = front._cpu_s(pid)
    thread = threading.Thread(target=work)
    thread.start()
    while front._cpu_s(pid) - whole < 0.2:
        time.sleep(0.01)
    others = front._cpu_s(pid) - whole - (front._cpu_s(pid, pid) - main)
    stop.set()
    thread.join()
    assert others > 0.1
    assert front._role(pid) == "main"


def test_a_cached_rank_takes_few_calls_of_the_engine() -> None:
    """210 when this was written, and 427 once; a tenth more is a part of the engine that nobody looked at."""
    options = front.FrontOptions(config=Path("configs/cpu.yaml"), parts=("calls",), traffic=Traffic(num_users=4))
    (line,) = front.lines(options)
    assert 150 < line.ours < 231
