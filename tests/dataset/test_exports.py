"""Exports of well-known tools and data sets, without an option: right, or an error with the option.

Rows are invented; names and forms are those of the exports.
"""

from __future__ import annotations

import json
import sqlite3
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, prepare, read_dataset

NINE = 1_709_283_600  # 2024-03-01 09:00 UTC
ROWS = [("u1", "A1", 0, "view"), ("u2", "B2", 60, "view"), ("u1", "B2", 120, "purchase")]


def at(second: int, form: str = "%Y-%m-%dT%H:%M:%SZ") -> str:
    return f"{datetime.fromtimestamp(NINE + second, UTC):{form}}"


def events(folder: Path) -> list[tuple[str, str, int, str]]:
    """User, item, seconds after nine, and action of each event, by time."""
    dataset = read_dataset(folder)
    log = dataset.interactions()
    items = map(str, dataset.names.names(log.items))
    return [
        (log.user_names[user], item, time - NINE, dataset.action_names[int(value)])
        for user, item, time, value in zip(
            log.users, items, log.timestamps.tolist(), log.values, strict=True
        )
    ]


def of_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def of_cells(header: str, rows: Sequence[Sequence[object]], mark: str = ",") -> str:
    return "\n".join([header, *(mark.join(map(str, row)) for row in rows)]) + "\n"


