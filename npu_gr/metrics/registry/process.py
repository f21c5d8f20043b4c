"""Metrics of the process: event loop, limits, version, recorder, reloads, API keys, admission."""

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
from npu_gr.core.health import Health
from npu_gr.core.kinds import KINDS
from npu_gr.core.logs import num_lines_dropped
from npu_gr.core.served import DeltaInfo, ModelInfo
from npu_gr.metrics.registry.families import LAG_S, LATENCY_S, Families, ReadCounter, ReadGauge


class ProcessMetrics:
    """Metrics of the process itself: event loop, garbage collector, limits, version, recorder."""

    def __init__(self, make: Families) -> None:
        self._registry = make.registry
        # on a registry of its own, because it reads files: `exposition.py` runs it in a thread
        self.collector = ProcessCollector(registry=CollectorRegistry())
        self._lag_s = make.histogram(
            "event_loop_lag_seconds", "How late timers of the event loop fire, sampled.", LAG_S
        )
        self.loop_froze = make.counter(
            "event_loop_freezes_total", "Times that the event loop was blocked for too long."
        ).inc
        ReadCounter(
            make.registry,
            "npu_gr_log_lines_dropped",
            "Log lines that were dropped, because the reader of the stream was too slow.",
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
            "Expiry of the current TLS certificate, in unix seconds.",
            ("of",),
        )
        self._ready = make.gauge("ready", "1 while the instance accepts new requests.")
        self._build = Info("npu_gr_build", "What is running.", registry=make.registry)
        self._recorder_on = make.gauge(
            "recorder_on",
            "1 while requests are recorded; `enabled`: whether record.enabled says that they are.",
            ("enabled",),
        )
        recorded = make.counter("recorded_total", "Requests offered to the recorder.", ("result",))
        self._recorded = {
            result: recorded.labels(result) for result in ("written", "dropped", "failed", "erased")
        }

        spans = make.counter("spans_total", "Spans, and those a collector took.", ("result",))
        self._spans = {result: spans.labels(result) for result in ("ended", "sent")}

    def spans(self, result: str, num: int) -> None:
        """Count spans, from any thread; `result` is ended, or sent: the collector took them."""
        self._spans[result].inc(num)

    def loop_lagged(self, seconds: float) -> None:
        """Record how late a timer fired."""
        self._lag_s.observe(seconds)

    def gc_paused(self, generation: int, seconds: float) -> None:
        """Record a pause of the garbage collector, which stops every thread."""
        self._gc_s[generation].observe(seconds)

    def recorded(self, result: str, num: int) -> None:
        """Count requests by what the recorder did with them, from any thread.

        `result` is written, dropped, failed or erased.
        """
        self._recorded[result].inc(num)

    def observe_recorder(self, read: Callable[[], bool], *, is_enabled: bool) -> None:
        """Export whether requests are recorded, read at each scrape.

        Args:
            read: Function that returns whether they are.
            is_enabled: Whether the configuration says that they are from the start.
        """
        self._recorder_on.labels(str(is_enabled).lower()).set_function(read)

    def observe_ready(self, read: Callable[[], tuple[bool, str]]) -> None:
        """Export whether the instance accepts new requests, read at each scrape."""
        self._ready.set_function(lambda: read()[0])

    def observe_health(self, health: Health) -> None:
        """Export what the workers do, read at each scrape."""
        ReadGauge(
            self._registry,
            "npu_gr_device_pass_age_seconds",
            "Time since the running pass of a device thread began; 0 = none runs.",
            "worker",
            lambda: {name: s for name, s in health.ages_s().items() if name.startswith("device_")},
        )
        ReadGauge(
            self._registry,
            "npu_gr_work_late",
            "1 while a thread or task has not moved for longer than its limit.",
            "worker",
            lambda: {name: float(late is not None) for name, late in health.late().items()},
        )

    def observe_certificate(self, of: str, read: Callable[[], float]) -> None:
        """Export the expiry of the current certificate, read at each scrape."""
        self._expires_at.labels(of).set_function(read)

    def observe_limits(self, named: Mapping[str, Callable[[], float]]) -> None:
        """Export the current limits, read at each scrape, because a reload may change them."""
        for name, read in named.items():
            self._limits.labels(name).set_function(read)

    def runs(self, model: ModelInfo) -> None:
        """Export the versions of the program and of the served model."""
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
    """What can be reloaded while the instance serves; the value of the metric label `what`."""

    CONFIGURATION = "configuration"  # the configuration file, with the models that it names
    CATALOGUE = "catalogue"  # the items of generate
    VECTORS = "vectors"  # the vectors of match
    DELTA = "delta"  # the ranker's weights, by a delta


