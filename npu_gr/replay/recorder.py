"""Record the requests and answers of a running service as a query log, in a thread.

A request only queues references; if the queue is full, its record is dropped and counted. The
thread encodes, hashes, compresses and writes. Users are sampled, not requests, so that the order,
signals and deltas of a user stay together.

Invariants:
  I1  `offer` never waits for the disk or the thread
  I2  the queue has at most `max_queue_bytes`, the folder at most `max_files` files
  I3  every offered record is counted once: written, dropped, failed or erased
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
import xxhash

from npu_gr.core.errors import ConfigError, DataError, NotFound, Unavailable
from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns, OneRow
from npu_gr.core.file_permissions import warn_if_shared
from npu_gr.core.health import Worker
from npu_gr.core.history import Events, HistoryRef, UserKey, in_time_order
from npu_gr.core.kinds import KINDS, Scored
from npu_gr.core.request import Answer, EventsRequest, Request
from npu_gr.core.settings import Count, Seconds, SomeBytes
from npu_gr.replay import erased
from npu_gr.replay.erased import made_key, names_of, read_key, recorded_as
from npu_gr.replay.files import PATTERN, RotatingFile, name_leftovers
from npu_gr.replay.log import (
    ANSWER_FIELDS,
    IN_FORMAT_1,
    OPTIONS,
    REQUEST_FIELDS,
    UNRANKED,
    LoggedAnswer,
    LoggedColumns,
    LoggedFeatures,
    LoggedHistory,
    QueryRecord,
    digest,
    raw,
)
from npu_gr.replay.purge import Purger

log = logging.getLogger(__name__)

FLUSH_S = 1.0  # a crash loses at most the records of this time
RECORD_BYTES = 1000  # upper estimate of a queued request without its arrays
ERASURE_S = 3600.0  # time to remember an erasure, longer than any request takes
WRITE_S = 10.0  # limit of one write or flush, which takes milliseconds
CLOSE_S = 5.0  # to write the queued records at the end

_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class RecordConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recording of requests; `npu-gr record` switches it on and off."""

    folder: str  # created if missing; its traffic-*.jsonl* files are managed
    enabled: bool = False  # record from the start
    sample_ratio: _Share = 1.0  # share of the users
    # hashed: users and tenants are replaced by their HMAC-SHA256
    users: Literal["hashed", "clear"] = "hashed"
    # key of the hashes; absent: `hash-key` in the folder, created if missing
    hash_key_file: str | None = None
    scores: bool = False  # record scores, not only their digest
    suffix: Literal[".jsonl", ".jsonl.gz", ".jsonl.zst"] = ".jsonl.gz"
    max_queue_bytes: SomeBytes = 67_108_864  # of queued records; further ones are dropped
    max_file_bytes: SomeBytes = 268_435_456  # then the next file begins
    max_file_s: Seconds = 3600.0
    max_files: Count = 24  # then the oldest is deleted

    def __post_init__(self) -> None:
        if self.users == "clear" and self.hash_key_file is not None:
            raise ValueError("users: clear excludes hash_key_file; give one of them")


class RecordOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to record a share of the users for some time."""

    sample_ratio: _Share = 1.0
    # null: until it is switched off
    duration_s: Annotated[float, msgspec.Meta(gt=0, le=1e7)] | None = 3600.0


class RecordStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of the recorder, and counts since the service started."""

    recording: bool
    ends_in_s: float | None  # None if it has no end, or is off
    sample_ratio: float
    written: int
    dropped: int  # the queue was full
    failed: int  # could not be written
    erased: int  # the user was erased while the record was queued
    queued_bytes: int
    files: list[str]  # newest last; `.part` is unfinished


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRequest:
    """A finished request and its answer."""

    kind: str  # a name in `KINDS`, of a kind with `is_recorded`
    arrived_at: float  # epoch seconds
    took_s: float
    budget_s: float
    user: UserKey
    status: int  # of the HTTP answer
    request: Request
    answer: Answer | None = None  # None if it failed with `status`

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the queued request."""
        history = _history(self.request)
        total = RECORD_BYTES + (0 if history is None else history.nbytes)
        total += _arrays_bytes(self.request)
        return total + (0 if self.answer is None else _arrays_bytes(self.answer))


def _history_ref(request: Request) -> HistoryRef:
    ref: HistoryRef = getattr(request, "history", HistoryRef())
    return ref


def _history(request: Request) -> Events | None:
    """Return the events that the request has."""
    if isinstance(request, EventsRequest):
        return in_time_order(request.events)  # so that any policy of `unsorted_history` replays it
    return _history_ref(request).events


def _arrays_bytes(message: Any) -> int:
    """Return the bytes of the arrays in the fields of a message and in its mappings."""
    total = 0
    for name in message.__struct_fields__:
        value = getattr(message, name)
        for part in value.values() if isinstance(value, Mapping) else (value,):
            total += part.nbytes if isinstance(part, np.ndarray | Columns) else 0
    return total


class Recorder:
    """Writes offered requests to files. Use it with `with`.

    Methods belong to the event loop's thread, except for `status`.

    Args:
        config: Section `record` of the configuration.
        on_result: Callback with "written", "dropped", "failed" or "erased" and a number, from the
            event loop or the recorder's thread.

    Raises:
        ConfigError: the folder or the key cannot be used.
    """

    def __init__(
        self,
        config: RecordConfig,
        on_result: Callable[[str, int], None] = lambda _result, _num: None,
    ) -> None:
        self.worker = Worker()
        self._config = config
        self._on_result = on_result
        self._folder = Path(config.folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _check_writable(self._folder)
            self._key = _key(config)
            name_leftovers(self._folder)
            warn_if_shared(*self._files())
        except OSError as error:
            raise ConfigError(f"record.folder: {config.folder}: {error.strerror}") from error
        self._queue: deque[tuple[int, RecordedRequest]] = deque()  # (bytes, request)
        self._offered_bytes = 0  # only the event loop writes it
        self._taken_bytes = 0  # only the recorder's thread writes it
        self._num = {"written": 0, "dropped": 0, "failed": 0, "erased": 0}
        # hash of a user (of this process, so that it identifies no user elsewhere) -> unix seconds
        # of the erasure, oldest first
        self._erased: dict[int, float] = {}
        self._was_on = config.enabled
        self._wake = threading.Event()
        self._stopping = False
        # users whose 32-bit hash is below it are recorded; 0 = recording is off
        self._threshold = 0
        self._ends_at = math.inf  # of time.monotonic()
        self._ratio = config.sample_ratio
        if config.enabled:
            self.switch_on(config.sample_ratio, None)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self.purger = Purger(self._folder)

    def __enter__(self) -> Self:
        self._thread.start()
        self.purger.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Write the queued records, and stop."""
        self._stopping = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the recorder did not write the last records within %.0f s", CLOSE_S)
        self.purger.close()

    # ---- the event loop's side

    def switch_on(self, sample_ratio: float, duration_s: float | None) -> None:
        """Record a share of the users for `duration_s`, or until `switch_off` if None."""
        self._was_on = True
        self._ratio = sample_ratio
        self._threshold = round(sample_ratio * (1 << 32))
        self._ends_at = math.inf if duration_s is None else time.monotonic() + duration_s

    def switch_off(self) -> None:
        """Stop recording. The thread writes the queued records and completes the file."""
        self._threshold = 0
        self._wake.set()

    @property
    def is_on(self) -> bool:
        """Whether requests are recorded now."""
        return self._threshold > 0 and time.monotonic() < self._ends_at

    def wants(self, user: UserKey) -> bool:
        """Whether this user's requests are recorded now."""
        if not self.is_on:
            return False
        name = f"{user.tenant}\0{user.user}".encode(errors="surrogatepass")
        return xxhash.xxh3_64_intdigest(name, seed=1) >> 32 < self._threshold

    def offer(self, request: RecordedRequest) -> None:
        """Queue a request, or drop it if the queue is full."""
        num_bytes = request.num_bytes
        if self._offered_bytes - self._taken_bytes + num_bytes > self._config.max_queue_bytes:
            self._count("dropped", 1)
            return
        self._offered_bytes += num_bytes
        self._queue.append((num_bytes, request))
        self._wake.set()

    async def erase(self, user: UserKey) -> bool:
        """Hide all records of the user up to now, also queued ones, and schedule their removal.

        Returns:
            Whether files may still have data of the user.

        Raises:
            Unavailable: the list of erased users cannot be written; records on disk are not
                hidden.
        """
        at = time.time()
        unnamed = hash(user)
        self._erased.pop(unnamed, None)
        self._erased[unnamed] = at
        while next(iter(self._erased.values())) < at - ERASURE_S:
            del self._erased[next(iter(self._erased))]
        try:
            is_listed = await asyncio.to_thread(self._list, user, at)
        except (OSError, DataError) as error:
            raise Unavailable(
                f"the recordings could not erase the user: {error}; send the request again"
            ) from error
        if is_listed:
            self.purger.listed(at)
        return is_listed

    def _list(self, user: UserKey, at: float) -> bool:
        """Add the user to the folder's list, unless the folder has no recordings."""
        if not self._folder.is_dir() or not (self._was_on or self._files()):
            return False
        erased.add(self._folder, names_of(user, self._folder, self._key), at)
        return True

    def status(self) -> RecordStatus:
        """Return the state. It lists the folder, so do not call it on the event loop."""
        is_on = self.is_on
        return RecordStatus(
            recording=is_on,
            ends_in_s=self._ends_at - time.monotonic()
            if is_on and self._ends_at < math.inf
            else None,
            sample_ratio=self._ratio,
            **self._num,
            queued_bytes=self._offered_bytes - self._taken_bytes,
            files=[str(path) for path in self._files()],
        )

    # ---- the thread's side

    def _run(self) -> None:
        config = self._config
        file = RotatingFile(self._folder, config.suffix, config.max_file_bytes, config.max_file_s)
        while True:
            stopping = self._stopping
            self._write(file)
            if stopping:
                file.close()
                return
            self._wake.wait(FLUSH_S)
            self._wake.clear()

    def _write(self, file: RotatingFile) -> None:
        """Write the queued records, and delete the oldest files beyond `max_files`."""
        while self._queue:
            num_bytes, request = self._queue.popleft()
            result = "written"
            try:
                if self._erased and request.arrived_at <= self._erased.get(hash(request.user), 0.0):
                    result = "erased"
                else:
                    record = record_of(request, self._key, self._config.scores)
                    with self.worker.busy(WRITE_S):
                        file.write(msgspec.json.encode(record) + b"\n")
            except (OSError, ValueError) as error:
                log.error("recording failed: %s", error)
                result = "failed"
                file.abandon()
            self._taken_bytes += num_bytes
            self._count(result, 1)
        try:
            with self.worker.busy(WRITE_S):
                file.flush(is_over=not self.is_on)
                for old in self._files()[: -self._config.max_files]:
                    old.unlink(missing_ok=True)
        except OSError as error:
            log.error("recording failed: %s", error)
            file.abandon()

    def _files(self) -> list[Path]:
        try:
            return sorted(self._folder.glob(PATTERN))
        except FileNotFoundError:  # the folder was removed
            return []

    def _count(self, result: str, num: int) -> None:
        self._num[result] += num
        self._on_result(result, num)


