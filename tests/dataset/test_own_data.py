"""Exports that companies have: read right without an option, or the message names the option."""

from __future__ import annotations

import json
import lzma
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import feather, orc

from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.dataset.summary import summary

NINE = 1_709_283_600  # 2024-03-01 09:00 UTC


def made(
    tmp_path: Path, text: str | bytes, name: str = "log.csv", **options: Any
) -> dict[str, Any]:
    """The manifest of a log."""
    log = tmp_path / name
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    return prepare(log, tmp_path / "out", PrepareOptions(**options)).manifest


def events(tmp_path: Path) -> list[tuple[str, str, int, str]]:
    """User, item, seconds after nine, and action of each event of the dataset, sorted."""
    dataset = read_dataset(tmp_path / "out")
    log = dataset.interactions()
    items = map(str, dataset.names.names(log.items))
    return sorted(
        (log.user_names[user], item, time - NINE, dataset.action_names[int(value)])
        for user, item, time, value in zip(
            log.users, items, log.timestamps.tolist(), log.values, strict=True
        )
    )


def test_an_order_is_an_event_of_each_product(tmp_path: Path) -> None:
    def row(user: str, minute: int, event: str, **more: Any) -> str:
        at = f"2024-03-01T09:{minute:02}:00Z"
        return json.dumps({"userId": user, "timestamp": at, "event": event, "properties": more})

    rows = [
        row("u1", 0, "Product Viewed", product_id="A1"),
        # what else was shown is no event, since the row has an item of its own
        row("u1", 1, "Product Added", product_id="A1", others=[{"product_id": "Z"}]),
        row("u1", 2, "Order", order_id="o", products=[{"product_id": "A1"}, {"product_id": "B2"}]),
        row("u2", 3, "Order", order_id="p", products=[]),
        row("u1", 4, "Order", order_id="q", products=[{"product_id": "C3"}, None]),
        "no json",
    ]
    manifest = made(tmp_path, "\n".join(rows), "log.jsonl")
    assert events(tmp_path) == [
        ("u1", "A1", 0, "Product Viewed"),
        ("u1", "A1", 60, "Product Added"),
        ("u1", "A1", 120, "Order"),
        ("u1", "B2", 120, "Order"),
        ("u1", "C3", 240, "Order"),
    ]
    assert {reason: one["rows"] for reason, one in manifest["rejected"].items()} == {
        "no item": 2,
        "not a JSON object": 1,
    }
    assert any("each object of" in note for note in manifest["notes"])


def test_sessions_of_events_are_unfolded(tmp_path: Path) -> None:
    row = {
        "session": 7,
        "events": [
            {"aid": 1, "ts": (NINE + at) * 1000, "type": kind}
            for at, kind in ((0, "clicks"), (9, "orders"))
        ],
    }
    made(tmp_path, json.dumps(row), "log.jsonl")
    assert events(tmp_path) == [("7", "1", 0, "clicks"), ("7", "1", 9, "orders")]


def test_an_event_type_that_is_lost_is_a_warning(tmp_path: Path) -> None:
    text = "user_id,sku,ts,event\nu,A,2024-03-01,view\nu,,2024-03-01,purchase\n"
    assert any("'purchase' cannot be used" in note for note in made(tmp_path, text)["notes"])
    with pytest.raises(DataError, match="--strict:\nWARNING: 1 of the 1 rows"):
        made(tmp_path, text, strict=True)


