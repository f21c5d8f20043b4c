"""One request and one answer of every kind.

A new kind needs an entry here, and has every test of test_kinds.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_gr.core.errors import Unprocessable
from npu_gr.core.history import HistoryReport, UserKey, Written
from npu_gr.core.request import (
    Basis,
    EraseAnswer,
    EventsAnswer,
    GenerateAnswer,
    IngestAnswer,
    LimitedBy,
    MatchAnswer,
    Outcome,
    RankAnswer,
    Reason,
    RecommendAnswer,
    SignalAnswer,
    StageReport,
    StageResult,
    Verdict,
)

USER = UserKey("t", "somebody")
NAMED = {"user_id": USER.user, "tenant": USER.tenant}
HISTORY = {"items": [7, 8], "actions": ["1", 2], "timestamps": [100, 200]}
REPORT = HistoryReport(
    fingerprint="f" * 32, num_tokens=2, read_events=2, cut_tokens=1, unknown_items=3
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """`path`: with its variables filled in.

    `body`: None = no body. `log`: the answer's part of the access log.
    """

    path: str
    body: dict[str, Any] | None
    answer: Any
    log: dict[str, Any]
    x_cache: str | None = None
    user: UserKey = USER


EXAMPLES: dict[str, Example] = {
    "signal": Example(
        path="/v1/signal",
        body={**NAMED, "history": HISTORY},
        answer=SignalAnswer(
            verdict=Verdict.PREINFER,
            model_version="m",
            history=REPORT,
            resident_for_s=10.0,
            stages_s={"history": 0.001, "decide": 0.0001},
        ),
        log={
            "verdict": "preinfer",
            "model_version": "m",
            "history_tokens": 2,
            "read_events": 2,
            "stages_s": {"history": 0.001, "decide": 0.0001},
        },
    ),
    "rank": Example(
        path="/v1/rank",
        body={**NAMED, "history": HISTORY, "candidates": [1, 2, 3]},
        answer=RankAnswer(
            model_version="m",
            outcome=Outcome.MISS_FULL,
            reason=Reason.NO_SIGNAL,
            scores={"click": np.array([1.0, np.nan, 2.0], np.float32)},
            top=None,
            history=REPORT,
            prefix_tokens=0,
            stages_s={"history": 0.001, "lease": 0.0, "queue": 0.0, "device": 0.002},
        ),
        log={
            "outcome": "miss_full",
            "reason": "no_signal",
            "model_version": "m",
            "history_tokens": 2,
            "read_events": 2,
            "prefix_tokens": 0,
            "num_items": 3,
            "stages_s": {"history": 0.001, "lease": 0.0, "queue": 0.0, "device": 0.002},
        },
        x_cache="miss",
    ),
    "generate": Example(
        path="/v1/generate",
        body={**NAMED, "history": HISTORY, "num_items": 2},
        answer=GenerateAnswer(
            model_version="m",
            catalogue_version="c",
            outcome=Outcome.HBM_HIT,
            reason=Reason.NONE,
            limited_by=LimitedBy.NONE,
            item_ids=np.array([5, 6]),
            sids=np.array([[0, 1], [1, 0]], np.int32),
            scores=np.array([-1.0, -2.0], np.float32),
            history=REPORT,
            prefix_tokens=2,
            stages_s={"history": 0.001, "lease": 0.0, "queue": 0.0, "device": 0.002},
        ),
        log={
            "outcome": "hbm_hit",
            "model_version": "m",
            "catalogue_version": "c",
            "history_tokens": 2,
            "read_events": 2,
            "prefix_tokens": 2,
            "num_items": 2,
            "stages_s": {"history": 0.001, "lease": 0.0, "queue": 0.0, "device": 0.002},
        },
        x_cache="hit-hbm",
    ),
    "match": Example(
        path="/v1/match",
        body={**NAMED, "num_items": 2},
        answer=MatchAnswer(
            vectors_version="v",
            basis=Basis.TARGET,
            limited_by=LimitedBy.FILTER,
            item_ids=np.array([9]),
            scores=np.array([0.5], np.float32),
            stages_s={"queue": 0.001, "device": 0.002},
        ),
        log={
            "vectors_version": "v",
            "basis": "target",
            "num_items": 1,
            "limited_by": "filter",
            "stages_s": {"queue": 0.001, "device": 0.002},
        },
    ),
    "recommend": Example(
        path="/v1/recommend",
        body={**NAMED, "history": HISTORY},
        answer=RecommendAnswer(
            model_version="m",
            verdict=Verdict.SKIP_LOAD,
            outcome=None,
            reason=Reason.NONE,
            order="retrieval",
            limited_by=LimitedBy.LIMIT,
            item_ids=np.array([5]),
            scores=np.array([np.nan], np.float32),
            origins=("generate",),
            num_candidates=4,
            stages=(
                StageReport(
                    stage="rank",
                    result=StageResult.OUT_OF_TIME,
                    began_s=0.1,
                    took_s=0.2,
                    num_items=0,
                ),
            ),
            history=REPORT,
            stages_s={"history": 0.001, "retrieve": 0.1, "preprocess": 0.0, "rank": 0.2},
        ),
        log={
            "verdict": "skip_load",
            "model_version": "m",
            "history_tokens": 2,
            "read_events": 2,
            "prefix_tokens": 0,
            "num_items": 1,
            "limited_by": "limit",
            "num_candidates": 4,
            "degraded": ["rank out_of_time"],
            "stages_s": {"history": 0.001, "retrieve": 0.1, "preprocess": 0.0, "rank": 0.2},
        },
        x_cache="none",
    ),
    "events": Example(
        path="/v1/events",
        body={**NAMED, "events": HISTORY},
        answer=EventsAnswer(num_events=2, stages_s={"store": 0.003}),
        log={"num_events": 2, "stages_s": {"store": 0.003}},
    ),
    "ingest": Example(
        path="/v1/events/bulk",
        body={"tenant": USER.tenant, "users": [{"user_id": USER.user, "events": HISTORY}] * 2},
        answer=IngestAnswer(
            results=(Written(2, 2), Unprocessable("events: no")), stages_s={"store": 0.003}
        ),
        log={"num_users": 2, "num_failed": 1, "num_added": 2, "stages_s": {"store": 0.003}},
        user=UserKey(USER.tenant, ""),
    ),
    "erase": Example(
        path=f"/v1/users/{USER.user}?tenant={USER.tenant}",
        body=None,
        answer=EraseAnswer(stages_s={"store": 0.003, "tiers": 0.0}),
        log={"stages_s": {"store": 0.003, "tiers": 0.0}},
    ),
}
