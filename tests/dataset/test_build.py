"""A log of any format becomes a dataset in time order, with named users, items and actions."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from npu_gr.core.names import item_id
from npu_gr.dataset import PrepareOptions, prepare, read_dataset, read_log
from npu_gr.dataset.summary import summary
from tests.dataset.logs import EVENTS, WRITERS, Event, table, write_csv


def named(folder: Path) -> list[tuple[str, str, int, str]]:
    """The events of a dataset in its own order, as a company names them."""
    dataset = read_dataset(folder)
    log = dataset.interactions()
    return [
        (log.user_names[user], str(item), time, log.action_names[int(value)])
        for user, item, time, value in zip(
            log.users.tolist(),
            dataset.names.names(log.items),
            log.timestamps.tolist(),
            log.values.tolist(),
            strict=True,
        )
    ]


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_says_the_same(name: str, tmp_path: Path) -> None:
    log = WRITERS[name](tmp_path / name, EVENTS)
    prepared = prepare(log, tmp_path / "data")
    assert named(tmp_path / "data") == [tuple(EVENTS[at]) for at in (0, 4, 1, 2, 3)]
    assert prepared.manifest["actions"] == {
        "kind": "events",
        "names": ["cart", "purchase", "view"],
        "edges": [],
        "events": [1, 1, 3],
    }
    assert (prepared.manifest["events"], prepared.manifest["users"], prepared.num_rejected) == (
        5,
        2,
        0,
    )


@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "log.jsonl", "log.json", "log.parquet"])
def test_blanks_around_names_do_not_count(name: str, tmp_path: Path) -> None:
    spelled = [
        event._replace(
            user=f"{event.user} " if at == 1 else event.user,
            item=f"\xa0{event.item}" if at in (1, 2) else event.item,
            event=f" {event.event}" if at == 4 else event.event,
        )
        for at, event in enumerate(EVENTS)
    ]
    items = pa.table({"item_id": [f" {EVENTS[0].item}\t", " "], "title": ["Lamp", "none"]})
    prepared = prepare(
        WRITERS[name](tmp_path / name, [*spelled, Event(" ", " x", 1_700_000_000, "view")]),
        tmp_path / "data",
        items=items,
    )
    assert named(tmp_path / "data") == [tuple(EVENTS[at]) for at in (0, 4, 1, 2, 3)]
    assert prepared.manifest["trimmed"] == 3
    assert "3 rows with blanks around a user, an item or an event" in summary(
        prepared.manifest, tmp_path
    )
    assert prepared.manifest["rejected"] == {"no user": {"rows": 1, "first": first_row(name) + 5}}
    assert prepared.manifest["rejected_items"] == {"no item": {"rows": 1, "first": 2}}
    assert prepared.manifest["items"]["with_title"] == 1


def first_row(name: str) -> int:
    """The number of the first row: a header is a line."""
    return 2 if name.endswith("sv") else 1


def test_items_have_the_ids_of_their_names(tmp_path: Path) -> None:
    prepare(write_csv(tmp_path / "log.csv", EVENTS), tmp_path / "data")
    log = read_log(tmp_path / "data")
    assert log.item_key
    ids = {item_id(name, log.item_key) for name in ("SKU-000242-C", "SKU-000007-A")}
    assert set(log.items.tolist()) == ids


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_files_are_unpacked(suffix: str, tmp_path: Path) -> None:
    plain = write_csv(tmp_path / "log.csv", EVENTS).read_bytes()
    packed = tmp_path / f"log.csv{suffix}"
    packed.write_bytes(
        gzip.compress(plain) if suffix == ".gz" else zstandard.ZstdCompressor().compress(plain)
    )
    prepare(packed, tmp_path / "data")
    assert len(named(tmp_path / "data")) == 5


def test_a_frame_is_a_log(tmp_path: Path) -> None:
    prepare(table(EVENTS), tmp_path / "data")
    assert len(named(tmp_path / "data")) == 5


def test_the_files_of_users_are_private(tmp_path: Path) -> None:
    prepare(write_csv(tmp_path / "log.csv", EVENTS), tmp_path / "data")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "data").iterdir()}
    assert modes["events.parquet"] == modes["users.parquet"] == modes["rejected.jsonl"] == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "log.csv"]


def test_events_are_stored_by_user_and_time(tmp_path: Path) -> None:
    prepare(write_csv(tmp_path / "log.csv", EVENTS), tmp_path / "data", PrepareOptions())
    events = pq.read_table(tmp_path / "data/events.parquet")
    assert events.schema.equals(
        pa.schema(
            [
                ("user", pa.int32()),
                ("item", pa.int64()),
                ("action", pa.int16()),
                ("time", pa.int64()),
            ]
        )
    )
    pairs = list(zip(events["user"].to_pylist(), events["time"].to_pylist(), strict=True))
    assert pairs == sorted(pairs)


def test_rows_that_repeat_another_one_in_everything_are_left_out(tmp_path: Path) -> None:
    """To the microsecond: two clicks of one second are two."""
    rows = [
        "a,x,1700000000.25,view",
        "a,x,1700000000.75,view",
        "a,y,1700000000.25,view",
        "a,x,1700000000.25,buy",
    ]
    (tmp_path / "log.csv").write_text(
        "\n".join(["user_id,item_id,ts,event", *rows, rows[1], rows[0], rows[0]])
    )
    manifest = prepare(tmp_path / "log.csv", tmp_path / "data").manifest
    assert (manifest["events"], manifest["duplicates"]) == (4, {"rows": 3, "kept": False})
    assert [item for _, item, _, _ in named(tmp_path / "data")] == ["x", "y", "x", "x"]
    kept = prepare(
        tmp_path / "log.csv", tmp_path / "data", PrepareOptions(keep_duplicates=True)
    ).manifest
    assert (kept["events"], kept["duplicates"]) == (7, {"rows": 3, "kept": True})


def test_events_of_a_second_keep_the_order_of_the_log(tmp_path: Path) -> None:
    rows = "".join(f"a,i{at},1700000000\n" for at in (5, 3, 9, 1))
    (tmp_path / "log.csv").write_text("user_id,item_id,ts\n" + rows)
    prepare(tmp_path / "log.csv", tmp_path / "data")
    assert [item for _, item, _, _ in named(tmp_path / "data")] == ["i5", "i3", "i9", "i1"]
