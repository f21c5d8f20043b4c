"""Request bodies and answers of a replay.

Histories are sent as logged, complete, or as deltas to what the service has cached.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec

from npu_gr.core.history import Events, UserKey
from npu_gr.core.kinds import RECOMMEND, Kind, Scored
from npu_gr.core.names import answered_ids
from npu_gr.core.renamed import current
from npu_gr.replay.log import (
    ANSWER_FIELDS,
    OPTIONS,
    RECORDED,
    REQUEST_FIELDS,
    UNRANKED,
    LoggedFeatures,
    LoggedHistory,
    LoggedValue,
    QueryRecord,
    column,
)
from npu_gr.replay.plan import user_of

MAX_USERS = 200_000  # with a remembered prefix
MAX_EVENTS = 16_000_000  # remembered for "whole", 18 bytes each

HistoryMode = Literal["logged", "whole", "delta"]


def encode(record: QueryRecord) -> bytes:
    """Encode the JSON body of a record's request.

    Columns are raw, since the service would read the ids and indices of a list as names.
    """
    body: dict[str, object] = {"user_id": record.user_id}
    if record.tenant:
        body["tenant"] = record.tenant
    body |= {name: _raw(getattr(record, name)) for name in REQUEST_FIELDS[record.kind]}
    # a signal that was generated from a rank has candidates instead of their number
    if "num_candidates" in body:
        body["num_candidates"] = record.num_candidates or len(record.candidate_ids()) or None
    if record.features is not None:
        body["features"] = record.features.on_the_wire()
    options = getattr(record, record.kind) if record.kind in OPTIONS else None
    if options is not None:
        body |= {
            name: _raw(current(value)) for name, value in msgspec.structs.asdict(options).items()
        }
    if record.kind == RECOMMEND.name:
        body["format"] = "columns"
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def _raw(value: object) -> object:
    if isinstance(value, LoggedHistory):
        raw = msgspec.structs.asdict(LoggedHistory.of(value.events()))
        features = raw.pop("features")
        return raw if features is None else {**raw, "features": features.on_the_wire()}
    return column(value).tobytes() if isinstance(value, list) else value


class _KnownPrefix(NamedTuple):
    num_events: int
    digest: str  # hash of those events
    fingerprint: str  # of the service, names the prefix


class _Whole(NamedTuple):
    fingerprint: str
    events: Events
    user_features: dict[str, LoggedValue] | None


_NOTHING = _Whole("", Events.empty(), None)


class SentHistories:
    """Rewrites the histories of records before they are sent.

    Each client has its own, through which all records of its users pass in order.
    """

    def __init__(self, mode: HistoryMode) -> None:
        self.mode = mode
        # for "delta": the cached prefix of the service
        self._prefixes: OrderedDict[UserKey, _KnownPrefix] = OrderedDict()
        # for "whole": the history of the log's last fingerprint
        self._wholes: OrderedDict[UserKey, _Whole] = OrderedDict()
        self._num_events = 0  # in `_wholes`

    def outgoing(self, record: QueryRecord) -> QueryRecord:
        """Return the record to send."""
        if not RECORDED[record.kind].takes_delta or self.mode == "logged":
            return record
        if record.history is None and record.base is None:  # it is in the history store
            return record
        return self._delta(record) if self.mode == "delta" else self._whole(record)

    def answered(self, record: QueryRecord, fingerprint: str) -> None:
        """Remember that the service has cached the record's full history as `fingerprint`."""
        if (
            self.mode != "delta"
            or record.history is None
            or record.base is not None
            or not fingerprint
        ):
            return
        events = record.history.events()
        self._prefixes[user := user_of(record)] = _KnownPrefix(
            len(events), events.fingerprint(), fingerprint
        )
        self._prefixes.move_to_end(user)
        if len(self._prefixes) > MAX_USERS:
            self._prefixes.popitem(last=False)

    def _delta(self, record: QueryRecord) -> QueryRecord:
        prefix = self._prefixes.get(user_of(record))
        if prefix is None or record.history is None or record.base is not None:
            return record
        events = record.history.events()
        if (
            len(events) < prefix.num_events
            or events[: prefix.num_events].fingerprint() != prefix.digest
        ):
            return record
        new = events[prefix.num_events :]
        history = LoggedHistory.of(new) if len(new) else None
        return msgspec.structs.replace(record, base=prefix.fingerprint, history=history)

    def _whole(self, record: QueryRecord) -> QueryRecord:
        user = user_of(record)
        events = Events.empty() if record.history is None else record.history.events()
        features = record.features
        if record.base is not None:
            known = self._wholes.get(user, _NOTHING)
            if known.fingerprint != record.base:
                return record  # the log does not have the base
            events = known.events + events
            if known.user_features is not None and (features is None or features.user is None):
                features = msgspec.structs.replace(
                    features or LoggedFeatures(), user=known.user_features
                )
        if record.answer is not None and record.answer.fingerprint:
            of_user = None if features is None else features.user
            self._remember(user, _Whole(record.answer.fingerprint, events, of_user))
        if record.base is None:
            return record
        return msgspec.structs.replace(
            record, base=None, history=LoggedHistory.of(events), features=features
        )

    def _remember(self, user: UserKey, whole: _Whole) -> None:
        replaced = self._wholes.pop(user, _NOTHING)
        self._num_events += len(whole.events) - len(replaced.events)
        self._wholes[user] = whole
        while self._num_events > MAX_EVENTS and len(self._wholes) > 1:
            self._num_events -= len(self._wholes.popitem(last=False)[1].events)


