"""More exports of shops: right without an option, or an error that names the option."""

from __future__ import annotations

import gzip
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, prepare
from npu_gr.dataset.sources import open_source
from tests.dataset.test_exports import NINE, ROWS, at, of_cells, of_lines
from tests.dataset.test_own_data import events, made

GERMAN = [(u, i, e, at(s, "%d.%m.%Y"), at(s, "%H:%M:%S")) for u, i, s, e in ROWS]
PLAIN = [(user, item, event, at(s)) for user, item, s, event in ROWS]
EVERY = sorted((user, one, s, event) for user, item, s, event in ROWS for one in (item, "Z9"))

RIGHT = {
    "dots after abbreviations": of_cells(
        "Kundennr.;Artikelnr.;Aktivität;Datum;Uhrzeit", GERMAN, ";"
    ),
    "French": of_cells("Identifiant client,Référence produit,Type d'événement,Horodatage", PLAIN),
    "Spanish": of_cells("id_usuario,id_producto,evento,fecha", PLAIN),
    "Italian": of_cells("id_utente,id_prodotto,evento,data_ora", PLAIN),
    "Japanese": of_cells("ユーザーID,商品ID,イベント,日時", PLAIN),
    "Russian": of_cells("пользователь,товар,событие,время", PLAIN),
}


@pytest.mark.parametrize("name", RIGHT)
def test_headers_of_more_languages(name: str, tmp_path: Path) -> None:
    made(tmp_path, RIGHT[name])
    assert events(tmp_path) == sorted(ROWS)


