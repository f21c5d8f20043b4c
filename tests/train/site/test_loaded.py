"""A night loads the files of events that no earlier run has loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.core.secret import SecretUrl
from npu_gr.dataset.build import add, prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.history_store.store import HistoryConfig
from npu_gr.train.site.loaded import FILE, not_loaded, note_loaded


def test_only_new_files_are_loaded_while_the_store_is_the_same(tmp_path: Path) -> None:
    store = HistoryConfig(path=str(tmp_path / "history.db"))
    base, day = {"name": "events.parquet", "digest": "a"}, {"name": "day.parquet", "digest": "b"}
    assert not_loaded(tmp_path, store, [base]) is None, "nothing is known"
    note_loaded(tmp_path, store, [base])
    assert not_loaded(tmp_path, store, [base]) is None, "the file of the store is gone"
    Path(store.path).touch()
    assert not_loaded(tmp_path, store, [base]) == []
    assert not_loaded(tmp_path, store, [base, day]) == ["day.parquet"]
    assert not_loaded(tmp_path, store, [base | {"digest": "c"}]) == ["events.parquet"]
    slower = msgspec.structs.replace(store, timeout_s=9.0)
    assert not_loaded(tmp_path, slower, [base]) == []
    redis = HistoryConfig(kind="redis", url=SecretUrl("redis://one"))
    assert not_loaded(tmp_path, redis, [base]) is None, "another store"
    note_loaded(tmp_path, redis, [base])
    assert not_loaded(tmp_path, redis, [base]) == []
    other = msgspec.structs.replace(redis, url=SecretUrl("redis://other"))
    assert not_loaded(tmp_path, other, [base]) is None
    (tmp_path / FILE).write_text("{")
    assert not_loaded(tmp_path, redis, [base]) is None
    with pytest.raises(DataError, match="cannot be written"):
        note_loaded(tmp_path / "none", redis, [base])


def test_the_events_of_a_day_are_read_alone(tmp_path: Path) -> None:
    for name, rows in (("log", "u,A,1700000000\nv,B,1700000001\n"), ("day", "v,C,1700000002\n")):
        (tmp_path / f"{name}.csv").write_text("user_id,item_id,timestamp\n" + rows)
    prepare(tmp_path / "log.csv", tmp_path / "data")
    add(tmp_path / "day.csv", tmp_path / "data")
    dataset = read_dataset(tmp_path / "data")
    day = dataset.interactions([dataset.event_files[-1]["name"]])
    every = dataset.interactions()
    assert (len(day), day.user_names) == (1, every.user_names)
    assert np.array_equal(day.items, every.items[2:])
    assert np.array_equal(day.users, every.users[2:])
