"""A broken row is counted by its reason and written to a file, and never affects another row."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, lines, prepare, read_log, table
from npu_gr.dataset.engine import in_memory
from npu_gr.dataset.lines import PACKED, ignore_progress
from npu_gr.dataset.rejects import RejectReason
from npu_gr.dataset.sources import open_source
from npu_gr.dataset.table import SourceTable

HEAD = b"user_id,item_id,ts,note\n"
GOOD = b"u,i,1700000000,x\n"


def lenient() -> PrepareOptions:
    return PrepareOptions(max_rejected_ratio=1)


def rejected(folder: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    return [(line.get("line", line.get("row")), line["reason"]) for line in lines]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"u,i,1700000000", RejectReason.CELLS),
        (b"garbage", RejectReason.CELLS),
        (b"u,i,1700000000,x,more", RejectReason.CELLS),
        (b'u,"i,1700000000,x', RejectReason.QUOTE),
        (b'u,"i,1700000000,x\nu,i,1700000001,x\nu,i,1700000002,"x', RejectReason.QUOTE),
        (b'u,"i,1700000000,x\nv",1', RejectReason.QUOTE),
        (b"\xffu,i,1700000000,x", RejectReason.NOT_UTF8),
        (b",i,1700000000,x", RejectReason.NO_USER),
        (b"NULL,i,1700000000,x", RejectReason.NO_USER),
        (b"u,,1700000000,x", RejectReason.NO_ITEM),
        (b"u,4.00638E+12,1700000000,x", RejectReason.ROUNDED),
        (b"u,\\N,1700000000,x", RejectReason.NO_ITEM),
        (b"u,i,,x", RejectReason.NO_TIME),
        (b"u,i,soon,x", RejectReason.UNREADABLE_TIME),
        (b"u,i,1700000000000,x", RejectReason.OTHER_UNIT),
        (b"u,i,0,x", RejectReason.EARLY),
        (b"u,i,99999999999,x", RejectReason.LATE),
        (b"u" * 129 + b",i,1700000000,x", RejectReason.LONG_USER),
        (b"u," + "é".encode() * 257 + b",1700000000,x", RejectReason.LONG_ITEM),
    ],
    ids=str,
)
def test_a_broken_row_is_named_by_its_line(
    row: bytes, reason: RejectReason, tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes(
        HEAD
        + GOOD
        + row
        + b"\n"
        + b"v,j,1700000009,y\n" * 1
        + b"\n"
        + b"broken\n"
        + b"w,k,1700000008,z"
    )
    prepared = prepare(log, tmp_path / "data", PrepareOptions(max_rejected_ratio=0.9))
    assert prepared.num_rejected == sum(
        one["rows"] for one in prepared.manifest["rejected"].values()
    )
    assert (3, reason.value) in rejected(tmp_path / "data")
    last = 3 + row.count(b"\n") + 3
    assert (last, RejectReason.CELLS.value) in rejected(tmp_path / "data")
    assert {"u", "v", "w"} <= set(read_log(tmp_path / "data").user_names)


def test_a_stray_quote_never_takes_its_neighbours(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    rows = [f"u{at},i{at},{1_700_000_000 + at},x" for at in range(500)]
    for at in (100, 200):
        rows[at] = f'u{at},"i{at},{1_700_000_000 + at},x'
    log.write_bytes(HEAD + "\n".join(rows).encode())
    assert prepare(log, tmp_path / "data").manifest["events"] == 498
    assert rejected(tmp_path / "data") == [(102, RejectReason.QUOTE), (202, RejectReason.QUOTE)]


def test_cells_with_newlines_and_separators_are_one_cell(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_bytes(
        HEAD + b'u,"a,b",1700000000,"two\nlines, ""quoted"""\r\nu,"say ""hi""",1700000001,\r\n'
    )
    dataset = prepare(log, tmp_path / "data").dataset
    assert dataset.names.names(dataset.interactions().items) == ["a,b", 'say "hi"']


def test_a_bare_carriage_return_ends_no_row(tmp_path: Path) -> None:
    """With as many blank lines the number of rows is right by chance, but row numbers are not."""
    log = tmp_path / "log.csv"
    two = GOOD.replace(b"\n", b"\r") + GOOD.replace(b"u", b"hidden")
    log.write_bytes(HEAD + GOOD + two + b"\r\n" + b"v,j,1700000009,y\r\n" + b"w,k,soon,z\n")
    prepare(log, tmp_path / "data", lenient())
    assert rejected(tmp_path / "data") == [
        (3, RejectReason.QUOTE),
        (6, RejectReason.UNREADABLE_TIME),
    ]
    assert read_log(tmp_path / "data").user_names == ["u", "v"]


