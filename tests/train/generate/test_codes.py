"""Semantic IDs are distinct, items used together share a prefix, levels refine each other."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import item_id
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.evaluate import Csr
from npu_gr.train.generate import codes as module
from npu_gr.train.generate.codes import (
    SHORTEST,
    SMOOTHING,
    ItemCodes,
    _largest,
    _neighbour_vectors,
    item_vectors,
    kmeans,
    read_codes,
    residual_codes,
)
from tests.train.synthetic import NUM_ITEMS, planted


def vectors(num_items: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_items, dim)).astype(np.float32)


def two_crowds() -> InteractionLog:
    """Users of even items and users of odd ones.

    Item 40 is in a test event only.
    """
    random = np.random.default_rng(0)
    items = [2 * random.integers(0, 20, 30) + user % 2 for user in range(40)]
    items[0][-1] = 40
    users = np.repeat(np.arange(40, dtype=np.int32), 30)
    times = np.tile(np.arange(30), 40)
    every = Interactions(
        users, np.concatenate(items), np.ones(1200), times, [str(user) for user in range(40)]
    )
    order = np.argsort(times, kind="stable")
    return build_log(every[order], [], "leave-one-out")


@pytest.mark.parametrize("code_count", [(4, 4, 4, 4), (16, 16), (200,), (8, 3, 9)])
def test_every_item_has_an_id_of_its_own_whatever_collides(code_count: tuple[int, ...]) -> None:
    rows = vectors(200)
    rows[50:120] = rows[50]  # seventy equal items
    found = residual_codes(rows, code_count, np.arange(200), 0)
    assert len(np.unique(found.sids, axis=0)) == 200
    assert (found.sids >= 0).all()
    assert (found.sids < np.array(code_count)).all()
    assert found.num_moved >= 69
    other = residual_codes(rows, code_count, np.arange(200), 0)
    assert np.array_equal(found.sids, other.sids)


def test_the_means_of_codes_are_what_they_stand_for() -> None:
    """A vector that is a sum of a centre a level is the sum of its codes' means.

    An unused code stands for nothing.
    """
    random = np.random.default_rng(0)
    first, second = (
        random.normal(size=(4, 8)).astype(np.float32),
        random.normal(size=(5, 8)).astype(np.float32),
    )
    second -= second.mean(0)
    sids = (
        np.stack(np.meshgrid(range(4), range(5), indexing="ij"), -1).reshape(-1, 2).astype(np.int32)
    )
    codes = ItemCodes(sids, (6, 5))
    means = codes.means(first[sids[:, 0]] + second[sids[:, 1]])
    np.testing.assert_allclose(means[0][:4], first, atol=1e-6)
    np.testing.assert_allclose(means[1], second, atol=1e-6)
    assert not means[0][4:].any()


def test_codes_say_how_even_they_are() -> None:
    even = ItemCodes(np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.int32), (2, 2))
    assert even.balance() == [1.0, 1.0]
    assert even.num_prefixes() == [2, 4]
    lopsided = ItemCodes(np.array([[0, 0], [0, 1], [0, 2], [0, 3]], np.int32), (4, 4))
    assert lopsided.balance() == [0.0, 1.0]
    assert lopsided.text() == (
        "codes: 4 x 4, balance 0.00, 1.00; distinct prefixes 1, 4, ready-made"
    )
    made = residual_codes(np.zeros((5, 2), np.float32), (2, 4), np.arange(5), 0)
    assert "4 items collided and got other codes" in made.text()


def test_ids_suffice_to_the_last_one_and_one_fewer_is_rejected() -> None:
    rows = np.zeros((27, 4), np.float32)
    assert len(np.unique(residual_codes(rows, (3, 3, 3), np.arange(27), 0).sids, axis=0)) == 27
    with pytest.raises(
        ConfigError,
        match=r"code_count: \[3, 3, 3\] make 27 semantic IDs, 28 "
        r"needed",
    ):
        residual_codes(np.zeros((28, 4), np.float32), (3, 3, 3), np.arange(28), 0)


def test_of_a_collision_the_most_used_item_keeps_its_codes() -> None:
    rows = vectors(60)
    rows[7] = rows[33] = rows[51]
    uses = np.zeros(60, np.int64)
    uses[33] = 5
    alone = residual_codes(rows, (16, 16, 16), uses, 0)
    nearest = [rows[33]]
    for table, code in zip(alone.centroids, alone.sids[33], strict=True):
        assert np.square(nearest[-1] - table).sum(1).argmin() == code
        nearest.append(nearest[-1] - table[code])
    # the others stay as near as a free ID allows: they share the beginning
    assert (alone.sids[[7, 51], :2] == alone.sids[33, :2]).all()


def slowly_resolved(sids: I64, vectors: F32, centroids: list[F32], order: I64) -> I64:
    """Walk all codes of each level by their distance, until one has a free semantic ID."""
    found, taken = sids.copy(), set()
    for first in (True, False):
        for row in order.tolist():
            is_kept = row == order[(sids[order] == sids[row]).all(1).argmax()]
            if is_kept and first:
                taken.add(tuple(sids[row].tolist()))
            elif not is_kept and not first:
                rest, sid = vectors[row], tuple[int, ...]()
                for level, table in enumerate(centroids):
                    below = [range(len(other)) for other in centroids[level + 1 :]]
                    for code in np.argsort(np.square(rest - table).sum(1), kind="stable").tolist():
                        if any((*sid, code, *end) not in taken for end in product(*below)):
                            break
                    rest, sid = rest - table[code], (*sid, code)
                taken.add(sid)
                found[row] = sid
    return found


@pytest.mark.parametrize("seed", range(4))
def test_items_with_one_vector_are_resolved_as_any_others(seed: int) -> None:
    """A long file of items has many without an event, whose features are all that they have."""
    random = np.random.default_rng(seed)
    few = random.normal(size=(6, 4)).astype(np.float32)
    vectors = np.concatenate([few[random.integers(6, size=50)], random.normal(size=(8, 4))])
    vectors = vectors.astype(np.float32)
    centroids = [random.normal(size=(4, 4)).astype(np.float32) for _ in range(3)]
    sids = random.integers(2, size=(58, 3))
    order = random.permutation(58)
    want = slowly_resolved(sids, vectors, centroids, order)
    got = sids.copy()
    module._resolve(got, vectors, centroids, order)
    assert np.array_equal(got, want)
    assert len(np.unique(got, axis=0)) == 58


def test_each_level_leaves_less() -> None:
    found = residual_codes(vectors(300), (16, 16, 16), np.zeros(300, np.int64), 0)
    assert (np.diff(found.residuals) < -0.1).all()
    rows, rest = vectors(300), vectors(300)
    assert np.isclose(found.residuals[0], np.square(rows).sum(1).mean())
    moved = np.zeros(300, np.bool_)
    for level, table in enumerate(found.centroids):
        moved |= found.sids[:, level] != np.square(rest[:, None] - table).sum(2).argmin(1)
        rest = rest - table[found.sids[:, level]]
    assert moved.sum() <= found.num_moved
    assert np.isclose(np.square(rest).sum(1).mean(), found.residuals[-1], rtol=0.1)


def test_a_centroid_without_rows_moves_to_where_it_is_needed() -> None:
    """Nine of ten rows are equal, so most centroids begin on the same spot.

    Five other rows need one each.
    """
    rows = torch.zeros(50, 2)
    rows[45:] = torch.eye(5, 2) * 9 + torch.arange(5)[:, None]
    table, code = kmeans(rows, 6, torch.Generator().manual_seed(0))
    assert torch.allclose(table[code], rows, atol=1e-5)
    assert len(code.unique()) == 6


def test_company_decides_the_codes_and_the_test_part_is_not_read() -> None:
    log = two_crowds()
    found = item_vectors(log, [], 8, 3, 0)
    even, odd = found[0:40:2], found[1:40:2]
    assert (even @ even.T).mean() > (even @ odd.T).mean() + 0.1
    assert (found[40] == 0).all()  # its only event is a test
    first = residual_codes(found, (2, 32), np.ones(41, np.int64), 0).sids[:40, 0]
    assert len(set(first[0::2])) == len(set(first[1::2])) == 1
    assert first[0] != first[1]


def test_company_is_pointwise_mutual_information_counted_pair_by_pair() -> None:
    log, window = build_log(planted(6, 9), [], "leave-one-out"), 2
    counts = np.zeros((log.num_items, log.num_items))
    for user in range(log.num_users):
        row = log.items[log.starts[user] : log.starts[user] + log.num_trained[user]].tolist()
        for i, one in enumerate(row):
            for apart in range(1, window + 1):
                if i + apart < len(row):
                    counts[one, row[i + apart]] += 1 / apart
                    counts[row[i + apart], one] += 1 / apart
    total = counts.sum(1) + SMOOTHING
    with np.errstate(divide="ignore"):
        want = np.log(counts * total.sum() / np.outer(total, total)).clip(min=0)
    np.fill_diagonal(want, 0)
    values, eigenvectors = np.linalg.eigh(want)
    want = eigenvectors[:, -4:] * np.sqrt(values[-4:])
    want /= np.linalg.norm(want, axis=1, keepdims=True).clip(min=SHORTEST)
    got = _neighbour_vectors(log, 4, window, 0).numpy()
    # up to the eigenvectors' signs
    np.testing.assert_allclose(got @ got.T, want @ want.T, atol=5e-2)


def test_the_largest_eigenvectors_rebuild_a_matrix_of_low_rank() -> None:
    rows = torch.from_numpy(vectors(30, 5))
    matrix = rows @ rows.T
    starts = torch.arange(0, 30 * 30 + 1, 30, dtype=torch.int32)
    dense = Csr(starts, torch.arange(30, dtype=torch.int32).repeat(30), matrix.flatten())
    found = _largest(dense, 6, 0)
    torch.testing.assert_close(found @ found.T, matrix, atol=1e-3, rtol=1e-3)


def test_features_place_items_without_events() -> None:
    kinds = ItemValues("kind", ["a", "b"], {item * 10: [item % 2] for item in range(NUM_ITEMS + 4)})
    log = build_log(planted(), [kinds], "leave-one-out")
    found = item_vectors(log, [kinds, ItemValues("none", [], {})], 8, 3, 0)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    assert found[NUM_ITEMS] @ found[NUM_ITEMS + 2] > 0.99
    assert found[NUM_ITEMS] @ found[NUM_ITEMS + 1] < 0.01


def test_ready_made_codes_are_read_by_item(tmp_path: Path) -> None:
    table = {"7": [1, 2], "3": [1, 0], "5": [0, 4]}
    (tmp_path / "index.json").write_text(json.dumps(table))
    (tmp_path / "items.jsonl").write_text(
        "".join(
            json.dumps({"item_id": int(item), "sid": sid}) + "\n" for item, sid in table.items()
        )
    )
    for name in ("index.json", "items.jsonl"):
        found = read_codes(tmp_path / name, np.array([3, 7]))
        assert found.sids.tolist() == [[1, 0], [1, 2]]
        assert found.code_count == (2, 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"3": [1, 0]}', "no codes for item 7"),
        ("{}", "the same number of codes"),
        ('{"3": [1, 0], "7": [1, 0]}', r"item 3 and another item have the same codes, \[1, 0\]"),
        ('{"3": [1, 0], "7": [1]}', "the same number of codes"),
        ('{"3": [1, -1], "7": [1, 0]}', "each 0 or more"),
        ('{"x": [1, 0]}', "no codes for item 3"),
        ('{"": [1, 0]}', "a name of 0 bytes is not an item name"),
        ("[1]", "must be {"),
        ("{", "Expecting property name"),
    ],
    ids=str,
)
def test_bad_codes_are_explained(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        read_codes(tmp_path / "index.json", np.array([3, 7]))


def test_codes_of_items_that_are_not_numbers_are_read(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"SKU-1": [0, 1], "7": [1, 0]}')
    assert read_codes(tmp_path / "index.json", np.array([item_id("SKU-1"), 7])).sids.tolist() == [
        [0, 1],
        [1, 0],
    ]


def test_codes_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: No such file"):
        read_codes(tmp_path / "none.json", np.array([3]))
