"""A value of a feature is read as the same one, whichever way it comes."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_gr.catalogue.centroids import Centroids, CodedFeature
from npu_gr.core.feature_schema.encode import encode
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.names import item_id
from npu_gr.dataset import PrepareOptions, prepare
from npu_gr.history_store.interactions import FeatureColumn
from npu_gr.server.config import ServerConfig
from npu_gr.server.oip.models import MODELS
from npu_gr.server.oip.routes import read
from npu_gr.server.schemas.admin import NewItemBody
from npu_gr.server.schemas.fields import parse_columns, parse_row
from npu_gr.train.rank.schema import _of_column
from tests.server.examples import EXAMPLES
from tests.server.oip.inputs import Input, inputs_of, json_body

VALUES = ("red", "0", "1", "1.5", "01", "1.10", "+1", "yes", "9007199254740992", "1e+20", "é")
NAMES: list[tuple[Any, str | None]] = [
    *((value, None) for value in (None, math.nan, "", " ", "\t", "\xa0", "none", "None", "null")),
    *((value, None) for value in ("NULL", "nan", "NaN", "\\N", " null ", "none\t")),
    *((value, "1") for value in (True, "True", "TRUE", "true", " true", "true ", 1, "1", " 1 ")),
    *((value, "1") for value in (1.0, "1.0", "1.00", " 1.0")),
    *((value, "0") for value in (False, "False", "FALSE", "false", 0, "0", 0.0, "0.0", "-0.0")),
    (-0.0, "0"),
    *((value, "red") for value in ("red", " red", "red ", "\xa0red", "\tred\n")),
    *((value, "1.5") for value in (1.5, "1.5", " 1.5")),
    *((value, value) for value in ("01", "1.10", "+1", "yes", "é")),
    *((value, "9007199254740992") for value in (2**53, 2.0**53, "9007199254740992")),
    *((value, "1e+20") for value in (1e20, "1e+20")),
    *((value, "?") for value in ("Red", "N/A", "NONE", "unknown", "tRUE", "1,5", "-1", -1, 2)),
]
NUMBERS: list[tuple[Any, float]] = [
    *((value, math.nan) for value in (None, math.nan, "", " ", "none", "null", "NaN", "\\N")),
    *((value, 1.0) for value in (True, "True", "TRUE", "true", " true", 1, 1.0, "1", "1.0", "+1")),
    *((value, 0.0) for value in (False, "False", "false", 0, "0", -0.0, "-0")),
    *((value, 7.0) for value in (7, "7", " 7 ", "\xa07", "7.", "7e0", "0.7E1", "007")),
    *((value, 0.5) for value in (0.5, ".5", "5e-1")),
]
CATEGORY = Feature(name="f", of="request", kind="category", values=VALUES)
HASHED = Feature(name="f", of="request", kind="hashed", num_buckets=1 << 20)
NUMBER = Feature(name="f", of="request", kind="number", clip=100.0)
HEADER = ("user_id", "item_id", "timestamp", "f")
Cells = Sequence[Any]
Way = Callable[[Feature, Cells, Path], list[Any]]


def as_csv(value: Any) -> str:
    """As pandas writes it."""
    return "" if value is None or value != value else str(value)


def rows(cells: Cells) -> list[tuple[Any, ...]]:
    return [("u", f"i{at}", 1_700_000_000 + at, cell) for at, cell in enumerate(cells)]


def write_csv(path: Path, cells: Cells) -> Path:
    with (path / "log.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows([*map(as_csv, cells)])])
    return path / "log.csv"


def write_jsonl(path: Path, cells: Cells) -> Path:
    written = [None if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells]
    lines = [json.dumps(dict(zip(HEADER, row, strict=True))) for row in rows(written)]
    (path / "log.jsonl").write_text("\n".join(lines))
    return path / "log.jsonl"


def write_parquet(path: Path, cells: Cells) -> Path:
    table = dict(zip(HEADER, map(list, zip(*rows(cells), strict=True)), strict=True))
    pq.write_table(pa.table(table), path / "log.parquet")
    return path / "log.parquet"


def prepared(log: Path, feature: Feature, out: Path) -> FeatureColumn:
    kind = "number" if feature.kind == "number" else "category"
    options = PrepareOptions(request_features=(f"f:{kind}",))
    (column,) = prepare(log, out, options).dataset.interactions().columns
    return column


def from_log(write: Callable[[Path, Cells], Path]) -> Way:
    def way(feature: Feature, cells: Cells, path: Path) -> list[Any]:
        column = prepared(write(path, cells), feature, path / "data")
        return codes(feature, column.values if column.is_number else column.values.tolist())

    return way


def from_parquet(feature: Feature, cells: Cells, path: Path) -> list[Any]:
    """A column has one type, so each type has a file."""
    found: dict[int, Any] = {}
    for place, kind in enumerate((bool, int, float, str)):
        own = [at for at, cell in enumerate(cells) if type(cell) is kind or cell is None]
        (path / str(place)).mkdir()
        read = from_log(write_parquet)(feature, [cells[at] for at in own], path / str(place))
        found |= dict(zip(own, read, strict=True))
    return [found[at] for at in range(len(cells))]


def from_items(feature: Feature, cells: Cells, path: Path) -> list[Any]:
    """The file of items, in a dataset."""
    if feature.kind == "number":
        pytest.skip("numbers of items are ranges")
    items = path / "items.jsonl"
    items.write_bytes(
        b"\n".join(
            msgspec.json.encode({"item_id": f"i{at}", "f": cell}) for at, cell in enumerate(cells)
        )
    )
    dataset = prepare(
        write_csv(path, ["x"] * len(cells)),
        path / "data",
        PrepareOptions(features=("f",)),
        items=items,
    ).dataset
    (found,) = dataset.item_features()
    ids = [item_id(f"i{at}", dataset.item_key) for at in range(len(cells))]
    named = [[found.values[at] for at in found.of_item[one]] for one in ids]
    return codes(feature, named)


def from_request(feature: Feature, cells: Cells, path: Path) -> list[Any]:
    """A row of a request, in msgpack."""
    found = []
    for cell in cells:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode({"f": cell}))
        found += codes(feature, [parse_row(sent, {"f": feature}, "x").get("f")])
    return found


def from_column(feature: Feature, cells: Cells, path: Path) -> list[Any]:
    """A column of events or candidates."""
    columns = parse_columns({"f": list(cells)}, {"f": feature}, len(cells), "x")
    return codes(feature, columns.given["f"])


def from_oip(feature: Feature, cells: Cells, path: Path) -> list[Any]:
    """A request of the Open Inference Protocol, in JSON."""
    found = []
    for cell in cells:
        given = None if isinstance(cell, float) and math.isnan(cell) else cell
        row_of = Input("features.request", "BYTES", [json.dumps({"f": given})])
        inputs = [*inputs_of(EXAMPLES["rank"].body or {}), row_of]
        sent = read(json_body(inputs), None, "rank")
        made = MODELS["rank"].body(sent, None, ServerConfig())
        row = parse_row(made.features.request, {"f": feature}, "x")
        found += codes(feature, [row.get("f")])
    return found


def from_catalogue(feature: Feature, cells: Cells, path: Path) -> list[Any]:
    """A new item of a catalogue change."""
    bodies = (msgspec.json.encode({"item_id": "x", "features": {"f": cell}}) for cell in cells)
    given = [msgspec.json.decode(body, type=NewItemBody).features["f"] for body in bodies]
    return codes(feature, given)


def codes(feature: Feature, values: Any) -> list[Any]:
    encoded = encode([feature], {"f": values}, len(values))
    if feature.kind != "number":
        return [row[0] for row in encoded.codes.tolist()]
    return [math.nan if missing else value for value, missing in encoded.numbers.tolist()]


WAYS: dict[str, Way] = {
    "csv": from_log(write_csv),
    "jsonl": from_log(write_jsonl),
    "parquet": from_parquet,
    "items": from_items,
    "request": from_request,
    "column": from_column,
    "oip": from_oip,
    "catalogue": from_catalogue,
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@each_way
def test_odd_names_have_one_code_by_every_way(way: Way, tmp_path: Path) -> None:
    found = way(CATEGORY, [value for value, _ in NAMES], tmp_path)
    missing, unknown = len(VALUES) + 1, len(VALUES)
    want = [
        missing if name is None else VALUES.index(name) if name in VALUES else unknown
        for _, name in NAMES
    ]
    assert [*zip(NAMES, found, strict=True)] == [*zip(NAMES, want, strict=True)]


@each_way
def test_spellings_of_one_name_are_hashed_alike(way: Way, tmp_path: Path) -> None:
    found = way(HASHED, [value for value, _ in NAMES], tmp_path)
    known = {name: code for (_, name), code in zip(NAMES, found, strict=True) if name != "?"}
    assert known[None] == HASHED.num_buckets, "missing"
    assert len(set(known.values())) == len(VALUES) + 1
    assert found == [known.get(name, code) for (_, name), code in zip(NAMES, found, strict=True)]


@each_way
def test_odd_numbers_are_one_number_by_every_way(way: Way, tmp_path: Path) -> None:
    found = way(NUMBER, [value for value, _ in NUMBERS], tmp_path)
    want = [number for _, number in NUMBERS]
    np.testing.assert_array_equal(found, want)


def test_a_number_beyond_float32_is_missing_in_a_log(tmp_path: Path) -> None:
    """A request with it is rejected: who sent it reads the answer."""
    column = prepared(write_csv(tmp_path, ["1e300", "x", "3"]), NUMBER, tmp_path / "data")
    np.testing.assert_array_equal(codes(NUMBER, column.values), [math.nan, math.nan, 3.0])


def test_the_vocabulary_has_each_name_once(tmp_path: Path) -> None:
    cells = ["True", "true", "1", "1.0", "False", "0", "none", "", "a", " a"] * 2
    column = prepared(write_csv(tmp_path, cells), CATEGORY, tmp_path / "data")
    made = _of_column(column, np.ones(len(cells), np.bool_))
    assert made.values == ("0", "1", "a")


@pytest.mark.parametrize("values", [("no", "True"), ("no", "true"), ("no", "1"), ("no", "1.0")])
def test_vocabularies_of_older_checkpoints_know_every_spelling(values: tuple[str, ...]) -> None:
    feature = Feature(name="f", of="request", kind="category", values=values)
    assert codes(feature, [True, "True", "true", 1, "1.0", "no"]) == [1, 1, 1, 1, 1, 0]


def test_a_text_of_the_vocabulary_is_not_missing() -> None:
    feature = Feature(name="f", of="request", kind="category", values=("none", "gold"))
    assert codes(feature, ["none", "null", None]) == [0, 3, 3]


def test_a_value_that_repeats_counts_once() -> None:
    feature = Feature(name="f", of="request", kind="category", values=("a", "1"), max_values=2)
    encoded = encode([feature], {"f": [["a", " a", 1, True, None]]}, 1)
    assert sorted(encoded.codes[0].tolist()) == [0, 1]


def test_spellings_in_a_file_of_items_are_one_value(tmp_path: Path) -> None:
    cells = ["True", "true", 1, "red"]
    items = pa.table({"item_id": [f"i{at}" for at in range(4)], "f": [*map(str, cells)]})
    options = PrepareOptions(features=("f",))
    log = write_csv(tmp_path, ["x"] * 4)
    dataset = prepare(log, tmp_path / "data", options, items=items).dataset
    (found,) = dataset.item_features()
    key = dataset.item_key
    assert len(found.values) == 2
    (yes,) = {place for at in range(3) for place in found.of_item[item_id(f"i{at}", key)]}
    assert found.of_item[item_id("i3", key)] == [1 - yes]
    assert found.values[1 - yes] == "red"


def test_a_semantic_id_is_made_of_every_spelling() -> None:
    centroids = Centroids((np.eye(2, dtype=np.float32),), (CodedFeature("f", ["True", "red"]),))
    spellings: tuple[Any, ...] = (True, "true", 1, "1.0", [True, "TRUE"])
    for value in spellings:
        assert centroids.vector({"f": value}).tolist() == [1, 0]
    assert not centroids.vector({"f": None}).any()
