"""One JSON line a request, whatever becomes of it, and no user in it but as a keyed hash."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.server.access_log import AccessLog
from npu_gr.server.config import ServerConfig
from tests.models import events
from tests.serving import FIRST_ID, columns, encoded, serving

HISTORY = columns(events(40))
RANK: dict[str, Any] = {"user_id": "somebody", "candidates": [FIRST_ID, FIRST_ID + 1], "history": HISTORY}
STAGES = ["history", "lease", "queue", "device"]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.getMessage()) for r in caplog.records if r.name == "npu_gr.request"]


async def test_every_request_has_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "npu_gr.request"):
        async with serving(tmp_path) as (client, service):
            await client.post("/v1/signal", json={"user_id": "somebody", "history": HISTORY})
            await encoded(service.versions.ranker().relay)
            await client.post("/v1/rank", json=RANK)
            await client.post("/v1/rank", json={**RANK, "candidates": [-1]})
            await client.get("/nowhere")
            await client.post("/v1/rank", json=RANK, headers={"X-Request-Timeout-Ms": "0"})
    signal, rank, bad, nowhere, late = lines(caplog)
    assert (signal["route"], signal["status"], signal["verdict"]) == ("/v1/signal", 202, "preinfer")
    assert (rank["method"], rank["route"], rank["status"]) == ("POST", "/v1/rank", 200)
    assert rank["outcome"] == "hbm_hit"
    assert (rank["history_tokens"], rank["prefix_tokens"], rank["num_items"]) == (40, 40, 2)
    assert list(rank["stages_s"]) == STAGES
    assert sum(rank["stages_s"].values()) <= rank["duration_s"] + 1e-5
    assert (bad["status"], bad["error"], nowhere["route"]) == (422, "unprocessable request", "none")
    assert (late["status"], late["error"]) == (504, "deadline exceeded")
    assert [r.levelname for r in caplog.records if r.name == "npu_gr.request"] == ["INFO"] * 4 + ["WARNING"]
    assert len({line["trace_id"] for line in lines(caplog)}) == 5
    assert "somebody" not in caplog.text
    assert str(FIRST_ID) not in caplog.text


async def test_only_what_is_slow_or_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "npu_gr.request"):
        async with serving(tmp_path, server={"log_requests": "slow"}) as (client, _):
            await client.get("/v1/models")
            await client.post("/v1/rank", json=RANK, headers={"X-Request-Timeout-Ms": "0"})
    assert [line["status"] for line in lines(caplog)] == [504]


async def test_a_user_is_a_keyed_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hashes = []
    for key in ("0123456789abcdef", "fedcba9876543210"):
        (tmp_path / "key").write_text(key)
        caplog.clear()
        with caplog.at_level(logging.INFO, "npu_gr.request"):
            async with serving(tmp_path, server={"log_user_key_file": str(tmp_path / "key")}) as (client, _):
                for user in ({"user_id": "ab"}, {"user_id": "ab"}, {"user_id": "b", "tenant": "a"}):
                    await client.post("/v1/rank", json={**RANK, **user})
        first, again, other = (line["user"] for line in lines(caplog))
        assert first == again != other
        hashes.append(first)
    assert hashes[0] != hashes[1]
    (tmp_path / "key").write_text("too short")
    with pytest.raises(ConfigError, match="9 bytes, needs 16 to 64"):
        AccessLog(ServerConfig(log_user_key_file=str(tmp_path / "key")))
    with pytest.raises(ConfigError, match=r"log_user_key_file: .*No such file"):
        AccessLog(ServerConfig(log_user_key_file=str(tmp_path / "none")))
