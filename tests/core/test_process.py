"""Large temporaries come from memory that the process has already touched."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from npu_gr.core.process import HUNG

# page faults of a round, when the heap has settled, in a thread
CODE = """
import resource, sys, threading
from npu_gr.core.process import set_up_process
if sys.argv[1] == "set": assert set_up_process()
import torch
x, faults = torch.zeros(1024, 8192), []  # 32 MiB
def work():
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x.log_softmax(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(max(faults[-4:]))
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_large_temporaries_do_not_fault_again() -> None:
    assert faults("set") < 100 < 1000 < faults("leave")


@pytest.mark.parametrize("given", [{}, {"TASK_QUEUE_ENABLE": "2", "PER_STREAM_QUEUE": "0"}])
def test_variables_are_set_where_nobody_has(given: dict[str, str]) -> None:
    """torch_npu gets a queue a stream; who says otherwise is left alone."""
    code = "import os; from npu_gr.core.process import set_up_process; set_up_process()\n"
    names = ("TASK_QUEUE_ENABLE", "PER_STREAM_QUEUE", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    code += f"print(*(os.environ[name] for name in {names}))"
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        given.get("TASK_QUEUE_ENABLE", "1"),
        given.get("PER_STREAM_QUEUE", "1"),
        "0",
    ]


HANGS = """
import threading
from npu_gr.core.logs import set_up_logs
from npu_gr.core.process import end_within
set_up_logs("INFO")
end_within(0.05)
threading.Thread(target=threading.Event().wait).start()  # not a daemon: the process cannot end
"""


def test_a_process_that_cannot_stop_ends_with_its_logs_written() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == HUNG
    assert "the process did not stop within" in done.stderr


TRIM = """
from npu_gr.core.process import set_up_process, trim_heap
assert set_up_process()
import numpy as np

def mb():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024

before = mb()
blocks = [np.ones(1 << 20, np.uint8) for _ in range(200)]
last = np.ones(1 << 16, np.uint8)  # above them, so that the heap cannot shrink
del blocks
freed = mb()
trim_heap()
print(freed - before, mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_freed_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", TRIM], capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 150
    assert left < 20


BLOCKED = """
import asyncio, time
from npu_gr.core.logs import set_up_logs
from npu_gr.core.process import end_if_blocked
set_up_logs("INFO")

async def main():
    end_if_blocked(1)
    await asyncio.sleep(0.1)
    while True:
        time.sleep(60)  # no signal handler of the loop runs

asyncio.run(main())
"""


def test_a_process_whose_event_loop_is_blocked_ends_and_says_where() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == HUNG
    assert "the event loop has not turned for 1 s" in done.stderr
    assert "in main" in done.stderr, "the stacks of all threads"
