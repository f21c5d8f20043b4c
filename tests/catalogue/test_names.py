"""The tables of names: what went in comes out, and nothing that is broken is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from npu_gr.catalogue import names as tables
from npu_gr.catalogue.names import (
    ACTIONS_FILE,
    EMPTY,
    FILE,
    ItemNames,
    key_of,
    load_actions,
    names_of,
    titles_of,
)
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.feature_schema.values import BLANKS
from npu_gr.core.names import item_ids

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NAME = TEXT.map(lambda name: name.strip(BLANKS)).filter(bool)


@given(st.lists(st.tuples(NAME, TEXT), unique_by=lambda pair: pair[0], max_size=30))
def test_what_went_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("names")
    ItemNames.make([name for name, _ in pairs], [title for _, title in pairs]).save(folder)
    table = ItemNames.load(folder)
    assert table is not None
    ids = item_ids([name for name, _ in pairs])
    assert list(map(str, table.names(ids))) == [name for name, _ in pairs]
    assert table.titles(ids) == [title for _, title in pairs]


def test_a_number_is_named_as_a_number_and_what_is_unknown_by_its_id() -> None:
    table = ItemNames.make(["7", "SKU-1"], ["Seven", ""])
    ids = np.array([7, *item_ids(["SKU-1", "SKU-2"]), 8])
    assert table.names(ids) == [7, "SKU-1", int(ids[2]), 8]
    assert table.titles(ids) == ["Seven", None, None, None]
    assert EMPTY.names(ids) == ids.tolist()


def test_no_name_twice() -> None:
    with pytest.raises(DataError, match="'a' occurs twice"):
        ItemNames.make(["a", "b", "a"])


def test_two_names_of_one_id_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "item_ids", lambda names, key: np.zeros(len(names), np.int64))
    with pytest.raises(DataError, match="'a' and 'b' have the same id"):
        ItemNames.make(["a", "b"])


def test_a_name_with_the_id_of_another_one_is_found() -> None:
    """The first pair of names has one id: the lower 62 bits of their hashes are equal."""
    ids = item_ids(["SKU-2A4E", "~2qx<o0+", "b"])
    table = ItemNames.make(["SKU-2A4E"])
    assert tables.collisions(["SKU-2A4E", "~2qx<o0+", "b"], ids, [EMPTY, table]) == {
        "~2qx<o0+": "SKU-2A4E"
    }
    assert tables.collisions(["~2qx<o0+", "SKU-2A4E", "b"], ids, [EMPTY]) == {
        "SKU-2A4E": "~2qx<o0+"
    }
    assert tables.collisions(["", "a"], item_ids([7, "a"]), [table]) == {}


def test_no_file_is_no_table(tmp_path: Path) -> None:
    assert ItemNames.load(tmp_path) is None


@pytest.mark.parametrize("broken", ["cut", "descending", "ends"])
def test_a_broken_file_is_rejected(tmp_path: Path, broken: str) -> None:
    ItemNames.make(["a", "b"], ["A", "B"]).save(tmp_path)
    path = tmp_path / FILE
    if broken == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        texts = np.frombuffer(b"ab", np.uint8)
        ends = np.array([0, 1, 2] if broken == "descending" else [0, 9, 2])
        ids = np.array([5, 4] if broken == "descending" else [4, 5])
        save_file(
            {"ids": ids, "names": texts, "name_ends": ends, "titles": texts, "title_ends": ends},
            path,
        )
    with pytest.raises(DataError, match=FILE):
        ItemNames.load(tmp_path)


GOOD = {
    "ids": np.array([4, 5]),
    "names": np.frombuffer("aä".encode(), np.uint8),
    "name_ends": np.array([0, 1, 3]),
    "titles": np.frombuffer(b"", np.uint8),
    "title_ends": np.array([0, 0, 0]),
}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"ids": np.array(4)}, "ids must be int64"),
        ({"ids": np.array([[4, 5]])}, "ids must be int64"),
        ({"ids": np.array([4.0, 5.0])}, "ids must be int64"),
        ({"names": np.frombuffer("aä".encode(), np.uint8)[:, None]}, "names do not fit the ids"),
        ({"names": np.array(7, np.uint8)}, "names do not fit the ids"),
        ({"names": np.frombuffer(b"ab\xff", np.uint8)}, "names: .*utf-8.* can't decode"),
        ({"name_ends": np.array([0, 2, 3])}, "name_ends: .*within a character"),
        (
            {"titles": np.frombuffer(b"\xc3", np.uint8), "title_ends": np.array([0, 0, 1])},
            "titles: .*utf-8",
        ),
    ],
)
def test_a_table_whose_texts_cannot_be_answered_is_rejected(
    tmp_path: Path, broken: dict[str, Any], message: str
) -> None:
    save_file(GOOD, tmp_path / FILE)
    table = ItemNames.load(tmp_path)
    assert table is not None
    assert table.names_at(np.array([0, 1])) == ["a", "ä"]
    save_file(GOOD | broken, tmp_path / FILE)
    with pytest.raises(DataError, match=f"{FILE}: {message}"):
        ItemNames.load(tmp_path)


def test_texts_are_checked_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BLOCK", 2)
    names = [f"ä{number}" for number in range(5)]
    ItemNames.make(names).save(tmp_path)
    table = ItemNames.load(tmp_path)
    assert table is not None
    assert sorted(table.names_at(np.arange(5))) == names


def test_tables_are_asked_in_turn_and_a_title_comes_from_the_first_that_has_one() -> None:
    first, second = (
        ItemNames.make(["SKU-1", "7"], ["", "Seven"]),
        ItemNames.make(["SKU-1", "SKU-2"], ["One", "Two"]),
    )
    ids = item_ids(["SKU-2", 7, "SKU-1", "SKU-3", 8])
    assert names_of([first, second], ids) == ["SKU-2", 7, "SKU-1", int(ids[3]), 8]
    assert titles_of([first, second], ids) == ["Two", "Seven", "One", None, None]
    assert names_of([], ids) == ids.tolist()


def test_the_same_file_is_in_memory_once(tmp_path: Path) -> None:
    for folder in ("ranker", "generator"):
        ItemNames.make(["a"], ["A"]).save(tmp_path / folder)
    loaded = ItemNames.load(tmp_path / "ranker")
    assert loaded is ItemNames.load(tmp_path / "generator")
    ItemNames.make(["a"], ["B"]).save(tmp_path / "generator")
    assert loaded is not ItemNames.load(tmp_path / "generator")


def test_without_a_file_actions_have_no_names(tmp_path: Path) -> None:
    assert load_actions(tmp_path) is None


def test_the_place_of_an_action_is_its_index(tmp_path: Path) -> None:
    (tmp_path / ACTIONS_FILE).write_text('["view", "5"]')
    found = load_actions(tmp_path)
    assert found is not None
    assert found.indices([5, "view"]).tolist() == [1, 0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '["a", "a"]', '["'])
def test_a_broken_file_of_actions_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / ACTIONS_FILE).write_text(text)
    with pytest.raises(DataError, match=ACTIONS_FILE):
        load_actions(tmp_path)


def test_the_key_is_kept_with_the_names(tmp_path: Path) -> None:
    key = b"k" * 16
    ItemNames.make(["SKU-1", "7"], ["One", ""], key).save(tmp_path)
    loaded = ItemNames.load(tmp_path)
    assert loaded is not None
    assert loaded.key == key
    assert loaded.names(item_ids(["SKU-1"], key)) == ["SKU-1"]
    assert loaded.find(item_ids(["SKU-1"])).tolist() == [-1]


def test_tables_of_two_keys_are_refused() -> None:
    keyed, other, old = (ItemNames.make(["SKU-1"], key=key) for key in (b"k" * 16, b"o" * 16, b""))
    numbers = ItemNames.make(["7"])
    assert key_of({"a": numbers, "b": keyed, "c": EMPTY, "d": keyed}) == keyed.key
    assert key_of({"a": numbers, "b": old}) == b""
    words = "match.vectors: its items have ids of the key .*, and those of checkpoint have ids "
    with pytest.raises(ConfigError, match=words + "of the key"):
        key_of({"checkpoint": keyed, "match.vectors": other})
    with pytest.raises(ConfigError, match=words + "without a key"):
        key_of({"checkpoint": old, "match.vectors": other})
