"""A new item gets the semantic ID that training would give it, and never one that is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.centroids import FILE, Centroids, CodedFeature, SidMaker
from npu_gr.catalogue.records import Features
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.errors import CatalogueError, DataError
from npu_gr.core.served import NewItem
from npu_gr.history_store.interactions import ItemValues
from npu_gr.train.data import build_log
from npu_gr.train.generate.codes import codes_of_new, item_vectors, residual_codes
from tests.train.synthetic import NUM_ITEMS, planted

COLOURS = CodedFeature("colour", ["red", "blue", "2"])
SIZES = CodedFeature("size", ["s", "m"])


def trie_of(sids: np.ndarray, code_count: tuple[int, ...]) -> Trie:
    return build_trie(
        sids.astype(np.int32), np.arange(len(sids)), Codebooks.stacked(code_count), None
    )


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_training_gives_a_new_item(seed: int) -> None:
    """Also in nearly full catalogues, where most of the nearest semantic IDs are taken."""
    random = np.random.default_rng(seed)
    code_count = ((4, 4), (2, 3, 4), (12,))[seed % 3]
    num = int(np.prod(code_count)) - 4 if seed < 3 else 6
    vectors = random.normal(size=(num, 5)).astype(np.float32)
    codes = residual_codes(vectors, code_count, np.ones(num, np.int64), seed)
    centroids = Centroids(codes.centroids, (CodedFeature("f", ["a", "b", "c", "d", "e"]),))
    make = SidMaker(trie_of(codes.sids, code_count), centroids)
    known, sids = vectors, codes.sids
    for values in (["a"], ["b", "c"], ["a"], ["a"]):
        new = centroids.vector({"f": list(values)})
        (want,) = codes_of_new(
            type(codes)(sids, code_count, codes.centroids), known, new[None]
        ).tolist()
        assert list(make.make(0, {"f": list(values)})) == want
        known, sids = (
            np.concatenate([known, new[None]]),
            np.concatenate([sids, [want]]).astype(np.int32),
        )
    assert len(np.unique(sids, axis=0)) == num + 4
    if seed < 3:
        with pytest.raises(CatalogueError, match=r"add\[7\]\.sid: .* every semantic ID is taken"):
            make.make(7, {"f": "a"})


def test_a_vector_is_that_of_an_item_without_history() -> None:
    features = [
        ItemValues("colour", COLOURS.values, {0: [0, 2]}),
        ItemValues("none", [], {}),
        ItemValues("size", SIZES.values, {0: [1]}),
    ]
    log = build_log(planted(), [ItemValues("colour", COLOURS.values, {7: [0, 2]})], "leave-one-out")
    of_item = [
        ItemValues(one.name, one.values, {7: one.of_item[0]} if one.of_item else {})
        for one in features
    ]
    row = log.item_ids.tolist().index(7)
    want = item_vectors(log, of_item, 4, 2, 0)
    assert len(want) == NUM_ITEMS + 1
    centroids = Centroids((want,), (COLOURS, SIZES))
    given: Features = {"colour": ["red", 2, "pink"], "size": "m", "other": 1}
    assert np.allclose(centroids.vector(given), want[row], atol=1e-5)
    assert not centroids.vector({"colour": "pink"}).any()


def test_what_an_item_brings_is_taken_too() -> None:
    levels = (np.eye(3, dtype=np.float32), np.zeros((2, 3), np.float32))
    make = SidMaker(trie_of(np.array([[0, 0]]), (3, 2)), Centroids(levels, (COLOURS,)))
    items = [
        NewItem(item_id=row, features={"colour": colour})
        for row, colour in enumerate(("red", "blue", "blue"))
    ]
    made = make.all_of([*items, NewItem(item_id=9, sid=(0, 1))])
    assert made == [(1, 0), (1, 1), (2, 0), (0, 1)], (
        "below code 0, and then code 1, nothing is free"
    )


def test_what_is_missing_is_named() -> None:
    trie = trie_of(np.array([[0, 0]]), (3, 2))
    with pytest.raises(CatalogueError, match=rf"add\[2\]\.sid: is missing, and there is no {FILE}"):
        SidMaker(trie, None).make(2, {"colour": "red"})
    levels = (np.eye(3, dtype=np.float32), np.zeros((2, 3), np.float32))
    with pytest.raises(
        CatalogueError,
        match=r"add\[0\]\.features: .* known value of at least one of colour",
    ):
        SidMaker(trie, Centroids(levels, (COLOURS,))).make(0, {"colour": "pink", "size": "s"})
    with pytest.raises(CatalogueError, match=r"\(3,\) codes, the catalogue \(3, 2\)"):
        SidMaker(trie, Centroids(levels[:1], (COLOURS,))).make(0, {"colour": "red"})


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Centroids.load(tmp_path) is None
    levels = tuple(
        np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32) for count in (4, 3)
    )
    Centroids(levels, (COLOURS, SIZES)).save(tmp_path)
    again = Centroids.load(tmp_path)
    assert again is not None
    assert all(np.array_equal(*pair) for pair in zip(again.levels, levels, strict=True))
    assert again.features == (COLOURS, SIZES)
    data = (tmp_path / FILE).read_bytes()
    for spoilt in (
        data[:-1],
        b"",
        data.replace(b'\\"format\\":1', b'\\"format\\":2'),
        data[:-4] + b"\0\0\xc0\x7f",
    ):
        (tmp_path / FILE).write_bytes(spoilt)
        with pytest.raises(DataError, match=FILE):
            Centroids.load(tmp_path)
    for wrong in ((), (np.zeros(3, np.float32),), (levels[0], levels[1][:, :5])):
        with pytest.raises(ValueError, match="levels"):
            Centroids(wrong, ())
    with pytest.raises(ValueError, match="features"):
        Centroids((levels[0][:, :3],), (COLOURS, SIZES))
