"""A real Redis Cluster of a test's own: three masters, each with a replica, on loopback."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.history_store.redis_server import redis_path
from tests.ports import BUS, free_port

NUM_SLOTS = 16384
NODE_TIMEOUT_MS = 1000  # after it a master counts as dead, and its replica takes its place


def wait_for(what: Callable[[], bool], within_s: float = 30.0) -> None:
    ends_at = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


class Node:
    """A running server."""

    def __init__(self, path: str, port: int) -> None:
        self.port = port
        self.admin = redis.Redis(unix_socket_path=path)

    def say(self, *command: str | int) -> Any:
        """Send a command of the cluster."""
        return self.admin.execute_command("CLUSTER", *command)  # type: ignore[no-untyped-call]

    def my_id(self) -> str:
        return str(self.say("MYID").decode())

    def kill(self) -> None:
        os.kill(self.admin.info("server")["process_id"], signal.SIGKILL)

    def is_up(self) -> bool:
        return bool(self.admin.cluster("info")["cluster_state"] == "ok")


@contextmanager
def cluster(folder: Path) -> Iterator[list[Node]]:
    """Run the servers; the first three are masters, and node i + 3 is the replica of node i."""
    with ExitStack() as stack:
        nodes = []
        for number in range(6):
            own = folder / str(number)
            own.mkdir()
            port = free_port(also=BUS)
            options = ["--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes"]
            options += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
            options += ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"]
            nodes.append(Node(stack.enter_context(redis_path(own, *options)), port))
            stack.callback(nodes[-1].admin.close)
        ends = [NUM_SLOTS * number // 3 for number in range(4)]
        for one, first, end in zip(nodes[:3], ends, ends[1:], strict=False):
            one.say("ADDSLOTSRANGE", first, end - 1)
        for node in nodes[1:]:
            node.say("MEET", "127.0.0.1", nodes[0].port)
        wait_for(lambda: all(len(node.admin.cluster("nodes")) == 6 for node in nodes))
        for number in range(3):
            master = nodes[number].my_id()
            nodes[number + 3].say("REPLICATE", master)
        wait_for(
            lambda: (
                all(
                    node.is_up()
                    and node.admin.info("replication").get("master_link_status", "up") == "up"
                    for node in nodes
                )
                and all(
                    node.admin.info("replication")["connected_slaves"] == 1 for node in nodes[:3]
                )
            )
        )
        yield nodes


def address(nodes: list[Node]) -> str:
    return "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:3])
