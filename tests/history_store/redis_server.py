"""A real Redis server of a test's own, on a Unix socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _answers(path: Path) -> bool:
    """Whether a server listens: its socket's file is there before it does."""
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(str(path)) == 0


@contextmanager
def redis_path(folder: Path, *options: str) -> Iterator[str]:
    """Run a server, and yield the path of its socket.

    Skip the test where there is no redis-server; OSError where it ends as it starts, which one does
    whose port somebody took.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    path = folder / "redis.sock"
    command = [
        binary,
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--dir",
        str(folder),
        "--save",
        "",
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not _answers(path):
                if server.poll() is not None:
                    raise OSError(f"redis-server ended with {server.returncode} as it started")
                time.sleep(0.05)
            yield str(path)
        finally:
            server.terminate()
