"""The click against trees: the columns see only what was before, both sides score the same rows."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest

from benchmarks.quality import QUICK
from benchmarks.quality_shown import (
    COLUMNS,
    PRIOR,
    Bools,
    columns_of,
    lightgbm,
    planted_pages,
    rows_of,
    shown_lines,
)
from npu_gr.core.errors import ConfigError
from npu_gr.train.data import build_log
from npu_gr.train.metrics import F64

TINY = msgspec.structs.replace(QUICK.rank, epochs=1, dim=16, num_layers=1)


def test_columns_are_counts_of_what_was_before() -> None:
    log = build_log(planted_pages(0, 12, 20), [], "user-time")
    rows = rows_of(log)
    found = columns_of(log, rows)
    users, times = log.users[rows.events], log.times[rows.events]
    for row in range(0, len(users), 7):
        before = times < times[row]
        same_item = before & (rows.items == rows.items[row])
        same_user = before & (users == users[row])
        mine = np.flatnonzero((log.users == users[row]) & (log.times < times[row]))
        want = {
            "item": rows.items[row],
            "place": rows.places[row],
            "clicks of the item": rows.clicked[same_item].sum(),
            "times it was shown": same_item.sum(),
            "its rate": rows.clicked[same_item].sum() / (same_item.sum() + PRIOR),
            "user's clicks": rows.clicked[same_user].sum(),
            "times the user was shown something": same_user.sum(),
            "user's clicks of the item": rows.clicked[same_item & same_user].sum(),
            "last item": log.items[mine[-1]] if len(mine) else -1,
        }
        for name, value in want.items():
            assert found[row, COLUMNS.index(name)] == pytest.approx(value), name


def test_both_sides_score_the_same_rows() -> None:
    """A score of the label itself is perfect only if every row is that of the ranker."""
    log = build_log(planted_pages(3, 40, 30), [], "user-time")
    rows = rows_of(log)
    given: list[int] = []

    def knowing(columns: F64, clicked: Bools, held: F64, held_clicked: Bools, tested: F64) -> F64:
        given.extend([len(columns), len(held), len(tested)])
        assert (len(columns), len(held)) == (len(clicked), len(held_clicked))
        assert not tested[:, COLUMNS.index("place")].any()
        return rows.clicked[~rows.trained].astype(np.float64)

    [line] = shown_lines((3,), TINY, knowing, 40, 30)
    assert sum(given) == len(rows.items)
    assert line.baseline_value == 1
    assert line.high is not None
    assert line.ok is False
    assert line.high < 0


def test_without_lightgbm_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ConfigError, match="pip install lightgbm"):
        lightgbm()
