"""Read the lines of a text file in Python: for the sample, and where DuckDB fails.

DuckDB reads files whose lines are all well-formed. If one is not (not UTF-8, a bare carriage
return, mixed line ends, longer than `line_sources.LINE_BYTES`), this module reads the file and
feeds DuckDB. It also parses rows with unusual quotes.
"""

from __future__ import annotations

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from npu_gr.core.errors import DataError
from npu_gr.core.names import value_name
from npu_gr.core.text_format import counted
from npu_gr.dataset.cells import pa
from npu_gr.dataset.rejects import CODES, UNSURE, RejectReason

OnProgress = Callable[[float], None]
"""Called with the share of the source that has been read, 0 to 1."""

BLOCK_BYTES = 4 << 20
# most lines that one row may span; a quote that stays open longer is a stray one
MAX_ROW_LINES = 100
MAX_LINE_BYTES = 8 << 20
MAX_MEMBER_BYTES = 4 << 20  # of one user with the items, in a nested file
BATCH_EVENTS = 50_000  # of a nested file
NESTED = ("user_id", "item_id", "place")  # columns of a nested file
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
MAX_DEPTH = 8  # of nested objects that become columns
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MEMBER = re.compile(
    rb'\s*(,?)\s*("(?:[^"\\]|\\.)*+")\s*:\s*(\[(?:[^\[\]"{}]|"(?:[^"\\]|\\.)*+")*+\])', re.DOTALL
)


def ignore_progress(ratio: float) -> None:
    """Ignore the progress."""


def read_chunks(path: Path, on_progress: OnProgress = ignore_progress) -> Iterator[bytes]:
    """Read a file in chunks, unpacked according to its suffix.

    Raises:
        DataError: the file cannot be read, is damaged or truncated, or begins as UTF-16.
    """
    packed = PACKED.get(path.suffix)
    num_bytes = 0
    try:
        size = max(path.stat().st_size, 1)
        with pa.OSFile(str(path)) as raw:
            stream = pa.CompressedInputStream(raw, packed) if packed else raw
            while chunk := stream.read(BLOCK_BYTES):
                if not num_bytes and chunk.startswith(_UTF16_MARKS):
                    raise DataError(
                        f"{path}: UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 {path} > "
                        "NEW"
                    )
                yield chunk if num_bytes else chunk.removeprefix(_UTF8_MARK)
                num_bytes += len(chunk)
                on_progress(raw.tell() / size)
    except OSError as error:
        if packed is None or error.strerror:
            raise DataError(f"{path}: {error.strerror or error}") from error
        raise DataError(
            f"{path}: the {packed} file is damaged or truncated after "
            f"{counted(num_bytes, 'byte')} of content: {error}"
        ) from error


def read_lines(path: Path, on_progress: OnProgress = ignore_progress) -> Iterator[list[bytes]]:
    """Read a file's lines in batches, without their line ends.

    Raises:
        DataError: as `read_chunks`; or a line is too long for a text log.
    """
    rest = b""
    num_lines = 0
    for chunk in read_chunks(path, on_progress):
        *lines, rest = (rest + chunk).split(b"\n")
        num_lines += len(lines)
        if len(rest) > MAX_LINE_BYTES:
            raise DataError(
                f"{path}, line {num_lines + 1}: longer than {MAX_LINE_BYTES >> 20} MiB, so this is "
                "not a text log"
            )
        if lines:
            yield [line.rstrip(b"\r") for line in lines]
    if rest:
        yield [rest.rstrip(b"\r")]


def has_like_ends(path: Path) -> bool:
    r"""Whether all lines end in \n, or all in \r\n, and no other carriage return occurs.

    Only then DuckDB counts the same lines: it may take a bare carriage return, or a line end unlike
    the first one, as a line of its own, and reports no error where it is the first byte of a
    thread's block.

    Raises:
        DataError: as `read_chunks`.
    """
    num_returns = num_both = num_ends = 0
    before = b""
    for chunk in read_chunks(path):
        num_returns += chunk.count(b"\r")
        num_both += chunk.count(b"\r\n") + (before == b"\r" and chunk.startswith(b"\n"))
        num_ends += chunk.count(b"\n")
        if num_returns and num_ends > num_returns:
            return False
        before = chunk[-1:]
    return num_returns == num_both and num_returns in (0, num_ends)


