"""Event types and ratings become named actions; continuous values become ranges.

A list of actions only grows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import DataError
from npu_gr.dataset import PrepareOptions, prepare, read_log
from npu_gr.dataset.actions import (
    SAMPLE,
    ActionKind,
    OldActions,
    ValueSample,
    bucket_names,
    of_events,
    of_values,
)


def sample(values: list[float]) -> ValueSample:
    found = ValueSample()
    found.add(np.array(values, np.float64))
    return found


def write(path: Path, rows: list[tuple[str, object]], column: str = "event") -> Path:
    lines = [f"u{at % 3},i{at},{1_700_000_000 + at},{value}" for at, (_, value) in enumerate(rows)]
    path.write_text("\n".join([f"user_id,item_id,ts,{column}", *lines]) + "\n")
    return path


def test_event_types_stand_in_the_order_of_the_alphabet() -> None:
    actions = of_events(["view", "buy"], OldActions())
    assert actions.names == ["buy", "view"]
    assert actions.of({"action": np.array([0, 1, 0])}).tolist() == [1, 0, 1]


def test_a_dataset_that_is_prepared_again_keeps_its_actions(tmp_path: Path) -> None:
    """New actions come at the end, and one that no row has any more keeps its place."""
    out = tmp_path / "data"
    prepare(write(tmp_path / "a.csv", [("", "view"), ("", "like")]), out)
    again = prepare(write(tmp_path / "b.csv", [("", "view"), ("", "buy"), ("", "add")]), out)
    assert again.manifest["actions"]["names"] == ["like", "view", "add", "buy"]
    assert again.manifest["actions"]["events"] == [0, 1, 1, 1]
    assert again.manifest["notes"] == ["actions that are new: add, buy"]
    log = read_log(out)
    assert [log.action_names[int(value)] for value in log.values] == ["view", "buy", "add"]


def test_actions_of_another_kind_are_rejected(tmp_path: Path) -> None:
    out = tmp_path / "data"
    prepare(write(tmp_path / "a.csv", [("", "view")]), out)
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(
        DataError,
        match=r"the dataset there has actions of the kind events.*choose another --out",
    ):
        prepare(write(tmp_path / "b.csv", [("", 3), ("", 4)], "rating"), out)
    assert (out / "manifest.json").read_bytes() == before


def test_few_values_are_ratings() -> None:
    actions = of_values("rating", sample([0.5, 5, 4.5, 5]), 10, OldActions())
    assert (actions.kind, actions.names) == (ActionKind.RATINGS, ["0.5", "4.5", "5"])
    again = of_values(
        "rating", sample([3]), 10, OldActions(kind="ratings", names=["0.5", "4.5", "5"])
    )
    assert again.names == ["0.5", "3", "4.5", "5"]
    assert any("lie between" in note for note in again.notes)


def test_a_value_that_never_changes_is_left_out() -> None:
    actions = of_values("rating", sample([1, 1]), 10, OldActions())
    assert (actions.kind, actions.names) == (ActionKind.ONE, ["event"])
    assert actions.notes == ["'rating' is 1 in every row, so it is not used"]


def test_edges_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "data"
    rows: list[tuple[str, object]] = [("", at * 1.5) for at in range(100)]
    options = PrepareOptions(num_buckets=4)
    first = prepare(write(tmp_path / "a.csv", rows, "dwell"), out, options).manifest["actions"]
    assert first["edges"] == [36, 73.5, 111]
    assert first["names"] == ["dwell<=36", "dwell<=73.5", "dwell<=111", "dwell>111"]
    assert first["events"] == [25] * 4
    again = prepare(write(tmp_path / "b.csv", [("", 1.5), ("", 1000)], "dwell"), out).manifest[
        "actions"
    ]
    assert (again["edges"], again["events"]) == (first["edges"], [1, 0, 0, 1])


def test_one_range_stays_one_range(tmp_path: Path) -> None:
    out = tmp_path / "data"
    rows: list[tuple[str, object]] = [("", at * 1.5) for at in range(100)]
    first = prepare(
        write(tmp_path / "a.csv", rows, "dwell"), out, PrepareOptions(num_buckets=1)
    ).manifest["actions"]
    assert (first["names"], first["edges"], first["events"]) == (["dwell"], [], [100])
    again = prepare(write(tmp_path / "b.csv", rows, "dwell"), out).manifest
    assert again["actions"] == first
    assert any("those of the previous dataset" in note for note in again["notes"])


def test_ratings_of_many_digits_keep_them(tmp_path: Path) -> None:
    out = tmp_path / "data"
    names = ["0.1234567", "1000000", "1234567", "1234568"]
    prepared = prepare(write(tmp_path / "a.csv", [("", name) for name in names], "rating"), out)
    assert prepared.manifest["actions"]["names"] == names
    assert prepared.manifest["actions"]["events"] == [1] * 4


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(2, 12))
def test_every_value_has_a_range_with_a_name_of_its_own(
    values: list[float], num_buckets: int
) -> None:
    edges = sample(values).edges(num_buckets)
    names = bucket_names("x", edges)
    assert len(set(names)) == len(names) == len(edges) + 1 <= num_buckets
    assert edges == sorted(set(edges))
    counts = np.bincount(
        np.searchsorted(np.array(edges), values, side="left"), minlength=len(names)
    )
    assert (counts > 0).all()


def test_the_sample_is_fair_and_bounded() -> None:
    """Of a rising sequence far longer than the sample, quantiles are where they should be."""
    found = ValueSample()
    for start in range(0, 10 * SAMPLE, SAMPLE // 2):
        found.add(np.arange(start, start + SAMPLE // 2, dtype=np.float64))
    assert np.allclose(found.edges(4), np.array([0.25, 0.5, 0.75]) * 10 * SAMPLE, rtol=0.02)
    assert not found.is_few
    assert len(found.distinct) < SAMPLE
