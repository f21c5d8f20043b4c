"""Item rows on disk are those in memory of the same dtype, bit for bit, hot or not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.core.errors import CheckpointError, DeviceError
from npu_gr.model.hot_rows import HotRows
from npu_gr.model.item_shards import (
    RowDtype,
    RowShards,
    decode,
    encode,
    encoded,
    file_name,
    write_rows,
)
from npu_gr.model.weights import Checkpoint, load, save, save_sharded
from tests.models import Request, full, tiny_model

DTYPES: tuple[RowDtype, ...] = ("float32", "bfloat16", "int8")
NUM, DIM, SPARE = 300, 6, 5
CPU_DEVICE = torch.device("cpu")


def vectors(count: int = NUM, seed: int = 0) -> Tensor:
    made = torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))
    made[count // 2] = 0
    return made


def written(folder: Path, dtype: RowDtype, per_file: int = 64) -> RowShards:
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.arange(NUM) + 7
    parts = encoded(vectors().split(50), dtype)
    about = write_rows(folder, parts, ids, "base", dtype, per_file)
    return RowShards(folder, about, NUM, DIM)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_record_is_the_vector_in_its_dtype(dtype: RowDtype) -> None:
    wide = vectors()
    found = decode(encode(wide, dtype), dtype)
    if dtype == "int8":
        step = wide.abs().amax(1, keepdim=True) / 127
        assert ((found - wide).abs() <= step / 2 * 1.0001).all()
        assert torch.equal(found.abs().amax(1), wide.abs().amax(1))
    else:
        assert torch.equal(found, wide.to(getattr(torch, dtype)))


class Table:
    """The slow definition: all vectors in memory."""

    def __init__(self, dtype: RowDtype) -> None:
        self.dtype = dtype
        self.stored = torch.cat([decode(encode(vectors(), dtype), dtype), torch.zeros(SPARE, DIM)])
        self.now = self.stored.clone()

    def write(self, rows: np.ndarray, new: Tensor) -> None:
        self.now[torch.from_numpy(rows)] = decode(encode(new, self.dtype), self.dtype).float()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    hot_bytes=st.sampled_from([0, 2000, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_reads_are_those_of_a_table_in_memory(
    tmp_path_factory: pytest.TempPathFactory, dtype: RowDtype, hot_bytes: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    shards = written(tmp_path_factory.mktemp("rows"), dtype)
    hot, table = HotRows(shards, SPARE, hot_bytes, CPU_DEVICE), Table(dtype)
    num_read = 0
    for _ in range(12):
        what = random.integers(4)
        if what == 0:
            rows = random.permutation(NUM + SPARE)[: random.integers(1, 9)]
            new = torch.from_numpy(random.normal(size=(len(rows), DIM))).float()
            hot.write(rows, new)
            table.write(rows, new)
        elif what == 1:
            rows = random.permutation(NUM)[:40]
            hot.restore(rows)
            table.now[torch.from_numpy(rows)] = table.stored[torch.from_numpy(rows)]
        else:
            shape = (random.integers(0, 5), random.integers(0, 60))
            rows = np.minimum(random.zipf(1.3, shape) - 1, NUM + SPARE - 1)
            found = hot.rows(torch.from_numpy(rows))
            assert torch.equal(found.float(), table.now[torch.from_numpy(rows)])
            num_read += len(np.unique(rows))
    reads = hot.reads
    assert reads.hits + reads.misses + reads.changed <= num_read
    assert reads.read_bytes == reads.misses * shards.record_bytes


def test_a_row_is_read_once_and_stays_while_it_is_popular(tmp_path: Path) -> None:
    hot = HotRows(written(tmp_path, "int8"), 0, 0, CPU_DEVICE)  # one set of 16 places
    popular = torch.arange(4)
    for _ in range(3):
        for row in popular:  # by themselves: a set takes one row of a pass
            hot.rows(row[None])
    assert hot.reads[:2] == (8, 4)
    for row in range(100, 130):
        hot.rows(torch.tensor([row]))
    before = hot.reads.misses
    hot.rows(popular)
    assert hot.reads.misses - before < 4  # others made way for most of the thirty
    assert hot.reads.read_bytes == hot.reads.misses * (DIM + 4)


def test_a_signal_reads_rows_ahead_that_are_in_no_memory(tmp_path: Path) -> None:
    hot = HotRows(written(tmp_path, "int8"), 2, 1 << 20, CPU_DEVICE)
    hot.rows(torch.tensor([3]))
    hot.write(np.array([4]), torch.ones(1, DIM))
    hot.prefetch(np.array([3, 4, 5, 5, 6, NUM + 1]))
    hot._prefetcher.shutdown(wait=True)
    assert hot.reads.prefetched == 2  # 5 and 6


@pytest.mark.parametrize("row", [-1, NUM + SPARE])
def test_a_row_beyond_the_table_is_rejected(tmp_path: Path, row: int) -> None:
    hot = HotRows(written(tmp_path, "float32"), SPARE, 0, CPU_DEVICE)
    with pytest.raises(IndexError, match=f"the table has {NUM + SPARE}"):
        hot.rows(torch.tensor([0, row]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_a_file_that_is_not_the_checkpoints_is_rejected_in_words(tmp_path: Path) -> None:
    shards = written(tmp_path, "int8")
    second = tmp_path / file_name(1)
    whole = second.read_bytes()
    cut(second)
    with pytest.raises(CheckpointError, match=r"has 639 bytes, and config.json asks for 640"):
        RowShards(tmp_path, shards.about, NUM, DIM)
    with pytest.raises(DeviceError, match="have been cut"):
        shards.read([127])
    second.write_bytes(whole)
    damage(second)
    with pytest.raises(CheckpointError, match=r"is not the file that config.json names"):
        RowShards(tmp_path, shards.about, NUM, DIM)
    second.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        RowShards(tmp_path, shards.about, NUM, DIM)
    with pytest.raises(CheckpointError, match=r"5 files of 64 rows, config.json has 400 items"):
        RowShards(tmp_path, shards.about, 400, DIM)


def test_a_start_reads_a_sample_and_check_config_everything(tmp_path: Path) -> None:
    ids = np.arange(30_000)
    rows = torch.randn(30_000, DIM).split(7000)
    about = write_rows(tmp_path, encoded(rows, "float32"), ids, "base", "float32")
    path = tmp_path / file_name(0)
    with path.open("r+b") as file:
        file.seek(6000)
        file.write(b"\x00\x01\x02\x03")
    shards = RowShards(tmp_path, about, 30_000, DIM)
    with pytest.raises(CheckpointError, match="its digest is wrong"):
        shards.check_all()


def made(folder: Path) -> Checkpoint:
    model = tiny_model()
    ids = np.arange(300, dtype=np.int64) + 1000
    save(Checkpoint(model=model, item_ids=ids, name="tiny"), folder)
    return load(folder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sharded_model_scores_as_one_with_the_same_rows_in_memory(
    tmp_path: Path, dtype: RowDtype
) -> None:
    whole = made(tmp_path / "whole")
    version = save_sharded(whole, tmp_path / "sharded", dtype, rows_per_file=70)
    sharded = load(tmp_path / "sharded", is_served=True)
    assert (sharded.version, sharded.item_ids.tolist()) == (version, whole.item_ids.tolist())
    assert version != whole.version
    assert sharded.rows is not None
    sharded.model.items.sharded = HotRows(sharded.rows, 0, 3000, CPU_DEVICE)
    whole.model.items.freeze()
    table = whole.model.items.table
    assert table is not None
    whole.model.items.table = decode(encode(table, dtype), dtype).float()
    for _ in range(2):  # cold, then hot
        request = Request(20, 8, seed=3)
        want, got = (full(one.model, request) for one in (whole, sharded))
        assert torch.equal(got, want)
    assert sharded.rows.about.has_id_range


def test_what_cannot_be_sharded_is_rejected_by_name(tmp_path: Path) -> None:
    retrieving = tiny_model(retrieval=True)
    checkpoint = Checkpoint(model=retrieving, item_ids=np.arange(300), name="tiny")
    with pytest.raises(CheckpointError, match="retrieval: the search reads the rows of all items"):
        save_sharded(checkpoint, tmp_path / "a", "int8")
    whole = made(tmp_path / "whole")
    with torch.no_grad():
        whole.model.item.weight[7] = torch.nan
    with pytest.raises(CheckpointError, match="not finite"):
        save_sharded(whole, tmp_path / "b", "int8")
    save_sharded(load(tmp_path / "whole"), tmp_path / "c", "int8")
    with pytest.raises(CheckpointError, match="is sharded, for serving alone"):
        load(tmp_path / "c")
    with pytest.raises(CheckpointError, match="File exists"):
        save_sharded(load(tmp_path / "whole"), tmp_path / "c", "int8")
