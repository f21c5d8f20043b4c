"""Front workers and an engine's side of them in one event loop, over real sockets; the service is a fake."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from npu_gr.admission.config import AdmissionConfig
from npu_gr.core.kinds import KINDS
from npu_gr.core.tasks import running
from npu_gr.front.control import Control
from npu_gr.front.engine.door import EngineDoor
from npu_gr.front.engine.workers import FrontWorkers
from npu_gr.front.frames import WorkerSettings
from npu_gr.front.questions import answers
from npu_gr.front.sockets import bind, close
from npu_gr.front.worker.run import FrontWorker
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.slo import Objective
from npu_gr.server.config import ServerConfig
from npu_gr.server.insight import OwnInsight
from npu_gr.server.newest import NewestRequests
from npu_gr.server.recording import OwnRecorder
from tests.server.fake import FakeService
from tests.serving import until


@dataclass
class Rig:
    """What a test sees of it."""

    service: FakeService
    door: EngineDoor
    workers: FrontWorkers
    metrics: Metrics
    newest: NewestRequests
    session: aiohttp.ClientSession
    ports: list[int]  # public, admin
    supervisors: list[Control] = field(default_factory=list)
    fronts: list[FrontWorker] = field(default_factory=list)
    stuck: list[tuple[int, str]] = field(default_factory=list)

    def url(self, path: str, *, admin: bool = False) -> str:
        return f"http://127.0.0.1:{self.ports[admin]}{path}"

    async def link(self, number: int) -> None:
        """Connect a worker with this engine, as the supervisor does."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.supervisors[number].send("engine", sockets=[theirs])
        await self.workers.connect(number, ours)

    async def unlink(self, number: int = 0) -> None:
        """The engine dies, as far as this worker sees."""
        self.workers._workers[number].peer.cut("a test")
        await until(lambda: self.fronts[number]._peer is None)


@asynccontextmanager
async def fronted(
    service: FakeService, num_workers: int = 1, admission: AdmissionConfig | None = None, **server: Any
) -> AsyncIterator[Rig]:
    config = ServerConfig(port=0, admin_port=0, workers=num_workers, **server)
    sockets = bind(config, num_workers)
    admission = admission or AdmissionConfig()
    objectives = {kind.name: 5.0 for kind in KINDS.values()}
    door = EngineDoor(admission, objectives.__getitem__, batch_requests=4)
    promised = tuple(Objective(kind=kind, threshold_s=s) for kind, s in objectives.items())
    metrics = Metrics(CollectorRegistry(), promised)
    newest = NewestRequests()
    workers = FrontWorkers(
        service,
        door,
        answers(service, OwnInsight(service, metrics, newest), OwnRecorder(None)),
        metrics,
        newest,
        settings=WorkerSettings(
            server=config,
            admission=admission,
            objectives=promised,
            batch_requests=4,
            num_workers=num_workers,
        ),
        read_settings=lambda: (admission, objectives),
    )
    ports = [addresses[0].getsockname()[1] for addresses in sockets[0]]
    tasks = []
    async with running(workers.watch()), aiohttp.ClientSession() as session:
        rig = Rig(service, door, workers, metrics, newest, session, ports)
        workers.on_stuck = lambda *what: rig.stuck.append(what)
        for number in range(num_workers):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            rig.supervisors.append(Control(ours))
            rig.fronts.append(FrontWorker(number, Control(theirs)))
            tasks.append(asyncio.create_task(rig.fronts[number].run()))
            addresses = sockets[number]
            rig.supervisors[number].send(
                "listen", *map(len, addresses), sockets=[one for group in addresses for one in group]
            )
            await rig.link(number)
            async with asyncio.timeout(10):
                message = await rig.supervisors[number].receive()
            assert message is not None
            assert message.name == "listening"
        try:
            yield rig
        finally:
            for addresses in sockets:
                close(addresses)
            for supervisor in rig.supervisors:
                supervisor.send("stop")
            async with asyncio.timeout(20):
                assert [await task for task in tasks] == [0] * num_workers
            for front, supervisor in zip(rig.fronts, rig.supervisors, strict=True):
                front._control.close()
                supervisor.close()
            await workers.close()
