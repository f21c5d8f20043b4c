"""A query log of the access log that a balancer, a gateway or a shop's own service wrote.

The user names the fields. What no field says, an access log does not know: histories then come from the service's own
store, and a rank needs its candidates. Lines that are no request of a user (other paths, refused requests, nobody
signed in) are left out and counted; a line that should be a record and is none is an error, or counted too.

Times are those of the arrival. nginx stamps a line when the answer is over, so the duration is taken off where the log
has one. Stamps of whole seconds would replay as bursts: requests of one second are spread over it, evenly, in order.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.kinds import EVENTS, RANK
from npu_gr.core.names import ActionNames
from npu_gr.core.words import near, quoted
from npu_gr.replay.access_fields import COLUMNS, FIELDS, LineReader, Stamp
from npu_gr.replay.fields import REQUEST_FIELDS
from npu_gr.replay.files import BadLines, raw_lines
from npu_gr.replay.line_format import line_format
from npu_gr.replay.log import OPTIONS, RECORDED, LoggedAnswer, LoggedHistory, QueryRecord

_NOT_ASKED = ("OPTIONS", "HEAD")  # methods that browsers and health checks send beside the requests
_LOAD = (408, 429, 499)  # client errors that came of load: these requests were good ones


class AccessLogOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How lines become records."""

    format: str = "json"  # as `line_format` reads it
    fields: dict[str, str] = {}  # a name of FIELDS -> where a line has it, as `look_up` reads it
    kind: str | None = None  # of all lines; None = the routes say it
    routes: dict[str, str] = {}  # path, which may have * -> kind; none = the routes of our own API
    stamped: Literal["start", "end"] | None = None  # what ts is the time of; None = as the format has it
    bad_lines: BadLines = "fail"


@dataclass(slots=True)
class LeftOut:
    """Lines that became no records for one reason."""

    num: int = 0
    first: str = ""  # where, and what it said


