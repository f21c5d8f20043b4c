"""All formats read the same edges, errors name the line, and splits do not leak."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.core.history import UserKey
from npu_gr.train.match.domains import Domains, hold_out, read_domains, split
from tests.train.match.synthetic import domains

EDGES = [("ann", 7), ("bob", 3), ("ann", 3), ("cy", 9), ("ann", 7)]


def as_tsv(path: Path) -> Path:
    path.write_text("".join(f"{user}\t{item}\t1\n" for user, item in EDGES) + "\n")
    return path


def as_atomic(path: Path) -> Path:
    path.write_text(
        "item_id:token\tuser_id:token\n" + "".join(f"{item}\t{user}\n" for user, item in EDGES)
    )
    return path


def as_jsonl(path: Path) -> Path:
    path.write_text(
        "".join(json.dumps({"user_id": user, "item_id": item}) + "\n" for user, item in EDGES)
    )
    return path


def seen(found: Domains) -> set[tuple[str, int]]:
    graph = found.source
    names = [found.users[user].user for user in graph.users]
    return set(zip(names, found.source_ids[graph.items].tolist(), strict=True))


@pytest.mark.parametrize(
    ("write", "name"), [(as_tsv, "a.tsv"), (as_atomic, "a.inter"), (as_jsonl, "a.jsonl")]
)
def test_every_format_gives_the_same_edges_each_once(
    write: object, name: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name)  # type: ignore[operator]
    found = read_domains(path, path, path_of_one_each(tmp_path))
    assert seen(found) == set(EDGES)
    assert found.source_ids.tolist() == [3, 7, 9]


def path_of_one_each(folder: Path) -> Path:
    path = folder / "test.tsv"
    path.write_text("ann\t11\ncy\t12\n")
    return path


def test_users_of_two_tenants_are_two_users_whatever_their_names(tmp_path: Path) -> None:
    path = tmp_path / "a.inter"
    rows = "".join(f"{user}\t{item}\t{tenant}\n" for tenant in "ab" for user, item in EDGES)
    path.write_text(f"user_id:token\titem_id:token\tshop:token\n{rows}")
    found = read_domains(path, path, tenant_column="shop")
    assert sorted(found.users) == sorted(
        UserKey(tenant, user) for tenant in "ab" for user in ("ann", "bob", "cy")
    )
    assert read_domains(path, path, tenant="all").users == [
        UserKey("all", user) for user in ("ann", "bob", "cy")
    ]
    with pytest.raises(DataError, match="no column 'shop': a plain TSV has no header"):
        read_domains(as_tsv(tmp_path / "a.tsv"), path, tenant_column="shop")
    (tmp_path / "a.jsonl").write_text('{"user_id": "u", "item_id": 1, "shop": 7}\n')
    with pytest.raises(DataError, match="line 1: 7 is not a tenant"):
        read_domains(tmp_path / "a.jsonl", path, tenant_column="shop")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ann\t3\nbob\n", "line 2: needs a user and an item"),
        ("ann\t3\n\nbob\tx\n", "line 3: 'x' is not an integer"),
        ("ann\t3\nbob\t99999999999999999999\n", "line 2"),
        ("", "no interaction"),
        ("zoe\t3\n", "share no user"),
    ],
)
def test_bad_files_are_named_with_the_line(text: str, says: str, tmp_path: Path) -> None:
    good, bad = as_tsv(tmp_path / "good.tsv"), tmp_path / "bad.tsv"
    bad.write_text(text)
    with pytest.raises(DataError, match=says):
        read_domains(good, bad)


def test_a_user_twice_in_the_test_file_is_an_error(tmp_path: Path) -> None:
    good, twice = as_tsv(tmp_path / "good.tsv"), tmp_path / "test.tsv"
    twice.write_text("ann\t1\nann\t2\n")
    with pytest.raises(DataError, match="more than one line"):
        read_domains(good, good, twice)


def test_nothing_held_out_is_trained_on_and_the_split_is_the_seeds(tmp_path: Path) -> None:
    both = domains(tmp_path)
    one, again, other = (split(both, 0.4, 40, seed) for seed in (1, 1, 2))
    trained = set(zip(one.target.users.tolist(), one.target.items.tolist(), strict=True))
    for held in (one.validation, both.test):
        assert not trained & set(zip(held.users.tolist(), held.items.tolist(), strict=True))
        assert len(np.unique(held.users)) == len(held.users)
    assert len(one.target.users) + len(one.validation.users) < 0.5 * len(both.target.users)
    assert (one.target.degrees()[0][one.validation.users] >= 1).all()
    assert np.array_equal(one.target.items, again.target.items)
    assert not np.array_equal(one.target.items, other.target.items)


def test_one_log_as_both_domains_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "one.tsv"
    path.write_text(
        "".join(f"u{user}\t{item}\t1\n" for user in range(20) for item in range(user % 4, 8))
    )
    with pytest.raises(
        DataError,
        match="asks for a near-duplicate of what its user has in the source: is it one log",
    ):
        split(read_domains(path, path), 1.0, 20, 0)


def test_only_users_with_enough_edges_lose_one(tmp_path: Path) -> None:
    graph = domains(tmp_path).target
    left, held = hold_out(graph, np.random.default_rng(0), 4, 1000)
    assert (graph.degrees()[0][held.users] >= 4).all()
    assert len(held.users) == int((graph.degrees()[0] >= 4).sum())
    assert len(left.users) + len(held.users) == len(graph.users)
