"""A real Redis server of a test's own, on a Unix socket."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def redis_path(folder: Path, *options: str) -> Iterator[str]:
    """Run a server, and yield the path of its socket.

    Skip the test where there is no redis-server.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    socket = folder / "redis.sock"
    command = [
        binary,
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--dir",
        str(folder),
        "--save",
        "",
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(200):
                if socket.exists():
                    break
                time.sleep(0.05)
            yield str(socket)
        finally:
            server.terminate()
