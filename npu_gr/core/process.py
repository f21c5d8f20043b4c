"""Set up a process once, before torch loads: how threads wait, and how the heap keeps memory.

glibc maps every block above 32 MiB anew and gives it back: each large temporary of torch then pays
again for its page faults, which cost more than the arithmetic: 34 MB of log_softmax take 20 ms,
from the heap 9. After a few rounds the heap has the two or three blocks that a computation needs.
The heap of a thread, as the device thread's, takes blocks up to nearly 64 MiB; what is larger
belongs into pools.

The garbage collector of a serving process: what imports made is never looked at again.

A collection stops every thread. Measured on an instance: imports leave 207,000 objects, and a full
collection takes 95 to 126 ms of CPU; with those frozen, 13,400 objects and 1.3 ms. Of an instance's
own objects none is frozen, so nothing has to be frozen anew when a model is swapped: the engine and
the relay of a version form a cycle, and frozen they would keep its weights for ever.

`stop_signals` are those that a process is stopped by.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
from collections.abc import Iterator

# Those of CPython 3.11, also where a later one has others. In 1,600 ranks 100 young collections
# stop the process for 0.5 ms each, 1.5 % of the CPU. A first threshold of 5,000 or 20,000 costs 0.8
# or 0.6 %, but has pauses of 11 to 31 ms.
THRESHOLDS = (700, 10, 10)


def freeze_imports() -> None:
    """Spare the collector what exists now. Call it after the imports, before models are loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


# of mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST = 1 << 30  # bytes


def set_up_process() -> bool:
    """Let threads sleep where they would spin, the heap keep its memory, and torch load no device's package by itself.

    An NPU's runtime is told to give each stream a queue of its own. A variable that is set already
    stays as it is.

    SIGUSR1 is ignored from here on; a process that serves answers it
    (`npu_gr/server/debug/stacks.py`).

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
    # an NPU's runtime hands launches to a thread that makes them: by default one for all streams,
    # and ours would wait for each other. It needs the task queue, of level 1: level 2 takes more
    # memory, and allows no graphs
    os.environ.setdefault("TASK_QUEUE_ENABLE", "1")
    os.environ.setdefault("PER_STREAM_QUEUE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _MOST), mallopt(_M_TRIM_THRESHOLD, _MOST)])


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Queue[int]]:
    """Put every SIGTERM and SIGINT into a queue while the block runs."""
    loop = asyncio.get_running_loop()
    received = asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
