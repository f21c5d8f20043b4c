"""The last lines of the demo say what was made, how fast it is, and what to type next."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest

from npu_gr.catalogue.names import EMPTY
from npu_gr.core import shipped
from npu_gr.core.errors import Unavailable
from npu_gr.dataset.files import Dataset
from npu_gr.history_store.interactions import Interactions
from npu_gr.replay.convert import ModelVocabulary
from npu_gr.replay.report import Latencies, Report
from npu_gr.service.config import load
from npu_gr.tools.demo import MadeDemo, longest_users, sum_up
from npu_gr.tools.demo_instance import started
from npu_gr.tools.demo_relay import (
    NUM_ITEMS,
    USERS,
    VISITS,
    LengthResult,
    _instance,
    conclusion,
    histories,
    plot,
    table,
    traffic,
)
from npu_gr.tools.evaluate import ServiceEvaluation
from npu_gr.train.site.report import SiteReport
from tests.replay.test_report import report

LOG = Interactions(
    np.zeros(6, np.int32), np.arange(6), np.full(6, 4.0), np.arange(6) + 800_000_000, ["it's me"]
)


def found(num_within: int, **more: object) -> Report:
    times = [
        Latencies(name="rank", count=100, ms={"p50": 5.4, "p95": 9.0, "p99": 36.0, "p99.9": 40.0})
    ]
    outcomes = {"hbm_hit": 98, "miss_full": 2}
    made = report([], 0.05, {})
    return dataclasses.replace(
        made,
        num_ranks=100,
        num_within_slo=num_within,
        latencies=times,
        outcomes=outcomes,
        **more,  # type: ignore[arg-type]
    )


def lines(measured: Report, *, has_longest: bool = False) -> list[str]:
    site = SiteReport(made_at="", dataset="d", num_events=6, num_users=1, num_items=6, parts={})
    made = MadeDemo(Path(".demo"), cast(Dataset, SimpleNamespace(names=EMPTY)), LOG, site)
    ranks = {"generate": [0.0, 30.0], "rank": [3.0, 4.0], "recommend": [1.0, 2.0]}
    evaluation = ServiceEvaluation(
        ranks=ranks,
        seconds={way: [0.01, 0.02] for way in ranks},
        sources={"generate": 100},
        order="fused",
        retrieved=1.0,
        outcomes={},
        hides_seen=True,
    )
    slower = dataclasses.replace(
        found(90), num_ranks=30, stages_p50_ms={"queue": 0.1, "device": 2.8}
    )
    by_length = [] if has_longest else RELAY_PAYS
    return sum_up(made, measured, slower if has_longest else None, evaluation, by_length, 0.99)


def by_length(*factors: float, lag_ms: float = 1.0, errors: int = 0) -> list[LengthResult]:
    """Results of 128 events, 256 events ...: the relay takes 10 ms, the other so often as much."""
    return [
        LengthResult(128 << place, 5.0, *(timed(ms, lag_ms, errors) for ms in (10 * factor, 10)))
        for place, factor in enumerate(factors)
    ]


def timed(ms: float, lag_ms: float, errors: int) -> Report:
    times = [Latencies(name="rank", count=100, ms={"p50": ms / 2, "p99": ms})]
    return dataclasses.replace(
        found(99), latencies=times, lag_ms={"p99": lag_ms}, errors={"rank 503": errors}
    )


RELAY_PAYS = by_length(0.9, 1.1, 2.0, 4.0)


def test_the_summary_is_short_and_says_what_to_type() -> None:
    text = lines(found(99))
    assert len(text) <= 12
    whole = "\n".join(text)
    assert "P50 5.4 ms, P99 36.0 ms: 99.0% of 100 ranks within 50 ms (objective 99%: met)" in whole
    assert "98.0% of the ranks found the user's KV ready" in whole
    assert "recommend 1.000; generate alone 0.500, rank alone 1.000" in whole
    assert "npu-gr serve --config .demo/serve.yaml" in whole
    assert """-d '{"user_id": "it'"'"'s me", """ in whole


