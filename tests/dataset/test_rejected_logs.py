"""Every log of the first user's day that was rejected makes a dataset now, without an option."""

from __future__ import annotations

import csv
import json
import random
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_gr.core.errors import DataError
from npu_gr.core.names import item_id
from npu_gr.dataset import PreparedDataset, prepare

BEAUTY = Path(__file__).parents[3] / "shared/data/amazon_beauty_sid/inter.json"
SINCE = datetime(1997, 12, 4, 15, 55, 49, tzinfo=UTC)


def rows(num_rows: int = 300) -> list[dict[str, Any]]:
    """Rows as a shop exports them."""
    random_ = random.Random(1)
    users = [str(uuid.UUID(int=random_.getrandbits(128), version=4)) for _ in range(20)]
    return [
        {
            "event_time": (SINCE + timedelta(seconds=random_.randrange(10_000_000))).isoformat(),
            "user_id": random_.choice(users),
            "sku": f"SKU-{random_.randrange(400):06d}-C",
            "event_type": random_.choice(["view", "view", "add_to_cart", "purchase"]),
            "price": round(random_.random() * 90, 2),
        }
        for _ in range(num_rows)
    ]


def check(prepared: PreparedDataset, num_users: int = 20) -> None:
    manifest = prepared.manifest
    assert manifest["actions"]["names"] == ["add_to_cart", "purchase", "view"]
    assert (manifest["events"], manifest["users"], prepared.num_rejected) == (300, num_users, 0)
    log = prepared.dataset.interactions()
    assert (log.timestamps[1:] >= log.timestamps[:-1]).all()
    assert SINCE.timestamp() <= log.timestamps[0]


def test_csv_with_uuids_skus_iso_times_and_event_types(tmp_path: Path) -> None:
    with (tmp_path / "events.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows()[0])
        writer.writeheader()
        writer.writerows(rows())
    prepared = prepare(tmp_path / "events.csv", tmp_path / "data")
    check(prepared)
    assert {role: column["name"] for role, column in prepared.manifest["columns"].items()} == {
        "user": "user_id",
        "item": "sku",
        "time": "event_time",
        "event": "event_type",
    }


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_parquet_with_timestamps(unit: str, tmp_path: Path) -> None:
    table = pa.Table.from_pylist(
        [{**row, "event_time": datetime.fromisoformat(row["event_time"])} for row in rows()]
    )
    at = table.schema.get_field_index("event_time")
    table = table.set_column(at, "event_time", table["event_time"].cast(pa.timestamp(unit, "UTC")))
    pq.write_table(table, tmp_path / "events.parquet")
    check(prepare(tmp_path / "events.parquet", tmp_path / "data"))


def test_jsonl_with_skus(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    check(prepare(tmp_path / "events.jsonl", tmp_path / "data"))


def test_jsonl_with_iso_times_and_integer_items(tmp_path: Path) -> None:
    numbered = [{**row, "sku": int(row["sku"][4:10])} for row in rows()]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
    prepared = prepare(tmp_path / "events.jsonl", tmp_path / "data")
    check(prepared)
    assert prepared.dataset.interactions().items.max() < 400  # a number is its own id


def test_without_a_rating_there_is_one_action(tmp_path: Path) -> None:
    bare = [{name: row[name] for name in ("event_time", "user_id", "sku")} for row in rows()]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    manifest = prepare(tmp_path / "events.jsonl", tmp_path / "data").manifest
    assert manifest["actions"] == {
        "kind": "event",
        "names": ["event"],
        "edges": [],
        "events": [300],
    }


def test_event_codes_are_ratings_of_few_values(tmp_path: Path) -> None:
    coded = [{**row, "rating": 1 + (row["event_type"] == "purchase")} for row in rows()]
    for row in coded:
        del row["event_type"]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in coded))
    prepared = prepare(tmp_path / "events.jsonl", tmp_path / "data")
    assert (prepared.manifest["actions"]["kind"], prepared.manifest["actions"]["names"]) == (
        "ratings",
        ["1", "2"],
    )
    log = prepared.dataset.interactions()
    assert (log.action_names, set(log.values.tolist())) == ((), {1.0, 2.0})