LISTS = {
    "names in JSON": of_lines(
        [{"user_id": u, "ts": at(s), "event": e, "content_ids": [i, "Z9"]} for u, i, s, e in ROWS]
    ),
    "an object in a list in a list": of_lines(
        [
            {
                "user_id": u,
                "hits": [{"ts": at(s), "event": e, "product": [{"sku": i}, {"sku": "Z9"}]}],
            }
            for u, i, s, e in ROWS
        ]
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_items_are_rows(name: str, tmp_path: Path) -> None:
    made(tmp_path, LISTS[name], "log.jsonl")
    assert events(tmp_path) == EVERY


def test_a_list_in_a_cell_is_rows_or_a_warning(tmp_path: Path) -> None:
    rows = [(u, at(s), e, json.dumps([i, "Z9"]).replace('"', '""')) for u, i, s, e in ROWS]
    made(tmp_path, of_cells("user_id,ts,event,skus", [(*row, f'"{cell}"') for *row, cell in rows]))
    assert events(tmp_path) == EVERY
    shutil.rmtree(tmp_path / "out")  # a dataset keeps its kind of actions
    bars = of_cells("user_id,ts,sku", [(u, at(s), f"{i}|Z9") for u, i, s, _ in ROWS])
    assert any("'A1|Z9' look like lists" in note for note in made(tmp_path, bars)["notes"])
    sizes = of_cells("user_id,ts,sku", [(u, at(s), f"{i} | {s}") for u, i, s, _ in ROWS])
    assert not any("look like lists" in note for note in made(tmp_path, sizes)["notes"])


def asked(cells: list[str], column: str) -> str:
    rows = [(u, i, at(s), cell) for (u, i, s, _), cell in zip(ROWS, cells, strict=True)]
    return of_cells(f"user_id,sku,ts,{column}", rows)


ASKED = [
    ("purchased", ["0", "1", "0"], "--positive 'purchased=1'", "positive"),
    ("is_like", ["False", "True", "False"], "--positive 'is_like=True'", "positive"),
    ("clicked", ["no", "yes", "no"], "--positive 'clicked=yes'", "positive"),
    ("geklickt", ["nein", "ja", "nein"], "--positive 'geklickt=ja'", "positive"),
    ("event", ["0", "1", "0"], "--positive 'event=1'", "positive"),
    ("rating", ["0", "1", "0"], "--positive 'rating=1'", "positive"),
    ("is_cancelled", ["0", "1", "0"], "--drop 'is_cancelled=1'", "drop"),
    ("returned", ["false", "true", "false"], "--drop 'returned=true'", "drop"),
    ("refund_amount", ["0", "9.90", "0"], "--drop 'refund_amount>0'", "drop"),
    ("Quantity", ["6", "-1", "2"], "--drop 'Quantity<0'", "drop"),
    (
        "transaction_type",
        ["SALE", "REFUND", "SALE"],
        "--drop 'transaction_type in (REFUND)'",
        "drop",
    ),
    ("event", ["buy", "Order Refunded", "buy"], "--drop 'event in (Order Refunded)'", "drop"),
]


@pytest.mark.parametrize(("column", "cells", "words", "option"), ASKED)
def test_rows_that_are_no_behaviour_are_asked_about(
    column: str, cells: list[str], words: str, option: str, tmp_path: Path
) -> None:
    text = asked(cells, column)
    with pytest.raises(DataError) as error:
        made(tmp_path, text)
    assert words in str(error.value)
    condition = words.partition(" ")[2].strip("'")
    kept = [(u, i) for (u, i, *_), cell in zip(ROWS, cells, strict=True) if cell == cells[1]]
    if option == "drop":
        kept = [(u, i) for (u, i, *_), cell in zip(ROWS, cells, strict=True) if cell != cells[1]]
    options: dict[str, Any] = {option: (condition,)}
    made(tmp_path, text, **options)  # what the message says
    assert [(user, item) for user, item, *_ in events(tmp_path)] == kept
    shutil.rmtree(tmp_path / "out")
    options[option] = ("none",)
    made(tmp_path, text, **options)
    assert read_count(tmp_path) == len(ROWS)


def read_count(tmp_path: Path) -> int:
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    return int(manifest["events"])


@pytest.mark.parametrize(
    ("column", "cells"),
    [("is_new", ["0", "1", "0"]), ("Quantity", ["6", "1", "2"]), ("refund_amount", ["0", "0", ""])],
)
def test_other_columns_are_not_asked_about(column: str, cells: list[str], tmp_path: Path) -> None:
    made(tmp_path, asked(cells, column))
    assert read_count(tmp_path) == len(ROWS)


def test_the_hour_of_a_folder_is_of_the_time(tmp_path: Path) -> None:
    for hour, (user, item, _, event) in zip((9, 10, 11), ROWS, strict=True):
        folder = tmp_path / "log" / "dt=2024-03-01" / f"hour={hour:02}"
        folder.mkdir(parents=True)
        (folder / "part.csv").write_text(of_cells("user_id,sku,event", [(user, item, event)]))
    prepare(tmp_path / "log", tmp_path / "out")
    wanted = [("u1", "A1", 0, "view"), ("u1", "B2", 7200, "purchase"), ("u2", "B2", 3600, "view")]
    assert events(tmp_path) == wanted
    # a time with its own clock, or another column of times, needs no hour
    rows = [(u, i, e, at(s), "09", "2024-03-01") for u, i, s, e in ROWS]
    made(tmp_path, of_cells("user_id,sku,event,ts,hour,date", rows))
    assert events(tmp_path) == sorted(ROWS)


def test_whole_days_of_a_spreadsheet(tmp_path: Path) -> None:
    text = of_cells("user_id,sku,date", [("u1", "A", 45352), ("u1", "B", 45354)])
    made(tmp_path, text)
    assert [time for *_, time, _ in events(tmp_path)] == [-9 * 3600, 39 * 3600]


def test_places_beside_times_are_asked_about(tmp_path: Path) -> None:
    text = of_cells(
        "user_id,sku,time,visitStart", [("u1", "A", 0, 1709283600), ("u1", "B", 60, "")]
    )
    with pytest.raises(DataError, match="'visitStart' has times: give --time visitStart, or"):
        made(tmp_path, text)
    made(tmp_path, text, time="time")
    assert read_count(tmp_path) == 2


def test_rows_without_a_user_name_the_column_that_has_one(tmp_path: Path) -> None:
    text = of_cells("user_id,anonymous_id,sku,ts", [("u1", "a", "A", at(0)), ("", "b", "A", at(1))])
    words = "--user user_id,anonymous_id names their users"
    assert any(words in note for note in made(tmp_path, text)["notes"])
    manifest = made(tmp_path, text, user="user_id,anonymous_id")
    assert not any(words in note for note in manifest["notes"])


SEVEN = [(u, i, e, at(s, "%d.%m.%Y %H:%M:%S")) for u, i, s, e in ROWS]
GERMAN_ROWS = of_cells("Kundennummer;Artikelnummer;Aktion;Zeitstempel", SEVEN, ";")
ABOVE = {
    "sep= of a spreadsheet": "sep=;\n" + GERMAN_ROWS,
    "sep= in quotes": '"sep=;"\n' + GERMAN_ROWS,
    "titles": "Bestellungen 2024\nStand: 05.03.2024;Filiale 7\n\n" + GERMAN_ROWS,
    "titles with all separators": "Bestellungen 2024;;;\n;;;\n" + GERMAN_ROWS,
    "comments": "# ------\n# Events, all users\n# 20240301-20240302\n" + GERMAN_ROWS,
    "a blank line": "\n" + GERMAN_ROWS,
    "and a sum at the end": "Report\n\n" + GERMAN_ROWS + "\nSumme;3\n",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ABOVE)
def test_the_names_of_columns_below_other_lines(name: str, packed: bool, tmp_path: Path) -> None:
    if packed:
        folder = tmp_path / "log"
        folder.mkdir()
        (folder / "a.csv.gz").write_bytes(gzip.compress(ABOVE[name].encode()))
        prepare(folder, tmp_path / "out")
    else:
        made(tmp_path, ABOVE[name])
    assert events(tmp_path) == sorted(ROWS)
    number = ABOVE[name].split("Kundennummer")[0].count("\n") + 1
    path = tmp_path / "log" if packed else tmp_path / "log.csv"
    assert open_source(path).format.endswith(f"their names in line {number}")


@pytest.mark.parametrize(
    "text",
    [
        "user item event\n1\tu1\tA1\tview\n2\tu2\tA1\tview\n",  # R: a row has one cell more
        "u1\nu1,A1,view\nu2,A1,view\n",  # the rows below may be all rows
        "user_id;ts\nu1,A1,3\nu2,A1,4\n",
    ],
)
def test_what_may_be_a_header_is_not_left_out(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        made(tmp_path, text)


CHINESE = [(u, i, "浏览", f"2024年3月1日 {9 + s // 3600}时{s // 60 % 60}分") for u, i, s, _ in ROWS]


@pytest.mark.parametrize("encoding", ["gbk", "gb2312", "gb18030", "utf-8"])
def test_a_chinese_export(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(of_cells("用户ID,商品ID,行为类型,时间", CHINESE).encode(encoding))
    manifest = prepare(path, tmp_path / "out").manifest
    assert events(tmp_path) == sorted((u, i, s // 60 * 60, "浏览") for u, i, s, _ in ROWS)
    said = [note for note in manifest["notes"] if "GB18030" in note]
    assert len(said) == (encoding != "utf-8")


@pytest.mark.parametrize("encoding", ["gbk", "euc_kr", "euc_jp"])
def test_an_encoding_that_nothing_tells_is_asked_about(encoding: str, tmp_path: Path) -> None:
    text = {"gbk": "机械键盘", "euc_kr": "무선 키보드", "euc_jp": "机と椅子"}[encoding]
    path = tmp_path / "log.csv"
    rows = [(u, i, at(s), text) for u, i, s, _ in ROWS]
    path.write_bytes(of_cells("user_id,sku,ts,title", rows).encode(encoding))
    with pytest.raises(DataError, match="--encoding") as error:
        prepare(path, tmp_path / "out")
    name = {"gbk": "gb18030"}.get(encoding, encoding)
    assert f"--encoding {name}" in str(error.value)
    prepare(path, tmp_path / "out", PrepareOptions(encoding=name))


CALENDARS = {
    "hours and minutes": "%Y年%m月%d日 %H时%M分",
    "no blank": "%Y年%m月%d日%H时%M分%S秒",
    "o'clock": "%Y年%m月%d日 %H点",
    "traditional signs": "%Y年%m月%d日 %H點%M分",
    "the colloquial day": "%Y年%m月%d号 %H点%M分",
    "a database": "%d-%b-%Y %H:%M:%S",
    "a database, capitals": "%d-%b-%Y %H:%M:%S upper",
    "American": "%b %d, %Y %I:%M %p",
    "American, in full": "%B %d, %Y",
    "a month in full": "%d %B %Y %H:%M",
    "a web server": "%d/%b/%Y:%H:%M:%S +0000",
    "two digits, German": "%d.%m.%y %H:%M",
    "two digits, American": "%m/%d/%y %H:%M",
    "two digits, British": "%d/%m/%y",
    "two digits, first": "%y/%m/%d %H:%M:%S",
    "two digits and a name": "%d-%b-%y",
}


@pytest.mark.parametrize("name", CALENDARS)
def test_more_calendars(name: str, tmp_path: Path) -> None:
    form, _, upper = CALENDARS[name].partition(" upper")
    times = [datetime(2024, 5, 4 + 2 * n, 9 + n, 30, 0, tzinfo=UTC) for n in range(12)]
    cells = [time.strftime(form + upper) for time in times]
    cells = [cell.upper() if "upper" in CALENDARS[name] else cell for cell in cells]
    cells = [f'"{cell}"' for cell in cells]
    made(tmp_path, of_cells("user_id,sku,ts", [("u1", f"A{n:02}", c) for n, c in enumerate(cells)]))
    want = [datetime.strptime(time.strftime(form), form).replace(tzinfo=UTC) for time in times]
    assert [datetime.fromtimestamp(NINE + s, UTC) for *_, s, _ in events(tmp_path)] == want


@pytest.mark.parametrize(
    ("cells", "options"),
    [
        (["01.03.24", "02.03.24"], ["%d.%m.%y", "%m.%d.%y", "%y.%m.%d"]),
        (["01/03/24", "02/03/24", "15/03/24", "17/03/23", "18/03/22"], []),
        (["05/06/24", "06/05/24", "07/04/24", "08/03/24"], ["%d/%m/%y", "%m/%d/%y"]),
    ],
)
def test_years_of_two_digits_are_asked_about(
    cells: list[str], options: list[str], tmp_path: Path
) -> None:
    text = of_cells("user_id,sku,ts", [("u1", f"A{n}", cell) for n, cell in enumerate(cells)])
    if not options:  # the day is over 12, and the other number that may be a year takes many values
        made(tmp_path, text)
        return
    with pytest.raises(DataError, match="two digits") as error:
        made(tmp_path, text)
    for one in options:
        assert f"--time-format '{one}'" in str(error.value)


def test_google_analytics_without_logins(tmp_path: Path) -> None:
    """The client is a number and a time, and the id of a login is never set."""
    names = {"u1": "1234567.1709283600", "u2": "7654321.1700000000"}
    rows = [
        {
            "event_timestamp": str((NINE + s) * 1_000_000),
            "event_name": e,
            "user_id": None,
            "user_pseudo_id": names[u],
            "items": [{"item_id": i}],
        }
        for u, i, s, e in ROWS
    ]
    made(tmp_path, of_lines(rows), "log.jsonl")
    assert events(tmp_path) == sorted((names[u], i, s, e) for u, i, s, e in ROWS)


def test_an_event_is_an_object(tmp_path: Path) -> None:
    rows = [
        {
            "external_user_id": u,
            "event": {"name": e, "time": at(s), "properties": {"product_id": i}},
        }
        for u, i, s, e in ROWS
    ]
    made(tmp_path, of_lines(rows), "log.jsonl")
    assert events(tmp_path) == sorted(ROWS)


def test_an_empty_column_gives_way_to_one_of_a_weaker_name(tmp_path: Path) -> None:
    rows = [("", u, i, at(s), e) for u, i, s, e in ROWS]
    made(tmp_path, of_cells("user_id,anonymous_id,sku,ts,event", rows))
    assert events(tmp_path) == sorted(ROWS)


@pytest.mark.parametrize(
    ("header", "time"),
    [
        ("KUNNR,MATNR,ERDAT", "%Y%m%d%H%M%S"),
        ("CustomerKey,ProductKey,OrderDateKey", "%Y%m%d%H%M%S"),
        ("external_user_id,product_id,time", "%d-%b-%y %I.%M.%S.000000 %p"),
        ("Email (Billing),SKU,Order Date", "%Y-%m-%d %H:%M:%S"),
    ],
)
def test_headers_of_more_systems(header: str, time: str, tmp_path: Path) -> None:
    rows = [(u, i, at(s, time).upper()) for u, i, s, _ in ROWS]
    made(tmp_path, of_cells(header, rows))
    assert events(tmp_path) == sorted((u, i, s, "event") for u, i, s, _ in ROWS)


def test_rows_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    """Shopify names the customer in the first line of an order; Diginetica calls users NA."""
    lines = [("c1" if n % 3 == 0 else "", f"A{n}", at(n)) for n in range(30)]
    lines += [(f"c{n}", "A1", at(n)) for n in range(30)]
    notes = made(tmp_path, of_cells("customer_id,sku,ts", lines))["notes"]
    assert any("20 rows without 'customer_id'" in note and "Shopify" in note for note in notes)
    shutil.rmtree(tmp_path / "out")
    rows = [("NA", f"A{n}", at(n)) for n in range(30)]
    notes = made(tmp_path, of_cells("userId,sku,ts", rows))["notes"]
    assert any("the user 'NA' has 30 of 30 rows" in note for note in notes)


def test_a_file_without_a_header_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"two columns are named '5'.*--columns a,b"):
        made(tmp_path, "1,5,5,1709283600\n2,6,4,1709283601\n")
