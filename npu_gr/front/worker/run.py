"""A front worker: HTTP with the engine of another process behind it.

the supervisor gives it its listening sockets and a connection to the engine
the engine says how it is to serve; it listens, and serves until it is told to stop
the engine dies       every request is refused until the supervisor brings a connection to the next one
the supervisor dies   it ends
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.door import Door
from npu_gr.core.tasks import running
from npu_gr.front import frames
from npu_gr.front.control import Control, Message
from npu_gr.front.peer import Peer
from npu_gr.front.worker.insight import RemoteInsight, RemoteRecorder
from npu_gr.front.worker.remote_service import RemoteService
from npu_gr.front.worker.reports import Reports
from npu_gr.metrics.registry import Metrics
from npu_gr.server.auth.browsers import is_loopback_name
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.entrance import ENTRANCE
from npu_gr.server.entrance.runner import DoorRunner
from npu_gr.server.entrance.sites import TLS
from npu_gr.server.recording import add_record_routes
from npu_gr.server.routes import build_web_app
from npu_gr.server.rpc.server import RPC
from npu_gr.server.tracing import spans

log = logging.getLogger(__name__)

AGAIN = 75  # exit code: start me again, the engine has other settings


class FrontWorker:
    """One process. Event loop only."""

    def __init__(self, number: int, control: Control) -> None:
        """Serve nothing yet.

        Args:
            number: of the worker.
            control: the supervisor's.
        """
        self._number = number
        self._control = control
        self._sockets: list[list[socket.socket]] = []  # of each listener
        self._settings: asyncio.Future[frames.WorkerSettings] = asyncio.get_running_loop().create_future()
        self._is_told = asyncio.Event()  # the state of the instance is known
        self._is_over = asyncio.Event()
        self._exit_code = 0
        self._peer: Peer | None = None
        self._is_greeted = False  # by the engine, which then is ready for calls
        self._service: RemoteService | None = None
        self._keys_and_door: tuple[Any, Door] | None = None
        self._reports: Reports | None = None
        self._early: list[Any] = []  # frames that came before the service was made

    async def run(self) -> int:
        """Serve until the supervisor says stop, or is gone. Returns the exit code."""
        async with running(self._listen_to_supervisor()):
            over = asyncio.ensure_future(self._is_over.wait())
            await asyncio.wait((self._settings, over), return_when=asyncio.FIRST_COMPLETED)
            if self._settings.done():
                await self._serve(self._settings.result())
            over.cancel()
        return self._exit_code

    # ---- the supervisor

    async def _listen_to_supervisor(self) -> None:
        while (message := await self._control.receive()) is not None and message.name != "stop":
            await self._obey(message)
        self._is_over.set()

    async def _obey(self, message: Message) -> None:
        if message.name == "listen":
            sockets = iter(message.sockets)
            self._sockets = [[next(sockets) for _ in range(count)] for count in message.values]
        elif message.name == "engine":
            if self._peer is not None:  # its end has not been seen yet
                self._lost(self._peer, "")
            peer = Peer("the engine", lambda frame: self._received(peer, frame), lambda why: self._lost(peer, why))
            self._peer = peer
            self._is_greeted = False
            self._early.clear()
            await asyncio.get_running_loop().create_unix_connection(lambda: peer, sock=message.sockets[0])
            peer.send(frames.HelloFrame(frames.BUILD, os.getpid(), self._number))

    # ---- the engine

    def _received(self, peer: Peer, frame: Any) -> None:
        if peer is not self._peer:
            return  # of an engine that is gone
        if self._service is not None:
            self._service.heard()
        match frame:
            case frames.HelloFrame():
                self._greeted(frame)
            case frames.CreditFrame():
                self._credited(frame)
            case _ if self._service is None:
                self._early.append(frame)
            case _:
                self._service.received(frame)

    def _greeted(self, hello: frames.HelloFrame) -> None:
        if hello.build != frames.BUILD or hello.settings is None:
            raise ValueError(f"it is of build {hello.build}, this is {frames.BUILD}")
        self._is_greeted = True  # an engine that only starts has not said so
        if self._service is not None and self._peer is not None:
            self._service.connected(self._peer)
        if not self._settings.done():
            self._settings.set_result(hello.settings)
        elif hello.settings != self._settings.result():
            log.warning("the engine has other settings than this worker: it starts again")
            self._exit_code = AGAIN
            self._is_over.set()

    def _credited(self, credit: frames.CreditFrame) -> None:
        if self._keys_and_door is None:
            return
        keys, door = self._keys_and_door
        door.share(credit.slots)
        for name, num in credit.spent.items():
            keys.spent_elsewhere(name, num)
        for tenant, num in credit.earned.items():
            door.earned_elsewhere(tenant, num)

    def _lost(self, peer: Peer, why: str) -> None:
        if self._peer is not peer:
            return
        if self._is_greeted:
            log.error("the engine is gone%s", f": {why}" if why else "")
        self._peer = None
        if self._service is not None:
            self._service.lost()

    def _send(self, frame: Any) -> bool:
        """Send a frame, or none at all; returns whether there is an engine."""
        if self._peer is None or not self._is_greeted:
            return False
        if frame is not None:
            self._peer.send(frame)
        return True

    # ---- HTTP

    async def _serve(self, settings: frames.WorkerSettings) -> None:
        config = _part_of(settings.server, settings.num_workers)
        objectives_s = {one.kind: one.threshold_s for one in settings.objectives}
        door = Door(
            _admission(settings.admission, settings.num_workers),
            objectives_s.__getitem__,
            batch_requests=settings.batch_requests,
        )
        metrics = Metrics(CollectorRegistry(), settings.objectives)
        service = _Reconfigured(door, settings.num_workers)
        made: list[Any] = []

        def insight(access_log: Any) -> RemoteInsight:
            made.append(access_log)
            return RemoteInsight(self._number, service, metrics, access_log.newest, lambda: reports.send_stats())

        with spans(config) as tracing:
            app = build_web_app(service, config, metrics, tracing, insight)
            add_record_routes(app, RemoteRecorder(service))
            entrance = app[ENTRANCE]
            reports = self._reports = Reports(door, entrance, metrics, made[0], app.get(TLS), self._send)
            self._keys_and_door = entrance.keys, door
            self._service = service
            if self._peer is not None and self._is_greeted:
                service.connected(self._peer)
                for frame in self._early:
                    service.received(frame)
            rpc = app.get(RPC)
            runner = DoorRunner(app, shutdown_timeout=config.shutdown_timeout_s)
            await runner.setup()
            try:
                async with running(reports.run()):
                    await self._listen(runner, config)
                    if rpc is not None:
                        await rpc.listen(is_shared=True)
                    self._control.send("listening")
                    await self._is_over.wait()
                    if self._exit_code != AGAIN:
                        log.info("front worker %d stops", self._number)
                    await asyncio.gather(runner.cleanup(), *([] if rpc is None else [rpc.stop()]))
                    reports.send_stats()
            finally:
                await runner.cleanup()
                if rpc is not None:
                    await rpc.stop()
                peer, self._peer = self._peer, None
                if peer is not None:
                    await peer.close()

    async def _listen(self, runner: DoorRunner, config: ServerConfig) -> None:
        tls = runner.app.get(TLS)
        for listener, sockets in zip(runner.app[ENTRANCE].listeners, self._sockets, strict=True):
            context = None
            if tls is not None and listener.is_public:
                context = tls.public
            elif tls is not None and not is_loopback_name(listener.host):
                context = tls.admin
            for one in sockets:
                await runner.listen(listener, config, context, one)


class _Reconfigured(RemoteService):
    """A service whose door follows what a reload has changed."""

    def __init__(self, door: Door, num_workers: int) -> None:
        super().__init__(door)
        self._num_workers = num_workers

    def received(self, frame: Any) -> None:
        super().received(frame)
        if isinstance(frame, frames.StateFrame):
            self.door.reconfigure(_admission(frame.admission, self._num_workers), frame.objectives_s.__getitem__)


def _part_of(config: ServerConfig, num_workers: int) -> ServerConfig:
    """The part of one worker in what the instance may hold."""
    return msgspec.structs.replace(
        config,
        max_connections=math.ceil(config.max_connections / num_workers),
        max_receiving_bytes=math.ceil(config.max_receiving_bytes / num_workers),
    )


def _admission(config: AdmissionConfig, num_workers: int) -> AdmissionConfig:
    return msgspec.structs.replace(config, max_inflight=math.ceil(config.max_inflight / num_workers))


async def run_worker(number: int, control: socket.socket) -> int:
    """Be a front worker. Returns the exit code of the process.

    Args:
        number: of the worker, from 0 on.
        control: the supervisor's.

    Raises:
        ConfigError: a file that the section `server` names cannot be used.
    """
    end = Control(control)
    try:
        return await FrontWorker(number, end).run()
    finally:
        end.close()