@pytest.mark.parametrize("num_bytes", [16, 40, 90])
def test_blocks_end_anywhere(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", num_bytes)
    rows = [f'u{at},"i\n{at}",{1_700_000_000 + at},"a, ""b"""' for at in range(40)]
    rows[7] = "bad"
    (tmp_path / "log.csv").write_text("\ufeff" + HEAD.decode() + "\n".join(rows), encoding="utf-8")
    dataset = prepare(tmp_path / "log.csv", tmp_path / "data").dataset
    assert dataset.names.names(dataset.interactions().items) == [
        f"i\n{at}" for at in range(40) if at != 7
    ]
    assert rejected(tmp_path / "data") == [(2 + 7 * 2, RejectReason.CELLS)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", RejectReason.NOT_JSON),
        (b"[1, 2]", RejectReason.NOT_JSON),
        (b"[" * 100_000, RejectReason.NOT_JSON),
        (b'{"user_id": "\xff", "item_id": 7, "ts": 1700000000}', RejectReason.NOT_JSON),
        (b'{"user_id": NaN, "item_id": 7, "ts": 1700000000}', RejectReason.NOT_JSON),
        (b'{"item_id": 7, "ts": 1700000000}', RejectReason.NO_USER),
        (b'{"user_id": null, "item_id": 7, "ts": 1700000000}', RejectReason.NO_USER),
        (
            b'{"user_id": 36893488147419103232, "item_id": 7, "ts": 1700000000}',
            RejectReason.ROUNDED,
        ),
        (b'{"user_id": "u", "item_id": {"id": 7}, "ts": 1700000000}', RejectReason.NO_ITEM),
        (b'{"user_id": "u", "item_id": [1, 2], "ts": 1700000000}', RejectReason.NO_ITEM),
        (b'{"user_id": "u", "item_id": 7, "ts": true}', RejectReason.UNREADABLE_TIME),
    ],
)
def test_a_broken_json_line_is_named(line: bytes, reason: RejectReason, tmp_path: Path) -> None:
    good = b'{"user_id": 7, "item_id": 42.0, "ts": 1700000000}\n'
    (tmp_path / "log.jsonl").write_bytes(good + b"\n" + line + b"\n" + good.replace(b"7", b"8"))
    prepared = prepare(tmp_path / "log.jsonl", tmp_path / "data", lenient())
    assert rejected(tmp_path / "data") == [(3, reason)]
    assert prepared.dataset.interactions().user_names == ["7", "8"]
    assert set(prepared.dataset.interactions().items.tolist()) == {42}


def test_objects_in_objects_have_an_end(tmp_path: Path) -> None:
    """Neither a thousand objects in each other nor a key for each row is a reason to fail."""
    row = b'{"u": {"user_id": 7}, "item_id": 1, "ts": 1700000000, "x": %b}\n'
    deep = b'{"x":' * 900 + b"1" + b"}" * 900
    wide = b"".join(row % b'{"k%d": 1}' % at for at in range(3000))
    (tmp_path / "log.jsonl").write_bytes(wide + row % deep)
    prepared = prepare(
        tmp_path / "log.jsonl", tmp_path / "data", PrepareOptions(keep_duplicates=True)
    )
    assert (prepared.manifest["events"], prepared.num_rejected) == (3001, 0)
    assert prepared.manifest["columns"]["user"]["name"] == "u.user_id"


def test_rows_of_a_table_are_named(tmp_path: Path) -> None:
    table = pa.table(
        {"user_id": ["u", None, "w"], "item_id": [1.0, 2.0, None], "ts": [1_700_000_000] * 3}
    )
    prepare(table, tmp_path / "data", lenient())
    assert rejected(tmp_path / "data") == [(2, RejectReason.NO_USER), (3, RejectReason.NO_ITEM)]


def test_progress_ends_with_the_whole(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"user_id": ["u"] * 3, "item_id": [1, 2, 3], "ts": [1_700_000_000] * 3}),
        tmp_path / "a.pq",
    )
    stages: list[tuple[str, float]] = []
    prepare(tmp_path / "a.pq", tmp_path / "data", on_stage=lambda *stage: stages.append(stage))
    assert dict(stages) == {"reading": 1.0, "sorting": 1.0}


def test_a_column_that_a_table_has_twice_is_named(tmp_path: Path) -> None:
    columns = [pa.array(["u"]), pa.array([1]), pa.array([1_700_000_000]), pa.array([2])]
    table = pa.table(columns, names=["user_id", "item_id", "ts", "item_id"])
    with pytest.raises(
        DataError, match="the frame: two columns are named 'item_id'; rename one of them"
    ):
        prepare(table, tmp_path / "data")
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log\.parquet: two columns are named 'item_id'"):
        prepare(tmp_path / "log.parquet", tmp_path / "data")
    nested = pa.table({"user_id": ["u"], "a.b": [1], "a": [{"b": 1}], "ts": [1]})
    with pytest.raises(DataError, match=r"two columns are named 'a\.b'"):
        prepare(nested, tmp_path / "data")