def record_of(recorded: RecordedRequest, key: bytes | None, keep_scores: bool) -> QueryRecord:
    """Make the record of a request.

    Args:
        recorded: The request and its answer.
        key: Key for HMAC-SHA256 of user and tenant; None to record them in clear text.
        keep_scores: Log the scores of candidates, not only their digest.
    """
    kind = recorded.kind
    request = recorded.request
    names = recorded_as(recorded.user, key)
    own = REQUEST_FIELDS[kind]
    fields: dict[str, Any] = {
        name: getattr(request, name) for name in own if name not in ("history", "base", "events")
    }
    if "candidates" in fields:
        fields["candidates"] = _plain(fields["candidates"])
    if "timestamp" in own and fields["timestamp"] is None:  # its default is the time of arrival
        fields["timestamp"] = int(recorded.arrived_at)
    events = _history(request)
    if events is not None:
        fields["events" if "events" in own else "history"] = LoggedHistory.of(events)
    if "base" in own:
        fields["base"] = _history_ref(request).base
    fields["features"] = _features_of(request)
    if kind in OPTIONS:
        options = OPTIONS[kind]
        made = options(
            **{name: _plain(getattr(request, name)) for name in options.__struct_fields__}
        )
        # records of kinds newer than format 1 omit default options
        if kind in IN_FORMAT_1 or msgspec.to_builtins(made):
            fields[kind] = made
    return QueryRecord(
        ts=recorded.arrived_at,
        kind=kind,
        user_id=names.user,
        tenant=names.tenant,
        deadline_ms=round(recorded.budget_s * 1e3, 3),
        answer=_answer_of(recorded, keep_scores),
        **fields,
    )


