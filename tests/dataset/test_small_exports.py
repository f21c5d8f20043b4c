"""Small exports, each of which a reader bends or loses easily: what is right for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset.files import read_dataset
from npu_gr.dataset.summary import summary
from tests.dataset.test_own_data import events, made

DAY = 86_400


class Export(NamedTuple):
    """A file, the options that it needs, and what the dataset has."""

    name: str
    text: str
    events: list[tuple[str, str, int, str]]  # user, item, seconds after 2024-03-01 09:00, action
    says: tuple[str, ...] = ()  # words of the summary
    options: dict[str, Any] = {}  # noqa: RUF012
    encoding: str = "utf-8"
    asks: str = ""  # without the options


def bought(*items: str) -> str:
    return ",".join(f'{{"product_id":"{item}"}}' for item in items)


EXPORTS = {
    "an order of several products": Export(
        "lost_purchases_segment.jsonl",
        "".join(
            f'{{"userId":"{user}","timestamp":"2024-03-01T{clock}:00Z","event":"{event}",'
            f'"properties":{{{properties}}}}}\n'
            for user, clock, event, properties in (
                ("u1", "09:00", "Product Viewed", '"product_id":"A1"'),
                ("u1", "09:01", "Product Added", '"product_id":"A1"'),
                (
                    *("u1", "09:02", "Order Completed"),
                    f'"order_id":"o1","products":[{bought("A1", "B2")}]',
                ),
                ("u2", "10:00", "Product Viewed", '"product_id":"B2"'),
                ("u2", "10:01", "Product Viewed", '"product_id":"C3"'),
                (
                    *("u2", "10:02", "Order Completed"),
                    f'"order_id":"o2","products":[{bought("C3")}]',
                ),
            )
        ),
        [
            ("u1", "A1", 0, "Product Viewed"),
            ("u1", "A1", 60, "Product Added"),
            ("u1", "A1", 120, "Order Completed"),
            ("u1", "B2", 120, "Order Completed"),
            ("u2", "B2", 3600, "Product Viewed"),
            ("u2", "C3", 3660, "Product Viewed"),
            ("u2", "C3", 3720, "Order Completed"),
        ],
        ("7 events", "'properties.order_id' (o1, o2)\n"),
    ),
    "shown and not clicked": Export(
        "ctr_label_ignored.csv",
        "user_id,item_id,timestamp,click\nu1,A,2024-03-01T09:00:00Z,0\n"
        "u1,B,2024-03-01T09:00:01Z,0\nu1,C,2024-03-01T09:00:02Z,1\nu2,A,2024-03-01T09:00:00Z,0\n"
        "u2,D,2024-03-01T09:00:01Z,1\n",
        [("u1", "C", 2, "event"), ("u2", "D", 1, "event")],
        ("3 of them are impressions",),
        {"positive": ("click=1",)},
        asks="--positive 'click=1'",
    ),
    "a day of the month": Export(
        "day_of_month.csv",
        "user_id,item_id,event,day,month,year\nu1,A,view,1,3,2024\nu1,B,view,30,1,2024\n"
        "u1,C,view,2,3,2024\n",
        [
            ("u1", "A", -9 * 3600, "view"),
            ("u1", "B", -9 * 3600 - 31 * DAY, "view"),
            ("u1", "C", 15 * 3600, "view"),
        ],
        ("2024-01-30 to 2024-03-02",),
    ),
    "a calendar of digits": Export(
        "yyyymmddhh.csv",
        "user_id,item_id,event,timestamp\nu1,A,view,2024030109\nu1,B,view,2024030110\n"
        "u2,A,view,2024030209\n",
        [("u1", "A", 0, "view"), ("u1", "B", 3600, "view"), ("u2", "A", DAY, "view")],
    ),
    "dates with slashes": Export(
        "slash_dates.csv",
        "user_id,sku,ts\nu1,A,2024/03/01 09:00:00\nu1,B,2024/03/01 09:01:00\n",
        [("u1", "A", 0, "event"), ("u1", "B", 60, "event")],
    ),
    "rounded epochs": Export(
        "epoch_rounded.csv",
        "user_id,sku,ts\nu1,A,1.709309E+09\nu1,B,1.709309E+09\nu1,C,1.710000E+09\n",
        [("u1", "A", 25_400, "event"), ("u1", "B", 25_400, "event"), ("u1", "C", 716_400, "event")],
        options={"time_unit": "s"},
        asks="probably by a spreadsheet",
    ),
    "ratings without times": Export(
        "book_rating_ignored.csv",
        "User-ID;ISBN;Book-Rating\n1;A;0\n1;B;10\n2;A;7\n2;C;0\n",
        [
            ("1", "A", 2 - 1_709_283_600, "0"),
            ("1", "B", 3 - 1_709_283_600, "10"),
            ("2", "A", 4 - 1_709_283_600, "7"),
            ("2", "C", 5 - 1_709_283_600, "0"),
        ],
        ("'Book-Rating' (its name)", "its time, 2 to 5\n", "for example    1: 0.0 A, 10.0 B\n"),
        {"has_time": False},
        asks="--no-time",
    ),
    "blanks and case": Export(
        "spaces.csv",
        "user_id,sku,event_type,ts\nu1,A,view,2024-03-01T09:00:00Z\n"
        "u1, A ,VIEW,2024-03-01T09:01:00Z\nu1,A,view ,2024-03-01T09:02:00Z\n",
        [("u1", "A", 0, "view"), ("u1", "A", 60, "view"), ("u1", "A", 120, "view")],
        ("2 rows with blanks", "'VIEW' is 'view'"),
    ),
    "Windows-1252": Export(
        "cp1252.csv",
        "user_id,sku,ts\nu1,Kühe,2024-03-01T09:00:00Z\nu1,B,2024-03-01T09:01:00Z\n",
        [("u1", "B", 60, "event"), ("u1", "Kühe", 0, "event")],
        ("is read as Windows-1252",),
        encoding="cp1252",
    ),
    "titles in the log": Export(
        "title_in_log.csv",
        "user_id,sku,ts,title\nu1,A,2024-03-01T09:00:00Z,Lamp\nu1,B,2024-03-01T09:00:00Z,Desk\n",
        [("u1", "A", 0, "event"), ("u1", "B", 0, "event")],
        ("titles of the log: 2 of 2 items",),
    ),
    "Chinese headers": Export(
        "chinese_headers.csv",
        "用户ID,商品ID,行为类型,时间戳\n7,3,pv,1709283600\n7,4,buy,1709283700\n",
        [("7", "3", 0, "pv"), ("7", "4", 100, "buy")],
    ),
    "places": Export(
        "places.csv",
        "user_id,sku,step\nu1,A,1\nu1,B,2\nu2,B,1\n",
        [
            ("u1", "A", 1 - 1_709_283_600, "event"),
            ("u1", "B", 2 - 1_709_283_600, "event"),
            ("u2", "B", 1 - 1_709_283_600, "event"),
        ],
        ("since 1970, 1 to 2\n", "for example    u1: A at 1, B at 2\n"),
        {"time": "step"},
        asks="name it with --time",
    ),
    "a line for each user": Export(
        "lists.txt",
        "u1 A B C\nu2 B\n",
        [
            ("u1", "A", 0 - 1_709_283_600, "event"),
            ("u1", "B", 1 - 1_709_283_600, "event"),
            ("u1", "C", 2 - 1_709_283_600, "event"),
            ("u2", "B", 0 - 1_709_283_600, "event"),
        ],
        (
            "lists.txt: a line for each user: the user, then the items, oldest first\n",
            "times          places in lists, 0 to 2\n",
            "for example    u1: A at 0, B at 1, C at 2\n",
        ),
    ),
}


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_an_export_comes_out_right_or_asks(export: Export, tmp_path: Path) -> None:
    content = export.text.encode(export.encoding)
    if export.asks:
        with pytest.raises(DataError) as error:
            made(tmp_path, content, export.name)
        assert export.asks in str(error.value)
    manifest = made(tmp_path, content, export.name, **export.options)
    if manifest["actions"]["kind"] == "ratings":
        log = read_dataset(tmp_path / "out").interactions()
        assert log.values.tolist() == [float(action) for *_, action in export.events]
    else:
        assert events(tmp_path) == export.events
    said = summary(manifest, tmp_path / "out") + "\n"
    assert [words for words in export.says if words not in said] == [], said
    assert "1970-" not in said


def test_titles_in_a_log_are_titles_of_items(tmp_path: Path) -> None:
    export = EXPORTS["titles in the log"]
    made(tmp_path, export.text, export.name)
    table = read_dataset(tmp_path / "out").items
    found = zip(table["name"].to_pylist(), table["title"].to_pylist(), strict=True)
    assert dict(found) == {"A": "Lamp", "B": "Desk"}
