"""Set up a process once, before torch loads: how threads wait, and how the heap keeps memory.

glibc maps every block above 32 MiB anew and gives it back: each large temporary of torch then pays again for its page
faults, which cost more than the arithmetic: 34 MB of log_softmax take 20 ms, from the heap 9. After a few rounds the
heap has the two or three blocks that a computation needs. The heap of a thread, as the device thread's, takes blocks
up to nearly 64 MiB; what is larger belongs into pools.
"""

from __future__ import annotations

import ctypes
import os
import signal

# of mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST = 1 << 30  # bytes


def set_up_process() -> bool:
    """Let threads sleep where they would spin, the heap keep its memory, and torch load no device's package by itself.

    An NPU's runtime is told to give each stream a queue of its own. A variable that is set already stays as it is.

    SIGUSR1 is ignored from here on; a process that serves answers it (`npu_gr/server/debug/stacks.py`).

    Call it before torch is imported.

    Returns:
        Whether the C library took the heap's settings; one that is not glibc has none.
    """
    # who asks for stacks must not kill a process that still starts, or one that has none to show
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # a thread that waits must not spin beside the event loop
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # where a device's package is installed and its driver is not, `import torch` would die of it
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # an NPU's runtime hands launches to a thread that makes them: by default one for all streams, and ours would wait
    # for each other. It needs the task queue, of level 1: level 2 takes more memory, and allows no graphs
    os.environ.setdefault("TASK_QUEUE_ENABLE", "1")
    os.environ.setdefault("PER_STREAM_QUEUE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _MOST), mallopt(_M_TRIM_THRESHOLD, _MOST)])
