"""A broker for tests: no Kafka, but its protocol."""

from __future__ import annotations

from typing import Any

import pytest

NUM_PARTITIONS = 4


class Broker:
    """librdkafka's mock cluster: brokers on loopback with groups and offsets."""

    def __init__(self) -> None:
        kafka = pytest.importorskip("confluent_kafka")
        self._producer: Any = kafka.Producer(
            {"bootstrap.servers": "mock", "test.mock.num.brokers": 1}
        )
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def send(self, values: list[tuple[int, bytes]], topic: str = "events") -> None:
        for partition, value in values:
            self._producer.produce(topic, value, partition=partition % NUM_PARTITIONS)
        assert self._producer.flush(30) == 0
