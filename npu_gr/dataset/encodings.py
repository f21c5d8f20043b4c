"""Files that are unpacked or transcoded before they are read: .xz, .zip, and other encodings."""

from __future__ import annotations

import codecs
import lzma
import re
import shutil
import zipfile
from pathlib import Path
from typing import IO

from npu_gr.core.errors import DataError
from npu_gr.dataset.lines import PACKED, read_chunks

UNPACKED = (".xz", ".zip")
UTF8 = "utf-8"
WINDOWS = "windows-1252"
_SAMPLE_BYTES = 4 << 20
# a letter with an accent next to an ASCII letter, as texts of European languages have them
_ACCENTED = re.compile(
    rb"[A-Za-z][\xc0-\xd6\xd8-\xf6\xf8-\xfc]|[\xc0-\xd6\xd8-\xf6\xf8-\xfc][A-Za-z]"
)
_MULTIBYTE = re.compile(
    rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
)


def guess(path: Path) -> str:
    """Return WINDOWS if the first 4 MiB have its accented letters and none of UTF-8, else UTF8."""
    sample = b""
    for chunk in read_chunks(path):
        sample += chunk
        if len(sample) >= _SAMPLE_BYTES:
            break
    if sample.isascii() or _MULTIBYTE.search(sample):
        return UTF8
    return WINDOWS if _ACCENTED.search(sample) else UTF8


def transcoded(path: Path, encoding: str, folder: Path) -> Path:
    """Write a file as UTF-8 into a folder, unpacked; return the new path.

    Raises:
        DataError: There is no such encoding, or the file has other bytes.
    """
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError:
        raise DataError(f"--encoding {encoding}: there is no such encoding") from None
    name = path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / name
    try:
        with found.open("wb") as file:
            for chunk in read_chunks(path):
                file.write(decoder.decode(chunk).encode())
            file.write(decoder.decode(b"", final=True).encode())
    except UnicodeError as error:
        raise DataError(f"{path}: not {encoding}: {error}; give another --encoding") from error
    return found


def unpacked(path: Path, folder: Path) -> list[Path]:
    """Unpack a .xz or .zip file into a folder; return the new paths, sorted by name.

    Raises:
        DataError: The file is damaged, or a .zip is empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".xz":
            with lzma.open(path) as packed:
                return [_copied(packed, folder / path.stem)]
        with zipfile.ZipFile(path) as archive:
            inside = [
                one
                for one in archive.infolist()
                if not one.is_dir() and not any(p[0] in "._" for p in Path(one.filename).parts)
            ]
            if not inside:
                raise DataError(f"{path}: no file in it")
            found = []
            for place, one in enumerate(sorted(inside, key=lambda one: one.filename)):
                (folder / str(place)).mkdir()
                with archive.open(one) as member:
                    to = folder / str(place) / Path(one.filename).name
                    found.append(_copied(member, to))
            return found
    except (EOFError, lzma.LZMAError, zipfile.BadZipFile, RuntimeError) as error:
        raise DataError(f"{path}: damaged, truncated or encrypted: {error}") from error


def _copied(packed: IO[bytes], found: Path) -> Path:
    with found.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return found