def line_batches(path: Path, num_skipped: int, on_progress: OnProgress) -> Iterator[Any]:
    """Read a file's lines as DuckDB would: Arrow batches of `line` (null if empty) and `state`."""
    for lines in read_lines(path, on_progress):
        texts = [line.decode(errors="replace") or None for line in lines[num_skipped:]]
        states = list(map(_state, lines[num_skipped:]))
        num_skipped = max(0, num_skipped - len(lines))
        yield pa.record_batch(
            [pa.array(texts, pa.string()), pa.array(states, pa.int8())], ["line", "state"]
        )


def _state(line: bytes) -> int:
    try:
        line.decode()
    except UnicodeDecodeError:
        return CODES[RejectReason.NOT_UTF8]
    return UNSURE if b"\r" in line else 0


class ParsedRow(NamedTuple):
    """A row of a text file, or a rejected one."""

    number: int  # of its first line, from 1
    num_more: int  # further lines that it spans
    text: str  # its first line, for rejected.jsonl
    cells: list[str] | None  # None if rejected
    reason: RejectReason | None


def read_rows(
    path: Path,
    delimiter: str,
    quote: str,
    num_columns: int,
    first: int = 1,
    only: Iterator[int] | None = None,
) -> Iterator[ParsedRow]:
    """Parse a delimited file row by row.

    Args:
        quote: Quote character; "" for none.
        first: Number of the first line to parse.
        only: Numbers of the lines to parse, ascending; None for all that are not empty.
    """
    lines = (line for some in read_lines(path) for line in some)
    following = deque(islice(lines, MAX_ROW_LINES + 1))
    number = 0
    wanted = first if only is None else next(only, 0)
    while following and wanted:
        line = following.popleft()
        following.extend(islice(lines, 1))
        number += 1
        if line and number >= wanted:
            row = _row(number, line, following, (delimiter, quote, num_columns))
            for _ in range(row.num_more):
                following.popleft()
                following.extend(islice(lines, 1))
            number += row.num_more
            yield row
            while only is not None and 0 < wanted <= number:
                wanted = next(only, 0)


def _row(
    number: int, line: bytes, following: deque[bytes], shape: tuple[str, str, int]
) -> ParsedRow:
    delimiter, quote, num_columns = shape
    shown = line.decode(errors="replace")
    try:
        cells, num_more = _parsed(
            line, islice(following, MAX_ROW_LINES), delimiter, quote, num_columns
        )
    except UnicodeError:
        return ParsedRow(number, 0, shown, None, RejectReason.NOT_UTF8)
    except csv.Error:
        return ParsedRow(number, 0, shown, None, RejectReason.QUOTE)
    if len(cells) != num_columns:
        return ParsedRow(number, num_more, shown, None, RejectReason.CELLS)
    return ParsedRow(number, num_more, shown, cells, None)


def _parsed(
    line: bytes, following: Iterator[bytes], delimiter: str, quote: str, num_columns: int
) -> tuple[list[str], int]:
    """Parse a row, which may span following lines: its cells, and the number of further lines.

    Raises:
        UnicodeError, csv.Error: no row begins at the line.
    """
    text = line.decode()
    if not quote or (quote not in text and "\r" not in text):
        return text.split(delimiter), 0
    if not _is_open(text, delimiter, quote):
        return parse(text, delimiter, quote), 0
    for num_more, more in enumerate(following, 1):
        text += "\n" + more.decode(errors="surrogateescape")
        if b'"' in more and not _is_open(text, delimiter, quote):
            text.encode()  # raises where a line was not UTF-8
            row = parse(text, delimiter, quote)
            if len(row) == num_columns:
                return row, num_more
            break
    raise csv.Error("a quote is not closed")


def _is_open(text: str, delimiter: str, quote: str) -> bool:
    """Whether a quote is open at the end of a text.

    Raises:
        csv.Error: a quote is closed where no cell ends.
    """
    try:
        parse(text, delimiter, quote)
    except csv.Error as error:
        if "unexpected end of data" not in str(error):
            raise
        return True
    return False


