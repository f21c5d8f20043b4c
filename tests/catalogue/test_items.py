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
    dense=st.booleans(),
)
def test_rows(ids: list[int], asked: list[int], dense: bool) -> None:
    if dense:
        ids = [i % 997 for i in ids]
        ids = list(dict.fromkeys(ids))
    vocabulary = ItemVocabulary(np.array(ids, np.int64))
    questions = np.array([*ids, *asked, 1000, 2**62], np.int64)
    where = {value: row for row, value in enumerate(ids)}
    want = [where.get(int(q), UNKNOWN) for q in questions]
    assert vocabulary.rows(questions).tolist() == want
    assert len(vocabulary) == len(ids)


@pytest.mark.parametrize("spread", [1, 1_000_003])
def test_no_ids_no_rows(spread: int) -> None:
    vocabulary = ItemVocabulary(np.arange(10, dtype=np.int64) * spread)
    assert vocabulary.rows(np.empty(0, np.int64)).tolist() == []
