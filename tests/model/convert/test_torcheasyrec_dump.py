"""Rows of TorchEasyRec's delta_embedding_dump, in files as its code writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from npu_gr.core.errors import CheckpointError
from npu_gr.model.convert.families import convert
from npu_gr.model.convert.source import GivenNames
from tests.model.convert.test_parity import DATA, fixture

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ITEMS = "model.embedding_group.seq_emb_impls.__BASE__.ec_dict.6.embeddings.video_id_emb"
AGES = "model.embedding_group.emb_impls.__BASE__.ebc.embedding_bags.age_emb"
DIM = 6
SCHEMA = pa.schema(
    [
        ("global_step", pa.int64()),
        ("rank", pa.int32()),
        ("world_size", pa.int32()),
        ("embedding_name", pa.string()),
        ("embedding_role", pa.string()),
        ("feature_name", pa.string()),
        ("table_fqn", pa.string()),
        ("key_id", pa.int64()),
        ("embedding", pa.list_(pa.float32())),
    ]
)
Rows = list[tuple[str, int, torch.Tensor]]


def dump(folder: Path, step: int, rows: Rows, rank: int = 0, ranks: int = 1) -> Path:
    name = f"delta_embedding_step_{step}"
    if ranks > 1:
        folder, name = folder / f"step_{step}", f"{name}_rank_{rank}_of_{ranks}"
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        {
            "global_step": step,
            "rank": rank,
            "world_size": ranks,
            "embedding_name": table.rpartition(".")[2],
            "embedding_role": "ec",
            "feature_name": "video_id",
            "table_fqn": table,
            "key_id": row,
            "embedding": values.tolist(),
        }
        for table, row, values in rows
    ]
    path = folder / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(made, schema=SCHEMA), path)
    return path


def run(folder: Path, changes: Rows) -> Path:
    """A run of step 20, whose tables have these rows."""
    weights, _ = fixture("torcheasyrec")
    for table, row, values in changes:
        weights[f"{table}.weight"][row] = values
    (folder / "model.ckpt-20" / "model").mkdir(parents=True)
    save_file(weights, folder / "model.ckpt-20" / "model" / "weights.safetensors")
    (folder / "pipeline.config").write_text((DATA / "torcheasyrec.config").read_text())
    return folder


def imported(folder: Path, dump: Path | None = None) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = convert(
        "torcheasyrec", folder, GivenNames(), dump=dump
    ).model.state_dict()
    return found


def test_dumped_rows_are_those_of_a_later_checkpoint(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)

    def row() -> torch.Tensor:
        return torch.randn(DIM, generator=random)

    older, first, second, age = row(), row(), row(), row()
    dumps = tmp_path / "dumps"
    dump(dumps, 10, [(ITEMS, 7, older)])  # before the checkpoint
    dump(dumps, 30, [(f"_dmp_wrapped_module.module.{ITEMS}", 3, first), (ITEMS, 5, first)])
    dump(dumps, 40, [(ITEMS, 5, second)], 0, 2)
    dump(dumps, 40, [(AGES, 1, age)], 1, 2)
    dump(dumps, 100, [])  # an empty file of its trainer, of a step that sorts last
    old = run(tmp_path / "old", [])
    want = run(tmp_path / "new", [(ITEMS, 3, first), (ITEMS, 5, second), (AGES, 1, age)])
    got, new, was = imported(old, dumps), imported(want), imported(old)
    assert all(torch.equal(tensor, new[name]) for name, tensor in got.items())
    changed = {name for name, tensor in got.items() if not torch.equal(tensor, was[name])}
    rows = (got["item.weight"] != was["item.weight"]).any(1).nonzero().flatten().tolist()
    assert "item.weight" in changed
    assert len(changed) > 1  # the ages' rows too
    assert rows == [3, 5]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder, dumps = run(tmp_path / "run", []), tmp_path / "dumps"
    dumps.mkdir()
    with pytest.raises(CheckpointError, match=r"no file \*_step_N\.parquet"):
        imported(folder, dumps)
    zero = torch.zeros(DIM)
    for rows, words in (
        ([("model.other", 0, zero)], r"the checkpoint has no table model\.other\.weight"),
        ([(ITEMS, 20, zero)], "key_id must be below 20"),
        ([(ITEMS, 2, torch.zeros(4))], "4 numbers a row, the table has 6"),
        ([(ITEMS, 2, zero / 0)], "a value is not finite"),
    ):
        dump(dumps, 30, rows)
        with pytest.raises(CheckpointError, match=words):
            imported(folder, dumps)
    path = dump(dumps, 30, [])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        imported(folder, dumps)
    path.unlink()
    dump(dumps, 40, [], 1, 2)
    with pytest.raises(CheckpointError, match=r"step 40 has the files of ranks \[1\] of 2"):
        imported(folder, dumps)
    with pytest.raises(CheckpointError, match="--from torcheasyrec alone"):
        convert("dlrmv3", folder, GivenNames(), dump=dumps)
