"""A histogram that sorts its observations later equals Prometheus' own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from npu_gr.core.renamed import METRICS, UNTIL
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.families import MAX_PENDING, Families, QuickHistogram
from npu_gr.service.config import SLOConfig

EDGES = (0.001, 0.01, 1.0)


def samples(family: Histogram) -> dict[tuple[str, str], float]:
    (metric,) = family.collect()
    return {
        (sample.name, str(sample.labels)): sample.value
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


@settings(deadline=None, derandomize=True)
@given(
    amounts=st.lists(
        st.one_of(st.sampled_from([*EDGES, 0.0, -1.0, float("inf")]), st.floats(-1.0, 2.0)),
        max_size=3 * MAX_PENDING,
    ),
    read_after=st.integers(0, 3 * MAX_PENDING),
)
def test_it_counts_as_prometheus_does(amounts: list[float], read_after: int) -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    ours = Families(registries[0]).histogram("took_seconds", "x", EDGES)
    theirs = Histogram("npu_gr_took_seconds", "x", buckets=EDGES, registry=registries[1])
    for number, amount in enumerate(amounts):
        ours.observe(amount)
        theirs.observe(amount)
        if number == read_after:
            assert samples(ours) == samples(theirs)
    read, wanted = samples(ours), samples(theirs)
    total = "npu_gr_took_seconds_sum", "{}"
    assert abs(read.pop(total, 0.0) - wanted.pop(total, 0.0)) < 1e-9 or float("inf") in amounts
    assert read == wanted


def test_nothing_is_lost_between_threads_that_observe_and_one_that_reads() -> None:
    family = Families(CollectorRegistry()).histogram("took_seconds", "x", EDGES, ("stage",))
    child = family.labels("rank")
    assert isinstance(child, QuickHistogram)
    num_threads, num_each = 4, 10 * MAX_PENDING

    def observe() -> None:
        for _ in range(num_each):
            child.observe(0.5)

    threads = [threading.Thread(target=observe) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        child.fold()
    count = samples(family)["npu_gr_took_seconds_count", "{'stage': 'rank'}"]
    assert count == num_threads * num_each


@pytest.mark.parametrize(("old", "new"), METRICS.items())
def test_a_family_is_there_under_its_old_name_too(old: str, new: str) -> None:
    name = new.removeprefix("npu_gr_")
    registry = CollectorRegistry()
    make = Families(registry)
    family: Counter | Gauge = (
        make.counter(name, "x", ("kind",))
        if name.endswith("_total")
        else make.gauge(name, "x", ("kind",))
    )
    family.labels("rank").inc(3)
    text = generate_latest(registry).decode()
    assert f'{old}{{kind="rank"}} 3.0\n' in text
    assert f'{new}{{kind="rank"}} 3.0\n' in text
    assert f"# HELP {old} Deprecated: use {new}; goes with npu_gr {UNTIL}.\n" in text
    restricted: Any = registry.restricted_registry([old])
    assert [one.name for family in restricted.collect() for one in family.samples] == [old]


def test_every_old_name_is_of_a_family_of_an_instance() -> None:
    registry = CollectorRegistry()
    Metrics(registry, SLOConfig().objectives())
    text = generate_latest(registry).decode()
    assert {name for name in METRICS if f"# HELP {name} Deprecated" in text} == set(METRICS)