class _Left(Exception):
    """This line is no request of a user: the reason, and what the line said."""

    def __init__(self, reason: str, said: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.said = said


@dataclass
class AccessLog:
    """The records of access logs, in the lines' order; iterating fills the counts.

    Args:
        paths: the files, oldest first; .gz and .zst are unpacked.
        options: how to read them.
        actions: of the model; needed for histories whose actions are names.

    Iterating raises DataError: the file, the line, the field and the reason. Options that do not fit raise ConfigError.
    """

    paths: Sequence[Path]
    options: AccessLogOptions
    actions: ActionNames | None = None
    num_lines: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # by reason
    num_spread: int = 0  # records whose stamp was a whole second
    _absent: dict[str, str] = field(
        default_factory=dict
    )  # named fields that no line had so far: what the first one said

    def __post_init__(self) -> None:
        options = self.options
        for name in options.fields:
            if name not in FIELDS:
                raise ConfigError(f"--field {name}: none of {', '.join(FIELDS)}{near(name, FIELDS)}")
        for kind in (*options.routes.values(), *filter(None, (options.kind,))):
            if kind not in RECORDED:
                raise ConfigError(
                    f"--route, --kind: {quoted(kind)} is none of {', '.join(RECORDED)}{near(kind, RECORDED)}"
                )
        self._format = line_format(options.format)
        usual = {name: source for name in FIELDS if (source := self._format.usual(name)) is not None}
        self._sources = usual | options.fields
        if self._sources.keys() >= {"latency_s", "latency_ms"}:
            self._sources.pop("latency_s" if "latency_ms" in options.fields else "latency_ms")
        for name in ("ts", "user_id"):
            if name not in self._sources:
                raise ConfigError(f"--field {name}=...: where does a line have it?")
        if options.kind is None and "path" not in self._sources:
            raise ConfigError("--kind: of which kind are these requests? Or --field path=... and --route PATH=KIND")
        self._routes = options.routes or {kind.path: name for name, kind in RECORDED.items()}
        by_format = "end" if self._format.is_stamped_at_end else "start"
        self._is_end = (options.stamped or by_format) == "end"

    def told(self, out: Path) -> list[str]:
        """Say what became of the lines, one fact a line. After the iteration."""
        kinds = ", ".join(f"{num} {kind}" for kind, num in self.kinds.most_common())
        lines = [f"{self.kinds.total()} of {self.num_lines} lines are records in {out}: {kinds}"]
        lines += [f"{left.num:>8}  {reason} (first: {left.first})" for reason, left in self.left_out.items()]
        if self.num_spread:
            lines.append(f"{self.num_spread} times are whole seconds: requests of one second are spread over it evenly")
        if self.is_late:
            lines.append("arrivals are the times of the answers: no field says how long a request took (latency_s)")
        return lines

    @property
    def has_latency(self) -> bool:
        """Whether the log says how long a request took."""
        return bool(self._sources.keys() & {"latency_s", "latency_ms"})

    @property
    def is_late(self) -> bool:
        """Whether the records' times are those of the answers, because nothing says when the requests came."""
        return self._is_end and not self.has_latency

    def __iter__(self) -> Iterator[QueryRecord]:
        self.num_lines = self.num_spread = 0
        self.kinds.clear()
        self.left_out.clear()
        self._absent.clear()
        self._found = set[str]()
        for together in _by_second(self._records()):
            self.num_spread += len(together) if together[0][1].is_whole else 0
            for place, (record, stamp, latency_s) in enumerate(together):
                ts = stamp.seconds + (place / len(together) if stamp.is_whole else 0.0)
                yield msgspec.structs.replace(record, ts=ts - latency_s if self._is_end else ts)
        names = ", ".join(map(str, self.paths))
        if not self.kinds:
            why = "; ".join(f"{left.num} {reason} (first: {left.first})" for reason, left in self.left_out.items())
            raise DataError(f"{names}: none of {self.num_lines} lines became a record: {why or 'they are empty'}")
        for name in self.options.fields:
            if name in self._absent and name not in self._found:
                raise DataError(
                    f"{names}: --field {name}={self.options.fields[name]}: no line has it: {self._absent[name]}"
                )

    def _records(self) -> Iterator[_Dated]:
        for path in self.paths:
            try:
                for number, line in enumerate(raw_lines(path, suffix=path.suffix), 1):
                    if line.strip():
                        self.num_lines += 1
                        yield from self._of_line(f"{path}, line {number}", line)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error

    def _of_line(self, at: str, line: bytes) -> Iterator[_Dated]:
        try:
            made = self._record(self._format.parse(line))
        except _Left as left:
            self._leave_out(left.reason, at, left.said)
            return
        except ValueError as error:
            if self.options.bad_lines == "fail":
                raise DataError(f"{at}: {error}; --bad-lines skip leaves such lines out") from error
            self._leave_out("bad line", at, str(error))
            return
        self.kinds[made[0].kind] += 1
        yield made

    def _leave_out(self, reason: str, at: str, said: str) -> None:
        found = self.left_out.setdefault(reason, LeftOut(first=at + (f": {said}" if said else "")))
        found.num += 1

    def _record(self, values: Mapping[str, Any]) -> _Dated:
        """Make the record of a line.

        Raises:
            _Left: it is no request of a user. ValueError: it should be a record, and cannot be one.
        """
        read = LineReader(values, self._sources)
        try:
            return self._read(read)
        finally:
            self._found |= read.found
            self._absent = read.absent | self._absent

    def _read(self, read: LineReader) -> _Dated:
        kind = self._kind(read)
        status = read("status")
        if status is not None and 400 <= status < 500 and status not in _LOAD:
            raise _Left(f"status {status}: refused for what it asked")
        user = read("user_id")
        if user is None:
            raise _Left("no user_id", read.absent.get("user_id", ""))
        stamp = read("ts")
        if stamp is None:
            raise ValueError(f"ts: {read.absent.get('ts', 'the line has none')}")
        latency_s = read("latency_s")
        latency_s = (read("latency_ms") or 0.0) * 1e-3 if latency_s is None else latency_s
        names = ("tenant", "deadline_ms", *(name for name in REQUEST_FIELDS[kind] if name in FIELDS))
        given = {name: value for name in names if (value := read(name)) is not None}
        for part in COLUMNS:
            if part in REQUEST_FIELDS[kind] and (columns := self._columns(read, part)) is not None:
                given[part] = columns
        for needed, by, source in (("candidates", RANK, "candidates"), ("events", EVENTS, "events.items")):
            if kind == by.name and needed not in given:
                told = f"needs some: --field {source}=... says where a line has them"
                raise ValueError(f"{source}: {read.absent.get(source, told)}")
        num_items = read("num_items")
        if num_items is not None and kind in OPTIONS and "num_items" in OPTIONS[kind].__struct_fields__:
            given[kind] = OPTIONS[kind](num_items=num_items)
        latency_ms = latency_s * 1e3 if self.has_latency else None
        if status is not None or latency_ms is not None:
            given["answer"] = LoggedAnswer(status=status or 200, latency_ms=latency_ms)
        return QueryRecord(ts=stamp.seconds, kind=kind, user_id=user, **given), stamp, latency_s

    def _kind(self, read: LineReader) -> str:
        if (method := read("method")) in _NOT_ASKED:
            raise _Left(f"{method} asks for nothing")
        if self.options.kind is not None and not self.options.routes:
            return self.options.kind
        path = read("path") or ""
        for route, kind in self._routes.items():
            if fnmatchcase(path, route):
                return kind
        if self.options.kind is not None:
            return self.options.kind
        raise _Left("a path of no --route", path)

    def _columns(self, read: LineReader, part: str) -> LoggedHistory | None:
        items = read(f"{part}.items")
        if items is None:
            return None
        named = read(f"{part}.actions")
        times = read(f"{part}.timestamps")
        for name, values in (("actions", named), ("timestamps", times)):
            if values is None:
                raise ValueError(f"{part}.{name}: the items have none")
        if self.actions is None:
            raise ValueError(f"{part}.actions: names, of which --checkpoint says the places")
        try:
            actions = self.actions.indices(named).tolist()
        except ValueError as error:
            raise ValueError(f"{part}.actions: {error}") from None
        return LoggedHistory(items=items, actions=actions, timestamps=times)


_Dated = tuple[QueryRecord, Stamp, float]  # a record, when the log says it was, and seconds until its answer


def _by_second(dated: Iterable[_Dated]) -> Iterator[list[_Dated]]:
    """Group neighbours with the same stamp, if that is a whole second; others stand alone."""
    together: list[_Dated] = []
    for one in dated:
        if together and (one[1] != together[0][1] or not one[1].is_whole):
            yield together
            together = []
        together.append(one)
    if together:
        yield together
