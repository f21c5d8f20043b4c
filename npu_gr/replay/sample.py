"""What became of one replayed request, and how its answer is read from the service's body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import msgspec

from npu_gr.core.kinds import Kind, Scored
from npu_gr.core.names import answered_ids
from npu_gr.replay.fields import ANSWER_FIELDS, UNRANKED
from npu_gr.replay.log import RECORDED, QueryRecord


class AnsweredHistory(TypedDict):
    """The report's part of what an answer says of the history."""

    num_tokens: int
    fingerprint: NotRequired[str]


class ReplayedAnswer(TypedDict):
    """The report's part of an answer that has scores, in one shape for all kinds."""

    outcome: str  # the value of the field that the kind's answers differ by; `UNRANKED` where it was null
    reason: str
    scores: dict[str, list[float | None]]  # task -> score of a candidate; null = unknown. Of chosen items: {"": ...}
    stages_s: dict[str, float]
    prefix_tokens: int
    history: AnsweredHistory
    items: NotRequired[list[int]]  # ids of those that the answer chose
    model_version: NotRequired[str]  # or that of the vectors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What became of one request."""

    record: QueryRecord
    due_at: float  # seconds after the run began
    lag_s: float  # from when it could leave to when it left
    latency_s: float  # from when it was due to its answer
    error: str  # "" = none; an HTTP status, "timeout", "no connection" or "bad answer"
    answer: ReplayedAnswer | None  # of a kind that has scores, without error
    number: int = 0  # of its action
    num_bytes: int = 0  # of the body
    was_resent: bool = False  # the service had forgotten the prefix of a delta


class _Unscored(TypedDict):
    history: NotRequired[AnsweredHistory]


def _wire_type(name: str, kind: Kind[Any, Any]) -> Any:
    """A Struct of the fields of the kind's body that `ReplayedAnswer` needs."""
    has = ANSWER_FIELDS[name]
    row = list[float | None]
    fields: list[Any] = [("scores", dict[str, row] if kind.scored is Scored.CANDIDATES else row)]
    if kind.scored is Scored.ITEMS:
        fields.append(("items", list[str | int]))
    if has.outcome is not None:
        fields.append((has.outcome, str | None if has.has_null_outcome else str))
    parts = (("reason", str), ("stages_s", dict[str, float]), ("prefix_tokens", int), ("history", AnsweredHistory))
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


def read_answer(record: QueryRecord, content: bytes) -> tuple[ReplayedAnswer | None, str]:
    """Read the body of a good answer.

    Args:
        record: what was asked.
        content: JSON.

    Returns:
        The answer (None for a kind without scores), and the fingerprint of its history ("" = not said).

    Raises:
        msgspec.MsgspecError, ValueError: the service broke its contract.
    """
    decoder = _SCORED.get(record.kind)
    if decoder is None:
        try:
            return None, _UNSCORED.decode(content).get("history", {}).get("fingerprint", "")
        except msgspec.MsgspecError:  # nothing in it is needed
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
        answer["items"] = answered_ids(body.items).tolist()
        return answer, history.get("fingerprint", "")
    num = len(record.candidate_ids())
    if any(len(scores) != num for scores in answer["scores"].values()):
        raise ValueError(f"expected {num} scores a task")
    return answer, history.get("fingerprint", "")
