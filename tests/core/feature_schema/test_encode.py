"""Encoded lists and arrays equal a slow reference implementation of the schema."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.feature_schema.encode import FeatureEncoder, as_column, encode
from npu_gr.core.feature_schema.schema import Feature

COUNTRY = Feature(name="country", of="user", kind="category", values=("fr", "de", "7", "true"))
SEGMENTS = Feature(
    name="segments", of="user", kind="category", values=("a", "b", "c"), max_values=3
)
CITY = Feature(name="city", of="user", kind="hashed", num_buckets=5)
TAGS = Feature(name="tags", of="user", kind="hashed", num_buckets=50, max_values=2)
AGE = Feature(name="age", of="user", kind="number", borders=(18.0, 30.0))
SPENT = Feature(name="spent", of="user", kind="number", mean=10.0, scale=4.0, clip=3.0)
ALL = (COUNTRY, SEGMENTS, CITY, TAGS, AGE, SPENT)


def slow(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> tuple[list[int], list[float], list[float]]:
    """Encode one row slowly: sorted codes without padding, numbers, and missing features."""
    codes, numbers, missing = [], [], []
    first = 0
    for feature in features:
        value = row.get(feature.name)
        names = [] if value is None else value if isinstance(value, list) else [value]
        names = [name for name in dict.fromkeys(names) if name]
        lost = first + feature.num_rows - 1
        if feature.kind == "category":
            codes += [
                first
                + (feature.values.index(name) if name in feature.values else len(feature.values))
                for name in names
            ] or [lost]
        elif feature.kind == "hashed":
            codes += [
                first + xxhash.xxh3_64_intdigest(name.encode()) % feature.num_buckets
                for name in names
            ] or [lost]
        elif feature.borders:
            codes += [
                lost
                if value is None
                else first + sum(border <= value for border in feature.borders)
            ]
        else:
            missing.append(float(value is None))
            scaled = 0.0 if value is None else (value - feature.mean) / feature.scale
            numbers.append(min(max(scaled, -feature.clip), feature.clip))
        first += feature.num_rows
    return sorted(codes), numbers, missing


NAME = st.sampled_from(["fr", "de", "7", "a", "b", "c", "ü", ""])
ROW = st.fixed_dictionaries(
    {
        "country": st.none() | NAME,
        "segments": st.lists(NAME, max_size=3),
        "city": st.none() | NAME,
        "tags": st.none() | NAME | st.lists(NAME, max_size=2),
        "age": st.none() | st.sampled_from([17.5, 18.0, 29.0, 30.0, -1.0]),
        "spent": st.none() | st.floats(-50, 50, width=32),
    }
)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(rows=st.lists(ROW, min_size=1, max_size=5), features=st.permutations(ALL))
def test_any_rows(rows: list[dict[str, Any]], features: list[Feature]) -> None:
    columns = {feature.name: [row[feature.name] for row in rows] for feature in features}
    got = encode(features, columns, len(rows))
    encoder = FeatureEncoder(features)
    assert got.codes.shape == (len(rows), encoder.width)
    for row, codes, numbers in zip(rows, got.codes, got.numbers, strict=True):
        want_codes, want_numbers, want_missing = slow(tuple(features), row)
        assert sorted(code for code in codes.tolist() if code != encoder.padding) == want_codes
        assert numbers.tolist() == pytest.approx(want_numbers + want_missing, rel=1e-5, abs=1e-6)
    read = {
        name: as_column(encoder.features[name], values, len(rows))
        for name, values in columns.items()
    }
    again = encoder.encode(read, len(rows))
    assert np.array_equal(again.codes, got.codes), "the middle form is read as the values are"
    assert np.array_equal(again.numbers, got.numbers)


def test_an_absent_column_is_missing() -> None:
    without = encode(ALL, {}, 2)
    of_none = encode(ALL, {feature.name: [None, None] for feature in ALL}, 2)
    assert np.array_equal(without.codes, of_none.codes)
    assert np.array_equal(without.numbers, of_none.numbers)


def test_arrays_and_spellings() -> None:
    def codes(feature: Feature, values: Any) -> list[list[int]]:
        found: list[list[int]] = encode(
            [feature], {feature.name: values}, len(values)
        ).codes.tolist()
        return found

    assert codes(COUNTRY, [7, "7", 7.0, True, None]) == [[2], [2], [2], [3], [5]]
    assert codes(COUNTRY, np.array(["fr", "xx"])) == [[0], [4]]
    assert codes(COUNTRY, np.array([7.0, np.nan])) == [[2], [5]], "NaN of an array is missing"
    assert codes(COUNTRY, np.array(["fr", None, np.nan], object)) == [[0], [5], [5]]
    assert codes(SEGMENTS, [["a", "b"], ["b", "a"]])[0] == codes(SEGMENTS, [["b", "a"]])[0], (
        "they are a set"
    )
    numbers = encode([SPENT], {"spent": np.array([10.0, np.nan, 1e30], np.float32)}, 3).numbers
    assert numbers.tolist() == [[0, 0], [0, 1], [3, 0]]
    assert encode([SPENT], {"spent": np.array([10, 14])}, 2).numbers.tolist() == [[0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("colour", [1, 2], "colour: unknown feature; the model has country"),
        ("spent", [1.0], "spent: 1 entries, expected 2"),
        ("spent", [1.0, "two"], "spent: row 1 is a text, expected a number"),
        ("spent", [None, [2]], "spent: row 1 is a list"),
        ("spent", [1.0, math.inf], "spent: row 1 is out of the range of float32"),
        ("spent", [1.0, 1e300], "spent: row 1 is out of the range of float32"),
        ("spent", [1, 10**400], "spent: row 1 is out of the range of float32"),
        ("spent", np.array(["1", "2"]), "spent: an array of <U1"),
        ("country", ["fr", {}], "country: row 1 is a map"),
        ("country", [["fr", "de"], "fr"], "country: row 0 has 2 values, the limit is 1"),
        ("tags", [["a"], ["a", "b", "c"]], "tags: row 1 has 3 values, the limit is 2"),
        ("tags", [["a"], [["b"]]], "tags: row 1 is a list"),
    ],
)
def test_errors_name_the_feature_the_row_and_the_limit(name: str, values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        encode(ALL, {name: values}, 2)
