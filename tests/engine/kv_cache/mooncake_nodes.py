"""A Mooncake Store on loopback: a master, and one node with the memory."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.ports import free_port

NEEDS = "needs pip install 'npu_gr[mooncake]', and Debian's libibverbs1"

# gives memory to the store until its input ends
NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
node = MooncakeDistributedStore()
own = "127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 24, "tcp", "", sys.argv[1]
print(node.setup(*own), flush=True)
sys.stdin.read()
"""


class MooncakeNodes(NamedTuple):
    """The processes of a store."""

    url: str  # its `kv_cache.pool`
    master: subprocess.Popen[str]
    node: subprocess.Popen[str]


@contextmanager
def mooncake(num_bytes: int) -> Iterator[MooncakeNodes]:
    """Run a store of so many bytes.

    Raises:
        ImportError: the package, or a library that it links to, is missing.
    """
    package = importlib.import_module("mooncake.store")
    binary = Path(str(package.__file__)).with_name("mooncake_master")
    binary.chmod(0o755)  # pip drops the mode
    port, metrics = free_port(), free_port()
    processes = [
        subprocess.Popen(
            [str(binary), f"--rpc_port={port}", f"--metrics_port={metrics}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    ]
    try:
        for _ in range(200):
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        node = started(sys.executable, "-c", NODE, f"127.0.0.1:{port}", str(num_bytes))
        processes.append(node)
        yield MooncakeNodes(f"mooncake://127.0.0.1:{port}", *processes)
    finally:
        for process in reversed(processes):
            ended(process)


def started(*command: str) -> subprocess.Popen[str]:
    """Start a process, and wait until it prints 0."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "0":
            return process
    raise AssertionError(f"{command[-1]} ended")


def ended(process: subprocess.Popen[str]) -> None:
    """Kill a process."""
    process.kill()
    process.communicate()
