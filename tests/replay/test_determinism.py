"""The same log, seed and model give equal scores: cold, from HBM, from DRAM, and as deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from npu_gr.core.kinds import A, Kind, Q
from npu_gr.handlers.base import HeldPermit
from npu_gr.replay.compare import compare
from npu_gr.replay.log import LoggedHistory, QueryRecord
from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.report import Report
from npu_gr.replay.run import replay
from tests.models import events
from tests.serving import FIRST_ID, serving

USERS, VISITS = 10, 3
COLD = {"relay": {"enabled": False}}
HBM = {"relay": {"t_life_s": 60.0}, "kv_cache": {"hbm_bytes": 16_000_000}}
DRAM = {"relay": {"t_life_s": 60.0}, "kv_cache": {"hbm_bytes": 1_400_000}}  # room for two users


def log() -> list[QueryRecord]:
    """Users who come back, each time with some more behaviours."""
    random = np.random.default_rng(0)
    histories = [events(1100, seed=user) for user in range(USERS)]
    records: list[QueryRecord] = []
    for visit in range(VISITS):
        for user, history in enumerate(histories):
            length = 1000 + 10 * visit
            records.append(
                QueryRecord(
                    ts=len(records) * 0.01,
                    kind="rank",
                    user_id=f"u{user}",
                    history=LoggedHistory.of(
                        replace(history, items=history.items + FIRST_ID)[:length]
                    ),
                    candidates=(random.choice(40, 12, replace=False) + FIRST_ID).tolist(),
                    timestamp=2_000_000_000,
                )
            )
    return records


async def run(folder: Path, name: str, sections: dict[str, Any], **options: Any) -> Report:
    """One run on a fresh service; its answers are in folder / name."""
    (folder / name).mkdir()
    sections = {"slo": {"rank_s": 10.0}, **sections}  # a slow machine rejects nothing
    async with serving(folder, watched=False, **sections) as (client, service):
        service.versions.ranker().engine.copy_bytes_per_s = float(
            "inf"
        )  # on a busy machine a reload may not seem to pay
        serve = service.serve

        async def spilled(
            kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None = None
        ) -> A:
            """Wait until spills are in DRAM before the next request, also on a busy machine."""
            answer = await serve(kind, request, budget_s, permit)
            await service.versions.ranker().relay.settled()
            return answer

        service.serve = spilled  # type: ignore[method-assign]
        url = str(client.make_url(""))
        given = ReplayOptions(base_url=url, timeout_s=20.0, **{"closed": 1, **options})
        report = await replay(log(), given, answers=folder / name / "answers.jsonl.gz")
    assert not report.errors
    return report


async def test_scores_are_the_same_on_every_path_and_in_every_run(tmp_path: Path) -> None:
    paths: dict[str, dict[str, Any]] = {"cold": COLD, "hbm": HBM, "dram": DRAM}
    for name, sections in paths.items():
        # a signal would bring it back to HBM first
        lead = {"signal_lead_s": 0.0} if name == "hbm" else {}
        reports = [await run(tmp_path, f"{name}{again}", sections, **lead) for again in (1, 2)]
        outcomes = reports[0].outcomes
        if name == "cold":
            assert set(outcomes) == {"miss_full"}
        else:
            assert outcomes.get(f"{name}_hit", 0) >= USERS, (outcomes, reports[0].reasons)
        twice = compare(tmp_path / f"{name}1", tmp_path / f"{name}2", 1.0).drift
        assert (twice.num_compared, twice.max_drift) == (
            USERS * VISITS,
            0.0,
        ) or twice.max_drift < 1e-5
    for name in ("hbm", "dram"):
        drift = compare(tmp_path / "cold1", tmp_path / f"{name}1", 1.0).drift
        assert drift.num_compared == drift.num_with_values == USERS * VISITS
        assert drift.max_drift < 1e-5
        assert drift.same_first_ratio == 1.0


async def test_open_loop_and_deltas_change_no_score(tmp_path: Path) -> None:
    await run(tmp_path, "plain", HBM)
    whole = await run(tmp_path, "fast", HBM, closed=None, speed=2.0)
    delta = await run(tmp_path, "delta", HBM, histories="delta")
    assert delta.sent_bytes < 0.6 * whole.sent_bytes
    for name in ("fast", "delta"):
        assert compare(tmp_path / "plain", tmp_path / name, 1.0).drift.max_drift < 1e-5


async def test_another_model_is_seen(tmp_path: Path) -> None:
    await run(tmp_path, "a", COLD)
    await run(tmp_path, "b", {**COLD, "dtype": "bfloat16"})
    drift = compare(tmp_path / "a", tmp_path / "b", 1.0).drift
    assert drift.num_same_digest == 0
    assert drift.max_drift > 1e-4
