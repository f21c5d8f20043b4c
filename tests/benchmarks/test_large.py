"""The large log is what it says, and what its commands take is measured of them alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import large
from npu_gr.core.errors import DataError


def columns(path: Path) -> list[np.ndarray]:
    _, *rows = path.read_text().splitlines()
    users, items, times = zip(*(row.split(",") for row in rows), strict=True)
    numbers = (np.array([int(name[1:]) for name in names]) for names in (users, items))
    return [*numbers, np.array(times, np.int64)]


def test_the_log_has_so_many_events_of_users_with_a_taste(tmp_path: Path) -> None:
    large.write_log(tmp_path / "log.csv", 20_000, 2000, 3)
    large.write_log(tmp_path / "again.csv", 20_000, 2000, 3)
    assert (tmp_path / "log.csv").read_bytes() == (tmp_path / "again.csv").read_bytes()
    users, items, times = columns(tmp_path / "log.csv")
    assert len(users) == 20_000
    assert (np.diff(times) >= 0).all()
    assert np.bincount(users).min() >= large.LEAST_EVENTS - 1  # the last events may be cut off
    uses = np.sort(np.bincount(items, minlength=2000))[::-1]
    assert uses[:20].sum() > 5 * uses[1000:1020].sum(), "popularity is not even"
    # the item before says more about the next one than chance
    order = np.lexsort((times, users))
    same = np.diff(users[order]) == 0
    pairs = items[order][:-1][same] * 2000 + items[order][1:][same]
    assert np.bincount(pairs).max() > 20


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="npu-gr prepare ended with"):
        large._run(["prepare", str(tmp_path / "none.csv"), "--out", str(tmp_path / "data")])


def test_the_limit_is_what_two_cores_have_in_an_hour() -> None:
    cpu, memory = large._took("x", 3600.0, 16_000_000_000)
    assert (cpu.ok, cpu.ratio) == (True, 2.0)
    assert (memory.ok, memory.ratio) == (False, 0.5)