def test_it_ends_with_where_the_relay_pays_and_where_it_does_not() -> None:
    pays, does_not = [line for line in lines(found(99)) if line.startswith("relay")]
    assert "pays from 512 events on" in pays
    assert "of 1,024 events P99 is 10.0 ms with it and 40.0 ms without it (4.0x)" in pays
    assert "Below about 512 events" in does_not
    assert "leave relay.enabled false" in does_not
    assert "Latency of a rank" in plot(RELAY_PAYS)
    assert len(table(RELAY_PAYS).rows) == 4


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (by_length(2.0, 1.0), "does not pay at any of these lengths"),  # the longest decides
        (by_length(2.0, 3.0), "pays from 128 events on"),
        (by_length(1.0, 3.0, lag_ms=90), "requests leave up to 90 ms late"),
        (by_length(1.0, 3.0, errors=2), "8 requests failed"),
    ],
)
def test_a_doubtful_comparison_is_called_so(results: list[LengthResult], said: str) -> None:
    assert said in "\n".join(conclusion(results))


def test_ranks_that_were_rejected_or_truncated_are_counted() -> None:
    (result,) = by_length(4.0)
    without = dataclasses.replace(result.without, errors={"rank 429": 2, "events 429": 1})
    with_relay = dataclasses.replace(result.with_relay, outcomes={"hbm_hit": 96, "degraded": 3})
    protected = dataclasses.replace(result, without=without, with_relay=with_relay)
    assert protected.num_protected == 5
    assert "rejected or truncated 5" in "\n".join(conclusion([protected]))
    assert "rejected" not in "\n".join(conclusion([result]))


def test_the_relay_is_measured_with_the_configuration_that_ships(tmp_path: Path) -> None:
    off, on = (_instance(tmp_path, name).config for name in ("without", "with"))
    shipped_config = load(shipped.path("configs/cpu.yaml"))
    for config in (off, on):
        for section in ("admission", "brownout", "scheduler", "slo", "trigger", "kv_cache"):
            assert getattr(config, section) == getattr(shipped_config, section), section
    assert (off.relay.enabled, on.relay.enabled) == (False, True)
    assert msgspec.structs.replace(off.relay, enabled=True) == on.relay == shipped_config.relay


def test_a_busy_machine_is_compared_by_the_median() -> None:
    assert "P50 is 5.0 ms with it" in "\n".join(conclusion(by_length(1.0, 3.0, lag_ms=90)))


def test_both_services_get_the_same_requests_of_users_who_come_back() -> None:
    vocabulary = ModelVocabulary(item_ids=np.arange(NUM_ITEMS), action_values=(1.0,))
    records = traffic(128, vocabulary)
    assert records == traffic(128, vocabulary)
    ranks = Counter(record.user_id for record in records if record.kind == "rank")
    assert set(ranks.values()) == {VISITS}
    events = histories([128, 512])
    assert set(ranks) == set(events.user_names[:USERS])
    assert np.bincount(events.users).tolist() == [128] * USERS + [512] * USERS
    assert events.timestamps.tolist() == sorted(events.timestamps)


def test_with_longest_it_says_what_the_relay_saves_the_device() -> None:
    fast = found(99, stages_p50_ms={"device": 1.24})
    whole = "\n".join(lines(fast, has_longest=True))
    assert "P50 of a rank on the device 1.2 ms, without the relay 2.8 ms" in whole
    assert "on the device" not in "\n".join(lines(found(99), has_longest=True))


@pytest.mark.parametrize(("num_within", "verdict"), [(98, "MISSED"), (99, "met")])
def test_a_missed_objective_is_called_so(num_within: int, verdict: str) -> None:
    assert any(f"objective 99%: {verdict}" in line for line in lines(found(num_within)))
    assert not any("load generator" in line for line in lines(found(num_within)))


def test_a_late_load_generator_is_called_so() -> None:
    late = found(99, lag_ms={"p99": 20.0})
    assert any("the load generator was late" in line for line in lines(late))


def test_the_longest_users_are_those_with_the_most_events() -> None:
    users = np.array([0, 1, 1, 2, 2, 2, 3, 3], np.int32)
    log = Interactions(users, np.arange(8), np.ones(8), np.arange(8), ["a", "b", "c", "d", "never"])
    assert longest_users(log, 2) == {"c", "b"}
    assert longest_users(log, 9) == {"a", "b", "c", "d", "never"}


async def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "print('first'); print('port 1 is in use'); raise SystemExit(2)",
    ]
    with pytest.raises(
        Unavailable, match=r"it did not start; its log: .*ends with: port 1 is in use"
    ):
        await started("it", command, "http://127.0.0.1:1/", tmp_path / "log")