class ReloadMetrics:
    """The result of the last reload of each thing that an instance serves.

    A rejected reload leaves the earlier version in service, so only these metrics show an operator
    that the new one is not served. A thing that the instance does not serve has no series.
    """

    def __init__(self, make: Families, clock: Callable[[], float] = time.time) -> None:
        """Make the families.

        Args:
            make: Families of the registry to use.
            clock: Clock, in unix seconds.
        """
        self._clock = clock
        self._successful = make.gauge(
            "last_reload_successful",
            "1 if the last reload took effect, 0 if it was rejected.",
            ("what",),
        )
        self._success_at = make.gauge(
            "last_reload_success_timestamp_seconds",
            "Time at which the served version was loaded, in unix seconds.",
            ("what",),
        )
        self._sequence = make.gauge(
            "delta_sequence", "Number of the delta that the ranker serves; 0 = its checkpoint."
        )
        self._made_at = make.gauge(
            "delta_made_timestamp_seconds",
            "Time at which the served delta was made, in unix seconds; 0 = none is served.",
        )
        self._rows = make.counter("delta_rows_total", "Rows of tensors that deltas have changed.")
        self._delta_s = make.histogram(
            "delta_duration_seconds", "Time from a durable delta until it is served.", LATENCY_S
        )

    def observe_delta(self, read: Callable[[], DeltaInfo]) -> None:
        """Export the served delta, read at each scrape."""
        self._sequence.set_function(lambda: read().sequence)
        self._made_at.set_function(lambda: read().made_at)

    def moved(self, num_rows: int, seconds: float) -> None:
        """Count a change of the served delta."""
        self._rows.inc(num_rows)
        self._delta_s.observe(seconds)

    def loaded(self, what: Reloaded) -> None:
        """Record that something was loaded, at the start or by a reload."""
        self._successful.labels(what.value).set(1)
        self._success_at.labels(what.value).set(self._clock())

    def failed(self, what: Reloaded) -> None:
        """Record that something could not be loaded."""
        self._successful.labels(what.value).set(0)

    @contextmanager
    def attempt(self, what: Reloaded) -> Iterator[None]:
        """Record whether the block, which reloads, succeeds or raises."""
        try:
            yield
        except BaseException:  # also CancelledError: the client disconnected during the reload
            self.failed(what)
            raise
        self.loaded(what)


class KeyMetrics:
    """Metrics of API keys: rejected requests, and the state of the key file."""

    def __init__(self, make: Families) -> None:
        self._rejected = make.counter(
            "api_keys_rejected_total", "Requests rejected for their API key.", ("reason",)
        )
        self._num_valid = make.gauge("api_keys", "Valid API keys, without expired ones.")
        self._is_stale = make.gauge(
            "api_keys_file_stale",
            "1 while the key file cannot be read, and the keys read before are used.",
        )

    def observe(
        self, reasons: Iterable[str], num_valid: Callable[[], int], is_stale: Callable[[], bool]
    ) -> None:
        """Export the state of the keys, read at each scrape.

        Args:
            reasons: All values of the label `reason`.
            num_valid: Function that counts the valid keys.
            is_stale: Function that returns whether the key file cannot be read.
        """
        for reason in reasons:
            self._rejected.labels(reason)
        self._num_valid.set_function(num_valid)
        self._is_stale.set_function(is_stale)

    def rejected(self, reason: str) -> None:
        """Count a rejected request."""
        self._rejected.labels(reason).inc()


@contextmanager
def noted_pauses(observe: Callable[[int, float], None]) -> Iterator[Callable[[], None]]:
    """Note the pauses of the garbage collector while the block runs.

    Pauses are noted first and observed later, because the collector may interrupt code that holds
    a metric's lock.

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


PLACES = ("waiting", "active", "suspended")


class ObservedAdmission(Protocol):
    """What the metrics read of the admission controller."""

    def counts(self, kind: str) -> dict[str, int]:
        """Return the requests of a kind by state, see `PLACES`."""

    def service_time_s(self, kind: str) -> float:
        """Return the service-time estimate of a kind, in seconds per request."""

    def concurrency_limit(self, kind: str) -> int:
        """Return the concurrency limit of a kind, if there are no requests of other kinds."""


class AdmissionMetrics:
    """Metrics of admission control, read at each scrape."""

    def __init__(self, make: Families) -> None:
        self._requests = make.gauge(
            "admission_requests",
            "Requests in admission control now: waiting, inside (active) or outside (suspended).",
            ("kind", "place"),
        )
        self._service_time_s = make.gauge(
            "admission_service_time_seconds",
            "Service-time estimate, in seconds per request.",
            ("kind",),
        )
        self._concurrency_limit = make.gauge(
            "admission_concurrency_limit", "Most active requests of the kind.", ("kind",)
        )
        self._paused = make.gauge(
            "rejections_paused", "Rejections that are delayed, to slow down clients that retry."
        )
        self._receiving = make.gauge(
            "receiving_bytes", "Bytes of request bodies that have arrived and are not answered yet."
        )

    def observe(
        self,
        controller: ObservedAdmission,
        paused: Callable[[], int],
        receiving_bytes: Callable[[], int],
    ) -> None:
        """Export the state of admission control, read at each scrape.

        Args:
            controller: Admission controller.
            paused: Function that counts the delayed rejections.
            receiving_bytes: Function that returns the bytes of bodies in memory.
        """
        for kind in KINDS:
            for place in PLACES:
                self._requests.labels(kind, place).set_function(
                    partial(_count, controller, kind, place)
                )
            self._service_time_s.labels(kind).set_function(partial(controller.service_time_s, kind))
            self._concurrency_limit.labels(kind).set_function(
                partial(controller.concurrency_limit, kind)
            )
        self._paused.set_function(paused)
        self._receiving.set_function(receiving_bytes)


def _count(controller: ObservedAdmission, kind: str, place: str) -> int:
    return controller.counts(kind)[place]
