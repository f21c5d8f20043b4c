"""The bench measures what the router adds, and reports nothing about Envoy where Envoy is not installed."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import picker
from benchmarks.router import lines
from npu_gr.core.errors import Unavailable


def test_without_envoy_nothing_is_said_of_the_picker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_names, **_more: None)
    with pytest.raises(Unavailable, match="needs Envoy"):
        next(iter(picker.lines(seed=0, budget_s=0.1)))


def test_the_router_costs_something_and_envoy_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_names, **_more: None)
    found = {line.case: line for line in lines(seed=0, budget_s=0.2)}
    assert found["router adds, p50"].ours > 0
    assert 1 < found["processor a request of 36000 B"].ours < 1e6
    assert not any(line.baseline in ("envoy", "haproxy") for line in found.values())
