"""One file with everything that a report of a fault needs: a .tar.gz of texts, credentials taken out."""

from __future__ import annotations

import gc
import io
import os
import platform
import resource
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from npu_gr import __version__
from npu_gr.core.redact import redacted

_VARIABLES = ("OMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "PYTHON", "ASCEND_", "CUDA_")  # beginnings; none is a secret
_CGROUP_FILES = ("cpu.max", "cpu.stat", "memory.max", "memory.current", "memory.events", "memory.pressure")


def packed(texts: Mapping[str, str], folder: str) -> bytes:
    """Pack texts; a file is named after its key.

    Args:
        texts: by file name.
        folder: that the archive unpacks into.
    """
    out = io.BytesIO()
    now_at = time.time()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in texts.items():
            data = redacted(text).encode(errors="backslashreplace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(data)
            entry.mtime = now_at
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def environment() -> str:
    """Describe the interpreter, the packages, the limits and the machine, as JSON. Reads files: not on the loop."""
    facts: dict[str, Any] = {
        "npu_gr": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "time_unix_s": time.time(),
        "pid": os.getpid(),
        "num_cpus": os.cpu_count(),
        "usable_cpus": sorted(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "num_threads": threading.active_count(),
        "num_descriptors": len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None,
        "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "gc": {"stats": gc.get_stats(), "frozen": gc.get_freeze_count(), "thresholds": gc.get_threshold()},
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "cgroup": {name: text for name in _CGROUP_FILES if (text := _text(Path("/sys/fs/cgroup", name)))},
        "packages": dict(sorted((one.name, one.version) for one in metadata.distributions() if one.name)),
    }
    return msgspec.json.format(msgspec.json.encode(facts)).decode()


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
