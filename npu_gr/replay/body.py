"""Request bodies of records, and how their histories are sent: as logged, whole, or as deltas on what is known."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

import msgspec

from npu_gr.core.history import Events, UserKey
from npu_gr.replay.fields import REQUEST_FIELDS
from npu_gr.replay.log import OPTIONS, RECORDED, LoggedHistory, QueryRecord, column
from npu_gr.replay.plan import user_of

MAX_USERS = 200_000  # of whom a client remembers the newest prefix
MAX_EVENTS = 16_000_000  # remembered for "whole"; 18 bytes each

HistoryMode = Literal["logged", "whole", "delta"]


def encode(record: QueryRecord) -> bytes:
    """The record's request body, JSON. Columns are raw: a record has ids and indices, a list would be read as names."""
    body: dict[str, object] = {"user_id": record.user_id}
    if record.tenant:
        body["tenant"] = record.tenant
    body |= {name: _raw(getattr(record, name)) for name in REQUEST_FIELDS[record.kind]}
    if "num_candidates" in body:  # a signal that the plan made from a rank has the candidates themselves
        body["num_candidates"] = record.num_candidates or len(record.candidate_ids()) or None
    options = getattr(record, record.kind) if record.kind in OPTIONS else None
    if options is not None:
        body |= {name: _raw(value) for name, value in msgspec.structs.asdict(options).items()}
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def _raw(value: object) -> object:
    if isinstance(value, LoggedHistory):
        return LoggedHistory.of(value.events())
    return column(value).tobytes() if isinstance(value, list) else value


class _KnownPrefix(NamedTuple):
    num_events: int
    digest: str  # of those events
    fingerprint: str  # the service's name of them


class SentHistories:
    """Rewrites the histories of records on their way out.

    Each client has one of its own, and all records of the client's users pass through it in order.
    """

    def __init__(self, mode: HistoryMode) -> None:
        self.mode = mode
        self._prefixes: OrderedDict[UserKey, _KnownPrefix] = OrderedDict()  # "delta": what the service knows
        self._wholes: OrderedDict[UserKey, tuple[str, Events]] = OrderedDict()  # "whole": what the log's bases mean
        self._num_events = 0  # in `_wholes`

    def outgoing(self, record: QueryRecord) -> QueryRecord:
        """The record as it is sent."""
        if not RECORDED[record.kind].takes_delta or self.mode == "logged":
            return record
        if record.history is None and record.base is None:  # the history store has it
            return record
        return self._delta(record) if self.mode == "delta" else self._whole(record)

    def answered(self, record: QueryRecord, fingerprint: str) -> None:
        """Remember that the service knows this logged record's whole history by `fingerprint`."""
        if self.mode != "delta" or record.history is None or record.base is not None or not fingerprint:
            return
        events = record.history.events()
        self._prefixes[user := user_of(record)] = _KnownPrefix(len(events), events.fingerprint(), fingerprint)
        self._prefixes.move_to_end(user)
        if len(self._prefixes) > MAX_USERS:
            self._prefixes.popitem(last=False)

    def _delta(self, record: QueryRecord) -> QueryRecord:
        prefix = self._prefixes.get(user_of(record))
        if prefix is None or record.history is None or record.base is not None:
            return record
        events = record.history.events()
        if len(events) < prefix.num_events or events[: prefix.num_events].fingerprint() != prefix.digest:
            return record
        new = events[prefix.num_events :]
        history = LoggedHistory.of(new) if len(new) else None
        return msgspec.structs.replace(record, base=prefix.fingerprint, history=history)

    def _whole(self, record: QueryRecord) -> QueryRecord:
        user = user_of(record)
        events = Events.empty() if record.history is None else record.history.events()
        if record.base is not None:
            fingerprint, known = self._wholes.get(user, ("", Events.empty()))
            if fingerprint != record.base:
                return record  # the log does not say what the base was
            events = known + events
        if record.answer is not None and record.answer.fingerprint:
            self._remember(user, record.answer.fingerprint, events)
        if record.base is None:
            return record
        return msgspec.structs.replace(record, base=None, history=LoggedHistory.of(events))

    def _remember(self, user: UserKey, fingerprint: str, events: Events) -> None:
        replaced = self._wholes.pop(user, ("", Events.empty()))[1]
        self._num_events += len(events) - len(replaced)
        self._wholes[user] = fingerprint, events
        while self._num_events > MAX_EVENTS and len(self._wholes) > 1:
            self._num_events -= len(self._wholes.popitem(last=False)[1][1])
