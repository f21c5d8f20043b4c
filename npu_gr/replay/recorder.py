"""The recorder: a running service's requests and answers as a query log, written by a thread of its own.

A request offers what it has, by reference, and goes on; where the queue is full the record is dropped and counted.
Encoding, hashing, packing and the disk are the thread's. Whole users are sampled, so that their order, their signals
and their deltas stay together.

Invariants:
  I1  `offer` never waits, for the disk or for the thread
  I2  what is queued is at most `max_queue_bytes`, what lies in the folder at most `max_files` files
  I3  every offered record is counted once: written, dropped or failed
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self, cast

import msgspec
import xxhash

from npu_gr.core.errors import ConfigError, NotFound
from npu_gr.core.request import (
    I64,
    EventsAnswer,
    EventsRequest,
    GenerateAnswer,
    GenerateRequest,
    MatchAnswer,
    MatchRequest,
    RankAnswer,
    RankRequest,
    RecommendAnswer,
    RecommendRequest,
    SignalAnswer,
    SignalRequest,
    UserKey,
)
from npu_gr.replay.answers import digest, raw
from npu_gr.replay.log import (
    UNRANKED,
    Kind,
    LoggedAnswer,
    LoggedGenerate,
    LoggedHistory,
    LoggedMatch,
    LoggedRecommend,
    Record,
    create,
)

log = logging.getLogger(__name__)

FLUSH_S = 1.0  # what a crash may lose
RECORD_BYTES = 1000  # of a record without its columns, in the queue
MIN_KEY_BYTES = 16

Request = RankRequest | SignalRequest | GenerateRequest | MatchRequest | RecommendRequest
Answer = RankAnswer | SignalAnswer | GenerateAnswer | MatchAnswer | RecommendAnswer

_Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class RecordConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where requests are recorded, and how much of them. `npu-gr record` switches a recording on and off."""

    folder: str  # is made; its traffic-*.jsonl* files are ours
    enabled: bool = False  # from the start
    sample_ratio: _Ratio = 1.0  # of the users
    hash_key_file: str | None = None  # users and tenants become HMAC-SHA256 by the key in this file
    scores: bool = False  # scores too, not only their digest
    suffix: Literal[".jsonl", ".jsonl.gz", ".jsonl.zst"] = ".jsonl.gz"
    max_queue_bytes: Annotated[int, msgspec.Meta(ge=1)] = 67_108_864  # that wait for the disk; more is dropped
    max_file_bytes: Annotated[int, msgspec.Meta(ge=1)] = 268_435_456  # then the next file begins
    max_file_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    max_files: Annotated[int, msgspec.Meta(ge=1)] = 24  # then the oldest is deleted


class RecordOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record this share of the users for so long."""

    sample_ratio: float = 1.0
    duration_s: float | None = 3600.0  # null = until it is switched off

    def __post_init__(self) -> None:
        if not 0 < self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio: {self.sample_ratio} is not in 0 .. 1")
        if self.duration_s is not None and not 0 < self.duration_s <= 1e7:
            raise ValueError(f"duration_s: {self.duration_s} is not in 0 .. 10,000,000")


class RecordStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorder does and has done since the service started."""

    recording: bool
    ends_in_s: float | None  # None = when it is told
    sample_ratio: float
    written: int
    dropped: int  # the queue was full
    failed: int  # the disk refused
    queued_bytes: int
    files: list[str]  # newest last; `.part` is being written


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRequest:
    """One request and its answer, or the status of its error."""

    kind: str  # a name of `KINDS`
    arrived_at: float  # epoch
    took_s: float
    budget_s: float
    user: UserKey
    status: int
    request: Any  # of the kind's type
    answer: Any = None

    @property
    def num_bytes(self) -> int:
        """About what it holds while it is queued."""
        request = self.request
        history = request.events if isinstance(request, EventsRequest) else request.history.events
        total = RECORD_BYTES + 18 * (0 if history is None else len(history))
        if isinstance(self.request, RankRequest):
            total += 8 * len(self.request.candidates)
        if isinstance(self.answer, RankAnswer):
            total += sum(scores.nbytes for scores in self.answer.scores.values())
        return total