def _features_of(request: Request) -> LoggedFeatures | None:
    """Return the features of a request without those of events; None if it has none."""
    user = _history_ref(request).user_features
    late: OneRow = getattr(request, "request_features", {})
    cross: Columns = getattr(request, "cross_features", NO_COLUMNS)
    if user is None and not late and not cross:
        return None
    of_user = None if user is None else _plain(user)
    return LoggedFeatures(user=of_user, request=_plain(late), cross=LoggedColumns.of(cross))


def _answer_of(recorded: RecordedRequest, keep_scores: bool) -> LoggedAnswer:
    common: dict[str, Any] = {
        "status": recorded.status,
        "latency_ms": round(recorded.took_s * 1e3, 4),
    }
    if recorded.answer is None:
        return LoggedAnswer(**common)
    answer: Any = recorded.answer
    has = ANSWER_FIELDS[recorded.kind]
    if has.version is not None:
        common["model_version"] = getattr(answer, has.version)
    if "history" in has.names:
        common["fingerprint"] = answer.history.fingerprint
    scored = KINDS[recorded.kind].scored
    if scored is Scored.NOTHING:
        return LoggedAnswer(**common)
    if has.outcome is not None:
        outcome = getattr(answer, has.outcome)
        common["outcome"] = UNRANKED if outcome is None else outcome.value
    if scored is Scored.ITEMS:
        if (drawn := getattr(answer, "propensities", None)) is not None:
            common["items"] = _plain(answer.item_ids)
            common["propensities"] = drawn.astype("<f4").tobytes()
        return LoggedAnswer(**common, digest=digest({"": answer.scores}, answer.item_ids))
    scores = {task: raw(values) for task, values in answer.scores.items()} if keep_scores else {}
    return LoggedAnswer(**common, digest=digest(answer.scores), scores=scores)


def _plain(value: Any) -> Any:
    """Convert a value to that of the log: arrays to raw columns, tuples to lists."""
    match value:
        case np.ndarray():
            return value.astype("<i8").tobytes()
        case tuple():
            return list(value)
        case Mapping():
            return {name: _plain(part) for name, part in value.items()}
        case _:
            return value


def _key(config: RecordConfig) -> bytes | None:
    """Return the key for hashing names; None to record them in clear text."""
    if config.users == "clear":
        return None
    return (
        made_key(Path(config.folder))
        if config.hash_key_file is None
        else read_key(Path(config.hash_key_file))
    )


def _check_writable(folder: Path) -> None:
    probe = folder / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink()


def the(recorder: Recorder | None) -> Recorder:
    """Return the instance's recorder.

    Raises:
        NotFound: the configuration has no section `record`.
    """
    if recorder is None:
        raise NotFound(
            "this instance has no recorder; add the section `record` to its configuration"
        )
    return recorder
