"""The frames between a front worker and the engine: a length of four bytes, then a msgpack array that has a tag first.

    Hello     both      who one is; both sides must be of one build. The engine's brings the settings of the worker
    Call      w -> e    a request of a kind, with the instant at which its answer is due
    Cancel    w -> e    the caller hung up: nobody waits for an answer any more
    Answer    e -> w    of a call
    Failure   e -> w    the error that a call, or a question, ended with
    Step      e -> w    a call waits for something else than this instance, or does so no more
    Ask       w -> e    a question of administration
    Told      e -> w    its answer
    State     e -> w    whether the instance is ready, what it serves, and the settings that a reload may change
    Load      w -> e    who wants how much, and what keys and tenants have spent
    Credit    e -> w    how many calls of each kind may be open; what the other workers' keys and tenants have spent
    Stats     w -> e    what was counted since the last one

There is a Call and an Answer for each kind of `KINDS`. Instants are of `time.monotonic()`: all processes of a host have
one. Both sides run the same files, so there are no versions: another build ends the connection.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
import xxhash

from npu_gr import __version__
from npu_gr.admission.config import AdmissionConfig
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.kinds import KINDS, Kind, Scored
from npu_gr.core.served import ModelInfo
from npu_gr.front.wire import ErrorOut, Wire, decoder, encoder, wire_of
from npu_gr.metrics.registry.deltas import Delta
from npu_gr.metrics.slo import Objective
from npu_gr.server.config import ServerConfig
from npu_gr.server.newest import EndedLine

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20  # a body has 4 MiB, and its columns are a few times as long at most


class _Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What all frames have."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a worker needs of the configuration. The engine has read it."""

    server: ServerConfig
    admission: AdmissionConfig
    objectives: tuple[Objective, ...]
    batch_requests: int  # of one pass of the device
    num_workers: int


class HelloFrame(_Frame, frozen=True, tag=1):
    """Who one is."""

    build: str
    pid: int
    worker: int
    settings: WorkerSettings | None = None  # None = from a worker


class CancelFrame(_Frame, frozen=True, tag=2):
    """The caller hung up."""

    id: int


class FailureFrame(_Frame, frozen=True, tag=3):
    """A call or a question ended with an error."""

    id: int
    error: ErrorOut


class StepFrame(_Frame, frozen=True, tag=4):
    """A call holds no place of the instance, or holds one again."""

    id: int
    is_outside: bool


class AskFrame(_Frame, frozen=True, tag=5):
    """A question of administration: an entry of `npu_gr.front.questions`."""

    id: int
    name: str
    body: bytes


class ToldFrame(_Frame, frozen=True, tag=6):
    """The answer of a question."""

    id: int
    body: bytes


class StateFrame(_Frame, frozen=True, tag=7):
    """What is true of the instance."""

    why_not: str  # "" = new work is welcome
    models: tuple[ModelInfo, ...]
    kind_versions: dict[str, tuple[str, ...]]  # that are served: kind -> its versions
    actions: dict[str, tuple[str, ...] | None]  # by version of the ranker; "" = where none is named
    features: dict[str, tuple[Feature, ...]]  # the same
    unsorted_history: str
    admission: AdmissionConfig
    objectives_s: dict[str, float]


class LoadFrame(_Frame, frozen=True, tag=8):
    """What a worker's door has to say."""

    wanted: dict[str, int]  # kind -> requests that wait or are inside
    wanting: dict[str, int]  # tenant -> requests that wait or are inside
    pressure: float
    spent: dict[str, int]  # key -> requests since the last frame
    earned: dict[str, int]  # tenant -> requests to the device since the last frame


class CreditFrame(_Frame, frozen=True, tag=9):
    """What a worker may do."""

    slots: dict[str, int]  # kind -> calls that may be open; a kind that is not named has no bound here
    spent: dict[str, int]  # by the other workers
    earned: dict[str, int]


