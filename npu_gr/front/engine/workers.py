"""All front workers of an engine: what they are told, what they say, and what their numbers add up to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from socket import socket
from typing import Any

from npu_gr.admission.config import AdmissionConfig
from npu_gr.core.errors import NotFound
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.kinds import KINDS
from npu_gr.front import frames
from npu_gr.front.credit import WorkerDemand, slots
from npu_gr.front.engine.connection import Answers, WorkerConnection
from npu_gr.front.engine.door import EngineDoor
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.door import PLACES
from npu_gr.server.auth.key_ring import KeyRefusal
from npu_gr.server.entrance.listener import State as ConnectionState
from npu_gr.server.newest import NewestRequests
from npu_gr.server.service_protocol import ServiceProtocol

log = logging.getLogger(__name__)

LOOK_S = 0.05  # between two looks at what the workers must be told
HEARTBEAT_S = 1.0  # a worker hears something at least so often, and says something
SILENT_S = 10.0  # a worker that says nothing for so long is stuck
UNREAD_S = 1.0  # one that takes nothing for so long, while UNREAD_BYTES wait for it, is stuck
UNREAD_BYTES = 8 << 20


class FrontWorkers:
    """Event loop only."""

    def __init__(
        self,
        service: ServiceProtocol,
        door: EngineDoor,
        answers: Answers,
        metrics: Metrics,
        newest: NewestRequests,
        *,
        settings: frames.WorkerSettings,
        read_settings: Callable[[], tuple[AdmissionConfig, Mapping[str, float]]],
    ) -> None:
        """Know no worker yet.

        Args:
            service: of the instance.
            door: of the engine.
            answers: to the workers' questions.
            metrics: of the instance; the workers' numbers go into them.
            newest: gets the requests that ended at the workers.
            settings: that a worker begins with.
            read_settings: admission and objectives in force, which a reload may change.
        """
        self._service = service
        self._door = door
        self._answers = answers
        self._metrics = metrics
        self._newest = newest
        self._settings = settings
        self._read_settings = read_settings
        self._workers: dict[int, WorkerConnection] = {}
        self._state: frames.StateFrame | None = None  # that all were told last
        self._dropped: dict[str, int] = {}  # lines of workers that are gone
        self.why_not = ""  # a reason of the supervisor's not to be ready
        self.on_stuck: Callable[[int, str], None] = lambda _number, _why: None
        door.read_pressure = lambda: max((one.load.pressure for one in self._workers.values()), default=0.0)
        self._observe()

    def __len__(self) -> int:
        return len(self._workers)

    def is_ready(self) -> tuple[bool, str]:
        """Whether new work is welcome, and if not, why."""
        if self.why_not:
            return False, self.why_not
        return self._service.is_ready()

    # ---- workers

    async def connect(self, number: int, sock: socket) -> None:
        """Begin to serve a worker that was just started, or that lost its engine.

        Args:
            number: of the worker; whoever had it before is gone.
            sock: connected to it.
        """
        if (old := self._workers.get(number)) is not None:
            old.peer.cut("another process has its number")
            self._lost(old)
        worker = WorkerConnection(
            number,
            self._service,
            self._door,
            self._answers,
            on_hello=self._hello,
            on_load=self._loaded,
            on_stats=self._counted,
            on_lost=self._lost,
        )
        self._workers[number] = worker
        self._observe_worker(number)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker.peer, sock=sock)

    def _hello(self, worker: WorkerConnection) -> None:
        worker.hello(self._settings)
        worker.peer.send(self._now())

    def _lost(self, worker: WorkerConnection) -> None:
        if self._workers.get(worker.number) is not worker:
            return
        del self._workers[worker.number]
        if worker.gauges is not None:
            for stream, num in worker.gauges.lines_dropped.items():
                self._dropped[stream] = self._dropped.get(stream, 0) + num

    def _loaded(self, worker: WorkerConnection) -> None:
        spent, earned = worker.load.spent, worker.load.earned
        for other in self._workers.values():
            if other is not worker:
                other.spent.update(spent)
                other.earned.update(earned)
        self._share()

    def _share(self) -> None:
        workers = [one for one in self._workers.values() if one.pid]
        wanted = [WorkerDemand(one.load.wanted, one.load.wanting) for one in workers]
        windows = {kind: self._door.window(kind) for kind in KINDS}
        weights = self._read_settings()[0].tenant_weights
        for worker, credit in zip(workers, slots(wanted, windows, weights), strict=True):
            if credit != worker.credit or worker.spent or worker.earned:
                worker.tell_credit(credit)

    def _counted(self, stats: frames.StatsFrame) -> None:
        self._metrics.counted_elsewhere(stats.deltas)
        for kind, line in stats.ended:
            self._newest.add(kind, line)
            if line.status < 400:
                self._metrics.requests.took_elsewhere(kind, line.duration_s)
        for kind, line in stats.slow:
            self._newest.keep(kind, line)

    # ---- what is true

    def _now(self) -> frames.StateFrame:
        admission, objectives_s = self._read_settings()
        ready, why_not = self.is_ready()
        models = tuple(self._service.models())
        names = self._service.names
        actions: dict[str, tuple[str, ...] | None] = {}
        features: dict[str, tuple[Feature, ...]] = {}
        for version in (None, *(model.version for model in models)):
            try:
                found = names.actions(version)
            except NotFound:
                continue
            actions[version or ""] = None if found is None else found.names
            features[version or ""] = names.features(version).features
        return frames.StateFrame(
            why_not="" if ready else why_not,
            models=models,
            kind_versions=self._service.kind_versions(),
            actions=actions,
            features=features,
            unsorted_history=names.unsorted_history,
            admission=admission,
            objectives_s=dict(objectives_s),
        )

    def tell(self) -> None:
        """Tell every worker what has changed."""
        now = self._now()
        if now != self._state:
            self._state = now
            for worker in self._workers.values():
                if worker.pid:
                    worker.peer.send(now)

    async def watch(self) -> None:
        """Tell the workers what changes, let them hear that the engine lives, and find those that are stuck."""
        heard_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            self.tell()
            for worker in list(self._workers.values()):
                # looks are counted, not the clock: what stops this process is no worker's fault
                worker.silent_s += LOOK_S
                worker.unread_s = worker.unread_s + LOOK_S if worker.peer.unsent_bytes > UNREAD_BYTES else 0.0
                if worker.pid and worker.silent_s > SILENT_S:
                    self._stuck(worker, f"it has said nothing for {SILENT_S:g} s")
                elif worker.unread_s > UNREAD_S:
                    self._stuck(worker, f"it has not taken {worker.peer.unsent_bytes:,} bytes for {UNREAD_S:g} s")
            if time.monotonic() - heard_at > HEARTBEAT_S:
                heard_at = time.monotonic()
                for worker in self._workers.values():
                    if worker.pid:
                        worker.tell_credit(worker.credit)

    def _stuck(self, worker: WorkerConnection, why: str) -> None:
        log.error("front worker %d is stuck: %s", worker.number, why)
        worker.peer.cut(why)
        self._lost(worker)
        self.on_stuck(worker.number, why)

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(worker.peer.close() for worker in list(self._workers.values())))

    # ---- numbers

    def _observe(self) -> None:
        metrics = self._metrics
        metrics.door.observe(
            self,
            {state.value: partial(self._sum, partial(_connections, state.value)) for state in ConnectionState},
            partial(self._sum, lambda gauges: gauges.paused),
            partial(self._sum, lambda gauges: gauges.lent),
            partial(self._sum, lambda gauges: gauges.receiving_bytes),
            partial(self._sum, lambda gauges: gauges.refusals_per_s),
        )
        metrics.requests.in_flight.set_function(partial(self._sum, lambda gauges: gauges.in_flight))
        metrics.keys.observe(KeyRefusal, lambda: self._most(lambda gauges: gauges.keys), self._is_stale)
        metrics.process.observe_ready(self.is_ready)
        metrics.process.lines_dropped_elsewhere = self._lines_dropped
        metrics.front.read_cpu_s = lambda: {
            str(number): one.gauges.cpu_s for number, one in self._workers.items() if one.gauges is not None
        }
        if self._settings.server.tls is not None:
            metrics.process.observe_certificate("server", self._expires_at)

    def _observe_worker(self, number: int) -> None:
        def read(of: Callable[[WorkerConnection], float]) -> Callable[[], float]:
            return lambda: of(self._workers[number]) if number in self._workers else 0.0

        self._metrics.front.observe(
            number,
            {
                "connected": read(lambda one: float(bool(one.pid))),
                "lag_s": read(lambda one: one.gauges.lag_s if one.gauges else 0.0),
                "resident_bytes": read(lambda one: one.gauges.resident_bytes if one.gauges else 0.0),
                "calls": read(lambda one: one.num_calls),
                "unsent_bytes": read(lambda one: one.peer.unsent_bytes),
            },
        )

    def counts(self, kind: str) -> dict[str, int]:
        """Count a kind's requests by where they are: waiting at the workers' doors, inside, outside."""
        waiting = self._sum(lambda gauges: gauges.places.get(kind, {}).get(PLACES[0], 0))
        return {**self._door.counts(kind), PLACES[0]: int(waiting)}

    def pace_s(self, kind: str) -> float:
        """Seconds a request of a kind, of all workers together."""
        return self._door.pace_s(kind)

    def window(self, kind: str) -> int:
        """How many requests of a kind may be inside where there are no others, of all workers together."""
        return self._door.window(kind)

    def _all(self) -> list[frames.Gauges]:
        return [one.gauges for one in self._workers.values() if one.gauges is not None]

    def _sum(self, read: Callable[[frames.Gauges], float]) -> Any:
        return sum(map(read, self._all()))

    def _most(self, read: Callable[[frames.Gauges], int]) -> int:
        return max(map(read, self._all()), default=0)

    def _is_stale(self) -> bool:
        return any(gauges.is_stale for gauges in self._all())

    def _expires_at(self) -> float:
        return min((one.expires_at for one in self._all() if one.expires_at is not None), default=float("inf"))

    def _lines_dropped(self) -> dict[str, int]:
        total = dict(self._dropped)
        for gauges in self._all():
            for stream, num in gauges.lines_dropped.items():
                total[stream] = total.get(stream, 0) + num
        return total


def _connections(state: str, gauges: frames.Gauges) -> int:
    return gauges.connections.get(state, 0)