class Recorder:
    """`with Recorder(...) as recorder`; `wants` and `offer` from one thread, the event loop's.

    Args:
        config: the section.
        on_result: called with "written", "dropped" or "failed" and how many, from either thread.

    Raises:
        ConfigError: the folder or the key cannot be used.
    """

    def __init__(
        self, config: RecordConfig, on_result: Callable[[str, int], None] = lambda _result, _num: None
    ) -> None:
        self._config, self._on_result = config, on_result
        self._folder = Path(config.folder)
        self._key = _read_key(config.hash_key_file)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _check_writable(self._folder)
            for left in self._folder.glob("traffic-*.part"):  # of a process that died: readable, with its end missing
                left.rename(left.with_suffix(""))
        except OSError as error:
            raise ConfigError(f"record.folder: {config.folder}: {error.strerror}") from error
        self._queue: deque[tuple[int, RecordedRequest]] = deque()
        self._offered_bytes = self._taken_bytes = 0  # each is written by one thread only
        self._num = {"written": 0, "dropped": 0, "failed": 0}
        self._wake, self._stopping = threading.Event(), False
        self._threshold, self._until_s = 0, math.inf
        self._ratio = config.sample_ratio
        if config.enabled:
            self.switch_on(config.sample_ratio, None)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Write what is queued."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    # ---- the event loop's side

    def switch_on(self, sample_ratio: float, duration_s: float | None) -> None:
        """Record that share of the users, until told otherwise or for so long."""
        self._ratio, self._threshold = sample_ratio, round(sample_ratio * (1 << 32))
        self._until_s = math.inf if duration_s is None else time.monotonic() + duration_s

    def switch_off(self) -> None:
        """Take nothing more; what is queued is written, and the file ends."""
        self._threshold = 0
        self._wake.set()

    @property
    def is_on(self) -> bool:
        """Whether requests are recorded now."""
        return self._threshold > 0 and time.monotonic() < self._until_s

    def wants(self, user: UserKey) -> bool:
        """Whether the user's requests are recorded now."""
        if not self.is_on:
            return False
        name = f"{user.tenant}\0{user.user}".encode(errors="surrogatepass")
        return xxhash.xxh3_64_intdigest(name, seed=1) >> 32 < self._threshold

    def offer(self, seen: RecordedRequest) -> None:
        """Queue a record, or drop it."""
        num_bytes = seen.num_bytes
        if self._offered_bytes - self._taken_bytes + num_bytes > self._config.max_queue_bytes:
            self._count("dropped", 1)
            return
        self._offered_bytes += num_bytes
        self._queue.append((num_bytes, seen))
        self._wake.set()

    def status(self) -> RecordStatus:
        """For people; lists the folder, so not for the event loop."""
        is_on = self.is_on
        return RecordStatus(
            recording=is_on,
            ends_in_s=self._until_s - time.monotonic() if is_on and self._until_s < math.inf else None,
            sample_ratio=self._ratio,
            **self._num,
            queued_bytes=self._offered_bytes - self._taken_bytes,
            files=[str(path) for path in self._files()],
        )

    # ---- the thread's side

    def _run(self) -> None:
        file = _File(self._config, self._folder)
        while True:
            stopping = self._stopping
            self._write(file)
            if stopping:
                file.close()
                return
            self._wake.wait(FLUSH_S)
            self._wake.clear()

    def _write(self, file: _File) -> None:
        """Everything that is queued now."""
        while self._queue:
            num_bytes, seen = self._queue.popleft()
            result = "written"
            try:
                file.write(self._encode(seen))
            except (OSError, ValueError) as error:
                log.error("recording: %s", error)
                result = "failed"
                file.abandon()
            self._taken_bytes += num_bytes
            self._count(result, 1)
        try:
            file.flush(is_over=not self.is_on)
            for old in self._files()[: -self._config.max_files]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.error("recording: %s", error)
            file.abandon()

    def _encode(self, seen: RecordedRequest) -> bytes:
        return msgspec.json.encode(record_of(seen, self._key, self._config.scores)) + b"\n"

    def _files(self) -> list[Path]:
        try:
            return sorted(self._folder.glob("traffic-*.jsonl*"))
        except FileNotFoundError:  # a folder that somebody has removed holds nothing
            return []

    def _count(self, result: str, num: int) -> None:
        self._num[result] += num
        self._on_result(result, num)


@dataclass(slots=True)
class _File:
    """The file that is being written; begins when there is something to write."""

    config: RecordConfig
    folder: Path
    _open: IO[bytes] | None = None
    _path: Path = field(default_factory=Path)
    _began_at: float = 0.0
    _num: int = 0

    def write(self, line: bytes) -> None:
        """Append, to a new file if need be."""
        if self._open is None:
            self._num += 1
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = f"traffic-{stamp}-{os.getpid()}-{self._num:04}{self.config.suffix}.part"
            self._path, self._began_at = self.folder / name, time.monotonic()
            self._open = create(self._path, Path(self.config.suffix).suffix)
        self._open.write(line)
        if self._open.tell() >= self.config.max_file_bytes:  # unpacked, so a packed file is well below
            self.close()

    def flush(self, is_over: bool) -> None:
        """What a crash now would lose is nothing; end the file if it is old, or the recording over."""
        if self._open is None:
            return
        if is_over or time.monotonic() - self._began_at >= self.config.max_file_s:
            self.close()
        else:
            self._open.flush()

    def close(self) -> None:
        """Give the file its name."""
        if self._open is not None:
            self._open.close()
            self._open = None
            self._path.rename(self._path.with_suffix(""))

    def abandon(self) -> None:
        """The disk refused; what is there stays, as far as it is there."""
        with contextlib.suppress(OSError):
            self.close()
        self._open = None


