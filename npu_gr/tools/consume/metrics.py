"""What a consumer counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from npu_gr.core.errors import ConfigError


class ConsumeMetrics:
    """The metrics of one consumer, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.messages = Counter(
            "npu_gr_consume_messages",
            "Messages by what became of them: written, known (read again, and counted before), dead.",
            ("result",),
            registry=self.registry,
        )
        self.retries = Counter(
            "npu_gr_consume_retries", "Rounds that were tried again: the store had no room.", registry=self.registry
        )
        self.lag = Gauge(
            "npu_gr_consume_lag_messages",
            "Messages of a partition that are not committed yet.",
            ("topic", "partition"),
            registry=self.registry,
        )
        for result in ("written", "known", "dead"):
            self.messages.labels(result)

    def serve(self, host: str, port: int) -> None:
        """Answer /metrics in a thread.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(f"--metrics-port: {host}:{port}: {error.strerror}") from error
