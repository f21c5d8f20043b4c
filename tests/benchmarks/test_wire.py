"""The bench checks that every form of a body is read as the same request before it measures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import wire


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LENGTHS", (8, 64))
    found = list(wire.lines(seed=0, budget_s=0.0))
    assert [line.case for line in found] == [
        f"L={length} M=500 {form}"
        for length in (8, 64)
        for form in ("JSON raw", "msgpack raw", "infer raw", "infer gRPC", "client")
    ]
    for line in found:
        assert line.ratio == pytest.approx(line.baseline_value / line.ours)
    assert [line.case for line in found if line.ok is not None] == ["L=64 M=500 msgpack raw"]


def test_a_form_that_says_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = wire.bodies

    def wrong(num_tokens: int, seed: int) -> Any:
        forms = made(num_tokens, seed)
        return forms | {"msgpack raw": made(num_tokens, seed + 1)["msgpack raw"]}

    monkeypatch.setattr(wire, "bodies", wrong)
    with pytest.raises(AssertionError, match="msgpack raw"):
        list(wire.lines(seed=0, budget_s=0.0))
