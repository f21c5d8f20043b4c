"""A plan keeps the order and the distances of signals, and is deterministic for a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.replay.log import LoggedHistory, QueryRecord
from npu_gr.replay.plan import Action, ReplayOptions, plan

EVENTS = LoggedHistory(items=[1], actions=[0], timestamps=[1])


def options(**values: Any) -> ReplayOptions:
    return ReplayOptions(base_url="http://127.0.0.1:1", **values)


def record(kind: Any, ts: float, user: str = "a", tenant: str = "") -> QueryRecord:
    fields: dict[str, dict[str, Any]] = {
        "rank": {"candidates": [1, 2]},
        "events": {"events": EVENTS},
    }
    return QueryRecord(ts=ts, kind=kind, user_id=user, tenant=tenant, **fields.get(kind, {}))


def all_of(records: list[QueryRecord], options: ReplayOptions) -> list[Action]:
    return list(plan(sorted(records, key=lambda r: r.ts), options))


def shape(actions: list[Action]) -> list[tuple[str, float]]:
    return [(action.record.kind, pytest.approx(action.due_at)) for action in actions]  # type: ignore[misc]


def test_speed_scales_gaps_but_not_the_lead() -> None:
    log = [record("rank", 100.0), record("rank", 110.0, "b")]
    actions = all_of(log, options(speed=10.0, signal_lead_s=0.25))
    assert shape(actions) == [("signal", 0.0), ("rank", 0.25), ("signal", 1.0), ("rank", 1.25)]


def test_a_made_signal_has_the_ranks_user_history_and_number_of_candidates() -> None:
    rank = QueryRecord(
        ts=0,
        kind="rank",
        user_id="a",
        tenant="t",
        candidates=[5, 6],
        history=EVENTS,
        labels={"x": [1, 0]},
    )
    signal = all_of([rank], options(signal_lead_s=0.1))[0].record
    assert (signal.kind, signal.user_id, signal.tenant, signal.history) == (
        "signal",
        "a",
        "t",
        EVENTS,
    )
    assert len(signal.candidates) == 2


def test_a_signal_of_the_log_is_used_as_it_is_and_keeps_its_gap() -> None:
    log = [record("signal", 10.0), record("rank", 10.2), record("rank", 12.2)]
    actions = all_of(log, options(speed=2.0, signal_lead_s=0.5))
    assert shape(actions) == [("signal", 0.0), ("rank", 0.2), ("signal", 0.7), ("rank", 1.2)]


def test_without_a_lead_only_the_logs_own_signals_are_sent() -> None:
    assert [a.record.kind for a in all_of([record("signal", 0), record("rank", 1)], options())] == [
        "signal",
        "rank",
    ]
    assert [a.record.kind for a in all_of([record("rank", 1)], options())] == ["rank"]


def test_a_delay_makes_ts_the_arrival_signal_at_once_rank_after_it_also_under_speed() -> None:
    late = QueryRecord(ts=100.0, kind="rank", user_id="a", candidates=[1], delay_ms=400.0)
    assert shape(all_of([late, record("rank", 110.0, "b")], options(speed=10.0))) == [
        ("signal", 0.0), ("rank", 0.4), ("rank", 1.0),
    ]  # fmt: skip
    modelled = all_of(
        [record("rank", float(i), f"u{i}") for i in range(4000)], options(rank_delay_s=0.1, seed=1)
    )
    assert [a.due_at for a in modelled if a.record.kind == "rank"] == pytest.approx(
        [i + 0.1 for i in range(4000)]
    )


def test_modelled_delays_have_their_median_and_p99_and_leave_the_logs_own_signals_alone() -> None:
    model = options(rank_delay_s=0.05, rank_delay_p99_s=0.2, seed=1)
    log = [record("rank", float(i), f"u{i}") for i in range(4000)]
    actions = all_of(log, model)
    sent_at = {(a.record.kind, a.number): a.due_at for a in actions}
    delays_s = np.array([sent_at["rank", i] - sent_at["signal", i] for i in range(4000)])
    assert np.median(delays_s) == pytest.approx(0.05, rel=0.1)
    assert np.percentile(delays_s, 99) == pytest.approx(0.2, rel=0.15)
    assert shape(all_of([record("signal", 10.0), record("rank", 10.2)], model)) == [
        ("signal", 0.0),
        ("rank", 0.2),
    ]


def test_a_users_ranks_and_events_stay_in_the_logs_order_however_long_a_delay() -> None:
    late = QueryRecord(ts=0.0, kind="rank", user_id="a", candidates=[1], delay_ms=3000.0)
    actions = all_of(
        [late, record("events", 1.0), record("rank", 1.0, "b"), record("rank", 4.0)], options()
    )
    assert [(a.record.kind, a.record.user_id, a.due_at) for a in actions] == [
        ("signal", "a", 0.0), ("rank", "b", 1.0), ("rank", "a", 3.0),
        ("events", "a", 3.0), ("rank", "a", 4.0),
    ]  # fmt: skip


def test_a_share_of_the_users_is_the_same_users_always() -> None:
    log = [record("rank", float(i), f"u{i % 100}") for i in range(400)]
    some = all_of(log, options(sample_users=0.3))
    users = {a.record.user_id for a in some}
    assert 15 <= len(users) <= 45
    assert len(some) == 4 * len(users)
    assert [a.number for a in some] == [i for i in range(400) if f"u{i % 100}" in users]


def test_a_long_log_is_planned_while_it_is_read() -> None:
    read = 0

    def endless() -> Iterator[QueryRecord]:
        nonlocal read
        while True:
            read += 1
            yield record("signal" if read % 3 == 0 else "rank", read * 0.1, f"u{read}")

    for made, action in enumerate(plan(endless(), options(signal_lead_s=0.05)), 1):
        assert read - action.number < 120  # PAIR_S, and the signal that waits for a rank as long
        if made == 5000:
            break


def test_constant_rate_paces_the_ranks_and_spreads_the_rest_between() -> None:
    log = [record("rank", 0.0), record("events", 7.0), record("rank", 8.0), record("rank", 1000.0)]
    actions = all_of(log, options(rate=10.0, arrival="constant"))
    assert shape(actions) == [("rank", 0.0), ("events", 0.05), ("rank", 0.1), ("rank", 0.2)]


def test_poisson_arrivals_have_the_rate_and_repeat_with_the_seed() -> None:
    log = [record("rank", float(i), f"u{i}") for i in range(4000)]
    due_at = np.array([action.due_at for action in all_of(log, options(rate=200.0, seed=3))])
    gaps_s = np.diff(due_at)
    assert gaps_s.mean() == pytest.approx(1 / 200, rel=0.1)
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.1)  # exponential
    assert due_at.tolist() == [action.due_at for action in all_of(log, options(rate=200.0, seed=3))]
    assert due_at.tolist() != [action.due_at for action in all_of(log, options(rate=200.0, seed=4))]


def test_limit_and_duration_cut_the_log_and_leave_no_signal_without_its_rank() -> None:
    log = [record("rank", float(i)) for i in range(10)]
    cut = all_of(log, options(limit=3, signal_lead_s=0.5))
    assert [action.record.kind for action in cut] == ["signal", "rank"] * 3
    cut = all_of(log, options(speed=2.0, duration_s=1.5, signal_lead_s=0.9))
    assert sorted(action.record.kind for action in cut) == ["rank"] * 3 + ["signal"] * 3


def test_an_empty_log_is_an_empty_plan() -> None:
    assert all_of([], options()) == []
    assert all_of([], options(rate=5.0)) == []


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["rank", "signal", "events"]), st.integers(0, 5), st.sampled_from("ab")
        ),
        max_size=25,
    ),
    lead_s=st.sampled_from([None, 0.0, 0.3, 9.0]),
    pace=st.sampled_from(
        [{"speed": 0.5}, {"speed": 8.0}, {"rate": 3.0}, {"rate": 3.0, "arrival": "constant"}]
    ),
)
def test_invariants(
    rows: list[tuple[str, int, str]], lead_s: float | None, pace: dict[str, Any]
) -> None:
    log = [record(kind, float(ts), user) for kind, ts, user in rows]
    actions = all_of(log, options(signal_lead_s=lead_s, **pace))
    due_at = [action.due_at for action in actions]
    assert due_at == sorted(due_at)
    assert due_at[:1] in ([], [0.0])
    logged = sorted(log, key=lambda r: r.ts)
    for user in "ab":
        mine = [r for r in logged if r.user_id == user and r.kind != "signal"]
        sent = [a.record for a in actions if a.record.user_id == user and a.record.kind != "signal"]
        assert [id(r) for r in sent] == [id(r) for r in mine]
    assert {id(log_record) for log_record in log} <= {id(action.record) for action in actions}
    num_ranks = sum(r.kind == "rank" for r in log)
    num_signals = sum(r.kind == "signal" for r in log)
    made = len(actions) - len(log)
    assert made == 0 if lead_s is None else num_ranks - num_signals <= made <= num_ranks


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speed": 0.0}, "speed"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": 5.0, "speed": 2.0}, "rate"),
        ({"arrival": "gamma"}, "arrival"),
        ({"limit": 0}, "limit"),
        ({"signal_lead_s": -1.0}, "signal_lead_s"),
        ({"closed": 4, "rate": 2.0}, "closed"),
        ({"rank_delay_s": 0.1, "signal_lead_s": 0.1}, "rank_delay_s"),
        ({"rank_delay_s": 0.2, "rank_delay_p99_s": 0.1}, "rank_delay_p99_s"),
        ({"sample_users": 0.0}, "sample_users"),
    ],
)
def test_bad_options_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**values)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://me:key@x", "http://x?y=1"]
)
def test_a_bad_base_url_is_rejected_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="base_url") as caught:
        ReplayOptions(base_url=url)
    assert "key@" not in str(caught.value)
