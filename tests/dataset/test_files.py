"""A folder says that it is a dataset, and what is broken in it is said with the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset import prepare, read_dataset, read_log
from tests.dataset.logs import EVENTS, table, write_atomic, write_csv


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(table(EVENTS), tmp_path / "data")
    return tmp_path / "data"


def test_a_folder_that_is_none(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(
        DataError, match=f"{tmp_path}: no dataset; npu-gr prepare LOG --out {tmp_path}"
    ):
        read_dataset(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(
        DataError, match="the dataset has format 99, this version reads 1 and 2; prepare it anew"
    ):
        read_dataset(folder)
    for broken in ("[]", "{", '{"kind": "npu_gr site"}'):
        (folder / "manifest.json").write_text(broken)
        with pytest.raises(DataError, match="no dataset"):
            read_dataset(folder)


@pytest.mark.parametrize("name", ["events.parquet", "users.parquet", "items.parquet"])
def test_a_file_that_is_broken(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"PAR1 no more PAR1")
    dataset = read_dataset(folder)
    with pytest.raises(DataError, match=rf"{name}: .*; npu-gr prepare makes it anew"):
        dataset.names if name == "items.parquet" else dataset.interactions()
    (folder / name).unlink()
    with pytest.raises(DataError, match=name):
        dataset.item_features() if name == "items.parquet" else dataset.interactions()


def test_users_of_another_log_are_noticed(folder: Path, tmp_path: Path) -> None:
    one = prepare(table(EVENTS[:1]), tmp_path / "one").dataset.folder
    (one / "users.parquet").replace(folder / "users.parquet")
    with pytest.raises(DataError, match=r"a user is not in users\.parquet"):
        read_log(folder)


def test_a_log_is_a_dataset_or_a_file(folder: Path, tmp_path: Path) -> None:
    log = read_log(folder)
    assert (len(log), log.action_names) == (5, ("cart", "purchase", "view"))
    with pytest.raises(
        DataError,
        match=r"prepare it first: npu-gr prepare .*log\.csv --out "
        r"site/data",
    ):
        read_log(write_csv(tmp_path / "log.csv", EVENTS))
    (tmp_path / "ratings.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\nu\t7\t4\t9\n"
    )
    assert len(read_log(tmp_path / "ratings.inter")) == 1
    with pytest.raises(DataError, match="no column 'rating'"):
        read_log(write_atomic(tmp_path / "log.inter", EVENTS))


def test_without_pyarrow_the_message_has_the_command(tmp_path: Path) -> None:
    """A log that needs no preparation is read all the same."""
    (tmp_path / "x.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\nu\t7\t4\t9\n"
    )
    code = (
        "import sys; sys.modules['pyarrow'] = None\nfrom pathlib import Path\nfrom npu_gr.dataset "
        f"import read_log\nprint(len(read_log(Path({str(tmp_path / 'x.inter')!r}))))\nfrom "
        "npu_gr.cli.main import main\nmain(['prepare', 'x.csv', '--out', "
        f"{str(tmp_path / 'data')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "1\n")
    assert done.stderr.endswith("npu-gr: datasets need pip install 'npu_gr[parquet]'\n")