# ---- answers


class AnsweredHistory(TypedDict):
    """The fields of an answer's history that the report needs."""

    num_tokens: int
    fingerprint: NotRequired[str]


class ReplayedAnswer(TypedDict):
    """The fields of an answer with scores that the report needs, the same for all kinds."""

    # value of the kind's outcome field; `UNRANKED` for null
    outcome: str
    reason: str
    # task -> score per candidate, null = unknown; {"": ...} for returned items
    scores: dict[str, list[float | None]]
    stages_s: dict[str, float]
    prefix_tokens: int
    history: AnsweredHistory
    items: NotRequired[list[int]]  # ids of returned items
    model_version: NotRequired[str]  # or version of the vectors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """The result of one request."""

    record: QueryRecord
    due_at: float  # seconds after the run began
    lag_s: float  # delay of sending by the player
    latency_s: float  # from the due time to the answer
    error: str  # "" = none; an HTTP status, "timeout", "no connection" or "bad answer"
    answer: ReplayedAnswer | None  # None after an error, or if the kind has no scores
    number: int = 0  # of its action
    num_bytes: int = 0  # of the body
    was_resent: bool = False  # the prefix of a delta was no longer cached


class _Unscored(TypedDict):
    history: NotRequired[AnsweredHistory]


def _wire_type(name: str, kind: Kind[Any, Any]) -> Any:
    """Make a Struct of the fields of a kind's answer that `ReplayedAnswer` needs."""
    has = ANSWER_FIELDS[name]
    row = list[float | None]
    fields: list[Any] = [("scores", dict[str, row] if kind.scored is Scored.CANDIDATES else row)]
    if kind.scored is Scored.ITEMS:
        fields.append(("items", list[str | int]))
    if has.outcome is not None:
        fields.append((has.outcome, str | None if has.has_null_outcome else str))
    parts = (
        ("reason", str),
        ("stages_s", dict[str, float]),
        ("prefix_tokens", int),
        ("history", AnsweredHistory),
    )
    fields += [part for part in parts if part[0] in has.names]
    if has.version is not None:
        fields.append((has.version, str, ""))
    return msgspec.defstruct(f"{kind.title}Body", fields)


_SCORED = {
    name: msgspec.json.Decoder(_wire_type(name, kind))
    for name, kind in RECORDED.items()
    if kind.scored is not Scored.NOTHING
}
_UNSCORED = msgspec.json.Decoder(_Unscored)


def read_answer(
    record: QueryRecord, content: bytes, item_key: bytes = b""
) -> tuple[ReplayedAnswer | None, str]:
    """Parse the body of a successful answer.

    Args:
        record: The request.
        content: JSON body.
        item_key: Key of the items' ids; empty = they have none.

    Returns:
        The answer (None for a kind without scores), and the fingerprint of its history ("" if it
        has none).

    Raises:
        msgspec.MsgspecError, ValueError: the answer is invalid.
    """
    decoder = _SCORED.get(record.kind)
    if decoder is None:
        try:
            return None, _UNSCORED.decode(content).get("history", {}).get("fingerprint", "")
        except msgspec.MsgspecError:  # no field is required
            return None, ""
    body = decoder.decode(content)
    has = ANSWER_FIELDS[record.kind]
    outcome = None if has.outcome is None else getattr(body, has.outcome)
    history: AnsweredHistory = getattr(body, "history", AnsweredHistory(num_tokens=0))
    answer = ReplayedAnswer(
        outcome=UNRANKED if outcome is None else outcome,
        reason=getattr(body, "reason", ""),
        scores={"": body.scores} if isinstance(body.scores, list) else body.scores,
        stages_s=getattr(body, "stages_s", {}),
        prefix_tokens=getattr(body, "prefix_tokens", 0),
        history=history,
    )
    if has.version is not None:
        answer["model_version"] = getattr(body, has.version)
    if hasattr(body, "items"):
        answer["items"] = answered_ids(body.items, item_key).tolist()
        return answer, history.get("fingerprint", "")
    num = len(record.candidate_ids())
    if any(len(scores) != num for scores in answer["scores"].values()):
        raise ValueError(f"expected {num} scores per task")
    return answer, history.get("fingerprint", "")
