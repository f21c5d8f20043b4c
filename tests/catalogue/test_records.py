"""Every format gives the same items, and a bad file a message with file, record and reason.

The list of popular items holds names as the company writes them, one a line.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.catalogue.records import Items, read_items, read_popular
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import item_id

RECORDS: list[dict[str, Any]] = [
    {
        "item_id": 5,
        "sid": [3, 7, 1],
        "order": 0.5,
        "attributes": {"stock": True, "price": 3, "kind": "book"},
    },
    {"item_id": 2**63 - 1, "sid": [0, 2**31 - 1, 9], "order": 2, "attributes": {}},
]
RECORDS[1]["attributes"] = {"kind": "é", "price": 2.5, "stock": False}  # in another order


def jsonl(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def check(items: Items) -> None:
    assert len(items) == 2
    assert items.item_ids.dtype == np.int64
    assert items.item_ids.tolist() == [5, 2**63 - 1]
    assert items.sids.dtype == np.int32
    assert items.sids.tolist() == [[3, 7, 1], [0, 2**31 - 1, 9]]


def check_all(items: Items) -> None:
    check(items)
    assert items.order is not None
    assert items.order.dtype == np.float32
    assert items.order.tolist() == [0.5, 2.0]
    assert {name: column.tolist() for name, column in items.attributes.items()} == {
        "stock": [True, False],
        "price": [3.0, 2.5],
        "kind": ["book", "é"],
    }
    assert [items.attributes[name].dtype.kind for name in ("stock", "price", "kind")] == [
        "b",
        "f",
        "U",
    ]


def test_jsonl_packed_or_not(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    lines = b"\n" + jsonl(RECORDS)  # a blank line is skipped
    for suffix, pack in (
        (".jsonl", bytes),
        (".jsonl.gz", gzip.compress),
        (".jsonl.zst", zstandard.compress),
    ):
        path = tmp_path / f"items{suffix}"
        path.write_bytes(pack(lines))
        check_all(read_items(path))


def test_jsonl_with_ids_only(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(
        jsonl([{key: record[key] for key in ("item_id", "sid")} for record in RECORDS])
    )
    items = read_items(path)
    check(items)
    assert items.order is None
    assert items.attributes == {}


def test_xllm(tmp_path: Path) -> None:
    path = tmp_path / "vocab.bin"
    raw = [(5).to_bytes(8, "little"), *(code.to_bytes(4, "little") for code in (3, 7, 1))]
    raw += [
        (2**63 - 1).to_bytes(8, "little"),
        *(code.to_bytes(4, "little") for code in (0, 2**31 - 1, 9)),
    ]
    path.write_bytes(b"".join(raw))
    items = read_items(path)
    check(items)
    assert items.order is None


@pytest.mark.parametrize("form", ["list", "large_list", "fixed"])
def test_parquet(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    sid = {
        "list": pa.list_(pa.uint32()),
        "large_list": pa.large_list(pa.int64()),
        "fixed": pa.list_(pa.int32(), 3),
    }
    columns = {
        name: [record["attributes"][name] for record in RECORDS]
        for name in ("stock", "price", "kind")
    }
    table = pa.table(
        {
            "item_id": pa.array([record["item_id"] for record in RECORDS], pa.uint64()),
            "sid": pa.array([record["sid"] for record in RECORDS], sid[form]),
            "order": [record["order"] for record in RECORDS],
            "stock": columns["stock"],
            "price": columns["price"],
            "kind": pa.array(columns["kind"]).dictionary_encode(),
        }
    )
    folder = tmp_path / "day=1"  # must not become a column
    folder.mkdir()
    parquet.write_table(table, folder / "items.parquet", row_group_size=1)
    check_all(read_items(folder / "items.parquet"))


@pytest.mark.parametrize("name", ["items.jsonl", "items.bin"])
def test_an_empty_file_is_an_empty_catalogue(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    items = read_items(tmp_path / name)
    assert len(items) == len(items.sids) == 0


GOOD = {"item_id": 1, "sid": [1, 2], "order": 0.5, "attributes": {"stock": 1}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"item_id": -1}, "`int` >= 0 - at `$.item_id`"),
        ({"item_id": 2**63}, "`int` <= 9223372036854775807"),
        ({"item_id": "1"}, "Expected `int`, got `str`"),
        ({"item_id": 1.5}, "Expected `int`, got `float`"),
        ({"sid": [1, -2]}, "`int` >= 0"),
        ({"sid": [1, 2**31]}, "`int` <= 2147483647"),
        ({"sid": []}, "length >= 1"),
        ({"sid": [1]}, "a SID of 1 codes, the first record has 2"),
        ({"order": None}, "no order score"),
        ({"order": "high"}, "Expected `float | null`, got `str`"),
        ({"order": 1e300}, "order score 1e+300 is out of range"),
        ({"stock": 1}, "unknown field `stock`"),
        ({"attributes": {}}, "no attribute 'stock', unlike the first record"),
        ({"attributes": {"stock": 1, "kind": 2}}, "an attribute 'kind', unlike the first record"),
        ({"attributes": {"stock": True}}, "attribute 'stock' is True, the first record has 1"),
        ({"attributes": {"stock": "x"}}, "attribute 'stock' is 'x', the first record has 1"),
        ({"attributes": {"stock": 2**64}}, "attribute 'stock' is 18446744073709551616, too large"),
        ({"attributes": {"stock": None}}, "got `null`"),
    ],
)
def test_bad_jsonl(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(jsonl([GOOD]) + b"\n" + jsonl([GOOD | change]))
    with pytest.raises(DataError) as caught:
        read_items(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert reason in str(caught.value)


def test_an_order_score_only_in_a_later_record(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(jsonl([{"item_id": 1, "sid": [1]}, {"item_id": 2, "sid": [1], "order": 1}]))
    with pytest.raises(DataError, match="line 2: an order score, the first record has none"):
        read_items(path)


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"item_id": 1}', b'{"item_id": 1, "sid": [1], "\xff": 2}']
)
def test_lines_that_are_no_record(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataError, match="line 1: "):
        read_items(path)


@pytest.mark.parametrize(
    ("item_id", "codes", "more", "reason"),
    [
        (-1, (1, 2, 3), b"", "record 2: item id -1 is out of range"),
        (1, (1, -2, 3), b"", "record 2: code -2 is out of range"),
        (1, (1, 2, 3), b"abc", "record 3: cut short, 3 of 20 bytes"),
    ],
)
def test_bad_xllm(
    tmp_path: Path, item_id: int, codes: tuple[int, ...], more: bytes, reason: str
) -> None:
    path = tmp_path / "vocab.bin"
    record = np.array([(0, (0, 0, 0)), (item_id, codes)], [("item", "<i8"), ("codes", "<i4", (3,))])
    path.write_bytes(record.tobytes() + more)
    with pytest.raises(DataError, match=reason):
        read_items(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"item_id": [1, -1]}, "record 2: item id -1 is out of range"),
        (
            {"item_id": np.array([1, 2**63], np.uint64)},
            "record 2: item id 9223372036854775808 is out of range",
        ),
        ({"item_id": [1, None]}, "record 2: no value in column 'item_id'"),
        ({"item_id": ["a", "b"]}, "column 'item_id' holds string, want integers"),
        ({"item_id": None}, "no column 'item_id'; there are sid, order, stock"),
        ({"sid": [[1, 2], [1]]}, "record 2: a SID of 1 codes, the first record has 2"),
        ({"sid": [[], []]}, "record 1: a SID without codes"),
        ({"sid": [[1, 2], [3, 2**31]]}, "record 2: code 2147483648 is out of range"),
        ({"sid": [[1, 2], [-3, 4]]}, "record 2: code -3 is out of range"),
        ({"sid": [[1, 2], [3, None]]}, "record 2: no value in column 'sid'"),
        ({"sid": [[1, 2], None]}, "record 2: no value in column 'sid'"),
        ({"sid": [[0.5, 1.0], [2.0, 3.0]]}, "column 'sid' holds double, want integers"),
        ({"sid": [1, 2]}, "column 'sid' holds int64, want lists of integers"),
        ({"order": [0.5, float("nan")]}, "record 2: order score nan is out of range"),
        ({"order": [0.5, None]}, "record 2: no value in column 'order'"),
        ({"order": ["a", "b"]}, "column 'order' holds string, want numbers"),
        ({"stock": [1, None]}, "record 2: no value in column 'stock'"),
        (
            {"stock": np.array([1, 2**64 - 1], np.uint64)},
            "record 2: attribute 'stock' is 18446744073709551615, too large",
        ),
        ({"stock": [[1], [2]]}, "column 'stock' holds list<"),
    ],
)
def test_bad_parquet(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "item_id": [1, 2],
        "sid": [[1, 2], [3, 4]],
        "order": [0.5, 1.0],
        "stock": [3, 4],
    } | change
    path = tmp_path / "items.parquet"
    arrays = {name: pa.array(cells) for name, cells in columns.items() if cells is not None}
    parquet.write_table(pa.table(arrays), path)
    with pytest.raises(DataError) as caught:
        read_items(path)
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name in ("a.jsonl", "a.parquet", "a.bin"):
        with pytest.raises(DataError, match=name):
            read_items(tmp_path / name)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"b\.parquet"):
        read_items(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"a\.csv: a catalogue is \.jsonl"):
        read_items(tmp_path / "a.csv")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"Parquet needs pip install 'npu_gr\[parquet\]'"):
        read_items(tmp_path / "items.parquet")


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "items.parquet"
    parquet.write_table(
        pa.Table.from_arrays([pa.array([1])] * 2, names=["item_id", "item_id"]), path
    )
    with pytest.raises(DataError, match="several columns 'item_id'"):
        read_items(path)


def test_a_line_is_a_name_and_a_number_its_own_id(tmp_path: Path) -> None:
    path = tmp_path / "popular.txt"
    path.write_bytes("\ufeffSKU-0042-C\r\n\r\n  42 \nblue shoes, size 42\n42\nGrün\n007\n".encode())
    names: list[str | int] = ["SKU-0042-C", 42, "blue shoes, size 42", "Grün", "007"]
    assert read_popular(str(path)).tolist() == [item_id(name) for name in names]


def test_no_list_is_no_item() -> None:
    assert len(read_popular(None)) == 0


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\n  \n", "holds no item"),
        (b"1\n" + b"x" * 513 + b"\n", "line 2: a name of 513 bytes is not an item name"),
        (b"1\n\xff\n", "codec can't decode"),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "popular.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_popular(str(path))
    assert str(error.value).startswith(f"recommend.popular: {path}")
    assert word in str(error.value)


def test_a_missing_list_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recommend\.popular: .*No such file"):
        read_popular(str(tmp_path / "none.txt"))
