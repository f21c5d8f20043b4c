"""A packed file is read whole, or named when it is damaged, cut short or not there."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from npu_gr.core.errors import DataError
from npu_gr.features.lines import read_lines

TEXT = b"".join(b"line %d\n" % number for number in range(300_000))  # more than one chunk, packed or not


def _pack(suffix: str, data: bytes) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        packed: bytes = pytest.importorskip("zstandard").ZstdCompressor(level=1, write_checksum=True).compress(data)
        return packed
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(_pack(suffix, TEXT))
    assert read_lines(path) == TEXT.splitlines()
    path.write_bytes(_pack(suffix, b"a\r\nb\n") + _pack(suffix, b"c\n"))  # members or frames one after the other
    assert read_lines(path) == [b"a", b"b", b"c"]
    path.write_bytes(b"")
    assert read_lines(path) == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged(tmp_path: Path, suffix: str) -> None:
    path, packed = tmp_path / f"x{suffix}", _pack(suffix, TEXT)
    middle = len(packed) // 2
    for data in (
        packed[:middle],
        packed[:-1],
        b"not packed",
        packed[:middle] + b"\x00\x01\x02" * 33 + packed[middle + 99 :],
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"x\{suffix}: "):
            read_lines(path)


def test_nothing_to_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            read_lines(path)
