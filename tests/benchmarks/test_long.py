"""Each part of `benchmarks long` that trains or serves runs once in a tiny form."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import long_far, long_quality, long_wire, relay_simulated
from benchmarks.long_far import ARMS, LEARNT, SEGMENT, Phase, sees
from npu_gr.backend.choose import choose
from tests.train.synthetic import planted


@given(st.sampled_from(ARMS), st.integers(1, 700), st.integers(0, 300))
def test_no_row_sees_what_comes_after_it(arm: str, num_events: int, more: int) -> None:
    """What a row of a history reads is the same whatever follows: its keys can be cached."""
    short, of = sees(arm, num_events)
    long, of_long = sees(arm, num_events + more)
    events, learnt = int((of >= 0).sum()), int((of < 0).sum())
    assert learnt == (num_events // SEGMENT * LEARNT if arm == "summaries" else 0)
    rows = torch.cat([torch.arange(events), torch.arange(learnt) + int((of_long >= 0).sum())])
    assert torch.equal(long[rows][:, rows], short[:-1])
    assert int(long[rows].sum()) == int(short[:-1].sum())
    assert short[:-1].any(1).all()
    segments = torch.arange(num_events) // SEGMENT
    for row in range(learnt):
        own = segments == row // LEARNT
        assert torch.equal(short[events + row, :events], own)


def test_a_far_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's scores are those of the reference that was trained."""
    monkeypatch.setattr(long_far, "TESTED", 2)
    monkeypatch.setattr(long_far, "SHARED", (Phase(2, 2, 8, before=0),))
    monkeypatch.setattr(long_far, "phases", lambda lag: (Phase(1, 1, lag),))
    found = list(long_far.lines(choose("cpu"), 300, 0))
    assert len(found) == 16
    assert {line.ok for line in found if line.baseline == "truncated"} == {None}
    real = long_far.Reader.forward
    monkeypatch.setattr(
        long_far.Reader, "forward", lambda self, *given: real(self, *given) + 1, raising=True
    )
    with pytest.raises(AssertionError, match="full attention: another score"):
        list(long_far.lines(choose("cpu"), 300, 0))


def test_a_window_on_the_longest_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {
        name: msgspec.structs.replace(options, epochs=1, dim=16, num_layers=1, patience=0)
        for name, options in long_quality.ARMS.items()
    }
    monkeypatch.setattr(long_quality, "ARMS", tiny)
    monkeypatch.setattr(long_quality, "USERS", 20)
    found = list(long_quality.lines(choose("cpu"), planted(24, 40), 0))
    assert [line.case.partition(",")[0] for line in found] == [
        *("HR@10: window", "AUC: window") * 2,
        *("HR@10: truncated", "AUC: truncated"),
    ]
    assert all("20 users" in line.case for line in found)
    assert [line.ok is None for line in found] == [False, False, True, True, True, True]


def test_a_long_history_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROUNDS": 1, "NEWEST": 300, "STEP": 64}.items():
        monkeypatch.setattr(long_wire, name, value)
    found = list(long_wire.lines((250, 500), 0))
    assert len(found) == 6
    assert [line.target is None for line in found] == [True] * 3 + [False, True, False]


def test_the_simulated_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COUNTED": 40, "BEFORE": 40, "STEP": 2.0, "STEPS": 6}.items():
        monkeypatch.setattr(relay_simulated, name, value)
    found = list(relay_simulated.lines([number % 30 for number in range(80)]))
    assert [line.target for line in found] == [2.0, 2.0]
    assert all(line.ratio >= 1 for line in found)
