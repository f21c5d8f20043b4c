"""Item rows on disk: files of records that a pass reads one by one, without loading them.

    items-00000.rows   records of the first rows; each file but the last has the same number
    items.ids          int64 little-endian id of each row

A record is the vector of an item as serving reads it, the sum of its parts, in the machine's byte
order: `dim` values, and for int8 the float32 scale behind them, so one read gets all of it.
`config.json` has the digest of every file. A start compares sizes and the digest of a sample of
blocks; `npu-gr check-config` reads everything.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.core.errors import CheckpointError, DeviceError

RowDtype = Literal["float32", "bfloat16", "int8"]
Records = npt.NDArray[np.uint8]  # [n, record_bytes]

IDS = "items.ids"
ROWS_PER_FILE = 1 << 24
_INT8_MOST = 127
_SCALE_BYTES = 4
_SAMPLED, _BLOCK_BYTES = 16, 4096  # what a start reads of each file


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digests of a file, xxh3-64 in hexadecimal."""

    whole: str
    sample: str  # of the blocks that a start reads


class ItemRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `config.json` says about the item rows of a sharded checkpoint."""

    base: str  # version of the weights of the checkpoint from which they were made
    dtype: RowDtype
    rows_per_file: int
    files: tuple[FileDigest, ...]
    ids: FileDigest
    has_id_range: bool  # the id of row i is that of row 0, plus i

    @property
    def digest(self) -> str:
        """Digest of all that is said here."""
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(self))


def record_bytes(dtype: RowDtype, dim: int) -> int:
    """Return the size of a record."""
    if dtype == "int8":
        return dim + _SCALE_BYTES
    return dim * (4 if dtype == "float32" else 2)


def encode(vectors: Tensor, dtype: RowDtype) -> Tensor:
    """Convert vectors to records: [n, dim] finite -> uint8 [n, record_bytes].

    int8 has one scale a row, the largest absolute value / 127.
    """
    wide = vectors.detach().float()
    if dtype != "int8":
        return wide.to(getattr(torch, dtype)).contiguous().view(torch.uint8)
    scales = wide.abs().amax(1, keepdim=True) / _INT8_MOST
    codes = (wide / torch.where(scales > 0, scales, 1.0)).round().to(torch.int8)
    return torch.cat([codes.view(torch.uint8), scales.contiguous().view(torch.uint8)], 1)


def decode(records: Tensor, dtype: RowDtype) -> Tensor:
    """Convert records to vectors: uint8 [n, record_bytes] -> float32 or bfloat16 [n, dim]."""
    if dtype != "int8":
        return records.contiguous().view(getattr(torch, dtype))
    codes, scales = records.split([records.shape[1] - _SCALE_BYTES, _SCALE_BYTES], 1)
    aligned = scales.clone(memory_format=torch.contiguous_format)
    vectors: Tensor = codes.view(torch.int8) * aligned.view(torch.float32)
    return vectors


def file_name(number: int) -> str:
    """Return the name of a file of rows."""
    return f"items-{number:05d}.rows"


def encoded(parts: Iterable[Tensor], dtype: RowDtype) -> Iterator[Records]:
    """Convert vectors [n, dim] of all rows, in order, to records.

    Raises:
        CheckpointError: A value is not finite.
    """
    row = 0
    for part in parts:
        if not bool(part.isfinite().all()):
            raise CheckpointError(f"vectors of items: rows from {row} on: not finite")
        row += len(part)
        yield encode(part, dtype).numpy()


def write_rows(
    folder: Path,
    parts: Iterable[Records],
    ids: I64,
    base: str,
    dtype: RowDtype,
    rows_per_file: int = ROWS_PER_FILE,
) -> ItemRows:
    """Write the records and ids of all items, in order.

    Args:
        folder: An existing folder without such files.
        parts: Records of the next rows, see `encoded`.
        ids: [num_items] id of each row, distinct.
        base: See `ItemRows`.
        dtype: Dtype of the records.
        rows_per_file: Number of rows in each file but the last.

    Raises:
        OSError: A file cannot be written, or is there already.
    """
    files: list[Path] = []
    row = 0
    for records in parts:
        ends = range(rows_per_file - row % rows_per_file, len(records), rows_per_file)
        for piece in np.split(records, ends):
            if row % rows_per_file == 0:
                files.append(folder / file_name(len(files)))
                files[-1].touch(exist_ok=False)
            with files[-1].open("ab") as file:
                file.write(piece.data)
            row += len(piece)
    with (folder / IDS).open("xb") as file:
        file.write(np.ascontiguousarray(ids, "<i8").data)
    return ItemRows(
        base=base,
        dtype=dtype,
        rows_per_file=rows_per_file,
        files=tuple(map(digests, files)),
        ids=digests(folder / IDS),
        has_id_range=bool(np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids)))),
    )


def digests(path: Path) -> FileDigest:
    """Read a whole file.

    Raises:
        OSError: It cannot be read.
    """
    whole = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            whole.update(block)
        return FileDigest(whole.hexdigest(), _sample(file.fileno()))


def _sample(file: int) -> str:
    """Digest the size of a file, and blocks at even distances, the first and last ones included."""
    size = os.fstat(file).st_size
    state = xxhash.xxh3_64(str(size).encode())
    for place in range(_SAMPLED):
        at = max(0, size - _BLOCK_BYTES) * place // (_SAMPLED - 1)
        state.update(os.pread(file, _BLOCK_BYTES, at))
    return state.hexdigest()


class RowShards:
    """The files of the item rows of one checkpoint, open for reading. Thread-safe."""

    def __init__(self, folder: Path, about: ItemRows, num_rows: int, dim: int) -> None:
        """Open the files.

        Args:
            folder: Folder of the checkpoint.
            about: What its `config.json` says.
            num_rows: Number of items.
            dim: Width of a vector.

        Raises:
            CheckpointError: A file is missing, has another size, or is not the one that
                `config.json` names; the message has the numbers.
        """
        self.about = about
        self.num_rows = num_rows
        self.dim = dim
        self.record_bytes = record_bytes(about.dtype, dim)
        self._files: list[int] = []
        self._folder = folder
        weakref.finalize(self, _close, self._files)
        each = about.rows_per_file
        if each < 1 or len(about.files) != -(-num_rows // each):
            raise CheckpointError(
                f"checkpoint {folder}: item_rows: {len(about.files)} files of {each} rows, "
                f"config.json has {num_rows} items"
            )
        for number, digest in enumerate(about.files):
            count = min(each, num_rows - number * each)
            self._files.append(
                _opened(folder / file_name(number), digest, count * self.record_bytes)
            )
        os.close(_opened(folder / IDS, about.ids, num_rows * 8))

    @property
    def num_bytes(self) -> int:
        """Bytes of the records of all rows."""
        return self.num_rows * self.record_bytes

    def ids(self) -> I64:
        """Map the id of each row, [num_rows]; nothing is read before it is used."""
        return np.asarray(np.memmap(self._folder / IDS, "<i8", "r", shape=(self.num_rows,)))

    def advise(self, rows: Sequence[int]) -> None:
        """Ask the kernel to read rows ahead; does not wait for them."""
        for file, at in map(self._place, rows):
            os.posix_fadvise(file, at, self.record_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, rows: Sequence[int]) -> Records:
        """Read the records of rows, each within the table.

        Raises:
            DeviceError: A file cannot be read, or has been cut since it was opened.
        """
        records = np.empty((len(rows), self.record_bytes), np.uint8)
        places = [self._place(row) for row in rows]
        try:
            if len(places) > 1:
                self.advise(rows)
            for record, (file, at) in zip(records, places, strict=True):
                if os.preadv(file, [record.data], at) != self.record_bytes:
                    raise DeviceError(f"{self._folder}: the item rows have been cut")
        except OSError as error:
            raise DeviceError(f"{self._folder}: item rows: {error.strerror}") from error
        return records

    def _place(self, row: int) -> tuple[int, int]:
        """Return the file of a row, and where it is."""
        number, place = divmod(row, self.about.rows_per_file)
        return self._files[number], place * self.record_bytes

    def check_all(self) -> None:
        """Read every file, and compare its digest.

        Raises:
            CheckpointError: One is damaged.
        """
        names = [*map(file_name, range(len(self.about.files))), IDS]
        for name, digest in zip(names, (*self.about.files, self.about.ids), strict=True):
            try:
                found = digests(self._folder / name)
            except OSError as error:
                raise CheckpointError(f"{self._folder / name}: {error.strerror}") from error
            if found != digest:
                raise CheckpointError(f"{self._folder / name}: is damaged: its digest is wrong")


def _opened(path: Path, digest: FileDigest, size: int) -> int:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    found = os.fstat(file).st_size
    if found != size or _sample(file) != digest.sample:
        os.close(file)
        why = "is not the file that config.json names"
        if found != size:
            why = f"has {found} bytes, and config.json asks for {size}"
        raise CheckpointError(f"{path}: {why}; make the folder again: npu-gr shard")
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: a row is a page
    return file


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
