"""The changes of a catalogue since its file was read, and the log that keeps them.

A line is a checksum (xxh3-64 of the rest) and JSON. The first line is a state, the net effect of
all changes up to its sequence number; each other line is one change:

    8c1d... {"format":1,"sequence":41,"base":"<digest>","added":[...],"removed":[],"withdrawn":[7]}
    09ab... {"sequence":42,"withdraw":[1003]}
    51f0... {"sequence":43,"add":[{"item_id":990001,...}]}

A change is synced to the disk before it is served. A line that a crash left incomplete is cut off
when the log is read, since it was not answered; other damage is an error. The log is replaced by
its state alone when it has `COMPACT_BYTES` and is twice as long as its state, so its length is
bounded by the number of items that differ from the file.

Sequence numbers begin at 1, have no gaps, and are never used twice.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import xxhash

from npu_gr.core.durable_files import lock, replace_file
from npu_gr.core.errors import CatalogueError, ConfigError, Unavailable
from npu_gr.core.served import NO_DELTA, CatalogueChange, DeltaMark, ItemChange, NewItem

log = logging.getLogger(__name__)

FORMAT = 1
COMPACT_BYTES = 1 << 20  # 4 MB with 24,000 changes of 10,000 items are read in 0.4 s
SETTING = "generate.change_log"
SUFFIX = ".changes"
_REMEDY = "restore the file, or remove it and repeat the changes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """The net effect of all changes of a catalogue file. Immutable."""

    base: str = ""  # `Snapshot.content` of the file that was changed
    added: Mapping[int, NewItem] = field(default_factory=dict)  # by item id, with semantic IDs
    removed: frozenset[int] = frozenset()  # withdrawn, then left out of the trie by an addition
    withdrawn: frozenset[int] = frozenset()
    delta: DeltaMark = NO_DELTA

    def then(self, *changes: CatalogueChange) -> Changes:
        """Return the net effect with more changes, each in the order of `CatalogueChange`."""
        added = dict(self.added)
        removed, withdrawn = set(self.removed), set(self.withdrawn)
        for change in changes:
            if change.add:  # takes the withdrawn items out of the trie
                for item in withdrawn:
                    added.pop(item, None)
                removed |= withdrawn
                withdrawn.clear()
                added |= {new.item_id: new for new in change.add}
            if change.withdraw is not None:
                withdrawn.update(change.withdraw.tolist())
            if change.restore is not None:
                withdrawn.difference_update(change.restore.tolist())
        return Changes(
            base=self.base,
            added=added,
            removed=frozenset(removed),
            withdrawn=frozenset(withdrawn),
            delta=self.delta,
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.withdrawn or self.delta.sequence)


NO_CHANGES = Changes()


class _State(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The first line of a log."""

    format: int
    sequence: int  # of the last change in it
    base: str
    added: list[NewItem]
    removed: list[int]
    withdrawn: list[int]
    delta: DeltaMark = NO_DELTA


class _Change(ItemChange, frozen=True, kw_only=True):
    """A line of a log but the first."""

    sequence: int


class LogContent(msgspec.Struct, frozen=True):
    """What a log holds."""

    changes: Changes
    sequence: int  # of the last line
    num_bytes: int  # without an incomplete last line
    num_state_bytes: int  # length of the first line


def log_path(catalogue: str, setting: str | None) -> Path | None:
    """Return the path of a catalogue's log, by `generate.change_log`; None = changes are not kept.

    Args:
        catalogue: Path of the catalogue.
        setting: A path, "none", or None for a file in the folder of the catalogue.
    """
    if setting == "none":
        return None
    return Path(catalogue + SUFFIX if setting is None else setting)