class Gauges(msgspec.Struct, frozen=True, array_like=True):
    """What is true of a worker when it says so."""

    places: dict[str, dict[str, int]]  # kind -> place -> requests at its door
    connections: dict[str, int]  # by state
    paused: int
    lent: int
    receiving_bytes: int
    in_flight: int
    refusals_per_s: float
    keys: int
    is_stale: bool
    expires_at: float | None  # of its certificate, unix seconds; None = it has none
    cpu_s: float  # since the start
    lag_s: float  # the latest timer since the last frame
    resident_bytes: int
    lines_dropped: dict[str, int]  # by stream


class StatsFrame(_Frame, frozen=True, tag=10):
    """What a worker counted since the last one."""

    deltas: tuple[Delta, ...]
    ended: tuple[EndedLine, ...]  # the first ones of each second, for percentiles
    slow: tuple[EndedLine, ...]  # the slowest of the others
    gauges: Gauges


class CallFrame(_Frame, frozen=True):
    """A request of a kind; `KindFrames.call` is its Struct with the request's own form."""

    id: int
    due_at: float  # inf = it must finish
    came_at: float  # when its last byte came
    trace: tuple[str, str, str | None, bool] | None
    wants_titles: bool
    request: Any


class AnswerFrame(_Frame, frozen=True):
    """The answer of a call; `KindFrames.answer` is its Struct with the answer's own form."""

    id: int
    answer: Any
    names: tuple[str | int, ...] | None  # of its items; None = their ids
    titles: tuple[str | None, ...] | None


class KindFrames:
    """The two frames of a kind."""

    def __init__(self, index: int, kind: Kind[Any, Any]) -> None:
        """Derive them.

        Args:
            index: of the kind in `KINDS`.
            kind: whose request and answer they carry.
        """
        self.kind = kind
        self.request = wire_of(kind.request)
        self.answered = wire_of(kind.answer)
        # the field of an answer that has items which are shown by their names; "" = none
        self.named = {Scored.CANDIDATES: "top", Scored.ITEMS: "item_ids", Scored.NOTHING: ""}[kind.scored]
        title = kind.name.title()
        self.call = _with(CallFrame, f"Call{title}", 100 + index, request=self.request.type)
        self.answer = _with(AnswerFrame, f"Answer{title}", 200 + index, answer=self.answered.type)


def _with(base: type[_Frame], name: str, tag: int, **typed: Any) -> type[Any]:
    """Make a frame of another one, with types for some of its fields."""
    hints = msgspec.structs.fields(base)
    fields = [(one.name, typed.get(one.name, one.type)) for one in hints]
    return msgspec.defstruct(name, fields, bases=(_Frame,), tag=tag, frozen=True, array_like=True, gc=False)


BY_KIND = {kind.name: KindFrames(index, kind) for index, kind in enumerate(KINDS.values())}
BY_CALL = {one.call: one for one in BY_KIND.values()}
BY_ANSWER = {one.answer: one for one in BY_KIND.values()}
PLAIN = (
    HelloFrame,
    CancelFrame,
    FailureFrame,
    StepFrame,
    AskFrame,
    ToldFrame,
    StateFrame,
    LoadFrame,
    CreditFrame,
    StatsFrame,
)
_ALL: tuple[type[Any], ...] = (*PLAIN, *BY_CALL, *BY_ANSWER)


def _form(struct: type[Any]) -> str:
    return f"{struct.__name__}{[(one.name, str(one.type)) for one in msgspec.structs.fields(struct)]}"


BUILD = f"{__version__} {xxhash.xxh3_64_hexdigest('|'.join(_form(one) for one in _ALL).encode())}"


encode = encoder().encode
"""Write a frame without its length.

Raises:
    UnicodeEncodeError: a text of it is not Unicode. OverflowError: a number needs more than 64 bits.
"""

decode = decoder(Union[_ALL]).decode  # noqa: UP007  (a type that is made at run time)
"""Read a frame; nothing of it is a view of what it was read from.

Raises:
    msgspec.DecodeError: it is no frame of this build.
"""


def pack(wire: Wire, value: Any) -> Any:
    """Make a value ready for a frame."""
    return value if wire.pack is None else wire.pack(value)


def unpack(wire: Wire, out: Any) -> Any:
    """Make a value of what a frame has."""
    return out if wire.unpack is None else wire.unpack(out)
