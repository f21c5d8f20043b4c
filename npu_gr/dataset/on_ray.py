"""Prepare a log on a Ray cluster: `npu-gr prepare 'log/*.parquet' --on ray --out site/data`.

    read     a task for each file: its rows, and the part that each row's user belongs to
    shuffle  Ray Data brings the rows of a part together
    prepare  a task for each part, on its rows in the order of the log
    merge    here: the dataset is that of one run over the parts, bit for bit (`merged.py`)

A task that dies is run again by Ray and changes nothing, since tasks return the files that they
make. The number of parts depends on the log alone, so every cluster makes the same dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow.fs as fs

from npu_gr.core.errors import DataError
from npu_gr.dataset.build import OnStage, PreparedDataset, ignore_stage, prepare
from npu_gr.dataset.cells import pa, pc, pq
from npu_gr.dataset.columns import NONE
from npu_gr.dataset.engine import MOST_MB, duckdb_errors, in_memory
from npu_gr.dataset.files import MANIFEST, is_dataset
from npu_gr.dataset.lines import ignore_progress
from npu_gr.dataset.logs import BATCH_ROWS, Log, joined_name_sql
from npu_gr.dataset.merged import merge
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.partitions import Partitioned, partitions
from npu_gr.dataset.sources import open_source

PART_BYTES = 32 << 20  # of the log for each part; a worker holds the rows of one part in memory
_PART = "npu_gr_part"
_FILE = "npu_gr_file"
_ROW = "npu_gr_row"


class _LogFile(NamedTuple):
    uri: str  # that pyarrow.fs.FileSystem.from_uri reads; a local file's path
    path: str  # inside its file system
    num_bytes: int


def prepare_on_ray(
    log: str,
    out: Path | str,
    options: PrepareOptions | None = None,
    *,
    items: Path | None = None,
    users: Path | None = None,
    on_stage: OnStage = ignore_stage,
    part_bytes: int = PART_BYTES,
) -> PreparedDataset:
    """Make a dataset on the cluster of `RAY_ADDRESS`, or on this machine's cores without one.

    Args:
        log: A Parquet file, a folder, or a folder and a pattern of names: a path that all workers
            see, or a URI that pyarrow reads (s3://, gs://, hdfs://).
        out: Folder of the dataset, on this machine.
        options: As for `prepare`; columns and the format of times are guessed from the first file.
        items: A file with titles and features of items, on this machine.
        users: A file with features of users, on this machine.
        on_stage: Callback for the progress.
        part_bytes: Bytes of the log for each part.

    Raises:
        DataError: Ray is not installed, the log has no times or is not Parquet, or as `prepare`
            and `merge`. `out` is unchanged.
    """
    try:
        import ray.data
    except ImportError as error:
        raise DataError("--on ray needs pip install 'npu_gr[ray]' on every node") from error
    files = _files(log)
    split, options = _split(files, options or PrepareOptions(), items, part_bytes)
    make = _MakePart(
        options=options,
        items=_SideFile.read(items),
        users=_SideFile.read(users),
        like=(Path(options.like) / MANIFEST).read_bytes() if options.like else b"",
    )
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(logging_level="ERROR", log_to_driver=False, include_dashboard=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        numbered = [{"number": at, "uri": one.uri} for at, one in enumerate(files)]
        parts = (
            ray.data.from_items(numbered, override_num_blocks=len(files))
            .map_batches(split, batch_size=1, batch_format="pyarrow")
            .groupby(_PART, num_partitions=split.num_parts)
            .map_groups(make.prepared, batch_format="pyarrow")
        )
        with TemporaryDirectory(prefix="npu-gr-parts-") as folder:
            try:
                for row in parts.iter_rows():
                    part = Path(folder) / f"{row['part']:06}"
                    part.mkdir(mode=0o700, exist_ok=True)
                    (part / row["name"]).write_bytes(row["content"])
                    on_stage("parts", len(list(Path(folder).iterdir())) / split.num_parts)
            except ray.exceptions.RayError as error:
                raise DataError(f"{log}: {getattr(error, 'cause', error)}") from error
            kept = PrepareOptions(
                like=options.like, strict=options.strict, memory_mb=options.memory_mb
            )
            return merge(str(Path(folder) / "*"), out, kept, on_stage=on_stage)
    finally:
        if is_ours:
            ray.shutdown()


def _files(log: str) -> list[_LogFile]:
    """List the Parquet files of a log, sorted by name.

    Raises:
        DataError: there are none.
    """
    place = log if "://" in log else str(Path(log).absolute())
    folder, name = place.rpartition("/")[::2]
    uri, pattern = (folder, name) if "*" in name else (place.rstrip("/"), "*.parquet")
    try:
        filesystem, path = fs.FileSystem.from_uri(uri)
        if filesystem.get_file_info(path).type == fs.FileType.File:
            found = [filesystem.get_file_info(path)]
        else:
            selected = fs.FileSelector(path, recursive="*" not in name)
            found = filesystem.get_file_info(selected)
            found = [one for one in found if one.is_file and fnmatch(one.base_name, pattern)]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{log}: {error}") from error
    root = uri.removesuffix(path).removesuffix(quote(path))
    files: list[_LogFile] = []
    for one in found:
        inside = one.path.removeprefix(path).strip("/").split("/")
        if not any(part.startswith((".", "_")) for part in inside):
            uri = root + (quote(one.path, safe="/=") if root else one.path)
            files.append(_LogFile(uri, one.path, one.size))
    if not files:
        raise DataError(f"{log}: no Parquet file; --on ray reads {pattern} in a folder")
    return sorted(files)


@contextmanager
def _local(uri: str) -> Iterator[Path]:
    """Yield the path of a file, or of a copy where DuckDB cannot read the file's place."""
    filesystem, path = fs.FileSystem.from_uri(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        yield Path(path)
        return
    with TemporaryDirectory(prefix="npu-gr-log-") as folder:
        # with the folders whose names are columns
        named = [one for one in PurePosixPath(path).parts[:-1] if "=" in one]
        copy = Path(folder, *named, PurePosixPath(path).name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        fs.copy_files(path, str(copy), source_filesystem=filesystem)
        yield copy


def _split(
    files: list[_LogFile], options: PrepareOptions, items: Path | None, part_bytes: int
) -> tuple[_Split, PrepareOptions]:
    """Choose the columns by the first file and the names of all folders.

    Returns options that every part has to follow.
    """
    if options.like and not is_dataset(Path(options.like)):
        raise DataError(f"--like {options.like}: not a dataset of `npu-gr prepare`")
    of_folders = partitions([Path(one.path) for one in files])
    with _local(files[0].uri) as first:
        source = open_source(first, "parquet")
        if isinstance(source, Partitioned):
            source = Partitioned(source.inner, of_folders)
        log = Log(source, options, describes_items=items is None)
    if log.columns.time is None or log.time_kind is None:
        raise DataError("--on ray: a log without times has no parts; prepare it at once")
    chosen: dict[str, Any] = {"time_format": options.time_format or log.time_kind.pattern}
    for role in ("user", "item", "time", "event", "value"):
        column = getattr(log.columns, role)
        chosen[role] = NONE if column is None else column.name
    if items is None and options.features is None:
        chosen["features"] = tuple(one.name for one in log.item_columns)
    num_parts = max(1, -(-sum(one.num_bytes for one in files) // part_bytes))
    return _Split(log.columns.user.parts or (log.columns.user.name,), num_parts), replace(
        options, **chosen
    )


@dataclass(frozen=True)
class _Split:
    """Task: reads files, and adds the part, the file and the place of each row."""

    user: tuple[str, ...]  # columns with the user; the first that is set counts
    num_parts: int

    def __call__(self, files: Any) -> Iterator[Any]:
        """Yield the rows of files, a table of `number` and `uri`, in batches."""
        for one in files.to_pylist():
            with _local(one["uri"]) as path:
                yield from self._rows(path, one["number"])

    def _rows(self, path: Path, number: int) -> Iterator[Any]:
        source = open_source(path, "parquet")
        of_folders = partitions([path])
        with in_memory(MOST_MB) as con, duckdb_errors(source.name, MOST_MB):
            (cells,) = source.relations(con, path, self.user, ignore_progress)
            cell = {name: f"c{place}" for place, name in enumerate(self.user)}
            user = joined_name_sql(source, cell, self.user)
            parts = con.sql(
                f"SELECT CAST(md5_number_lower({user}) % {self.num_parts} AS INTEGER) AS part FROM "
                f"({cells.sql})"
            ).to_arrow_table()["part"]
        first = 0
        for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            for name, value in of_folders[0].items() if of_folders else ():
                if name not in table.column_names:
                    cell = pa.scalar(value, pa.string())
                    table = table.append_column(name, pa.repeat(cell, len(table)))
            places = np.arange(first, first + len(table))
            # rows without a user are rejected: no part has so many that it fails
            of_place = pa.array(places % self.num_parts, pa.int32())
            part = pc.coalesce(parts.slice(first, len(table)), of_place)
            table = table.append_column(_PART, part)
            table = table.append_column(_FILE, pa.array(np.full(len(table), number, np.int32)))
            yield table.append_column(_ROW, pa.array(places))
            first += len(table)


class _SideFile(NamedTuple):
    name: str
    content: bytes

    @classmethod
    def read(cls, path: Path | None) -> _SideFile | None:
        return None if path is None else cls(path.name, path.read_bytes())

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / self.name).write_bytes(self.content)
        return folder / self.name


@dataclass(frozen=True, kw_only=True)
class _MakePart:
    """Task: prepares the rows of a part; returns the files of its dataset."""

    options: PrepareOptions
    items: _SideFile | None
    users: _SideFile | None
    like: bytes  # a manifest; empty = none

    def prepared(self, rows: Any) -> Any:
        """Prepare the rows of one part; returns a table of its files."""
        number = rows[_PART][0].as_py()
        rows = rows.sort_by([(_FILE, "ascending"), (_ROW, "ascending")])
        rows = rows.drop_columns([_PART, _FILE, _ROW])
        with TemporaryDirectory(prefix="npu-gr-part-") as scratch:
            folder = Path(scratch)
            items = None if self.items is None else self.items.write(folder / "items")
            users = None if self.users is None else self.users.write(folder / "users")
            options = self.options
            if self.like:
                (folder / "like").mkdir()
                (folder / "like" / MANIFEST).write_bytes(self.like)
                options = replace(options, like=str(folder / "like"))
            options = replace(options, strict=False)
            prepare(rows, folder / "out", options, items=items, users=users)
            made = sorted(one for one in (folder / "out").iterdir() if one.is_file())
            return pa.table(
                {
                    "part": pa.array([number] * len(made), pa.int32()),
                    "name": [one.name for one in made],
                    "content": pa.array([one.read_bytes() for one in made], pa.large_binary()),
                }
            )