def read_log(path: Path) -> LogContent | None:
    """Read a log; None = there is none.

    Raises:
        ConfigError: it cannot be read or is damaged; the message names the line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{SETTING}: {path}: {error.strerror}") from error
    *lines, rest = data.split(b"\n")
    payloads = [_checked(line) for line in lines]
    # Blocks that a crash left unwritten read as zeros.
    if payloads and payloads[-1] is None and b"\0" in lines[-1]:
        payloads.pop()
        rest = lines.pop()
    if None in payloads or not payloads:
        number = payloads.index(None) + 1 if payloads else 1
        raise ConfigError(f"{SETTING}: {path}, line {number}: is damaged; {_REMEDY}")
    number = 1
    try:
        state = msgspec.json.decode(payloads[0] or b"", type=_State)
        if state.format != FORMAT:
            raise ConfigError(
                f"{SETTING}: {path}: its format is {state.format}, and this version reads {FORMAT}"
            )
        changes = Changes(
            base=state.base,
            added={new.item_id: new for new in state.added},
            removed=frozenset(state.removed),
            withdrawn=frozenset(state.withdrawn),
            delta=state.delta,
        )
        sequence = state.sequence
        made = []
        decoder = msgspec.json.Decoder(_Change)
        for number, payload in enumerate(payloads[1:], 2):
            line = decoder.decode(payload or b"")
            if line.sequence != sequence + 1:
                raise ConfigError(
                    f"{SETTING}: {path}, line {number}: change {line.sequence} follows "
                    f"{sequence}, so some are missing; {_REMEDY}"
                )
            sequence = line.sequence
            made.append(line.change())
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{SETTING}: {path}, line {number}: {error}; {_REMEDY}") from error
    if rest:
        log.warning("%s: %d bytes of an unfinished change are ignored", path, len(rest))
    num_bytes = sum(len(line) + 1 for line in lines)
    return LogContent(changes.then(*made), sequence, num_bytes, len(lines[0]) + 1)


def _checked(line: bytes) -> bytes | None:
    """Return the payload of a line; None if its checksum is wrong."""
    checksum, _, payload = line.partition(b" ")
    return payload if xxhash.xxh3_64_hexdigest(payload).encode() == checksum else None


def _line(record: _State | _Change) -> bytes:
    payload = msgspec.json.encode(record)
    return xxhash.xxh3_64_hexdigest(payload).encode() + b" " + payload + b"\n"


def _check_finite(change: CatalogueChange) -> None:
    """Check that JSON can hold all numbers.

    Raises:
        CatalogueError: one is infinite or NaN; the message names the item.
    """
    for new in change.add:
        for given in (*new.attributes.values(), *new.features.values()):
            for value in given if isinstance(given, list) else [given]:
                if isinstance(value, float) and not math.isfinite(value):
                    raise CatalogueError(
                        f"item {new.name or new.item_id}: {value} is not a finite number"
                    )


class ChangeLog:
    """The log of a catalogue in service. Its methods block; call them in a thread, one at a time.

    The first change creates the file, which is locked from its first use until `close`.
    """

    def __init__(self, path: Path) -> None:
        """Begin without a file."""
        self.path = path
        self._recorded: Changes | None = None  # content of the file; None = it was not used yet
        self._sequence = 0
        self._num_bytes = 0
        self._compact_at = 0  # bytes
        self._lock: IO[str] | None = None
        self._is_broken = False

    @property
    def sequence(self) -> int:
        """Sequence number of the last change in the file."""
        return self._sequence

    def load(self) -> Changes:
        """Lock and read the file, and cut off an incomplete change; without a file do nothing.

        Raises:
            ConfigError: the file is damaged, cannot be used, or another process has it.
        """
        if not self.path.exists():
            return NO_CHANGES
        self._own()
        try:
            found = read_log(self.path)
            assert found is not None
            if self.path.stat().st_size > found.num_bytes:
                os.truncate(self.path, found.num_bytes)
        except OSError as error:
            self.close()
            raise ConfigError(f"{SETTING}: {self.path}: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise
        self._sequence = found.sequence
        self._holds(found.changes, found.num_bytes, found.num_state_bytes)
        return found.changes

    def append(self, change: CatalogueChange, after: Changes) -> None:
        """Write a change durably.

        Args:
            change: The change, with semantic IDs.
            after: The net effect of all changes with this one.

        Raises:
            CatalogueError: the change has a number that is not finite.
            Unavailable: it cannot be written; the file is as before.
        """
        _check_finite(change)
        made = ItemChange.of(change)
        line = _line(_Change(sequence=self._sequence + 1, **msgspec.structs.asdict(made)))
        with self._writing():
            size = self.path.stat().st_size if self.path.exists() else 0
            if size and self._recorded is None:
                raise Unavailable(
                    f"nothing is changed: another process has written {self.path} since this one "
                    f"started; restart it, or set {SETTING} to a path of its own"
                )
            # another size: a training has replaced the folder
            if size != self._num_bytes or size + len(line) > self._compact_at:
                self._replace(after)
                return
            self._append(line)
            self._num_bytes += len(line)
            self._sequence += 1
            self._recorded = after

    def write(self, changes: Changes) -> None:
        """Replace the content of the file, durably. Does nothing if it has this content already.

        Raises:
            Unavailable: it cannot be written; the file is as before.
        """
        if changes is not self._recorded and (changes or self._recorded):
            with self._writing():
                self._replace(changes)

    def take_over(self, previous: ChangeLog | None, changes: Changes) -> None:
        """Replace the content by the changes of the log before, and continue its sequence numbers.

        Raises:
            Unavailable: as `write`.
        """
        if previous is not None:
            self._sequence = max(self._sequence, previous._sequence)
        if changes or self.path.exists():
            with self._writing():
                self._replace(changes)

    def close(self) -> None:
        """Release the file."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _own(self) -> None:
        if self._lock is None:
            self._lock = lock(self.path, SETTING)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            if self._is_broken:
                raise OSError(0, "an earlier write failed and could not be undone; restart")
            self._own()
            yield
        except (OSError, ConfigError) as error:
            why = f"{self.path}: {error.strerror}" if isinstance(error, OSError) else error
            raise Unavailable(f"nothing is changed, since it cannot be kept: {why}") from error

    def _append(self, line: bytes) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(line):
                done += os.pwrite(handle, line[done:], self._num_bytes + done)
            os.fsync(handle)
        except OSError:
            self._is_broken = True
            os.ftruncate(handle, self._num_bytes)
            os.fsync(handle)
            self._is_broken = False
            raise
        finally:
            os.close(handle)

    def _replace(self, changes: Changes) -> None:
        state = _State(
            format=FORMAT,
            sequence=self._sequence + 1,
            base=changes.base,
            added=[*changes.added.values()],
            removed=sorted(changes.removed),
            withdrawn=sorted(changes.withdrawn),
            delta=changes.delta,
        )
        line = _line(state)
        self._is_broken = True  # the file may be new although its folder could not be synced
        try:
            replace_file(self.path, line)
            self._is_broken = False
        except OSError:
            size = self.path.stat().st_size if self.path.exists() else 0
            self._is_broken = size != self._num_bytes
            raise
        self._sequence += 1
        self._holds(changes, len(line), len(line))

    def _holds(self, changes: Changes, num_bytes: int, num_state_bytes: int) -> None:
        self._recorded = changes
        self._num_bytes = num_bytes
        self._compact_at = max(COMPACT_BYTES, 2 * num_state_bytes)
