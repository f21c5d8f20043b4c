"""The process: admission, its event loop, its limits, what it runs, its reloads, its keys, its recorder.

A rejected reload leaves what served before in service, so nothing else shows it: an operator would
believe that the new checkpoint serves.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Info
from prometheus_client.process_collector import ProcessCollector

from npu_gr import __version__
from npu_gr.core.kinds import KINDS
from npu_gr.core.logs import num_lines_dropped
from npu_gr.core.served import ModelInfo
from npu_gr.metrics.registry.families import LAG_S, Families, ReadCounter


class ProcessMetrics:
    """What is neither a request nor the device."""

    def __init__(self, make: Families) -> None:
        # apart: it reads files when it is asked
        self.collector = ProcessCollector(registry=CollectorRegistry())
        self._lag_s = make.histogram(
            "event_loop_lag_seconds", "How late timers fire, of all instants alike.", LAG_S
        )
        self.loop_froze = make.counter(
            "event_loop_freezes_total", "Times that the event loop stood still."
        ).inc
        ReadCounter(
            make.registry,
            "npu_gr_log_lines_dropped",
            "Log lines that nobody took.",
            "stream",
            num_lines_dropped,
        )
        pauses = make.histogram(
            "gc_pause_seconds", "Pauses of the garbage collector.", LAG_S, ("generation",)
        )
        self._gc_s = [pauses.labels(str(generation)) for generation in range(3)]
        self._limits = make.gauge(
            "limit", "Effective limits: requests, jobs, rows, tokens, bytes, seconds.", ("name",)
        )
        self._expires_at = make.gauge(
            "tls_certificate_expires_at_seconds",
            "When a certificate in force expires, in unix seconds.",
            ("of",),
        )
        self._ready = make.gauge("ready", "1 while new work is welcome.")
        self._build = Info("npu_gr_build", "What is running.", registry=make.registry)
        recorded = make.counter("recorded_total", "Requests offered to the recorder.", ("result",))
        self._recorded = {
            result: recorded.labels(result) for result in ("written", "dropped", "failed", "erased")
        }

    def loop_lagged(self, seconds: float) -> None:
        """Record how late a timer fired."""
        self._lag_s.observe(seconds)

    def gc_paused(self, generation: int, seconds: float) -> None:
        """Record a pause of the garbage collector, which stops every thread."""
        self._gc_s[generation].observe(seconds)

    def recorded(self, result: str, num: int) -> None:
        """Count requests that the recorder has written, dropped, failed to write, or erased.

        From any thread.
        """
        self._recorded[result].inc(num)

    def observe_ready(self, read: Callable[[], tuple[bool, str]]) -> None:
        """Export whether new work is welcome, read at each scrape."""
        self._ready.set_function(lambda: read()[0])

    def observe_certificate(self, of: str, read: Callable[[], float]) -> None:
        """Export when a certificate in force expires, read at each scrape: the files are followed."""
        self._expires_at.labels(of).set_function(read)

    def observe_limits(self, named: Mapping[str, Callable[[], float]]) -> None:
        """Export the limits in force, read at each scrape: a reload may change them."""
        for name, read in named.items():
            self._limits.labels(name).set_function(read)

    def runs(self, model: ModelInfo) -> None:
        """Say what is running."""
        self._build.info(
            {
                "version": __version__,
                "model": model.name,
                "model_version": model.version,
                "device": model.device,
                "native": str(model.kernels != "torch").lower(),
                "kernels": model.kernels,  # torch, or the instruction set of the native ones
            }
        )


class Reloaded(StrEnum):
    """What can be read again while the instance serves; the value of the metric label `what`."""

    CONFIGURATION = "configuration"  # the file with every section; models too
    CATALOGUE = "catalogue"  # the items that generates find
    VECTORS = "vectors"  # what matches search


class ReloadMetrics:
    """The last reload of each thing that an instance serves.

    A thing that it does not serve has no series.
    """

    def __init__(self, make: Families, clock: Callable[[], float] = time.time) -> None:
        """Make the families.

        Args:
            make: on which registry.
            clock: unix seconds.
        """
        self._clock = clock
        self._successful = make.gauge(
            "last_reload_successful",
            "1 if the last reload took effect, 0 if it was rejected.",
            ("what",),
        )
        self._success_at = make.gauge(
            "last_reload_success_timestamp_seconds",
            "When what serves now was loaded, in unix seconds.",
            ("what",),
        )

    def loaded(self, what: Reloaded) -> None:
        """Record that something was loaded, at the start or by a reload."""
        self._successful.labels(what.value).set(1)
        self._success_at.labels(what.value).set(self._clock())

    @contextmanager
    def attempt(self, what: Reloaded) -> Iterator[None]:
        """Record how the block ends: it reloads, or it raises, and what served before goes on."""
        try:
            yield
        except (
            BaseException
        ):  # a caller who leaves in the middle did not get what it asked for either
            self._successful.labels(what.value).set(0)
            raise
        self.loaded(what)


class KeyMetrics:
    """Rejections by reason, and gauges that are read when they are scraped."""

    def __init__(self, make: Families) -> None:
        self._rejected = make.counter(
            "api_keys_rejected_total", "Requests rejected for their API key.", ("reason",)
        )
        self._in_force = make.gauge("api_keys", "API keys in force; expired ones are not.")
        self._is_stale = make.gauge(
            "api_keys_file_stale", "1 while the key file cannot be used: older keys hold."
        )

    def observe(
        self, reasons: Iterable[str], in_force: Callable[[], int], is_stale: Callable[[], bool]
    ) -> None:
        """Export what is true when it is scraped.

        Args:
            reasons: every value of the label `reason`.
            in_force: counts the keys.
            is_stale: whether the file cannot be used.
        """
        for reason in reasons:
            self._rejected.labels(reason)
        self._in_force.set_function(in_force)
        self._is_stale.set_function(is_stale)

    def rejected(self, reason: str) -> None:
        """Count a request."""
        self._rejected.labels(reason).inc()


@contextmanager
def noted_pauses(observe: Callable[[int, float], None]) -> Iterator[Callable[[], None]]:
    """Note the pauses while the block runs.

    Yields:
        A function that calls `observe(generation, seconds)` for each pause noted since its last
        call.
    """
    noted: deque[tuple[int, float]] = deque(maxlen=4096)
    began_at = 0.0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal began_at
        if phase == "start":
            began_at = time.perf_counter()
        else:
            noted.append((info["generation"], time.perf_counter() - began_at))

    def drain() -> None:
        while noted:
            observe(*noted.popleft())

    gc.callbacks.append(on_collection)
    try:
        yield drain
    finally:
        gc.callbacks.remove(on_collection)


PLACES = ("waiting", "inside", "outside")


class ObservedAdmission(Protocol):
    """What can be read of a door."""

    def counts(self, kind: str) -> dict[str, int]:
        """Requests of a kind by where they are: `PLACES`."""

    def service_time_s(self, kind: str) -> float:
        """Seconds a request of a kind."""

    def concurrency_limit(self, kind: str) -> int:
        """Requests of a kind that may be inside where there are no others."""


class AdmissionMetrics:
    """Gauges that are read when they are scraped."""

    def __init__(self, make: Families) -> None:
        self._requests = make.gauge(
            "admission_requests", "Requests at the door now.", ("kind", "place")
        )
        self._pace_s = make.gauge(
            "admission_service_time_seconds",
            "Seconds a request, learnt from departures.",
            ("kind",),
        )
        self._window = make.gauge(
            "admission_concurrency_limit", "Requests of the kind that may be inside.", ("kind",)
        )
        self._paused = make.gauge(
            "rejections_paused", "Rejections that wait, so that clients who retry are paced."
        )
        self._receiving = make.gauge(
            "receiving_bytes", "Bodies that have arrived and are not answered."
        )

    def observe(
        self,
        door: ObservedAdmission,
        paused: Callable[[], int],
        receiving_bytes: Callable[[], int],
    ) -> None:
        """Export what is true when it is scraped.

        Args:
            door: whose places and paces.
            paused: counts rejections that wait.
            receiving_bytes: of bodies.
        """
        for kind in KINDS:
            for place in PLACES:
                self._requests.labels(kind, place).set_function(partial(_count, door, kind, place))
            self._pace_s.labels(kind).set_function(partial(door.service_time_s, kind))
            self._window.labels(kind).set_function(partial(door.concurrency_limit, kind))
        self._paused.set_function(paused)
        self._receiving.set_function(receiving_bytes)


def _count(door: ObservedAdmission, kind: str, place: str) -> int:
    return door.counts(kind)[place]
