"""The process: its event loop, its limits, what it runs, its recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Info
from prometheus_client.process_collector import ProcessCollector

from npu_gr import __version__
from npu_gr.core.logs import num_lines_dropped
from npu_gr.core.served import ModelInfo
from npu_gr.metrics.registry.families import LAG_S, Families, ReadCounter


class ProcessMetrics:
    """What is neither a request nor the device."""

    def __init__(self, make: Families) -> None:
        self.lines_dropped_elsewhere: Callable[[], Mapping[str, int]] = dict
        self.collector = ProcessCollector(registry=CollectorRegistry())  # apart: it reads files when it is asked
        self._lag_s = make.histogram("event_loop_lag_seconds", "How late timers fire, of all instants alike.", LAG_S)
        self.loop_froze = make.counter("event_loop_freezes_total", "Times that the event loop stood still.").inc
        ReadCounter(
            make.registry, "npu_gr_log_lines_dropped", "Log lines that nobody took.", "stream", self._lines_dropped
        )
        pauses = make.histogram("gc_pause_seconds", "Pauses of the garbage collector.", LAG_S, ("generation",))
        self._gc_s = [pauses.labels(str(generation)) for generation in range(3)]
        self._limits = make.gauge("limit", "Effective limits: requests, jobs, rows, tokens, bytes, seconds.", ("name",))
        self._expires_at = make.gauge(
            "tls_certificate_expires_at_seconds", "When a certificate in force expires, in unix seconds.", ("of",)
        )
        self._ready = make.gauge("ready", "1 while new work is welcome.")
        self._build = Info("npu_gr_build", "What is running.", registry=make.registry)
        recorded = make.counter("recorded_total", "Requests offered to the recorder.", ("result",))
        self._recorded = {result: recorded.labels(result) for result in ("written", "dropped", "failed", "erased")}

    def _lines_dropped(self) -> Mapping[str, float]:
        elsewhere = self.lines_dropped_elsewhere()
        return {stream: num + elsewhere.get(stream, 0) for stream, num in num_lines_dropped().items()}

    def loop_lagged(self, seconds: float) -> None:
        """Record how late a timer fired."""
        self._lag_s.observe(seconds)

    def gc_paused(self, generation: int, seconds: float) -> None:
        """Record a pause of the garbage collector, which stops every thread."""
        self._gc_s[generation].observe(seconds)

    def recorded(self, result: str, num: int) -> None:
        """Count requests that the recorder has written, dropped, failed to write, or erased. From any thread."""
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
