"""The device's queue, its passes, and what runs the backend's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.registry.families import POWERS, Families

WORKS = (*(name for name, kind in KINDS.items() if kind.uses_device), "prefill", "copy", "other")


class EngineMetrics:
    """Reported by the device threads."""

    def __init__(self, make: Families) -> None:
        self.queue_depth: Callable[[], int] = lambda: 0  # for the status page
        self._queue_depth = make.gauge("queue_depth", "Jobs waiting for the device.")
        self._batch = make.histogram("batch_requests", "Requests scored in one pass.", POWERS[:6])
        self._batch_rows = make.histogram(
            "batch_rows", "Rows in one pass; passes are ragged, no row is padding.", POWERS
        )
        busy = make.counter("device_busy_seconds_total", "Time the device thread worked.", ("work",))
        self._busy = {work: busy.labels(work) for work in WORKS}
        self._chosen: dict[str, str] = {}
        self._ops = make.gauge("backend_op_info", "1 for what runs an op of the backend.", ("op", "impl"))
        self._fallbacks = make.counter(
            "backend_fallbacks_total", "Calls that an op's implementation did not take.", ("op",)
        )

    def observe_queue(self, depth: Callable[[], int]) -> None:
        """Export how many jobs wait, read at each scrape."""
        self._queue_depth.set_function(depth)
        self.queue_depth = depth

    def batch_done(self, num_requests: int, num_rows: int) -> None:
        """Record a pass that requests shared."""
        self._batch.observe(num_requests)
        self._batch_rows.observe(num_rows)

    def worked(self, work: str, seconds: float) -> None:
        """Count seconds that a device thread was busy; `work` is one of `WORKS`."""
        self._busy[work].inc(seconds)

    def ops_chosen(self, ops: Mapping[str, str]) -> None:
        """Export what runs each operator that has a choice, in place of what was exported before."""
        for op, impl in ops.items():
            if self._chosen.get(op, impl) != impl:
                self._ops.labels(op, self._chosen[op]).set(0)
            self._chosen[op] = impl
            self._ops.labels(op, impl).set(1)
            self._fallbacks.labels(op)

    def fell_back(self, op: str) -> None:
        """Count a call that ran as torch operators because the op's implementation did not take it."""
        self._fallbacks.labels(op).inc()
