"""Builds that tests share: made once under build/, by the hash of what they are made of."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILDS = ROOT / "build" / "tests"


def digest(files: Iterable[Path], *more: str) -> str:
    """Hash the names and contents of files, and what else a build depends on."""
    made = hashlib.sha256("\0".join(more).encode())
    for path in sorted(files):
        made.update(path.as_posix().encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:16]


def once(name: str, make: Callable[[Path], None]) -> Path:
    """Make a folder or file under build/tests if it is not there; another worker may be at it."""
    target = BUILDS / name
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            part = BUILDS / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.replace(target)
    return target
