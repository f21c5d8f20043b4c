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
from npu_gr.dataset.column_names import ALL_NAMES
from npu_gr.dataset.lines import PACKED, read_chunks

UNPACKED = (".xz", ".zip")
UTF8 = "utf-8"
WINDOWS = "windows-1252"
CHINESE = "gb18030"  # GBK and GB2312 are parts of it
GUESSED = {
    WINDOWS: "Windows-1252, by its letters with accents",
    CHINESE: "GB18030, by the name of a column",
}
_OF_EAST_ASIA = ("big5", "euc_kr", "euc_jp", "shift_jis")
_SAMPLE_BYTES = 4 << 20
_ASCII = bytes(range(128))
_PAIRS = re.compile(rb"(?:[\x81-\xfe][\xa1-\xfe])+")
_MOST_IN_PAIRS = 0.8  # share of the bytes that are no ASCII; accented letters stand alone
_LEAST_LINES = 3  # with pairs; fewer are damaged rows, which are rejected one by one
# a letter with an accent next to an ASCII letter, as texts of European languages have them
_ACCENTED = re.compile(
    rb"[A-Za-z][\xc0-\xd6\xd8-\xf6\xf8-\xfc]|[\xc0-\xd6\xd8-\xf6\xf8-\xfc][A-Za-z]"
)
_MULTIBYTE = re.compile(
    rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
)


def guess(path: Path) -> str:
    """Guess the encoding of a text file by its first 4 MiB.

    Returns:
        WINDOWS if they have its accented letters and none of UTF-8; CHINESE if they are no UTF-8
        and the first line has a name of a column in it; else UTF8.

    Raises:
        DataError: They are no UTF-8, and may be of several encodings of East Asia.
    """
    sample = b""
    for chunk in read_chunks(path):
        sample += chunk
        if len(sample) >= _SAMPLE_BYTES:
            break
    if sample.isascii() or _decodes(sample, UTF8):
        return UTF8
    in_pairs = sum(map(len, _PAIRS.findall(sample)))
    if in_pairs > _MOST_IN_PAIRS * len(sample.translate(None, _ASCII)):
        if _decodes(sample, CHINESE) and _names_a_column(sample):
            return CHINESE
        num_lines = sum(_PAIRS.search(line) is not None for line in sample.split(b"\n"))
        found = [name for name in (CHINESE, *_OF_EAST_ASIA) if _decodes(sample, name)]
        if found and num_lines >= _LEAST_LINES:
            raise DataError(
                f"{path}: not UTF-8, and its letters do not say which encoding it has; give "
                f"{' or '.join(f'--encoding {name}' for name in found)}"
            )
    if _MULTIBYTE.search(sample):
        return UTF8
    return WINDOWS if _ACCENTED.search(sample) else UTF8


def _decodes(sample: bytes, encoding: str) -> bool:
    """Whether a file can begin with a sample, whose last letter may be cut."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeError:
        return False
    return True


def _names_a_column(sample: bytes) -> bool:
    """Whether the first line has a Chinese name of a column."""
    header = sample.split(b"\n", 1)[0].decode(CHINESE, errors="replace")
    cells = {re.sub(r"\W", "", cell).lower() for cell in re.split("[,;\t|]", header)}
    return any(not name.isascii() for name in ALL_NAMES & cells)


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