EXPORTS = {
    "amplitude.jsonl": of_lines(
        [
            {
                "user_id": user,
                "device_id": "d",
                "event_type": event,
                "event_time": at(s, "%Y-%m-%d %H:%M:%S.%f"),
                "server_upload_time": at(s + 9, "%Y-%m-%d %H:%M:%S.%f"),
                "event_properties": {"product_id": item},
            }
            for user, item, s, event in ROWS
        ]
    ),
    "mixpanel.jsonl": of_lines(
        [
            {
                "event": event,
                "properties": {"time": NINE + s, "distinct_id": user, "product_id": item},
            }
            for user, item, s, event in ROWS
        ]
    ),
    "ga4.jsonl": of_lines(
        [
            {
                "event_date": at(s, "%Y%m%d"),
                "event_timestamp": str((NINE + s) * 1_000_000),
                "event_name": event,
                "user_id": None,
                "user_pseudo_id": user,
                "items": [{"item_id": item, "item_name": "N"}],
            }
            for user, item, s, event in ROWS
        ]
    ),
    "snowplow.csv": of_cells(
        "event_id,collector_tstamp,user_id,domain_userid,event_name,sku",
        [
            (s, at(s, "%Y-%m-%d %H:%M:%S.%f"), user, "d", event, item)
            for user, item, s, event in ROWS
        ],
    ),
    "retailrocket.csv": of_cells(
        "timestamp,visitorid,event,itemid,transactionid",
        [((NINE + s) * 1000, user, event, item, "") for user, item, s, event in ROWS],
    ),
    "rudderstack.csv": of_cells(
        "userId,timestamp,event,properties",
        [
            (user, at(s), event, f'"{{""product_id"": ""{item}"", ""price"": 3}}"')
            for user, item, s, event in ROWS
        ],
    ),
    "snowflake.jsonl": of_lines(
        [
            {"USER_ID": user, "TS": at(s), "EVENT": event, "DATA": json.dumps({"sku": item})}
            for user, item, s, event in ROWS
        ]
    ),
    "otto.jsonl": of_lines(
        [
            {
                "session": user,
                "events": [
                    {"aid": item, "ts": (NINE + s) * 1000, "type": event}
                    for own, item, s, event in ROWS
                    if own == user
                ],
            }
            for user in ("u1", "u2")
        ]
    ),
    "goodreads.jsonl": of_lines(
        [
            {
                "user_id": user,
                "book_id": item,
                "date_added": at(s - 8 * 3600, "%a %b %d %H:%M:%S -0800 %Y"),
                "action": event,
            }
            for user, item, s, event in ROWS
        ]
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_read_right(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(EXPORTS[name], encoding="utf-8")
    prepare(tmp_path / name, tmp_path / "data")
    assert events(tmp_path / "data") == ROWS


ASKED = {
    "shopify.csv": (
        of_cells(
            "Name,Email,Financial Status,Created at,Lineitem sku",
            [("#1", "a@x", "paid", at(0), "A"), ("#2", "b@x", "refunded", at(1), "B")],
        ),
        r"--drop 'Financial Status in \(refunded\)'",
    ),
    "woocommerce.csv": (
        of_cells("order_date,customer_id,product_id,sku", [(at(0), 1, 2, "A"), (at(1), 2, 3, "B")]),
        "--item product_id or --item sku",
    ),
    "kuairand.csv": (
        of_cells(
            "user_id,video_id,time_ms,is_click", [(1, 2, NINE * 1000, 0), (1, 3, NINE * 1000, 1)]
        ),
        "--positive 'is_click=1'",
    ),
    "ga4.csv": (
        of_cells(
            "user_pseudo_id,item_id,event_timestamp,event_name",
            [("u", "A", NINE, "view_item_list"), ("u", "A", NINE, "purchase")],
        ),
        r"--positive 'event_name not in \(view_item_list\)'",
    ),
    "UserBehavior.csv": (
        "1,2268318,2520377,1511544070,pv\n1,2333346,2520771,1511561733,pv\n",
        "--columns",
    ),
    "ratings.dat": ("1::1193::5::978300760\n1::661::3::978302109\n", "sed 's/::/"),
    "pairs.txt": ("1 5\n1 6\n2 5\n", "--format lists"),
    "orders.xlsx": ("PK", "read_excel"),
    "two.sqlite": ("no database", "not a database"),
    "artists.tsv": (
        of_cells("userID\tartistID\tweight", [(1, 2, 9), (1, 3, 4)], "\t"),
        "--no-time",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_not_clear_is_asked(name: str, tmp_path: Path) -> None:
    text, option = ASKED[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=option):
        prepare(tmp_path / name, tmp_path / "data")


def test_shown_items_of_mind_are_impressions_and_the_history_comes_first(tmp_path: Path) -> None:
    header = "impression_id\tuser_id\ttime\thistory\timpressions"
    rows = [
        (1, "U1", "11/13/2019 8:36:57 AM", "N9 N8", "N1-0 N2-1 N3-0"),
        (2, "U1", "11/13/2019 8:40:57 AM", "N9 N8", "N4-1"),
        (3, "U2", "11/14/2019 8:40:57 AM", "", "N1-0 N4-1"),
    ]
    (tmp_path / "behaviors.tsv").write_text(of_cells(header, rows, "\t"))
    manifest = prepare(tmp_path / "behaviors.tsv", tmp_path / "data").manifest
    found = [(user, item) for user, item, *_ in events(tmp_path / "data")]
    assert found == [("U1", "N9"), ("U1", "N8"), ("U1", "N2"), ("U1", "N4"), ("U2", "N4")]
    assert manifest["filtered"] == 3


def test_a_line_of_a_user_and_the_items(tmp_path: Path) -> None:
    (tmp_path / "beauty.txt").write_text("1 5 6 7\n2 6\n3 9 9\n")
    prepare(tmp_path / "beauty.txt", tmp_path / "data")
    log = read_dataset(tmp_path / "data").interactions()
    assert [
        (log.user_names[user], item) for user, item in zip(log.users, log.items, strict=True)
    ] == [
        ("1", 5),
        ("2", 6),
        ("3", 9),
        ("1", 6),
        ("3", 9),
        ("1", 7),
    ]


def test_a_database_of_one_table(tmp_path: Path) -> None:
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as con:
        con.execute("CREATE TABLE log (user_id TEXT, item_id TEXT, ts INTEGER, event TEXT)")
        con.executemany(
            "INSERT INTO log VALUES (?, ?, ?, ?)", [(u, i, NINE + s, e) for u, i, s, e in ROWS]
        )
    prepare(path, tmp_path / "data")
    assert events(tmp_path / "data") == ROWS
    with sqlite3.connect(path) as con:
        con.execute("CREATE TABLE users (user_id TEXT)")
    con.close()
    with pytest.raises(DataError, match="sqlite3 -header -csv"):
        prepare(path, tmp_path / "data")


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    for day in (1, 2):
        folder = tmp_path / "log" / f"dt=2024-03-0{day}" / "shop=a%20b"
        folder.mkdir(parents=True)
        (folder / "part.csv").write_text(f'user_id,item_id\nu1,A{day}\nu2,"B\n{day}"\n')
    manifest = prepare(
        tmp_path / "log", tmp_path / "data", PrepareOptions(request_features=("shop",))
    ).manifest
    assert manifest["columns"]["time"]["name"] == "dt"
    day = 86_400
    nine = 9 * 3600
    assert [(user, time) for user, _, time, _ in events(tmp_path / "data")] == [
        ("u1", -nine),
        ("u2", -nine),
        ("u1", day - nine),
        ("u2", day - nine),
    ]
    (shop,) = read_dataset(tmp_path / "data").interactions().columns
    assert shop.values.tolist() == ["a b"] * 4
    (tmp_path / "log" / "other.csv").write_text("user_id,item_id\nu1,A\n")
    with pytest.raises(DataError, match="one layout"):
        prepare(tmp_path / "log", tmp_path / "data")


def test_names_of_folders_are_columns_of_parquet_too(tmp_path: Path) -> None:
    for number, (user, item, _, event) in enumerate(ROWS):
        folder = tmp_path / "log" / "year=2024" / "month=3" / f"day={number + 1}"
        folder.mkdir(parents=True)
        pq.write_table(
            pa.table({"user_id": [user, None], "item_id": [item, "Z"], "event": [event, event]}),
            folder / "part.parquet",
        )
    manifest = prepare(tmp_path / "log", tmp_path / "data").manifest
    assert [user for user, *_ in events(tmp_path / "data")] == ["u1", "u2", "u1"]
    assert manifest["rejected"]["no user"]["rows"] == 3
    assert manifest["last_time"] - manifest["first_time"] == 2 * 86_400


def test_each_file_has_its_own_encoding(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "log.zip", "w") as archive:
        archive.writestr("b.csv", f"user_id,item_id,ts\nu1,Tür,{NINE}\n".encode("cp1252"))
        archive.writestr("a.csv", f"user_id,item_id,ts\nu1,Größe,{NINE}\n".encode())
        archive.writestr("__MACOSX/._a.csv", b"\x00")
    manifest = prepare(tmp_path / "log.zip", tmp_path / "data").manifest
    assert sorted(item for _, item, *_ in events(tmp_path / "data")) == ["Größe", "Tür"]
    assert any("1 of the files" in note for note in manifest["notes"])


def test_visitors_without_a_name_are_warned_of(tmp_path: Path) -> None:
    rows = [(f"u{n % 20}" if n % 8 else "NA", f"i{n % 30}", NINE + 60 * n) for n in range(400)]
    (tmp_path / "log.csv").write_text(of_cells("user_id,item_id,ts", rows))
    notes = prepare(tmp_path / "log.csv", tmp_path / "data").manifest["notes"]
    assert any("--drop 'user_id=NA'" in note for note in notes)


def test_lists_and_decimal_commas_of_the_items_file(tmp_path: Path) -> None:
    log = of_cells("user_id,item_id,ts", [("u1", f"i{n}", NINE + n) for n in range(40)])
    (tmp_path / "log.csv").write_text(log)
    header = "item_id;price;tags;python;semi;words;note"
    rows = [
        (
            f"i{n}",
            f"1.{n:03},50",
            f'"[""a{n % 3}"", ""b""]"',
            f"['x{n % 2}', 'y']",
            f'"p{n % 2};q"',
            f"Home, L{n % 2}",
            f"A sentence, no list {n}",
        )
        for n in range(40)
    ]
    (tmp_path / "items.csv").write_text(of_cells(header, rows, ";"))
    dataset = prepare(tmp_path / "log.csv", tmp_path / "data", items=tmp_path / "items.csv").dataset
    features = {one.name: one for one in dataset.item_features()}
    assert sorted(features["price"].numbers.values())[:2] == [1000.5, 1001.5]
    assert sorted(features["tags"].values) == ["a0", "a1", "a2", "b"]
    assert sorted(features["python"].values) == ["x0", "x1", "y"]
    assert sorted(features["semi"].values) == ["p0", "p1", "q"]
    assert sorted(features["words"].values) == ["Home", "L0", "L1"]
    assert "note" in dataset.manifest["skipped"]
