"""The tier stays full, and what is found is what was put there."""

from __future__ import annotations

import pytest

from benchmarks import store
from tests.engine.kv.invariants import check_dram


def test_a_line_of_small_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FEW", 10)
    monkeypatch.setattr(store, "MANY", 100)
    monkeypatch.setattr(store, "TURNS", 50)
    [line] = store.lines(0)
    assert line.ours > 0
    assert "100 entries" in line.case
    tier = store.FullTier(10, 0)
    tier.turns()
    check_dram(tier.store)
    assert len(tier.store) == 10
