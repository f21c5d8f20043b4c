"""A feature whose fields contradict each other is rejected, with its name and the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from npu_gr.core.feature_schema.schema import MOST_FEATURES, MOST_WHOLE, Feature, check_features

NUMBER: dict[str, Any] = {"name": "age", "of": "user", "kind": "number"}
CATEGORY: dict[str, Any] = {"name": "age", "of": "user", "kind": "category", "values": ("a", "b")}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**NUMBER, "values": ("a",)}, "values"),
        ({**CATEGORY, "values": ()}, "values"),
        ({**CATEGORY, "values": ("a", "a")}, "values"),
        ({**CATEGORY, "num_buckets": 4}, "num_buckets"),
        ({**CATEGORY, "kind": "hashed", "values": ()}, "num_buckets"),
        ({**CATEGORY, "mean": 1.0}, "mean"),
        ({**CATEGORY, "borders": (1.0,)}, "borders"),
        ({**NUMBER, "max_values": 2}, "max_values"),
        ({**NUMBER, "borders": (2.0, 1.0)}, "ascend"),
        ({**NUMBER, "borders": (2.0, 2.0)}, "ascend"),
        ({**NUMBER, "num_buckets": 3, "borders": (1.0,)}, "num_buckets"),
        ({**NUMBER, "num_buckets": MOST_WHOLE + 1}, "num_buckets"),
        ({**NUMBER, "mean": float("nan")}, "finite"),
        ({**NUMBER, "scale": 0.0}, "over 0"),
    ],
)
def test_contradictions(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"features\.age.*{said}"):
        Feature(**fields)


def test_rows_of_the_table() -> None:
    assert Feature(**CATEGORY).num_rows == 4, "two values, unknown, missing"
    assert Feature(name="id", of="user", kind="hashed", num_buckets=10).num_rows == 11
    assert Feature(**NUMBER, borders=(1.0, 2.0)).num_rows == 4, "three intervals, missing"
    assert Feature(**NUMBER).num_rows == 0
    numbered = Feature(**NUMBER, num_buckets=MOST_WHOLE)
    assert (numbered.num_rows, numbered.is_dense) == (MOST_WHOLE + 1, False), (
        "whole numbers, missing"
    )


def test_names_of_one_kind_are_distinct_and_not_too_many() -> None:
    age = Feature(**NUMBER)
    check_features([age, msgspec.structs.replace(age, of="request")])
    with pytest.raises(ValueError, match="age of user occurs twice"):
        check_features([age, age])
    many = [Feature(name=f"f{i}", of="cross", kind="number") for i in range(MOST_FEATURES + 1)]
    with pytest.raises(ValueError, match=f"257 of cross, the limit is {MOST_FEATURES}"):
        check_features(many)


def test_defaults_are_not_written() -> None:
    assert msgspec.to_builtins(Feature(**NUMBER)) == NUMBER
    assert msgspec.convert({**CATEGORY, "values": ["a", "b"]}, Feature) == Feature(**CATEGORY)
