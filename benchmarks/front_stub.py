"""An instance whose ranker answers zeros without computing: what is left is everything but the model.

    python -m benchmarks.front_stub CONFIG [KEY=VALUE ...]           with `server.workers` as it says
    python -m benchmarks.front_stub engine FD LEVEL CONFIG [...]     the engine of such an instance

The model is proven and warmed up first, as ever; it is replaced when the instance becomes ready.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from npu_gr.core.arrays import F32
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.front.plan import read_server
from npu_gr.front.supervisor import Processes, Supervisor
from npu_gr.service.service import Service

_PROCESSES = "npu_gr.cli.front"


def zeros(self: RankEngine, passes: Sequence[RankPass]) -> list[F32]:
    """Answer zeros, in the place of `RankEngine.forward`."""
    tasks = len(self.model.config.tasks)
    return [np.zeros((len(one.candidates), tasks), np.float32) for one in passes]


def replace_model() -> None:
    """Let every ranker of this process answer zeros, from when the instance is ready."""
    set_ready = Service.set_ready

    def then_replaced(self: Service, why_not: str = "") -> None:
        if not why_not:
            RankEngine.forward = zeros  # type: ignore[method-assign]
        set_ready(self, why_not)

    Service.set_ready = then_replaced  # type: ignore[method-assign]


def _supervise(config: Path, overrides: tuple[str, ...]) -> int:
    def command(module: str, *words: object) -> list[str]:
        return [sys.executable, "-m", module, *map(str, words)]

    plan = Processes(
        engine=lambda fd: command(__spec__.name, "engine", fd, "WARNING", config, *overrides),
        worker=lambda number, fd: command(_PROCESSES, "worker", fd, "WARNING", number),
        server=read_server(config, overrides),
    )

    async def run() -> int:
        return await Supervisor(plan).run()

    return asyncio.run(run())


def main(*words: str) -> int:
    """Run what the words say. Returns the exit code."""
    if words[0] == "engine":
        replace_model()
        runpy.run_module(_PROCESSES, run_name="__main__")
        return 0
    config, *overrides = words
    if read_server(Path(config), overrides).workers:
        return _supervise(Path(config), tuple(overrides))
    replace_model()
    sys.argv[1:] = ["--log-level", "WARNING", "serve", "--config", config]
    sys.argv += [word for setting in overrides for word in ("--set", setting)]
    runpy.run_module("npu_gr", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
