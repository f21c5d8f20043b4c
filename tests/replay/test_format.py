"""Format 1 is stable: records equal `format1.jsonl` byte for byte, and old lines are readable."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.history import Events, HistoryRef, HistoryReport, UserKey
from npu_gr.core.request import (
    Answer,
    Basis,
    EventsAnswer,
    EventsRequest,
    GenerateAnswer,
    GenerateRequest,
    LimitedBy,
    MatchAnswer,
    MatchRequest,
    Outcome,
    RankAnswer,
    RankRequest,
    Reason,
    RecommendAnswer,
    RecommendRequest,
    Request,
    SignalAnswer,
    SignalRequest,
    Verdict,
)
from npu_gr.replay.answers import AnswerLine
from npu_gr.replay.log import QueryRecord
from npu_gr.replay.recorder import RecordedRequest, record_of
from npu_gr.replay.requests import encode

LINES = (Path(__file__).parent / "format1.jsonl").read_bytes().splitlines()
KEY = b"0123456789abcdef"
USER = UserKey("t", "ü")
HISTORY = HistoryRef(events=Events.make([3, 4], [0, 1], [10, 11]), base="f" * 8)
REPORT = HistoryReport(fingerprint="ab" * 8, num_tokens=3)


def ids(*values: int) -> I64:
    return np.array(values, np.int64)


EXAMPLES: tuple[tuple[str, Request, Answer], ...] = (
    (
        "signal",
        SignalRequest(user=USER, history=HISTORY, num_candidates=7),
        SignalAnswer(
            verdict=Verdict.PREINFER, model_version="v", history=REPORT, resident_for_s=1.0
        ),
    ),
    (
        "rank",
        RankRequest(user=USER, history=HISTORY, candidates=ids(5, 6), top_k=1),
        RankAnswer(
            model_version="v",
            outcome=Outcome.HBM_HIT,
            reason=Reason.NONE,
            scores={"click": np.array([1.5, np.nan], np.float32)},
            top=None,
            history=REPORT,
            prefix_tokens=2,
        ),
    ),
    (
        "generate",
        GenerateRequest(
            user=USER,
            history=HistoryRef(),
            num_items=3,
            beam_width=8,
            normalise="valid",
            temperature=0.5,
            allow_items=ids(1, 2),
            attributes={"genre": ("x", 3)},
        ),
        GenerateAnswer(
            model_version="v",
            catalogue_version="c",
            outcome=Outcome.JOINED,
            reason=Reason.COMPUTE,
            limited_by=LimitedBy.NONE,
            item_ids=ids(1),
            sids=np.zeros((1, 3), np.int32),
            scores=np.array([-1.0], np.float32),
            history=REPORT,
            prefix_tokens=0,
        ),
    ),
    (
        "match",
        MatchRequest(user=USER, num_items=4, exclude_seen=False, deny_items=ids(9)),
        MatchAnswer(
            vectors_version="w",
            basis=Basis.FOLDED,
            limited_by=LimitedBy.NONE,
            item_ids=ids(2),
            scores=np.array([0.5], np.float32),
        ),
    ),
    (
        "recommend",
        RecommendRequest(
            user=USER,
            history=HISTORY,
            num_items=4,
            num_candidates=20,
            exclude_seen=True,
            context={"page": "home"},
        ),
        RecommendAnswer(
            model_version="v",
            verdict=Verdict.PREINFER,
            outcome=None,
            reason=Reason.NONE,
            order="retrieval",
            limited_by=LimitedBy.NONE,
            item_ids=ids(7),
            scores=np.array([np.nan], np.float32),
            origins=("popular",),
            num_candidates=1,
            stages=(),
            history=REPORT,
        ),
    ),
)


def written(
    kind: str,
    request: Request,
    answer: Answer | None,
    key: bytes | None = None,
    keep_scores: bool = True,
) -> bytes:
    over = RecordedRequest(
        kind=kind,
        arrived_at=1_700_000_000.25,
        took_s=0.0125,
        budget_s=0.5,
        user=request.user,
        status=429 if answer is None else 200,
        request=request,
        answer=answer,
    )
    return msgspec.json.encode(record_of(over, key, keep_scores))


def test_every_kind_is_written_as_ever() -> None:
    lines = []
    for kind, request, answer in EXAMPLES:
        lines += [written(kind, request, answer), written(kind, request, answer, KEY)]
        lines.append(written(kind, request, None, keep_scores=False))
    events = EventsRequest(user=USER, events=Events.make([8], [1], [12]))
    lines.append(written("events", events, EventsAnswer(num_events=3)))
    assert lines == LINES


def test_old_lines_read_back_the_same() -> None:
    for line in LINES:
        assert msgspec.json.encode(msgspec.json.decode(line, type=QueryRecord)) == line


def test_a_line_of_answers_keeps_its_names() -> None:
    text = (
        b'{"number":1,"kind":"rank","due_s":0.5,"latency_ms":2.0,"outcome":"hbm_hit","digest":"d"}'
    )
    line = msgspec.json.decode(text, type=AnswerLine)
    assert line.due_at == 0.5
    assert msgspec.json.encode(line) == text


def test_names_of_earlier_versions_are_read_and_sent_as_they_are_called_now() -> None:
    recommend = {"sources": ["trunk", "match"], "order": "fitted", "unknown_items": "last"}
    for kind, options, sent in (
        ("recommend", recommend, {"sources": ["shared_encoder", "match"], "order": "blended"}),
        ("rank", {"unknown_items": "refuse"}, {"unknown_items": "reject"}),
    ):
        line = {"ts": 1.0, "kind": kind, "user_id": "u", "candidates": [1], kind: options}
        record = msgspec.json.decode(msgspec.json.encode(line), type=QueryRecord)
        assert sent.items() <= msgspec.json.decode(encode(record)).items()