@pytest.mark.parametrize("ones", [("0", "1"), ("false", "true"), ("0.0", "1.0")])
def test_shown_and_not_clicked_is_no_behaviour(tmp_path: Path, ones: tuple[str, str]) -> None:
    lines = [f"u,A{at},2024-03-01T09:00:0{at}Z,{ones[at % 2]}" for at in range(6)]
    text = "\n".join(["user_id,item_id,timestamp,click", *lines])
    no, yes = (one.removesuffix(".0") for one in ones)
    with pytest.raises(DataError, match=f"'click' is {no} or {yes}.*--positive 'click={yes}'"):
        made(tmp_path, text)
    made(tmp_path, text, positive=("none",))
    assert len(events(tmp_path)) == 6
    manifest = made(tmp_path, text, positive=(f"click={ones[1]}",))
    assert [item for _, item, *_ in events(tmp_path)] == ["A1", "A3", "A5"]
    assert (manifest["filtered"], manifest["rejected"]) == (3, {})
    assert len(read_dataset(tmp_path / "out").names) == 3  # nobody clicked the others


def test_cancelled_orders_are_asked_about(tmp_path: Path) -> None:
    text = (
        "user_id,sku,ts,status\nu,A,2024-03-01,COMPLETED\nu,B,2024-03-01,CANCELLED\n"
        "u,C,2024-03-01,RETURNED\nu,D,2024-03-01,\n"
    )
    with pytest.raises(DataError, match=r"--drop 'status in \(CANCELLED, RETURNED\)'"):
        made(tmp_path, text)
    german = text.replace("CANCELLED", "storniert").replace("RETURNED", "retourniert")
    with pytest.raises(DataError, match=r"--drop 'status in \(storniert, retourniert\)'"):
        made(tmp_path, german)
    made(tmp_path, text, drop=("status in (CANCELLED, RETURNED)",))
    assert [item for _, item, *_ in events(tmp_path)] == ["A", "D"]
    made(tmp_path, text, where=("status = 'COMPLETED'",))
    assert [item for _, item, *_ in events(tmp_path)] == ["A"]
    made(tmp_path, text, drop=("none",))
    assert len(events(tmp_path)) == 4


