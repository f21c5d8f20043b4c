"""A real instance in a process of its own, whose event loop measures itself.

Run it with `python -m tests.fuzz.instance FOLDER`.

It measures in seconds of CPU of the loop's thread, which neighbours on the machine do not disturb:
what one callback takes is how long everybody else waits for it. It has every listener that is ours:
the public and the admin address, gRPC, the agent-check, and a gateway's picker. The ports come on
standard output; then each line on standard input is answered by a line of figures since the last
one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import time
from pathlib import Path
from typing import Any

from npu_gr.core.process import freeze_imports
from npu_gr.core.settings import from_table
from npu_gr.route.config import RouterConfig
from npu_gr.route.fan_out import InstanceCalls
from npu_gr.route.picker import picking
from npu_gr.server.grpc.server import RPC
from npu_gr.server.run import serve
from npu_gr.service.app import instance
from npu_gr.service.config import Config
from npu_gr.vector_search.vectors import save
from tests.ports import free_port
from tests.server.test_recommend_over_http import section
from tests.serving import FIRST_ID, make_config, write_checkpoint
from tests.vector_search.vectors import make_vectors

PATIENT = {
    f"{kind}_s": 5.0
    for kind in ("signal", "rank", "generate", "match", "recommend", "events", "erase")
}


class Measured:
    """The longest callback of the loop since it was last asked for."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.of = ""
        real = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            before_s = time.thread_time()
            real(handle)
            took_s = time.thread_time() - before_s
            if took_s > self.longest_s:
                self.longest_s = took_s
                self.of = repr(handle)[:300]

        asyncio.Handle._run = run  # type: ignore[method-assign, assignment]

    def take(self) -> dict[str, Any]:
        """Return the figures, and begin anew."""
        page_bytes = resource.getpagesize()
        taken = {
            "longest_s": self.longest_s,
            "of": self.of,
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes,
            "num_tasks": len(asyncio.all_tasks()),
            "cpu_s": time.process_time(),  # of all threads, since the start
        }
        self.longest_s = 0.0
        return taken


def sections(folder: Path) -> dict[str, Any]:
    if not (folder / "checkpoint").exists():
        write_checkpoint(folder / "checkpoint")
        save(make_vectors(), folder / "vectors")
        (folder / "popular.txt").write_text(f"{FIRST_ID}\n{FIRST_ID + 1}\n")
    given = section(folder)
    return {
        **given,
        # else a slow retrieval is 503
        "recommend": {**given["recommend"], "popular": str(folder / "popular.txt")},
        "match": {"vectors": str(folder / "vectors")},
        "record": {"folder": str(folder / "records")},
        "slo": PATIENT,  # a busy machine: requests are admitted
        "admission": {"max_inflight": 64},
        "server": {
            "body_timeout_s": 2.0,
            "log_requests": "slow",
            "grpc_port": 0,
            "agent_port": free_port(),
        },
    }


def router() -> RouterConfig:
    """A router of an instance that is not there, which it asks for its health once an hour."""
    given = {
        "discovery": {"instances": [{"name": "a", "host": "127.0.0.1", "port": 1}]},
        "health": {"interval_s": 3600.0},
        "picker": {"port": 0},
    }
    return from_table(given, RouterConfig)


async def main(config: Config) -> None:
    measured = Measured()
    loop = asyncio.get_running_loop()
    routed = router()
    listed = routed.discovery.instances
    look = (InstanceCalls(routed), listed, {"a": "127.0.0.1"})
    async with (
        instance(config, lambda: config) as (app, service),
        picking(routed, lambda: look) as picker_port,
    ):

        async def drain() -> None:
            service.set_ready("draining")

        def say(what: object) -> None:
            sys.stdout.write(json.dumps(what) + "\n")
            sys.stdout.flush()

        def asked() -> None:
            if sys.stdin.readline():
                say(measured.take())

        def listening(port: int, admin_port: int) -> None:
            measured.take()
            ports = {"public": port, "admin": admin_port, "grpc": app[RPC].port}
            say({**ports, "agent": config.server.agent_port, "picker": picker_port})
            loop.add_reader(sys.stdin, asked)

        await serve(app, config.server, on_drain=drain, on_listening=listening)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    made = make_config(Path(sys.argv[1]), **sections(Path(sys.argv[1])))
    freeze_imports()  # what made the files, too, which an instance does not have
    asyncio.run(main(made))