def test_recbole_with_asins(tmp_path: Path) -> None:
    (tmp_path / "amazon.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\nA1RLJLDMXI7A6M\tB00005N7P0\t5.0\t1405468800.0\nA1RLJLDMXI7A6M\t0205616461\t3.0\t1405468801.0\nA2EMF5AQT2JWIW\tB00005N7P0\t4.0\t1405468700.0\n"
    )
    (tmp_path / "amazon.item").write_text(
        "item_id:token\ttitle:token_seq\tcategories:token_seq\tprice:float\n"
        'B00005N7P0\t"Quoted" lipstick\tMakeup Lips\t9.5\n0205616461\tA cream\tSkin\t\n'
    )
    prepared = prepare(tmp_path / "amazon.inter", tmp_path / "data", items=tmp_path / "amazon.item")
    log = prepared.dataset.interactions()
    key = log.item_key
    assert log.values.tolist() == [4, 5, 3]
    assert log.timestamps.tolist() == [1405468700, 1405468800, 1405468801]
    assert log.items.tolist() == [
        item_id("B00005N7P0", key),
        item_id("B00005N7P0", key),
        item_id("0205616461", key),
    ]
    assert prepared.dataset.names.titles(log.items[1:]) == ['"Quoted" lipstick', "A cream"]
    # a leading zero is not a number's
    assert prepared.dataset.names.names(log.items[2:]) == ["0205616461"]
    (category,) = [one for one in prepared.dataset.item_features() if one.name == "categories"]
    assert {category.values[at] for at in category.of_item[item_id("B00005N7P0", key)]} == {
        "Makeup",
        "Lips",
    }


def test_dwell_times_become_ranges_with_a_warning(tmp_path: Path) -> None:
    timed = [
        {**row, "dwell_s": round(random.Random(at).expovariate(0.1), 3)}
        for at, row in enumerate(rows(997))
    ]
    for row in timed:
        del row["event_type"]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    prepared = prepare(tmp_path / "events.jsonl", tmp_path / "data")
    actions = prepared.manifest["actions"]
    assert (actions["kind"], len(actions["names"]), len(actions["edges"])) == ("buckets", 10, 9)
    assert actions["names"][0].startswith("dwell_s<=")
    assert actions["names"][-1].startswith("dwell_s>")
    assert max(actions["events"]) - min(actions["events"]) <= 2
    assert any("'dwell_s' is continuous" in note for note in prepared.manifest["notes"])


def test_users_and_their_items(tmp_path: Path) -> None:
    (tmp_path / "inter.json").write_text('{"v": [9, 7, 9], "u": [], "w": ["B00]5"]}')
    log = prepare(tmp_path / "inter.json", tmp_path / "data").dataset.interactions()
    assert log.user_names == ["v", "w"]
    assert log.users.tolist() == [0, 1, 0, 0]
    assert log.items.tolist() == [9, item_id("B00]5", log.item_key), 7, 9]
    assert log.timestamps.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        '{"v": [9] "u": [7]}',
        '{, "v": [9]}',
        '{"v": [9],, "u": [7]}',
        '{"v": [9], }',
        '{"v": [9], "u": [7]',
        "{ ]",
    ],
)
def test_users_and_their_items_are_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "inter.json").write_text(text)
    with pytest.raises(DataError, match=r"inter\.json"):
        prepare(tmp_path / "inter.json", tmp_path / "data")


def test_amazon_beauty(tmp_path: Path) -> None:
    """The real file, if its data are next to the checkout."""
    if not BEAUTY.exists():
        pytest.skip(f"{BEAUTY}: the data set is not there")
    manifest = prepare(BEAUTY, tmp_path / "data").manifest
    assert (manifest["events"], manifest["users"], manifest["items"]["all"]) == (
        198_502,
        22_363,
        12_101,
    )
    assert manifest["actions"]["names"] == ["event"]
