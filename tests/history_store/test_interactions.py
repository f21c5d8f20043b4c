"""A log is read whole or not at all, and a bad record is named with its line.

A packed file is read whole, or named when it is damaged, cut short or not there.
"""

from __future__ import annotations

import gzip
import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.core.feature_schema.columns import as_columns
from npu_gr.core.history import UserKey
from npu_gr.core.lines import read_lines
from npu_gr.history_store.interactions import (
    FeatureColumn,
    movielens_100k,
    read_interactions,
    read_item_features,
)
from npu_gr.history_store.load import features_loaded, load_interactions
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig
from tests.features_of import every_feature

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"


def atomic(tmp_path: Path, *rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "x.inter"
    path.write_text(header + "".join(row + "\n" for row in rows))
    return path


def test_time_order_and_codes(tmp_path: Path) -> None:
    log = read_interactions(
        atomic(tmp_path, "u2\t7\t4\t30", "u1\t8\t3.5\t10", "u2\t9\t1\t20", "u1\t5\t2\t20.0")
    )
    assert log.items.tolist() == [8, 9, 5, 7]
    assert [log.user_names[code] for code in log.users] == ["u1", "u2", "u1", "u2"]
    assert log.values.tolist() == [3.5, 1, 2, 4]
    assert log.timestamps.tolist() == [10, 20, 20, 30]


def test_jsonl_says_the_same(tmp_path: Path) -> None:
    line = '{"user_id": "u", "item_id": 7, "rating": 4, "timestamp": 30}\n'
    plain, packed = tmp_path / "x.jsonl", tmp_path / "y.jsonl.gz"
    plain.write_text(line * 2 + "\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        log = read_interactions(path)
        assert (log.items.tolist(), log.user_names) == ([7, 7], ["u"])
    zst = pytest.importorskip("zstandard")
    third = tmp_path / "z.jsonl.zst"
    third.write_bytes(zst.ZstdCompressor().compress(plain.read_bytes()))
    assert len(read_interactions(third)) == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("u\tseven\t4\t30", "line 3: 'seven' is not an integer"),
        ("u\t7.5\t4\t30", "line 3: '7.5' is not an integer"),
        ("u\t1_000\t4\t30", "line 3: '1_000' is not an integer"),
        ("u\t9223372036854775808\t4\t30", "line 3: a number that does not fit into 64 bits"),
        ("u\t7\tx\t30", "line 3: could not convert"),
        ("u\t7\tnan\t30", "line 3: 'nan' is not finite"),
        ("u\t7\t1_0\t30", "line 3: '1_0' is not a number"),
        ("u\t7", "line 3: 2 columns, the header has 4"),
        ("u\t7\t4\t30\tmore", "line 3: 5 columns, the header has 4"),
        ("u\t7\t4\tinf", "line 3: 'inf' is not finite"),
        ("u\t7\t4\t1e30", "line 3: a number that does not fit into 64 bits"),
        ("\t7\t4\t30", "line 3: '' is not a user"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, row: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_interactions(atomic(tmp_path, "u\t1\t1\t1", row))


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'rating'; there are user_id, item_id"):
        read_interactions(atomic(tmp_path, header="user_id:token\titem_id:token\n"))
    with pytest.raises(DataError, match="not the header"):
        read_interactions(atomic(tmp_path, header="user_id,item_id\n"))
    with pytest.raises(DataError, match=r"none\.inter"):
        read_interactions(tmp_path / "none.inter")
    (tmp_path / "empty.inter").touch()
    with pytest.raises(DataError, match="line 1: not the header"):
        read_interactions(tmp_path / "empty.inter")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"user_id": 1}', "line 1: no 'item_id'"),
        (b"[1, 2]", "line 1: not a JSON object"),
        (b"[" * 100_000, "line 1: "),
        (
            b'{"user_id": null, "item_id": 7, "rating": 4, "timestamp": 30}',
            "line 1: None is not a user",
        ),
        (
            b'{"user_id": "u", "item_id": null, "rating": 4, "timestamp": 30}',
            "line 1: None is not an integer",
        ),
        (
            b'{"user_id": "u", "item_id": 1e300, "rating": 4, "timestamp": 30}',
            "line 1: 1e\\+300 is not an integer",
        ),
        (b'{"user_id": "u", "item_id": 7, "rating": null, "timestamp": 30}', "line 1: "),
        (
            b'{"user_id": "u", "item_id": 7, "rating": true, "timestamp": 30}',
            "line 1: True is not a number",
        ),
        (b'{"user_id": "u", "item_id": 7, "rating": NaN, "timestamp": 30}', "line 1: "),
        (b'{"user_id": "\xff", "item_id": 7, "rating": 4, "timestamp": 30}', "line 1: "),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(DataError, match=reason):
        read_interactions(path)


def test_item_features(tmp_path: Path) -> None:
    path = tmp_path / "x.item"
    path.write_text(
        "item_id:token\tyear:token\tclass:token_seq\n1\t1995\tA B\n2\t1994\tB\n3\t1995\t\n"
    )
    year, kind = read_item_features(path, ["year", "class"])
    assert (year.values, kind.values) == (["1995", "1994"], ["A", "B"])
    assert kind.of_item == {1: [0, 1], 2: [1], 3: []}


async def test_bulk_load(tmp_path: Path) -> None:
    log = read_interactions(atomic(tmp_path, "u\t7\t4\t30", "v\t8\t3\t10", "u\t9\t3\t20"))
    store = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert store is not None
    with pytest.raises(DataError, match=r"lacks: '4'; the model has: '3'; the log has: '3', '4'"):
        await load_interactions(store, log, ["3"])
    assert (await load_interactions(store, log, ["3", "4"], "t")).num_added == 3
    read = (await store.read(UserKey("t", "u"), 9)).events
    assert (read.items.tolist(), read.actions.tolist(), read.timestamps.tolist()) == (
        [9, 7],
        [0, 1],
        [20, 30],
    )
    await store.close()


async def test_features_of_events_are_loaded(tmp_path: Path) -> None:
    """Those that log and model both have.

    A second load of a log with more of them fills in what is missing.
    """
    features = every_feature(("event", "user"))
    log = read_interactions(atomic(tmp_path, "u\t7\t4\t30", "v\t8\t4\t10", "u\t9\t4\t20"))
    of_events: dict[str, list[Any]] = {
        "country": ["de", None, "fr"],
        "tags": [["a", "b"], ["c"], None],
    }
    columns = [FeatureColumn(name="spent", of="event", values=np.array([1.5, np.nan, 2.5]))]
    columns += [
        FeatureColumn(name=name, of="event", values=objects(cells))
        for name, cells in of_events.items()
    ]
    # the model does not have it
    columns.append(FeatureColumn(name="other", of="event", values=np.ones(3)))
    columns.append(FeatureColumn(name="age", of="user", values=np.ones(2)))
    store = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert store is not None
    first = replace(log, columns=tuple(columns[:1]))
    assert (await load_interactions(store, first, ["4"], features=features)).num_added == 3
    whole = replace(log, columns=tuple(columns))
    assert features_loaded(whole, features) == ("spent", "country", "tags")
    for filled in (3, 0):
        loaded = await load_interactions(store, whole, ["4"], features=features)
        assert (loaded.num_added, loaded.num_known, loaded.num_filled) == (0, 3, filled)
    read = (await store.read(UserKey("", "u"), 9)).events
    known = {one.name: one for one in features if one.of == "event"}
    given = {
        column.name: column.values
        for column in columns
        if column.name in known and column.of == "event"
    }
    want = as_columns(known, given, 3).take(log.users == log.user_names.index("u"))
    assert msgspec.structs.replace(read, features=want).fingerprint() == read.fingerprint()
    bad = replace(
        log, columns=(FeatureColumn(name="spent", of="event", values=objects(["x", None, None])),)
    )
    with pytest.raises(DataError, match="features of events: spent: row 0"):
        await load_interactions(store, bad, ["4"], features=features)
    await store.close()


def objects(cells: list[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(cells, np.object_, len(cells))


def test_sequences_of_items_are_events_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "inter.json").write_text('{"v": [9, 7, 9], "u": [], "w": ["4"]}')
    log = read_interactions(tmp_path / "inter.json")
    assert log.user_names == ["v", "u", "w"]
    assert (log.users.tolist(), log.items.tolist()) == ([0, 2, 0, 0], [9, 4, 7, 9])
    assert (log.timestamps.tolist(), log.values.tolist()) == ([0, 0, 1, 2], [1.0] * 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[1, 2]]", r'not \{"user": \[item, \.\.\.\]\}'),
        ('{"u": 3}', r'not \{"user"'),
        ('{"u": [3, "x"]}', "user 'u': 'x' is not an integer"),
        ('{"u": [3', "inter.json: "),
    ],
    ids=str,
)
def test_bad_sequences_are_explained(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "inter.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        read_interactions(tmp_path / "inter.json")


def test_movielens() -> None:
    """The real file, where its package is installed (`make test` installs it)."""
    try:
        importlib.metadata.files("recbole")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package recbole, which carries MovieLens-100K, is not installed")
    log = read_interactions(movielens_100k())
    assert (len(log), len(log.user_names), len(set(log.items.tolist()))) == (100_000, 943, 1682)
    assert set(log.values.tolist()) == {1.0, 2.0, 3.0, 4.0, 5.0}


# more than one chunk, packed or not
TEXT = b"".join(b"line %d\n" % number for number in range(300_000))


def _pack(suffix: str, data: bytes) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        packed: bytes = (
            pytest.importorskip("zstandard")
            .ZstdCompressor(level=1, write_checksum=True)
            .compress(data)
        )
        return packed
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(_pack(suffix, TEXT))
    assert read_lines(path) == TEXT.splitlines()
    # members or frames one after the other
    path.write_bytes(_pack(suffix, b"a\r\nb\n") + _pack(suffix, b"c\n"))
    assert read_lines(path) == [b"a", b"b", b"c"]
    path.write_bytes(b"")
    assert read_lines(path) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged(tmp_path: Path, suffix: str) -> None:
    path, packed = tmp_path / f"x{suffix}", _pack(suffix, TEXT)
    middle = len(packed) // 2
    for data in (
        packed[:middle],
        packed[:-1],
        b"not packed",
        packed[:middle] + b"\x00\x01\x02" * 33 + packed[middle + 99 :],
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"x\{suffix}: "):
            read_lines(path)


def test_nothing_to_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            read_lines(path)
