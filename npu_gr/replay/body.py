"""Request bodies of records, and how their histories are sent: as logged, whole, or as deltas on what is known."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

import msgspec

from npu_gr.core.request import Events, UserKey
from npu_gr.replay.log import LoggedHistory, Record
from npu_gr.replay.plan import user_of

MAX_USERS = 200_000  # whose newest prefix a client remembers
MAX_EVENTS = 16_000_000  # remembered for `whole`; 18 bytes each

Mode = Literal["logged", "whole", "delta"]

_FIELDS = {
    "rank": ("history", "base", "candidates", "timestamp", "top_k"),
    "signal": ("history", "base"),
    "generate": ("history", "base"),
    "match": ("history",),
    "recommend": ("history", "base", "timestamp"),
    "events": ("events",),
}


def encode(record: Record) -> bytes:
    """The record's request body."""
    body: dict[str, object] = {"user_id": record.user_id}
    if record.tenant:
        body["tenant"] = record.tenant
    body |= {name: value for name in _FIELDS[record.kind] if (value := getattr(record, name)) is not None}
    if record.kind == "signal" and (num := record.num_candidates or len(record.candidate_ids())):
        body["num_candidates"] = num
    asked = getattr(record, record.kind) if record.kind in ("generate", "match", "recommend") else None
    if asked is not None:
        body |= msgspec.structs.asdict(asked)
        body = {name: value for name, value in body.items() if value is not None}
    return msgspec.json.encode(body)


class _Prefix(NamedTuple):
    num_events: int
    digest: str  # of those events
    fingerprint: str  # the service's name of them


class Histories:
    """Rewrites records on their way out; one of a client, whose users' records all pass here in order."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._prefixes: OrderedDict[UserKey, _Prefix] = OrderedDict()  # delta: what the service knows
        self._wholes: OrderedDict[UserKey, tuple[str, Events]] = OrderedDict()  # whole: what the log's bases mean
        self._num_events = 0

    def outgoing(self, record: Record) -> Record:
        """The record as it is sent."""
        is_fixed = record.kind in ("events", "match")  # they know no deltas
        if is_fixed or self.mode == "logged" or (record.history is None and record.base is None):
            return record
        return self._delta(record) if self.mode == "delta" else self._whole(record)

    def answered(self, record: Record, fingerprint: str) -> None:
        """The service knows this logged record's whole history by `fingerprint` from now on."""
        if self.mode != "delta" or record.history is None or record.base is not None or not fingerprint:
            return
        events = record.history.events()
        self._prefixes[user := user_of(record)] = _Prefix(len(events), events.fingerprint(), fingerprint)
        self._prefixes.move_to_end(user)
        if len(self._prefixes) > MAX_USERS:
            self._prefixes.popitem(last=False)

    def _delta(self, record: Record) -> Record:
        prefix = self._prefixes.get(user_of(record))
        if prefix is None or record.history is None or record.base is not None:
            return record
        events = record.history.events()
        if len(events) < prefix.num_events or events[: prefix.num_events].fingerprint() != prefix.digest:
            return record
        new = events[prefix.num_events :]
        history = LoggedHistory.of(new) if len(new) else None
        return msgspec.structs.replace(record, base=prefix.fingerprint, history=history)

    def _whole(self, record: Record) -> Record:
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
        self._num_events += len(events) - len(self._wholes.pop(user, ("", Events.empty()))[1])
        self._wholes[user] = fingerprint, events
        while self._num_events > MAX_EVENTS and len(self._wholes) > 1:
            self._num_events -= len(self._wholes.popitem(last=False)[1][1])