def parse(text: str, delimiter: str, quote: str) -> list[str]:
    """Split a row into its cells.

    Raises:
        csv.Error: a quote is misplaced.
    """
    if not quote:
        return text.split(delimiter)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, quotechar=quote, strict=True
    )
    cells = next(reader, [])
    if next(reader, None) is not None:
        raise csv.Error("more than a row")
    return cells


def json_object(line: bytes | str) -> dict[str, Any] | None:
    """Read a JSON object; None if the line is not one."""
    try:
        row = orjson.loads(line)
    except (orjson.JSONDecodeError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def flat(row: dict[str, Any], prefix: str = "", depth: int = 1) -> dict[str, Any]:
    """Flatten nested objects: `{"properties": {"sku": ...}}` has the cell `properties.sku`."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and depth < MAX_DEPTH:
            found |= flat(value, f"{prefix}{name}.", depth + 1)
        else:
            found[f"{prefix}{name}"] = value
    return found


def json_cell(row: dict[str, Any], name: str) -> Any:
    """Find a cell of a row: by its name, else through nested objects where the name has dots."""
    if name in row:
        return row[name]
    cell: Any = row
    for part in name.split("."):
        if not isinstance(cell, dict):
            return None
        cell = cell.get(part)
    return cell


def json_column(cells: Sequence[Any], *, is_list: bool | None = None) -> Any:
    """Convert JSON values to an array: strings, or lists of strings if any value is a list.

    Objects become null.

    Args:
        is_list: Whether to make lists; None to decide by the cells.
    """
    cells = [None if type(cell) is dict else cell for cell in cells]
    if is_list is None:
        is_list = any(type(cell) is list for cell in cells)
    if is_list:
        lists = [
            None if cell is None else _texts(cell if type(cell) is list else [cell])
            for cell in cells
        ]
        return pa.array(lists, pa.list_(pa.string()))
    single = [
        (cell[0] if len(cell) == 1 else None) if type(cell) is list else cell for cell in cells
    ]
    return pa.array(_texts(single), pa.string())


def _texts(cells: Sequence[Any]) -> list[str | None]:
    return [cell if type(cell) is str or cell is None else _text(cell) for cell in cells]


def _text(cell: Any) -> str:
    if type(cell) is bool:
        return "true" if cell else "false"
    if type(cell) is float:
        return value_name(cell)
    return str(cell) if type(cell) is int else orjson.dumps(cell, default=str).decode()


def nested_batches(path: Path, on_progress: OnProgress) -> Iterator[Any]:
    """Read {"user": [item, ...]}, oldest first, as Arrow batches of `NESTED`.

    The index of an item is its time.

    Raises:
        DataError: the file has another structure.
    """
    rows: list[tuple[str, Any, int]] = []
    for user, items in _members(path, on_progress):
        for place, item in enumerate(items):
            rows.append((user, item, place))
            if len(rows) == BATCH_EVENTS:
                yield _nested_batch(rows)
                rows = []
    if rows:
        yield _nested_batch(rows)


def _nested_batch(rows: list[tuple[str, Any, int]]) -> Any:
    users, items, places = zip(*rows, strict=True)
    columns = [
        pa.array(users, pa.string()),
        json_column(items, is_list=False),
        pa.array(places, pa.int64()),
    ]
    return pa.record_batch(columns, list(NESTED))


def _members(path: Path, on_progress: OnProgress) -> Iterator[tuple[str, list[Any]]]:
    rest = b""
    is_open = False
    is_first = True
    for chunk in read_chunks(path, on_progress):
        rest += chunk
        at = 0
        if not is_open:
            at = rest.find(b"{") + 1
            is_open = True
        while found := _MEMBER.match(rest, at):
            if bool(found[1]) == is_first:
                raise _broken(path, rest, at)
            is_first = False
            try:
                yield orjson.loads(found[2]), orjson.loads(found[3])
            except orjson.JSONDecodeError as error:
                raise _broken(path, rest, at) from error
            at = found.end()
        rest = rest[at:]
        if len(rest) > MAX_MEMBER_BYTES:
            raise _broken(path, rest, 0)
    if rest.strip() != b"}":
        raise _broken(path, rest, 0)


def _broken(path: Path, rest: bytes, at: int) -> DataError:
    return DataError(f'{path}: not {{"user": [item, ...]}} from here on: {rest[at : at + 40]!r}')
