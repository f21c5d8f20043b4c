"""Set up a process before torch is imported: thread waiting, heap, garbage collector, signals.

Heap: glibc maps and unmaps every block above 32 MiB, so each large temporary of torch pays for its
page faults again, which cost more than the arithmetic: 34 MB of log_softmax take 20 ms, and 9 ms
from the heap. With the settings here, blocks up to nearly 64 MiB stay in the heap of a thread;
larger ones belong in pools. `trim_heap` gives back what a load took.

Garbage collector: a collection stops all threads, so the objects of imports are frozen. On an
instance imports leave 207,000 objects, and a full collection takes 95 to 126 ms of CPU; with those
frozen, 13,400 objects and 1.3 ms. Objects of models are not frozen: the engine and the relay of a
version form a cycle, which would keep its weights for ever.

`stop_signals` receives SIGTERM and SIGINT. `end_within` and `end_if_blocked` end a process
that cannot stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from npu_gr.core.logs import close_logs

log = logging.getLogger(__name__)

HUNG = 70  # exit status of a process in which something hung: EX_SOFTWARE of BSD

# The defaults of CPython 3.11, for all versions. In 1,600 ranks 100 young collections stop the
# process for 0.5 ms each, 1.5 % of the CPU. A first threshold of 5,000 or 20,000 costs 0.8 % or
# 0.6 %, but has pauses of 11 to 31 ms.
THRESHOLDS = (700, 10, 10)


def freeze_imports() -> None:
    """Exempt all current objects from collection. Call it after imports, before loading models."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


# of mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST = 1 << 30  # bytes


def set_up_process() -> bool:
    """Set environment variables and heap parameters; call it before torch is imported.

    Waiting threads sleep instead of spinning, the heap keeps its memory, torch does not load device
    packages automatically, the NPU runtime has a queue per stream, and grpcio's core is silent.
    Variables that are already set stay. SIGUSR1 is ignored until a service handles it
    (`npu_gr/server/debug/stacks.py`).

    Returns:
        Whether the C library accepted the heap parameters; only glibc has them.
    """
    # a request for stacks must not kill a process that still starts, or has no handler
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # a waiting thread must not take the CPU from the event loop
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # `import torch` would fail if a device package is installed without its driver
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # the NPU runtime launches kernels in a thread, by default one for all streams, so that streams
    # wait for each other. A queue per stream needs task queue level 1; level 2 takes more memory,
    # and does not allow graphs
    os.environ.setdefault("TASK_QUEUE_ENABLE", "1")
    os.environ.setdefault("PER_STREAM_QUEUE", "1")
    # grpcio's core writes a line to standard error for each header that it rejects, without a key
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _MOST), mallopt(_M_TRIM_THRESHOLD, _MOST)])


def end_now(status: int = HUNG) -> None:
    """End the process without waiting for anything but its logs; the last are all stacks."""
    close_logs()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(status)


def end_within(seconds: float) -> None:
    """End the process after `seconds` if it still runs then, whatever it waits for."""

    def work() -> None:
        time.sleep(seconds)
        log.critical("the process did not stop within %.0f s; it ends now", seconds)
        end_now()

    threading.Thread(target=work, name="npu_gr-end", daemon=True).start()


def end_if_blocked(seconds: int) -> None:
    """End the process if the event loop does not turn for `seconds`, since no signal reaches it."""
    loop = asyncio.get_running_loop()
    turned = threading.Event()

    def work() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                turned.clear()
                loop.call_soon_threadsafe(turned.set)
                # counted, so that a standstill of the whole process is one second
                if not any(turned.wait(1.0) for _ in range(seconds)):
                    log.critical("the event loop has not turned for %d s; it ends now", seconds)
                    end_now()
                time.sleep(1.0)

    threading.Thread(target=work, name="npu_gr-loop", daemon=True).start()


def resident_bytes() -> int:
    """Return the memory that the process takes now; 0 = unknown."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def trim_heap() -> None:
    """Give freed memory back to the system: after a load, copies of weights stay in the heap.

    Only with glibc. It takes 0.2 to 0.5 s for each GB, in which no thread can allocate: call it
    when no request waits (`npu_gr/service/idle_heap.py`).
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Queue[int]]:
    """Yield a queue that receives SIGTERM and SIGINT during the block."""
    loop = asyncio.get_running_loop()
    received = asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
