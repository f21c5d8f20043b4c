"""`python -m benchmarks delta --only fleet`: how soon all instances of a fleet serve a delta.

Three instances follow one folder, and then one Redis stream. Each delta is posted to the first one;
the time is from the post until the last instance says that it serves the delta.
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.frame import Line, compared
from benchmarks.servers import instance, running
from npu_gr.core.errors import Unavailable
from tests.ports import free_port

if TYPE_CHECKING:
    from benchmarks.delta import Stream

INSTANCES = 3
CONVERGED_S = 1.0  # target
GIVE_UP_S = 60.0
LOOK_S = 0.01


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """Run a Redis server on a socket, and yield its URL.

    Raises:
        Unavailable: There is none, or it does not start.
    """
    binary, path = shutil.which("redis-server"), folder / "redis.sock"
    if binary is None:
        raise Unavailable("bench: no redis-server on PATH (Debian: apt-get install redis-server)")
    words = ["--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", ""]
    with subprocess.Popen([binary, *words], stdout=subprocess.DEVNULL) as server:
        try:
            give_up_at = time.monotonic() + GIVE_UP_S
            while not path.exists():
                if server.poll() is not None or time.monotonic() > give_up_at:
                    raise Unavailable("bench: redis-server did not start")
                time.sleep(LOOK_S)
            yield f"unix://{path}"
        finally:
            server.terminate()


def served(port: int) -> int:
    """Return the number of the delta that an instance serves."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/v1/models")
        number: int = json.loads(connection.getresponse().read())["models"][0]["delta"]["sequence"]
        return number
    finally:
        connection.close()


def lines(stream: Stream, config: Path) -> Iterator[Line]:
    """Measure both ways.

    Args:
        stream: A checkpoint, and its deltas.
        config: Configuration of the instances.

    Raises:
        Unavailable: A process did not start, or an instance did not follow.
    """
    from benchmarks.delta import post

    with redis(stream.folder) as url:
        for way in ("folder", "stream"):
            ports, fleet = [], []
            for number in range(INSTANCES):
                shared = "" if way == "folder" else number
                own = [f"models.deltas_from={stream.folder}/{way}{shared}"]
                if way == "stream":
                    own.append(f"models.deltas_stream={url}")
                ports.append(free_port())
                own.append(f"server.admin_port={ports[-1]}")
                name = f"fleet {way} {number}"
                fleet.append(instance(name, stream.checkpoint, stream.folder, own, config))
            with running(way, *fleet):
                took = []
                for number, file in enumerate(stream.files, 1):
                    began_at = time.monotonic()
                    post(ports[0], file)
                    while any(served(one.port) != number for one in fleet):
                        if time.monotonic() > began_at + GIVE_UP_S:
                            raise Unavailable(f"bench: the fleet does not follow delta {number}")
                        time.sleep(LOOK_S)
                    took.append(time.monotonic() - began_at)
            yield compared(
                "delta",
                f"{INSTANCES} instances on one {way}, {len(took)} deltas of {stream.changed} rows, "
                f"until all serve it: median; longest {max(took):.2f} s",
                median(took),
                "s",
                "the target",
                CONVERGED_S,
                CONVERGED_S / max(took),
                1.0,
            )
