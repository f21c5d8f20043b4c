"""Names of items: an id is a function of the name, and a plain number is its own."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core import names as names_module
from npu_gr.core.feature_schema.values import BLANKS
from npu_gr.core.names import (
    FIRST_HASHED,
    MAX_NAME_BYTES,
    ActionNames,
    answered_ids,
    is_hashed,
    item_id,
    item_ids,
    names_of_numbers,
    value_name,
)


def test_a_plain_number_is_its_own_id_as_text_too() -> None:
    assert [item_id(name) for name in (0, 42, "42", FIRST_HASHED - 1)] == [
        0,
        42,
        42,
        FIRST_HASHED - 1,
    ]


@pytest.mark.parametrize(
    "name", ["SKU-1", "007", "+1", "1.0", "-3", "٣", str(FIRST_HASHED), str(10**18 * 9), "1 2"]
)
def test_another_spelling_is_hashed(name: str) -> None:
    assert FIRST_HASHED <= item_id(name) < 2**63


@pytest.mark.parametrize("name", [" a", "a ", "\ta\n", "\xa0a", 7, " 7", "7\r\n"])
def test_blanks_around_a_name_do_not_count(name: str | int) -> None:
    plain = str(name).strip(BLANKS)
    assert item_id(name) == item_id(plain) == item_ids(["x", name])[1]


def test_the_hash_never_changes() -> None:
    """Stores and checkpoints hold these numbers."""
    assert item_id("SKU-0042-C") == 0x708371FB42C597E1


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
            lambda name: name.strip(BLANKS)
        ),
        unique_by=lambda name: name.strip(BLANKS),
        max_size=50,
    )
)
def test_names_that_differ_have_ids_that_differ(names: list[str]) -> None:
    ids = item_ids(names)
    assert len(np.unique(ids)) == len(names)
    assert ids.min(initial=0) >= 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 bytes"),
        (" \t", "0 bytes"),
        (-1, "-1 is not an item id"),
        ("é" * MAX_NAME_BYTES, "1024 bytes"),
    ],
)
def test_what_is_no_name_is_rejected(name: str | int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        item_id(name)
    with pytest.raises(ValueError, match=f"index 1: .*{why}"):
        item_ids(["good", name])


def test_which_ids_need_a_table() -> None:
    assert is_hashed(item_ids([3, "three"])).tolist() == [False, True]


SPELLINGS = st.one_of(
    st.integers(0, FIRST_HASHED - 1),
    st.integers(0, 10**20),
    st.integers(0, 10**20).map(str).filter(lambda text: int(text) < 2**70),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
        lambda name: name.strip(BLANKS)
    ),
    st.sampled_from(
        ["007", "٣", "a\0b", '"', ",", "1e5", "+1", " 1", str(FIRST_HASHED - 1), str(FIRST_HASHED)]
    ),
)


@given(st.lists(SPELLINGS, max_size=30))
def test_many_at_once_are_as_one_by_one(names: list[str | int]) -> None:
    want = [item_id(name) for name in names]
    assert item_ids(names).tolist() == want
    assert item_ids([str(name) for name in names]).tolist() == want
    plain = [
        str(name) if isinstance(name, int) and name >= FIRST_HASHED else name for name in names
    ]
    assert answered_ids(plain).tolist() == want


def test_a_number_that_json_rounds_is_answered_as_its_text() -> None:
    ids = [0, 2**53 - 1, 2**53, 1234567890123456789, FIRST_HASHED - 1, FIRST_HASHED + 5]
    names = names_of_numbers(np.array(ids))
    assert names == [0, 2**53 - 1, *map(str, ids[2:5]), FIRST_HASHED + 5]
    assert answered_ids(names).tolist() == ids
    assert item_ids(names[:5]).tolist() == ids[:5]
    assert names_of_numbers(np.array([], np.int64)) == []


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ([1, -1], "index 1: -1 is not an item id"),
        ([2**62, -(2**70)], "index 1: -1180591620717411303424 is not an item id"),
        (["a", ""], "index 1: a name of 0 bytes is not an item name: it must have 1 to 512"),
        (["é" * 257, 1], "index 0: a name of 514 bytes is not an item name"),
        (["a", "\ud800"], "index 1: .* surrogates not allowed"),
    ],
)
def test_the_first_name_that_is_no_items_is_told(names: list[str | int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        item_ids(names)


def test_an_id_that_was_answered_without_a_name_is_itself() -> None:
    assert answered_ids([2**62 + 5, "a", 7]).tolist() == [2**62 + 5, item_id("a"), 7]


def test_a_number_stands_for_the_action_of_its_plain_text() -> None:
    actions = ActionNames(
        ["view", "5", "4.5", "1000000", "007", "nan", "1234567", "1234568", "0.12345678", "1e+20"]
    )
    assert actions.indices(
        ["view", 5, "5", 5.0, 4.5, "4.5", 1_000_000, 1e6, "007", "nan"]
    ).tolist() == [
        *(0, 1, 1, 1, 2, 2, 3, 3, 4, 5),
    ]
    assert actions.indices([1234567, 1234568.0, 0.12345678, 1e20]).tolist() == [6, 7, 8, 9]
    assert actions.indices([]).dtype == np.int16


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (5, "5"),
        (5.0, "5"),
        (-0.0, "0"),
        (4.5, "4.5"),
        (1e6, "1000000"),
        (2**53, "9007199254740992"),
        (1e-7, "1e-07"),
    ],
)
def test_the_name_of_a_number(value: float, name: str) -> None:
    assert value_name(value) == name


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_two_numbers_have_two_names(value: float) -> None:
    assert float(value_name(value)) == value


@pytest.mark.parametrize(
    ("action", "said"),
    [("buy", '"buy"'), (7, "7"), (float("nan"), "nan"), ("5.0", '"5.0"'), (4.25, "4.25")],
)
def test_an_action_that_the_model_lacks_is_told_with_those_that_it_has(
    action: str | float, said: str
) -> None:
    actions = ActionNames(["view", "cart", "5"])
    with pytest.raises(
        ValueError, match=f"^{said} at index 1 is not an action of the model; it has view, cart, 5$"
    ):
        actions.indices(["view", action])


def test_an_error_about_an_action_is_short() -> None:
    with pytest.raises(ValueError, match="not an action") as rejected:
        ActionNames([f"action {number}" for number in range(1000)]).indices(["x" * 500])
    assert len(str(rejected.value)) < 400


def test_a_key_changes_the_ids_of_texts_alone() -> None:
    key, other = b"k" * 16, b"o" * 16
    names: list[str | int] = ["SKU-1", 7, "8", " SKU-1 ", 2**62, str(2**62), "SKU-2"]
    ids = item_ids(names, key)
    assert ids.tolist() == [item_id(name, key) for name in names]
    assert ids[[1, 2]].tolist() == [7, 8]
    assert ids[0] == ids[3]
    assert ids[4] == ids[5]
    for keys in ((key, other), (key, b""), (other, b"")):
        here, there = (item_ids(names, one) for one in keys)
        assert (here == there).tolist() == [False, True, True, False, False, False, False]
    assert answered_ids([*names[:1], int(ids[6])], key).tolist() == ids[[0, 6]].tolist()
    digest = hashlib.blake2b(b"SKU-1", key=key, digest_size=8).digest()
    assert ids[0] == int.from_bytes(digest, "little") & (2**62 - 1) | 2**62
    with pytest.raises(ValueError, match=r"^index 1: a name of 0 bytes"):
        item_ids(["a", " "], key)


def test_names_that_are_remembered_have_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_module, "_REMEMBERED", 5)
    key = b"r" * 16
    for part in (["a", "b", "a"], ["b", "c", "d"], ["e", "f", "a"], [*"abcdefgh"], ["7", "a"]):
        for _ in range(2):
            assert item_ids(part, key).tolist() == [item_id(name, key) for name in part]
        assert len(names_module._known(key)) <= 5
