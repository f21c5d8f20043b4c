"""The bench checks raw columns against lists and cached ranks against full ones before it measures."""

from __future__ import annotations

import pytest

from benchmarks import features
from benchmarks.rank import config
from npu_gr.core.feature_schema.columns import Columns
from npu_gr.server.codec import rank


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "TOKENS", 32)
    monkeypatch.setattr(features, "CANDIDATES", 20)
    monkeypatch.setattr(features, "config", lambda: config(num_layers=1, dim=32))
    read, *groups = features.lines("cpu", seed=0, budget_s=0.0)
    assert read.case == "read 20 x 40 cross features, raw msgpack"
    assert [line.case.split()[-1] for line in groups] == ["user", "event", "request", "40", "all"]
    assert [line.ok is None for line in groups] == [True, True, True, False, True]


def test_raw_columns_that_say_something_else_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> object:
        raise AssertionError("timed")

    monkeypatch.setattr(features, "timed_in_turn", wrong)
    made = rank.parse

    def first_read_differs(*given: object) -> object:
        request = made(*given)  # type: ignore[arg-type]
        numbers = {name: column + 1 for name, column in request.cross_features.numbers.items()}
        monkeypatch.setattr(features, "parse", made)
        return type("Read", (), {"cross_features": Columns(numbers)})

    monkeypatch.setattr(features, "parse", first_read_differs)
    with pytest.raises(AssertionError, match="raw columns"):
        list(features.lines("cpu", seed=0, budget_s=0.0))
