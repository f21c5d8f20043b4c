"""A request's times count from its arrival.

A serving process loads what it serves with, and nothing else.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.errors import ConfigError, NotFound, Overloaded
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import ERASE, GENERATE, MATCH, RANK, RECOMMEND, Kind
from npu_gr.core.request import (
    EraseRequest,
    GenerateRequest,
    MatchRequest,
    RankRequest,
    RecommendRequest,
    Request,
)
from tests.serving import FIRST_ID, serving, write_checkpoint

USER = UserKey("", "u")
CANDIDATES = np.arange(FIRST_ID, FIRST_ID + 4)


def test_a_serving_process_loads_no_trainer_no_player_no_bench() -> None:
    code = (
        "import sys, npu_gr.service.app; print(*(m for m in sys.modules if "
        "m.startswith('npu_gr.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "npu_gr.handlers.service" in loaded
    foreign = ("train", "bench", "tools", "simulate", "cli", "router", "fleet")
    assert not [name for name in loaded if name.split(".")[1] in foreign]
    assert not [
        name
        for name in loaded
        if name.split(".")[-1] in ("player", "plan", "timer", "interactions")
    ]


async def test_a_device_without_windows_rejects_a_semi_local_ranker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "checkpoint", attention_window_tokens=8)
    monkeypatch.setattr("npu_gr.backend.cpu.backend.CPUBackend.has_windows", False)
    with pytest.raises(ConfigError, match=r"attention_window_tokens 8.* backend cpu do not"):
        async with serving(tmp_path):
            pass


async def test_waiting_counts_from_the_arrival_also_if_the_history_is_slow(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, service):
        store, engine = service.parts.histories.store, service.versions.ranker().engine
        assert store is not None
        read, rank = store.read, engine.rank
        seen: list[float] = []

        async def slow_read(*given: Any) -> object:
            await asyncio.sleep(0.2)
            return await read(*given)

        async def noted(work: object, deadline_at: float, arrived_at: float, tenant: str) -> object:
            seen.append(arrived_at)
            return await rank(work, deadline_at, arrived_at, tenant)  # type: ignore[arg-type]

        store.read = slow_read  # type: ignore[method-assign, assignment]
        engine.rank = noted  # type: ignore[method-assign, assignment]
        sent_at = time.monotonic()
        await service.serve(
            RANK, RankRequest(user=USER, candidates=CANDIDATES, history=HistoryRef()), 5.0
        )
        assert [at - sent_at < 0.1 for at in seen] == [True]


async def test_a_kind_that_is_not_configured_is_not_found(tmp_path: Path) -> None:
    asked: list[tuple[Kind[Any, Any], Request]] = [
        (GENERATE, GenerateRequest(user=USER, history=HistoryRef(), num_items=1)),
        (MATCH, MatchRequest(user=USER, num_items=1)),
        (RECOMMEND, RecommendRequest(user=USER, history=HistoryRef(), num_items=1)),
    ]
    async with serving(tmp_path) as (_, service):
        for kind, request in asked:
            with pytest.raises(
                NotFound, match=f"does not {kind.name}; .* has no section {kind.name}"
            ):
                await service.serve(kind, request, 1.0)


async def test_an_erasure_is_never_rejected_for_load(tmp_path: Path) -> None:
    history = HistoryRef(events=Events.make(CANDIDATES, [0] * 4, [1] * 4))
    rank = RankRequest(user=USER, candidates=CANDIDATES, history=history)
    async with serving(tmp_path, admission={"max_inflight": 1}) as (_, service):
        with await service.admission.enter(RANK.name, "", time.monotonic(), 1.0):
            with pytest.raises(Overloaded):
                await service.serve(RANK, rank, 1.0)
            await service.serve(ERASE, EraseRequest(user=USER), budget_s=0.0)
        await service.serve(RANK, rank, 1.0)
