"""The cost model finds planted coefficients, and never falls with length."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from npu_gr.engine.cost import FREE_RATIO, LEAST_TOKENS, CostModel, fit

PLANTED = CostModel(1e-3, 2e-5, 3e-9, 1e-6, 4e-9)


def test_fit_finds_what_was_planted() -> None:
    shapes = itertools.product((16, 128, 512, 1024), (8, 128))
    found = fit((n, c, PLANTED.full_s(n, c)) for n, c in shapes)
    for n, c in ((64, 1), (4000, 500)):
        assert abs(found.full_s(n, c) / PLANTED.full_s(n, c) - 1) < 1e-6


@given(seconds=st.lists(st.floats(1e-5, 1.0), min_size=8, max_size=8))
def test_costs_never_fall(seconds: list[float]) -> None:
    shapes = itertools.product((16, 128, 512, 1024), (8, 128))
    cost = fit((n, c, s) for (n, c), s in zip(shapes, seconds, strict=True))
    ladder = [cost.full_s(n, c) for n, c in ((0, 0), (10, 0), (10, 10), (1000, 10), (1000, 900))]
    assert ladder == sorted(ladder)


@given(n=st.integers(0, 5000), c=st.integers(0, 600), budget_s=st.floats(-0.1, 0.3))
def test_safe_tokens_fit_and_are_the_most_but_never_none(n: int, c: int, budget_s: float) -> None:
    safe = PLANTED.safe_tokens(n, c, budget_s)
    assert min(n, LEAST_TOKENS) <= safe <= n
    budget_s = max(budget_s, (1 + FREE_RATIO) * PLANTED.full_s(0, c))
    if safe > LEAST_TOKENS:
        assert PLANTED.full_s(safe, c) <= budget_s
    if safe < n:
        assert PLANTED.full_s(safe + 1, c) > budget_s
