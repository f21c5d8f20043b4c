"""The gate keeps out who would be late, learns what estimates lack, and never shuts for good."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.admission.gate import OPEN, Gate
from npu_gr.core.errors import Overloaded


def lets_in(gate: Gate, wait_s: float, objective_s: float = 0.1) -> bool:
    try:
        gate.check(wait_s, objective_s)
    except Overloaded:
        return False
    return True


def test_a_new_gate_guesses() -> None:
    assert lets_in(Gate(), 0.059)
    with pytest.raises(Overloaded, match="it would wait 61 ms for the device, the limit is 60"):
        Gate().check(0.061, 0.1)


def test_what_requests_take_beyond_their_wait_is_kept_free() -> None:
    gate, source = Gate(), random.Random(0)
    for slowest_s in (9.0, 0.04):  # what is long ago is forgotten
        for _ in range(128):
            wait_s = source.uniform(0.0, 0.05)
            gate.learn(wait_s, wait_s + source.uniform(0.0, slowest_s))
    assert lets_in(gate, 0.05)
    assert not lets_in(gate, 0.055)


@given(took_s=st.lists(st.floats(0, 1e3), max_size=60), objective_s=st.floats(1e-3, 10))
def test_it_never_shuts_for_good(took_s: list[float], objective_s: float) -> None:
    gate = Gate()
    for each_s in took_s:
        for _ in range(3):
            gate.learn(0.0, each_s)
    assert lets_in(gate, OPEN * objective_s, objective_s)
    assert not lets_in(gate, 1.01 * objective_s, objective_s)