@pytest.mark.parametrize(
    ("condition", "items"),
    [
        ("n=2", "B"),
        ("n != 2", "ACD"),
        ("n>=2", "BC"),
        ("n < 2", "A"),
        ("n in (1, 3)", "AC"),
        ("n not in (1,3)", "BD"),
        ("kind='x, y'", "A"),
        ("n=2.0", "B"),
    ],
)
def test_conditions(tmp_path: Path, condition: str, items: str) -> None:
    text = (
        'user_id,sku,ts,n,kind\nu,A,2024-03-01,1,"x, y"\nu,B,2024-03-01,2,z\nu,C,2024-03-01,3,z\n'
        "u,D,2024-03-01,,z\n"
    )
    made(tmp_path, text, where=(condition,))
    assert "".join(item for _, item, *_ in events(tmp_path)) == items
    made(tmp_path, text, drop=(condition,))
    assert "".join(item for _, item, *_ in events(tmp_path)) == "".join(
        sorted(set("ABCD") - set(items))
    )


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("n", "--where 'n': not a condition"),
        ("m=1", "--where: there is no column 'm'; there are 'user_id', 'sku', 'ts', 'n'"),
        ("n>x", "> compares with a number"),
    ],
)
def test_a_wrong_condition_is_an_error(tmp_path: Path, condition: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(tmp_path, "user_id,sku,ts,n\nu,A,2024-03-01,1\n", where=(condition,))


def test_dates_in_several_columns(tmp_path: Path) -> None:
    rows = "u,A,view,1,3,2024,9\nu,B,view,30,1,2024,10\n"
    manifest = made(tmp_path, f"user_id,item_id,event,day,month,year,hour\n{rows}")
    assert manifest["columns"]["time"]["name"] == "year+month+day+hour"
    day = 86_400
    assert [at for *_, at, _ in events(tmp_path)] == [0, -31 * day + 3600]
    shutil.rmtree(tmp_path / "out")
    made(tmp_path, "user_id,item_id,date,time\nu,A,2024-03-01,09:00:05\nu,B,,09:00\n")
    assert [at for *_, at, _ in events(tmp_path)] == [5]
    made(tmp_path, "user_id,item_id,d,t\nu,A,01.03.2024,09:00:05\n", time="d+t")
    assert [at for *_, at, _ in events(tmp_path)] == [5]


@pytest.mark.parametrize(
    "header", ["用户ID,商品ID,行为类型,时间戳", "Kunden-ID,Artikelnummer,Ereignis,Zeitstempel"]
)
def test_headers_of_other_languages(tmp_path: Path, header: str) -> None:
    made(tmp_path, f"{header}\n7,3,pv,{NINE}\n7,4,buy,{NINE + 1}\n")
    assert events(tmp_path) == [("7", "3", 0, "pv"), ("7", "4", 1, "buy")]


def test_types_of_extended_json(tmp_path: Path) -> None:
    row = {"user_id": "u", "sku": {"$oid": "A"}, "ts": {"$numberLong": str(NINE)}}
    made(tmp_path, json.dumps(row), "log.jsonl")
    assert events(tmp_path) == [("u", "A", 0, "event")]


def test_windows_1252_is_recognised(tmp_path: Path) -> None:
    text = "user_id,sku,ts\nu,Küche,2024-03-01T09:00:00Z\nu,B,2024-03-01T09:00:01Z\n"
    manifest = made(tmp_path, text.encode("cp1252"))
    assert [item for _, item, *_ in events(tmp_path)] == ["B", "Küche"]
    assert any("Windows-1252" in note for note in manifest["notes"])
    manifest = made(tmp_path, text.encode("cp1252"), encoding="utf-8")
    assert [item for _, item, *_ in events(tmp_path)] == ["B"]
    assert any("--encoding windows-1252" in note for note in manifest["notes"])
    made(tmp_path, text.encode("latin-1"), encoding="latin-1")
    assert len(events(tmp_path)) == 2
    # one broken row in a file of UTF-8 does not change how the others are read
    made(tmp_path, text.encode() + b"u,K\xfcbel,2024-03-01T09:00:02Z\n")
    assert [item for _, item, *_ in events(tmp_path)] == ["B", "Küche"]
    with pytest.raises(DataError, match="--encoding no: there is no such encoding"):
        made(tmp_path, text, encoding="no")


def test_titles_of_the_log(tmp_path: Path) -> None:
    text = "user_id,sku,ts,title\nu,A,1700000000,Lamp\nu,B,1700000001,\nu,A,1700000002,Lamp 2\n"
    manifest = made(tmp_path, text)
    names = read_dataset(tmp_path / "out").names
    log = read_dataset(tmp_path / "out").interactions()
    assert names.titles(np.unique(log.items)) in (["Lamp 2", None], [None, "Lamp 2"])
    assert manifest["columns"]["title"]["name"] == "title"


def test_event_types_that_differ_in_case_or_blanks_are_one(tmp_path: Path) -> None:
    text = "user_id,sku,ts,event\nu,A,1,VIEW\nu,B,2,view\nu,C,3,view \n"
    manifest = made(tmp_path, text)
    assert manifest["actions"]["names"] == ["view"]
    assert any("'VIEW' is 'view'" in note for note in manifest["notes"])


def test_every_column_is_accounted_for(tmp_path: Path) -> None:
    text = (
        "user_id,sku,ts,is_new,price,rating,color\nu,A,1,0,9.90,N/A,red\nu,B,2,1,8.5,4,\n"
        "u,B,3,1,8.5,N/A,\n"
    )
    manifest = made(tmp_path, text)
    unused = {one["name"]: (one["values"], one["hint"]) for one in manifest["unused"]}
    assert unused == {
        "is_new": ("0, 1", "if 0 is shown and not clicked: --positive 'is_new=1'"),
        "price": ("9.90, 8.5", "--features price makes it a feature of items"),
        "rating": ("N/A, 4", "its cells are text, not numbers; --value rating rejects the others"),
        "color": ("red", "--event-features color makes it a feature of events"),
    }


def test_a_column_that_is_not_used_names_the_option_that_uses_it(tmp_path: Path) -> None:
    head = "user_id,sku,ts,Waren Gruppe,surface,age,order,note,seen_at\n"
    text = head + "".join(
        f"u{at % 4},A{at % 5},{NINE + at},{'xy'[at % 5 % 2]},{'pq'[at // 7 % 2]},"
        f"{20 + at % 4},{900 + at},,2024-03-01\n"
        for at in range(40)
    )

    def hints(**options: Any) -> dict[str, str]:
        return {one["name"]: one["hint"] for one in made(tmp_path, text, **options)["unused"]}

    assert hints() == {
        "Waren Gruppe": "--features 'Waren Gruppe' makes it a feature of items",
        "surface": "--event-features surface makes it a feature of events",
        "age": "in the file of --users it is a feature of users",
        "order": "",
        "note": "",
        "seen_at": "",
    }
    followed = hints(features=("Waren Gruppe",), event_features=("surface",))
    assert list(followed) == ["age", "order", "note", "seen_at"]
    items = tmp_path / "items.csv"
    items.write_text("sku,title\nA0,Lamp\n")
    manifest = prepare(tmp_path / "log.csv", tmp_path / "out", items=items).manifest
    assert manifest["unused"][0]["hint"] == "in the file of --items it is a feature of items"


@pytest.mark.parametrize("point", [".", ","])
def test_values_have_a_decimal_point_or_a_decimal_comma(tmp_path: Path, point: str) -> None:
    cells = ["4,5", "3,0", "1.000,5", "5"] * 4
    if point == ".":
        cells = [cell.replace(".", "").replace(",", ".") for cell in cells]
    rows = [f"u;i{at};{at};{cell}\n" for at, cell in enumerate(cells)]
    manifest = made(tmp_path, "user_id;sku;ts;rating\n" + "".join(rows))
    assert manifest["columns"]["value"]["name"] == "rating"
    assert manifest["actions"]["names"] == ["3", "4.5", "5", "1000.5"]


def test_implausible_times_and_names_are_warnings(tmp_path: Path) -> None:
    text = "user_id,sku,ts\nu,Ab,4000000000\nu,ab,4000000001\n"
    notes = " ".join(made(tmp_path, text)["notes"])
    assert "in the future" in notes
    assert "items 'Ab' and 'ab' differ in case or blanks alone" in notes
    rows = "".join(f"u{at},i{at},{14_102_100 + at}\n" for at in range(100))
    notes = " ".join(made(tmp_path, "user_id,sku,ts\n" + rows)["notes"])
    assert "the first event is of 1970-06-13" in notes
    assert "within 2 minutes" in notes
    assert "100 items for 100 events" in notes
    assert "100 users for 100 events" in notes


def test_a_dated_folder_keeps_the_actions_of_another(tmp_path: Path) -> None:
    made(tmp_path, "user_id,sku,ts,event\nu,A,1,view\nu,A,2,purchase\n")
    day = tmp_path / "day.csv"
    day.write_text("user_id,sku,ts,event\nu,A,1,add_to_cart\nu,A,2,view\n")
    arguments = ["prepare", str(day), "--out", str(tmp_path / "new")]
    assert CliRunner().invoke(main, [*arguments, "--like", str(tmp_path / "out")]).exit_code == 0
    names = read_dataset(tmp_path / "new").action_names
    assert names == ("purchase", "view", "add_to_cart")
    failed = CliRunner().invoke(main, [*arguments, "--like", str(tmp_path)])
    assert failed.exit_code == 2
    assert "--like" in failed.output


def test_two_identities_are_one_user(tmp_path: Path) -> None:
    rows = f"u,c1,A,{NINE}\n,c1,B,{NINE}\n,,C,{NINE}\n"
    manifest = made(tmp_path, f"user_id,anonymous_id,sku,ts\n{rows}", user="user_id,anonymous_id")
    assert [(user, item) for user, item, *_ in events(tmp_path)] == [("c1", "B"), ("u", "A")]
    assert manifest["rejected"]["no user"]["rows"] == 1


@pytest.mark.parametrize("suffix", [".csv.xz", ".csv.zip", ".feather", ".arrow", ".orc"])
def test_other_formats(tmp_path: Path, suffix: str) -> None:
    text = f"user_id,sku,ts\nu,A,{NINE}\nu,B,{NINE + 1}\n"
    log = tmp_path / f"log{suffix}"
    if suffix == ".csv.xz":
        log.write_bytes(lzma.compress(text.encode()))
    elif suffix == ".csv.zip":
        with zipfile.ZipFile(log, "w") as archive:
            archive.writestr("day/log.csv", text)
    else:
        table = pa.table({"user_id": ["u", "u"], "sku": ["A", "B"], "ts": [NINE, NINE + 1]})
        (orc.write_table if suffix == ".orc" else feather.write_feather)(table, str(log))
    prepare(log, tmp_path / "out")
    assert events(tmp_path) == [("u", "A", 0, "event"), ("u", "B", 1, "event")]
    log.write_bytes(log.read_bytes()[:20])
    with pytest.raises(DataError, match=re.escape(str(log))):
        prepare(log, tmp_path / "out")


def test_an_archive_without_a_file_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "log.csv.zip", "w") as archive:
        archive.mkdir("empty")
    with pytest.raises(DataError, match="no file in it"):
        prepare(tmp_path / "log.csv.zip", tmp_path / "out")


