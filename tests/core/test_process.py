"""Large temporaries come from memory that the process has already touched."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_large_temporaries_do_not_fault_again() -> None:
    assert faults("set") < 100 < 1000 < faults("leave")
