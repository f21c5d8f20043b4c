"""Names of items: an id is a function of the name, and a plain number is its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.names import FIRST_HASHED, MAX_NAME_BYTES, is_hashed, item_id, item_ids


def test_a_plain_number_is_its_own_id_as_text_too() -> None:
    assert [item_id(name) for name in (0, 42, "42", FIRST_HASHED - 1)] == [0, 42, 42, FIRST_HASHED - 1]


@pytest.mark.parametrize("name", ["SKU-1", "007", "+1", "1.0", "-3", "٣", str(FIRST_HASHED), str(10**18 * 9), " 1"])
def test_another_spelling_is_hashed(name: str) -> None:
    assert FIRST_HASHED <= item_id(name) < 2**63


def test_the_hash_never_changes() -> None:
    """Stores and checkpoints hold these numbers."""
    assert item_id("SKU-0042-C") == 0x708371FB42C597E1


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), unique=True, max_size=50))
def test_names_that_differ_have_ids_that_differ(names: list[str]) -> None:
    ids = item_ids(names)
    assert len(np.unique(ids)) == len(names)
    assert ids.min(initial=0) >= 0


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "0 bytes"), (-1, "-1 is no item"), (FIRST_HASHED, "is no item"), ("é" * MAX_NAME_BYTES, "1024 bytes")],
)
def test_what_is_no_name_is_refused(name: str | int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        item_id(name)
    with pytest.raises(ValueError, match=f"index 1: .*{why}"):
        item_ids(["good", name])


def test_which_ids_need_a_table() -> None:
    assert is_hashed(item_ids([3, "three"])).tolist() == [False, True]
