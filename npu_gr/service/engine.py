"""The engine process of an instance with front workers: models, tiers and scheduler, and no HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress

from npu_gr.core.errors import NpuGrError
from npu_gr.core.kinds import KINDS
from npu_gr.core.tasks import running
from npu_gr.front.control import Control
from npu_gr.front.engine.door import EngineDoor
from npu_gr.front.engine.workers import HEARTBEAT_S, FrontWorkers
from npu_gr.front.frames import WorkerSettings
from npu_gr.front.questions import answers
from npu_gr.metrics.registry.process import noted_pauses
from npu_gr.server.insight import OwnInsight
from npu_gr.server.loop_lag import probe_loop_lag
from npu_gr.server.newest import NewestRequests
from npu_gr.server.recording import OwnRecorder
from npu_gr.service.app import OpenedInstance, opened
from npu_gr.service.config import Config

log = logging.getLogger(__name__)


async def run_engine(config: Config, read: Callable[[], Config], control: socket.socket) -> None:
    """Serve the front workers that the supervisor names, until it says stop, or is gone.

    Args:
        config: what is served.
        read: reads the configuration again, for a reload.
        control: the supervisor's.

    Raises:
        ConfigError: as `opened`.
    """
    supervisor = Control(control)
    try:
        async with opened(config, read, EngineDoor) as instance:
            await _serve(config, instance, supervisor)
    finally:
        supervisor.close()
    log.info("the engine has stopped")


async def _serve(config: Config, instance: OpenedInstance, supervisor: Control) -> None:
    service, served, metrics, recorder = instance
    newest = NewestRequests()
    insight = OwnInsight(served, metrics, newest)
    door = service.door
    assert isinstance(door, EngineDoor)
    settings = service.parts.settings

    workers = FrontWorkers(
        served,
        door,
        answers(served, insight, OwnRecorder(recorder)),
        metrics,
        newest,
        settings=WorkerSettings(
            server=config.server,
            admission=config.admission,
            objectives=tuple(config.slo.objectives()),
            batch_requests=config.scheduler.max_batch_requests * config.scheduler.streams,
            num_workers=config.server.workers,
        ),
        read_settings=lambda: (
            settings.config.admission,
            {kind: settings.config.slo.objective_s(kind) for kind in KINDS},
        ),
    )
    workers.on_stuck = lambda number, why: supervisor.send("stuck", number, why)
    reloads = set[asyncio.Task[None]]()

    async def reload() -> None:
        with suppress(NpuGrError):  # the log has it
            await service.reload_models()

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            supervisor.send("alive")

    process = metrics.process
    with noted_pauses(process.gc_paused) as drain:
        async with (
            probe_loop_lag(process.loop_lagged, process.loop_froze, drain),
            running(workers.watch()),
            running(beat()),
        ):
            supervisor.send("ready")
            while (message := await supervisor.receive()) is not None:
                match message.name:
                    case "worker":
                        number, starts = message.values
                        metrics.front.started(number, starts)
                        await workers.connect(number, message.sockets[0])
                    case "unready":
                        (workers.why_not,) = message.values
                    case "drain":
                        service.set_ready("draining")
                    case "reload":
                        reloads.add(task := asyncio.get_running_loop().create_task(reload()))
                        task.add_done_callback(reloads.discard)
                    case _:
                        break
                workers.tell()
            await workers.close()
    for task in reloads:
        task.cancel()