def test_a_log_that_is_mostly_garbage_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(HEAD + GOOD + b"u,,1700000000,x\n" * 2)
    with pytest.raises(
        DataError,
        match=r"67% of the rows cannot be used.*2 x no item \(first: line "
        r"3\).*--max-rejected",
    ):
        prepare(tmp_path / "log.csv", tmp_path / "data")
    assert not (tmp_path / "data").exists()
    assert prepare(tmp_path / "log.csv", tmp_path / "data", lenient()).manifest["events"] == 1
    (tmp_path / "log.csv").write_bytes(HEAD + b"u,,1700000000,x\n")
    with pytest.raises(DataError, match=r"no row can be used: 1 x no item \(first: line 2\)"):
        prepare(tmp_path / "log.csv", tmp_path / "data", lenient())


def test_the_file_of_rejected_rows_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MAX_WRITTEN", 3)
    (tmp_path / "log.csv").write_bytes(HEAD + GOOD + b"x" * 10_000 + b"\n" + b"bad\n" * 99)
    prepared = prepare(tmp_path / "log.csv", tmp_path / "data", lenient())
    assert prepared.num_rejected == 100
    lines = (tmp_path / "data/rejected.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) < 700


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.csv", b"", "x.csv: the file is empty"),
        ("x.csv", b"\n" + HEAD, "the first line is empty"),
        ("x.csv", b"sep=;\n\n" + HEAD, "line 2 is empty"),
        ("x.csv", HEAD, "no row follows the first line"),
        ("x.csv", HEAD + b"a\n", "no row has the 4 cells of the first line.*--columns"),
        (
            "x.csv",
            b"u1,i1,1700000000\nu2,i2,1700000001\n",
            "no column looks like the user.*--columns a,b",
        ),
        ("x.csv", b"user_id,user_id\n", "two columns are named 'user_id'"),
        ("x.csv", "user_id,item_id,ts\n".encode("utf-16"), "UTF-16, not UTF-8; convert"),
        ("x.csv", b"\xff\xe9,b\n1,2\n", "not UTF-8; convert"),
        (
            "x.csv.gz",
            b"plain",
            "x.csv.gz: the gzip file is damaged or truncated after 0 bytes of content: ",
        ),
        ("x.parquet", b"plain", "x.parquet: "),
        ("x.json", b"7", "neither JSON objects"),
        ("x.json", b'{"u": [1, [2]]}', r'not \{"user": \[item'),
        ("x.json", b'{"u": [1', r'not \{"user": \[item'),
        ("x.json", b"[1, 2]", "not a list of JSON objects"),
        ("x.json", b"[{", "x.json: "),
        ("x.jsonl", b"no\n", "no line is a JSON object"),
        ("x.xlsx", b"", "a workbook; save the sheet as CSV"),
        ("x.sheet", b"", "unknown suffix; name the format: --format csv"),
    ],
    ids=str,
)
def test_a_file_that_is_no_log_says_why(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        prepare(tmp_path / name, tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_of_a_file_that_is_cut_short_it_says_how_much_was_read(tmp_path: Path) -> None:
    packed = gzip.compress(random.Random(0).randbytes(5 << 20).hex().encode())
    test_a_file_that_is_no_log_says_why("x.csv.gz", packed[:-99], "after 8,388,608 bytes", tmp_path)


def test_what_is_no_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: no such file"):
        prepare(tmp_path / "none.csv", tmp_path / "data")
    with pytest.raises(DataError, match=r"no log in the folder; known suffixes: \.csv"):
        prepare(tmp_path, tmp_path / "data")
    nothing: Any = [1, 2]
    with pytest.raises(DataError, match="a list is not a log"):
        prepare(nothing, tmp_path / "data")


def test_an_event_column_of_very_many_kinds_is_rejected(tmp_path: Path) -> None:
    rows = "".join(f"u,i,1700000000,e{at}\n" for at in range(101))
    (tmp_path / "log.csv").write_text("user_id,item_id,ts,event\n" + rows)
    with pytest.raises(DataError, match=r"'event' has over 100 distinct values.*--event none"):
        prepare(tmp_path / "log.csv", tmp_path / "data", PrepareOptions(event="event"))


ODD = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"\0", b",", b"a", b'"', b"\xff", b"\xef\xbb\xbf"])
).map(b"".join)


