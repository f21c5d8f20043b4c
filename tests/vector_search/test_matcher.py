"""The approximate index finds most of what the exact one finds, and never a hidden item.

Each user is matched by the right basis, filters come before the top-k, and damaged files are
rejected.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.numpy import load_file, save_file

from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Basis
from npu_gr.vector_search.index import ExactIndex, ExactSteps, recall
from npu_gr.vector_search.ivf import PROMISED, IvfIndex
from npu_gr.vector_search.matcher import Matcher
from npu_gr.vector_search.vectors import load, save
from tests.vector_search.vectors import COLD, FIRST_ID, KNOWN, NEAR_DUPLICATES, make_vectors


def test_ivf_finds_most_and_never_a_hidden_item() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    generator = torch.Generator().manual_seed(0)
    queries, items, users = (torch.randn(n, 16, generator=generator) for n in (20, 5000, 300))
    exact = ExactIndex(items.numpy(), CPUBackend())
    near = IvfIndex(items.numpy(), users.numpy(), exact)
    assert near.recall >= PROMISED
    assert 1 < near.num_probes <= near.num_lists == 64
    assert recall(near.search(queries, 20), exact.search(queries, 20)) >= 0.95
    fewer = IvfIndex(items.numpy(), users.numpy(), exact)
    fewer.num_probes = 1
    assert recall(fewer.search(queries, 20), exact.search(queries, 20)) < 0.9
    best = exact.search(queries, 5)
    order = best.items.flatten().argsort(stable=True)
    hidden = Hidden(torch.arange(20).repeat_interleave(5)[order], best.items.flatten()[order])
    found, want = near.search(queries, 20, hidden), exact.search(queries, 20, hidden)
    assert not (found.items[:, :, None] == best.items[:, None]).any()
    assert recall(found, want) >= 0.95
    assert near.search(queries, 6000).items.shape == (20, 6000)


@pytest.mark.parametrize("step", [7, 100, 5000])
def test_an_exact_search_in_steps_is_the_exact_one(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExactSteps, "STEP", step)
    random = np.random.default_rng(step)
    items = random.integers(-3, 4, (331, 8)).astype(np.float32)  # ties on purpose
    query = random.integers(-3, 4, 8).astype(np.float32)
    hidden = np.sort(random.choice(331, 40, replace=False))
    for k in (1, 20, 400):
        search = ExactSteps(items, query, k, hidden)
        while not search.is_over:
            search.step()
        assert search.rows.tolist() == brute(items @ query, set(hidden.tolist()), k)


def test_recall_counts_shares() -> None:
    def best(rows: list[list[int]]) -> Best:
        return Best(torch.zeros(len(rows), len(rows[0])), torch.tensor(rows))

    assert recall(best([[1, 2, 9]]), best([[1, 2, 3]])) == pytest.approx(2 / 3)
    assert recall(best([[1, -1, -1]]), best([[1, -1, -1]])) == 1


VECTORS = make_vectors()
MATCHER = Matcher(VECTORS, "exact", CPUBackend())
assert VECTORS.source is not None
SOURCE = VECTORS.source


def brute(scores: np.ndarray[tuple[int], np.dtype[np.float32]], off: set[int], k: int) -> list[int]:
    return sorted(
        (row for row in range(len(scores)) if row not in off), key=lambda row: (-scores[row], row)
    )[:k]


def ids(*rows: int) -> I64:
    return np.array([row * 2 + FIRST_ID for row in rows], np.int64)


@pytest.mark.parametrize(
    ("user", "basis"),
    [
        (KNOWN, Basis.TARGET),
        (COLD, Basis.SOURCE),
        ("none's", Basis.POPULARITY),
        ("unknown", Basis.POPULARITY),
    ],
)
@pytest.mark.parametrize("allow", [None, ids(1, 2, 3, 11, 12, 30)])
@pytest.mark.parametrize("deny", [None, ids(2, 4, 30)])
def test_each_user_is_served_as_the_page_says(
    user: str, basis: Basis, allow: I64 | None, deny: I64 | None
) -> None:
    scores = {
        Basis.TARGET: VECTORS.items @ VECTORS.users[0],
        Basis.SOURCE: VECTORS.items @ VECTORS.users[1],
        Basis.POPULARITY: VECTORS.popularity.astype(np.float32),
    }[basis]
    off = NEAR_DUPLICATES.get(user, set()) | ({1, 5, 7} if user == KNOWN else set())
    off |= set() if deny is None else {2, 4, 30}
    off |= set() if allow is None else set(range(40)) - {1, 2, 3, 11, 12, 30}
    search = MATCHER.search_for(UserKey("", user), 10, True, allow, deny)
    (found,) = MATCHER.run([search])
    assert search.basis is basis
    assert found.items.tolist() == brute(scores, off, 10)
    assert found.scores.tolist() == scores[found.items].tolist()


def test_what_was_seen_may_come_again_if_asked_for() -> None:
    (found,) = MATCHER.run([MATCHER.search_for(UserKey("", KNOWN), 40, False, None, None)])
    assert sorted(found.items.tolist()) == list(range(40))


def test_unknown_ids_in_filters_count_for_nothing() -> None:
    strange = np.array([-5, FIRST_ID + 1, 10**12], np.int64)
    assert MATCHER.rows(strange).tolist() == []
    (found,) = MATCHER.run([MATCHER.search_for(UserKey("", KNOWN), 5, True, strange, None)])
    assert len(found.items) == 0
    plain, denied = MATCHER.run(
        [MATCHER.search_for(UserKey("", KNOWN), 5, True, None, deny) for deny in (None, strange)]
    )
    assert plain.items.tolist() == denied.items.tolist()


def test_many_at_once_are_each_as_alone() -> None:
    searches = [
        MATCHER.search_for(UserKey("", user), k, k % 2 == 0, allow, deny)
        for user in (KNOWN, COLD, "unknown")
        for k in (1, 4, 40, 60)
        for allow in (None, ids(0, 9, 20))
        for deny in (None, ids(9, 11))
    ]
    for search, together in zip(searches, MATCHER.run(searches), strict=True):
        (alone,) = MATCHER.run([search])
        assert alone.items.tolist() == together.items.tolist()


def test_vectors_that_know_no_source_serve_a_cold_user_by_popularity() -> None:
    no_user = np.zeros(3, np.bool_)
    matcher = Matcher(make_vectors(in_source=no_user, source=None), "exact", CPUBackend())
    search = matcher.search_for(UserKey("", COLD), 3, True, None, None)
    assert search.basis is Basis.POPULARITY
    assert len(search.hidden) == 0


def test_near_duplicates_of_what_a_history_says_are_hidden_too() -> None:
    search = MATCHER.search_for(
        UserKey("", "unknown"), 40, True, None, None, np.array([11, *ids(3)])
    )
    assert search.hidden.tolist() == [3, 8, 9]
    again = MATCHER.search_for(
        UserKey("", "unknown"), 40, False, None, None, np.array([11, *ids(3)])
    )
    assert len(again.hidden) == 0
    no_ids = make_vectors(source=replace(SOURCE, ids=None))  # they mean other items in the target
    matcher = Matcher(no_ids, "exact", CPUBackend())
    assert (
        len(matcher.search_for(UserKey("", "unknown"), 40, True, None, None, np.array([11])).hidden)
        == 0
    )
    assert matcher.search_for(UserKey("", COLD), 40, True, None, None).hidden.tolist() == [8, 9]


def test_a_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    version = save(VECTORS, tmp_path)
    again = load(tmp_path)
    assert again.version == version
    for field in fields(VECTORS):
        if field.name != "version":
            want, got = getattr(VECTORS, field.name), getattr(again, field.name)
            for one, two in pairs(want, got):
                assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two
    assert save(VECTORS, tmp_path / "again") == version
    assert save(make_vectors(seed=1), tmp_path / "other") != version


def pairs(want: Any, got: Any) -> list[tuple[Any, Any]]:
    """Pairs of values to compare; of a dataclass its fields."""
    if not is_dataclass(want):
        return [(want, got)]
    return [(getattr(want, field.name), getattr(got, field.name)) for field in fields(want)]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "vectors.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "truncated"),
        (
            lambda folder: flip(folder / "vectors.safetensors"),
            "its digest differs from that in manifest.json",
        ),
        (lambda folder: edit(folder / "manifest.json", format=1), "format 1, this version reads 2"),
    ],
)
def test_a_damaged_folder_is_rejected(
    damage: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    save(VECTORS, tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=says):
        load(tmp_path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"users": np.zeros((3, 7), np.float32)}, "users is"),
        ({"items": np.full((40, 8), np.nan, np.float32)}, "not finite"),
        ({"item_ids": np.zeros(40, np.int64)}, "item_ids must ascend"),
        ({"seen_items": np.array([1, 5, 40], np.int32)}, "seen_items has a row outside 0 .. 39"),
        ({"seen_starts": np.array([0, 3, 2, 3])}, "seen_starts do not divide seen_items"),
        ({"source": replace(SOURCE, ids=np.array([1, 1, 2]))}, "source.ids must ascend"),
        ({"source": replace(SOURCE, ids=np.array([1, 2]))}, "source.ids is"),
        (
            {"source": replace(SOURCE, near_duplicate_items=np.array([8, 9, 40], np.int32))},
            "source.near_duplicate_items has a row",
        ),
        (
            {"source": replace(SOURCE, seen_items=np.array([2, 0, 3], np.int32))},
            "source.seen_items has a row",
        ),
    ],
)
def test_vectors_that_do_not_fit_are_rejected(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save(make_vectors(**change), tmp_path)
    with pytest.raises(DataError, match=says):
        load(tmp_path)


TENANTS = [UserKey("a", "u1"), UserKey("b", "u1"), UserKey("", "u1")]


def test_two_tenants_users_of_one_name_are_two_users(tmp_path: Path) -> None:
    everybody = np.ones(3, np.bool_)
    save(make_vectors(user_keys=TENANTS, in_target=everybody), tmp_path)
    vectors = load(tmp_path)
    assert vectors.user_keys == TENANTS
    matcher = Matcher(vectors, "exact", CPUBackend())
    for row, user in enumerate(TENANTS):
        (found,) = matcher.run([matcher.search_for(user, 10, False, None, None)])
        assert found.items.tolist() == brute(vectors.items @ vectors.users[row], set(), 10)
    for unknown in (UserKey("c", "u1"), UserKey("a", "u2"), UserKey("u1", "a")):
        search = matcher.search_for(unknown, 10, True, None, None)
        assert (search.user, search.basis, len(search.hidden)) == (-1, Basis.POPULARITY, 0)


def test_other_tenants_are_another_version(tmp_path: Path) -> None:
    """A reload serves vectors whose users got their tenants, though every vector is as it was."""
    versions = {
        save(
            make_vectors(user_keys=[UserKey(tenant, name) for name in (KNOWN, COLD, "x")]), tmp_path
        )
        for tenant in ("", "a", "b")
    }
    assert len(versions) == 3


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            {"user_tenants": np.array([0, 1, 2], np.int32)},
            "must have one of 2 tenants for each of 3 users",
        ),
        ({"user_tenants": np.array([0, 1, -1], np.int32)}, "must have one of 2 tenants"),
        ({"user_tenants": np.array([0, 1], np.int32)}, "must have one of 2 tenants"),
        ({"user_tenants": np.array([0, 0, 1], np.int32)}, "a user occurs twice"),
    ],
)
def test_users_without_a_tenant_of_theirs_are_rejected(
    tensors: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save(
        make_vectors(user_keys=[UserKey("a", "u"), UserKey("b", "u"), UserKey("b", "v")]), tmp_path
    )
    path = tmp_path / "vectors.safetensors"
    save_file(load_file(path) | {"user_names": np.frombuffer(b"uuv", np.uint8)} | tensors, path)
    edit(tmp_path / "manifest.json", version=xxhash.xxh3_128_hexdigest(path.read_bytes()))
    with pytest.raises(DataError, match=says):
        load(tmp_path)


def test_a_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    save(VECTORS, tmp_path)
    path = tmp_path / "vectors.safetensors"
    tensors = {name.replace("near_duplicate", "twin"): one for name, one in load_file(path).items()}
    assert "source.twin_starts" in tensors
    save_file(tensors, path)
    edit(tmp_path / "manifest.json", version=xxhash.xxh3_128_hexdigest(path.read_bytes()))
    source = load(tmp_path).source
    assert source is not None
    for name in ("near_duplicate_starts", "near_duplicate_items", "seen_items"):
        np.testing.assert_array_equal(getattr(source, name), getattr(SOURCE, name))
