"""Front workers: the processes that parse, check and answer in front of one engine process (`server.workers`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from npu_gr.metrics.registry.families import Families, ReadCounter


class FrontMetrics:
    """Gauges by the number of the worker, read when they are scraped. Without workers they have no series."""

    def __init__(self, make: Families) -> None:
        self.read_cpu_s: Callable[[], Mapping[str, float]] = dict
        self._connected = make.gauge("front_worker_connected", "1 while the engine hears the worker.", ("worker",))
        self._lag_s = make.gauge("front_worker_loop_lag_seconds", "The latest timer of the newest second.", ("worker",))
        self._bytes = make.gauge("front_worker_resident_bytes", "Memory of the process.", ("worker",))
        self._calls = make.gauge("front_calls", "Requests that the engine has of the worker.", ("worker",))
        self._unsent = make.gauge("front_unsent_bytes", "Frames that the worker has not taken.", ("worker",))
        self._started: dict[str, float] = {}
        ReadCounter(
            make.registry,
            "npu_gr_front_worker_starts",
            "Times that a worker was started.",
            "worker",
            lambda: self._started,
        )
        ReadCounter(
            make.registry,
            "npu_gr_front_worker_cpu_seconds",
            "CPU time of the worker since its start.",
            "worker",
            lambda: self.read_cpu_s(),
        )

    def observe(self, worker: int, read: Mapping[str, Callable[[], float]]) -> None:
        """Export a worker.

        Args:
            worker: its number.
            read: connected, lag_s, resident_bytes, calls and unsent_bytes.
        """
        name = str(worker)
        self._connected.labels(name).set_function(read["connected"])
        self._lag_s.labels(name).set_function(read["lag_s"])
        self._bytes.labels(name).set_function(read["resident_bytes"])
        self._calls.labels(name).set_function(read["calls"])
        self._unsent.labels(name).set_function(read["unsent_bytes"])

    def started(self, worker: int, starts: int) -> None:
        """Say how often a worker was started, which the supervisor counts: it outlives the engine."""
        self._started[str(worker)] = starts