@settings(deadline=None)
@given(
    content=st.binary(max_size=200) | ODD,
    header=st.sampled_from([b"user_id,item_id\n", b"user_id,item_id\r\n", b""]),
    packed=st.sampled_from(["", ".gz", ".zst"]),
)
# DuckDB takes the \r for an empty line
@example(content=b"\r\0", header=b"user_id,item_id\n", packed="")
@example(content=b"\r\n", header=b"user_id,item_id\n", packed=".gz")  # two empty lines
@example(content=b"a,b\n\rc,d", header=b"", packed=".zst")
@example(content=b"\x81\xa1", header=b"user_id,item_id\n", packed="")  # not a file in GBK
def test_any_bytes_are_a_log_or_are_rejected(
    content: bytes, header: bytes, packed: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each line is a row, a part of one, or rejected: none is lost."""
    path = tmp_path_factory.mktemp("x") / f"log.csv{packed}"
    with pa.output_stream(path, compression=PACKED.get(packed)) as stream:
        stream.write(header + content)
    try:
        source = open_source(path, columns=() if header else ("user_id", "item_id"))
    except DataError:
        assert not header  # of what has none the first line must have two cells
        return
    first = 2 if header else 1
    with in_memory() as con:
        found = SourceTable(
            con,
            "log",
            source,
            ["user_id", "item_id"],
            lambda cells: f"SELECT *, state AS reason FROM ({cells})",
        )
        found.load(ignore_progress)
        seen = [n + first for (n,) in con.execute("SELECT n FROM log WHERE reason >= 0").fetchall()]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(first, content.count(b"\n") + first + 1))
    if b'"' not in content:
        rest = content if header else content.removeprefix(b"\xef\xbb\xbf")
        assert sorted(seen) == [
            at for at, line in enumerate(rest.split(b"\n"), first) if line.rstrip(b"\r")
        ]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 4 << 20])
def test_duckdb_reads_files_whose_ends_are_alike(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", block_bytes)
    for content, is_alike in {
        b"": True,
        b"ab": True,
        b"a\nb": True,
        b"a\r\nb\r\n": True,
        b"a\nb\r\n": False,
        b"a\r\nb\nc\r\n": False,
        b"a\nb\r": False,
        b"a\r\n\r": False,
        b"a\rb\nc": False,
    }.items():
        (tmp_path / "log.csv").write_bytes(content)
        assert lines.has_like_ends(tmp_path / "log.csv") is is_alike, content


@pytest.mark.parametrize(
    ("column", "reason"), [("user_id", RejectReason.LONG_USER), ("item_id", RejectReason.LONG_ITEM)]
)
@pytest.mark.parametrize("kind", [pa.string(), pa.binary()], ids=str)
def test_a_long_key_of_parquet_is_rejected_and_not_cut(
    tmp_path: Path, column: str, reason: RejectReason, kind: Any
) -> None:
    times = [1_700_000_000 + n for n in range(4)]
    log = {"user_id": list("uuuu"), "item_id": list("iiii"), "ts": times}
    keys = pa.array(["a", "b", "k" * 4097, "k" * 5000]).cast(kind)
    pq.write_table(pa.table(log | {column: keys}), tmp_path / "l.parquet")
    prepare(tmp_path / "l.parquet", tmp_path / "out", lenient())
    assert rejected(tmp_path / "out") == [(3, reason), (4, reason)]


@pytest.mark.parametrize("which", ["items", "users"])
def test_a_long_key_of_a_side_file_is_rejected(tmp_path: Path, which: str) -> None:
    (tmp_path / "log.csv").write_bytes(HEAD + GOOD)
    key = f"{which[:-1]}_id"
    pq.write_table(
        pa.table({key: ["u", "i", "k" * 5000], "age": [1, 2, 3]}), tmp_path / "which.parquet"
    )
    prepare(
        tmp_path / "log.csv",
        tmp_path / "out",
        lenient(),
        **{which: tmp_path / "which.parquet"},  # type: ignore[arg-type]
    )
    reason = RejectReason.LONG_ITEM if which == "items" else RejectReason.LONG_USER
    assert rejected(tmp_path / "out") == [(3, reason)]


def test_a_parquet_bomb_names_itself_the_limit_and_the_option(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.parquet"
    log = {
        "user_id": ["u" * 8_000_000] * 40,
        "item_id": ["i"] * 40,
        "ts": [1_700_000_000 + n for n in range(40)],
    }
    pq.write_table(pa.table(log), bomb, compression="zstd")
    with pytest.raises(
        DataError,
        match=rf"^{bomb}: reading it needs more than DuckDB's limit of 100 MB; "
        r"raise it with --memory",
    ):
        prepare(bomb, tmp_path / "out")
    with pytest.raises(DataError, match="user: over 128 characters"):
        prepare(bomb, tmp_path / "out", PrepareOptions(memory_mb=4000))
