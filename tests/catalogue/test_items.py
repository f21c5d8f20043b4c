"""Every id finds its row, and nothing else does; dense and sparse ids alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.catalogue.items import UNKNOWN, ItemVocabulary


@settings(deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=50, unique=True),
    asked=st.lists(st.integers(-5, 2**62), max_size=20),
    dense_from=st.sampled_from([None, 0, 100_000, 2**62]),
)
def test_rows(ids: list[int], asked: list[int], dense_from: int | None) -> None:
    first = dense_from or 0
    if dense_from is not None:
        ids = list(dict.fromkeys(first + i % 997 for i in ids))
    vocabulary = ItemVocabulary(np.array(ids, np.int64))
    ends = [min(ids) - 1, max(ids) + 1, -(2**63), 2**63 - 1]
    questions = np.array([*ids, *asked, *ends, first + 1000, 2**62], np.int64)
    where = {value: row for row, value in enumerate(ids)}
    want = [where.get(int(q), UNKNOWN) for q in questions]
    assert vocabulary.rows(questions).tolist() == want
    assert len(vocabulary) == len(ids)


@settings(deadline=None, derandomize=True)
@given(
    num_trained=st.integers(1, 40),
    spread=st.sampled_from([1, 1_000_003]),
    added=st.lists(st.lists(st.integers(0, 9), max_size=5, unique=True), max_size=6),
)
def test_new_items_have_the_row_that_they_got_last(num_trained: int, spread: int, added: list[list[int]]) -> None:
    trained = np.arange(num_trained, dtype=np.int64) * spread
    vocabulary = ItemVocabulary(trained)
    where = {item: row for row, item in enumerate(trained.tolist())}
    id_of = trained.tolist()
    for some in added:
        before = vocabulary
        held = before.rows(np.array(id_of, np.int64)).tolist()
        ids = [num_trained * spread + 1 + item for item in some]
        vocabulary = vocabulary.with_new(np.array(ids, np.int64))
        where |= {item: len(id_of) + place for place, item in enumerate(ids)}
        assert before.rows(np.array(id_of, np.int64)).tolist() == held  # who holds the one before sees no change
        id_of += ids
    questions = np.array([*where, -1, 2**61], np.int64)
    assert vocabulary.rows(questions).tolist() == [*where.values(), UNKNOWN, UNKNOWN]
    assert vocabulary.ids_of(np.arange(len(vocabulary))).tolist() == id_of
    assert vocabulary.trained_rows(questions).tolist() == [
        row if row < num_trained else UNKNOWN for row in [*where.values(), UNKNOWN, UNKNOWN]
    ]


@pytest.mark.parametrize("spread", [1, 1_000_003])
def test_no_ids_no_rows(spread: int) -> None:
    vocabulary = ItemVocabulary(np.arange(10, dtype=np.int64) * spread)
    assert vocabulary.rows(np.empty(0, np.int64)).tolist() == []