def record_of(seen: RecordedRequest, key: bytes | None, keep_scores: bool) -> Record:
    """The log's record of a request. With a key, user and tenant are 32 hex digits of HMAC-SHA256."""
    appended = seen.request.events if isinstance(seen.request, EventsRequest) else None
    request = None if isinstance(seen.request, EventsRequest) else seen.request
    answer = None if isinstance(seen.answer, EventsAnswer) else seen.answer
    user = seen.user
    history = None if request is None or request.history.events is None else LoggedHistory.of(request.history.events)
    logged = LoggedAnswer(status=seen.status, latency_ms=round(seen.took_s * 1e3, 4))
    if isinstance(answer, MatchAnswer):
        logged = msgspec.structs.replace(
            logged,
            outcome=answer.basis.value,
            model_version=answer.vectors_version,
            digest=digest({"": answer.scores}, answer.item_ids),
        )
    elif answer is not None:
        logged = msgspec.structs.replace(
            logged, model_version=answer.model_version, fingerprint=answer.history.fingerprint
        )
    if isinstance(answer, RankAnswer):
        scores = {task: raw(values) for task, values in answer.scores.items()} if keep_scores else {}
        logged = msgspec.structs.replace(
            logged, outcome=answer.outcome.value, digest=digest(answer.scores), scores=scores
        )
    elif isinstance(answer, GenerateAnswer | RecommendAnswer):
        outcome = answer.outcome.value if answer.outcome else UNRANKED
        logged = msgspec.structs.replace(logged, outcome=outcome, digest=digest({"": answer.scores}, answer.item_ids))
    rank = request if isinstance(request, RankRequest) else None
    recommend = request if isinstance(request, RecommendRequest) else None
    shown_at = rank.timestamp if rank else recommend.timestamp if recommend else None
    return Record(
        ts=seen.arrived_at,
        kind=cast("Kind", seen.kind),
        user_id=_hashed(key, "user", *user) if key else user.user,
        tenant=_hashed(key, "tenant", user.tenant) if key and user.tenant else user.tenant,
        history=history,
        base=None if request is None else request.history.base,
        candidates=rank.candidates.astype("<i8").tobytes() if rank else [],
        num_candidates=request.num_candidates if isinstance(request, SignalRequest) else None,
        timestamp=int(seen.arrived_at) if (rank or recommend) and shown_at is None else shown_at,
        top_k=rank.top_k if rank else None,
        deadline_ms=round(seen.budget_s * 1e3, 3),
        generate=_generate(request) if isinstance(request, GenerateRequest) else None,
        match=_match(request) if isinstance(request, MatchRequest) else None,
        recommend=_recommend(recommend) if recommend else None,
        events=None if appended is None else LoggedHistory.of(appended),
        answer=logged,
    )


def _ids(values: I64 | None) -> bytes | None:
    return None if values is None else values.astype("<i8").tobytes()


def _generate(request: GenerateRequest) -> LoggedGenerate:
    return LoggedGenerate(
        num_items=request.num_items,
        beam_width=request.beam_width,
        normalise=request.normalise,
        temperature=request.temperature,
        allow_items=_ids(request.allow_items),
        deny_items=_ids(request.deny_items),
        attributes={name: list(values) for name, values in request.attributes.items()},
    )


def _match(request: MatchRequest) -> LoggedMatch:
    return LoggedMatch(
        num_items=request.num_items,
        exclude_seen=request.exclude_seen,
        allow_items=_ids(request.allow_items),
        deny_items=_ids(request.deny_items),
    )


def _recommend(request: RecommendRequest) -> LoggedRecommend:
    return LoggedRecommend(
        num_items=request.num_items,
        num_candidates=request.num_candidates,
        exclude_seen=request.exclude_seen,
        deny_items=_ids(request.deny_items),
        context=request.context,
    )


def _hashed(key: bytes, *parts: str) -> str:
    message = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)
    return hmac.new(key, message, hashlib.sha256).hexdigest()[:32]


def _read_key(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"record.hash_key_file: {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"record.hash_key_file: {path} holds {len(key)} bytes, at least {MIN_KEY_BYTES} are needed")
    return key


def _check_writable(folder: Path) -> None:
    probe = folder / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink()


def the(recorder: Recorder | None) -> Recorder:
    """The instance's recorder. Raises NotFound where its configuration has none."""
    if recorder is None:
        raise NotFound("this instance does not record: its configuration has no section record")
    return recorder
