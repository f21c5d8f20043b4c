"""Memory that this process may take: the machine's, and the limits of its control groups.

A process in a container sees the memory of the whole machine in `/proc/meminfo`, but is killed at
the limit of its control group. Groups of both versions (v1, v2) are read, with those around them.
What is unknown limits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
# folder below /sys/fs/cgroup, limit, used bytes, and the part of them that the kernel can take back
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("", "memory.max", "memory.current", "inactive_file")


class HostMemory(NamedTuple):
    """An amount of host memory."""

    num_bytes: int
    limited_by: str  # the machine, or a control group


def total_memory(root: Path = _ROOT) -> HostMemory | None:
    """Return the most memory that this process can have; None if it is unknown.

    Args:
        root: Folder of `proc` and `sys`.
    """
    return _least(root, "MemTotal", lambda limit, _used: limit)


def free_memory(root: Path = _ROOT) -> HostMemory | None:
    """Return the memory that this process can still take; None if it is unknown.

    Args:
        root: Folder of `proc` and `sys`.
    """
    return _least(root, "MemAvailable", lambda limit, used: max(0, limit - used))


def misfit(name: object, needed: float, free: HostMemory | None) -> str:
    """Describe why something cannot be loaded while the current version serves; "" if it can.

    Args:
        name: What is loaded.
        needed: Bytes that loading it takes.
        free: Memory that is free; None = unknown.
    """
    if free is None or needed <= free.num_bytes:
        return ""
    return (
        f"{name} needs about {size_text(needed)} while the current version serves, but "
        f"{size_text(free.num_bytes)} are free ({free.limited_by}); give the instance more memory, "
        "or restart it with the new version"
    )


def size_text(num_bytes: float) -> str:
    """Format a number of bytes: "1.5 GiB", "20.0 MiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _least(root: Path, field: str, of_group: Callable[[int, int], int]) -> HostMemory | None:
    found = [
        HostMemory(of_group(limit, used), "the limit of its control group")
        for limit, used in _groups(root)
    ]
    if (kib := _field(root / "proc/meminfo", f"{field}:")) is not None:
        found.append(HostMemory(1024 * kib, "the machine"))
    return min(found, default=None)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each group of this process that has a limit."""
    text = ""
    with suppress(OSError):
        text = (root / "proc/self/cgroup").read_text()
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        below, *names, reclaimable = _V1 if controllers else _V2
        mounted = root / "sys/fs/cgroup" / below
        folder = mounted / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(mounted):
                break
            with suppress(OSError, ValueError):  # "max" = no limit
                limit, used = (int((group / name).read_text()) for name in names)
                yield limit, used - (_field(group / "memory.stat", reclaimable) or 0)


def _field(path: Path, name: str) -> int | None:
    """Return the number after a name in a file with one name per line."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            key, number, *_ = line.split()
            if key == name:
                return int(number)
    return None