def test_the_summary_shows_users_as_models_read_them(tmp_path: Path) -> None:
    rows = f"u,B,{NINE + 90_000},buy\nu,A,{NINE},view\nu,B,{NINE + 60},view\nv,A,{NINE},view\n"
    manifest = made(tmp_path, f"user_id,sku,ts,event\n{rows}")
    lines = summary(manifest, tmp_path).splitlines()
    assert (
        "  for example    u: view A 2024-03-01 09:00:00, view B 09:01:00, buy B 2024-03-02 10:00:00"
        in lines
    )
    assert "  for example    v: view A 2024-03-01 09:00:00" in lines


def test_rows_with_a_time_of_cancelling_are_asked_about(tmp_path: Path) -> None:
    text = f"user_id,sku,ts,Cancelled at\nu,A,{NINE},\nu,B,{NINE + 1},2024-03-02\nu,C,{NINE + 2},\n"
    with pytest.raises(DataError, match=r"'Cancelled at' is set in some rows.*--drop \"Cancelled"):
        made(tmp_path, text)
    made(tmp_path, text, drop=("Cancelled at != ''",))
    assert [item for _, item, *_ in events(tmp_path)] == ["A", "C"]
    made(tmp_path, text, where=("Cancelled at != ''",))
    assert [item for _, item, *_ in events(tmp_path)] == ["B"]
    made(tmp_path, text, drop=("none",))
    assert len(events(tmp_path)) == 3
    made(tmp_path, text.replace("2024-03-02", ""))  # set in no row


def test_months_and_days_without_a_year_are_a_warning(tmp_path: Path) -> None:
    days = [100 * month + day for month in (8, 9, 10, 11) for day in range(1, 11)]

    def notes(rows: list[int]) -> str:
        text = "".join(f"u{at % 7},i{at % 5},{at}\n" for at in rows)
        return " ".join(made(tmp_path, "user_id,item_id,time_stamp\n" + text)["notes"])

    assert "801 to 1110 look like a month and a day (MMDD)" in notes(days)
    assert "MMDD" not in notes([*days, 845])
    assert "MMDD" not in notes(days[:5])


def test_ratings_of_a_log_without_times(tmp_path: Path) -> None:
    rows = '"1";"A";"0"\n"1";"B";"10"\n"2";"A";"7"\n'
    manifest = made(tmp_path, '"User-ID";"ISBN";"Book-Rating"\n' + rows, has_time=False)
    assert manifest["actions"]["names"] == ["0", "7", "10"]
    assert (manifest["unused"], manifest["events"]) == ([], 3)
