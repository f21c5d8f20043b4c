"""Every request has one JSON line, also a failed one; a user is in it only as a keyed hash."""

from __future__ import annotations

import gc
import json
import logging
import sqlite3
import weakref
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.history_store.embedded import GroupWriter
from npu_gr.server.access_log import MOST_DETAIL, AccessLog, Failure
from npu_gr.server.config import ServerConfig
from tests.models import events
from tests.serving import FIRST_ID, columns, encoded, serving

HISTORY = columns(events(40))
RANK: dict[str, Any] = {
    "user_id": "somebody",
    "candidates": [FIRST_ID, FIRST_ID + 1],
    "history": HISTORY,
}
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
    assert [r.levelname for r in caplog.records if r.name == "npu_gr.request"] == ["INFO"] * 4 + [
        "WARNING"
    ]
    assert len({line["trace_id"] for line in lines(caplog)}) == 5
    assert "somebody" not in caplog.text
    assert str(FIRST_ID) not in caplog.text


async def test_only_slow_and_failed_requests_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "npu_gr.request"):
        async with serving(tmp_path, server={"log_requests": "slow"}) as (client, _):
            await client.get("/v1/models")
            await client.post("/v1/rank", json=RANK, headers={"X-Request-Timeout-Ms": "0"})
    assert [line["status"] for line in lines(caplog)] == [504]


async def test_a_failed_request_says_what_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the store's disk full, each line has what its caller was told.

    The cause is one warning, not one each.
    """

    async def full(_self: object, _work: object, **_: object) -> None:
        try:
            raise sqlite3.OperationalError("database or disk is full")
        except sqlite3.Error as error:
            raise Unavailable(f"the history store cannot be written: {error}") from error

    body = {"user_id": "somebody", "events": HISTORY}
    with caplog.at_level(logging.INFO):
        async with serving(tmp_path) as (client, _):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GroupWriter, "submit", full)
                answers = [await client.post("/v1/events", json=body) for _ in range(20)]
            told = [(await answer.json())["detail"] for answer in answers]
            await client.post("/v1/rank", json={**RANK, "somebody": 1})
    *failed, bad = lines(caplog)
    assert {(line["status"], line["error"]) for line in failed} == {(503, "unavailable")}
    assert [line["detail"] for line in failed] == told
    assert told[0] == "the history store cannot be written: database or disk is full"
    assert bad["status"] == 422
    assert "detail" not in bad  # it names the field, which may be anything that the caller has
    warned = [
        record.getMessage()
        for record in caplog.records
        if record.name == "npu_gr.server.access_log"
    ]
    assert 1 <= len(warned) < 20
    assert warned[0] == (
        f"requests are failing: unavailable: {told[0]} (OperationalError: database or disk is full)"
    )
    assert "somebody" not in caplog.text


def test_a_detail_is_bounded_and_has_no_password() -> None:
    failure = AccessLog(ServerConfig()).failed(
        Unavailable("redis://me:s3cret@db/0 is gone " + "x" * 1000)
    )
    assert failure is not None
    assert failure.detail is not None
    assert failure.detail.startswith("redis://***@db/0 is gone xxx")
    assert len(failure.detail) == MOST_DETAIL


async def test_a_failed_request_leaves_no_cycle(tmp_path: Path) -> None:
    """A failed request leaves no garbage for the collector.

    An error kept by a frame of its own traceback would wait for it, with all its frames.
    """
    kept: list[weakref.ref[Exception]] = []
    failed = AccessLog.failed

    def noted(self: AccessLog, error: Exception) -> Failure | None:
        kept.append(weakref.ref(error))
        return failed(self, error)

    async with serving(tmp_path) as (client, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AccessLog, "failed", noted)
            gc.disable()
            try:
                await client.post("/v1/rank", json=RANK, headers={"X-Request-Timeout-Ms": "0"})
                await client.get("/v1/models")
                assert [one() for one in kept] == [None]
            finally:
                gc.enable()


async def test_a_user_is_a_keyed_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hashes = []
    for key in ("0123456789abcdef", "fedcba9876543210"):
        (tmp_path / "key").write_text(key)
        caplog.clear()
        with caplog.at_level(logging.INFO, "npu_gr.request"):
            async with serving(tmp_path, server={"log_user_key_file": str(tmp_path / "key")}) as (
                client,
                _,
            ):
                for user in ({"user_id": "ab"}, {"user_id": "ab"}, {"user_id": "b", "tenant": "a"}):
                    await client.post("/v1/rank", json={**RANK, **user})
        first, again, other = (line["user"] for line in lines(caplog))
        assert first == again != other
        hashes.append(first)
    assert hashes[0] != hashes[1]
    (tmp_path / "key").write_text("too short")
    with pytest.raises(ConfigError, match="has 9 bytes; a key has 16 to 64"):
        AccessLog(ServerConfig(log_user_key_file=str(tmp_path / "key")))
    with pytest.raises(ConfigError, match=r"log_user_key_file: .*No such file"):
        AccessLog(ServerConfig(log_user_key_file=str(tmp_path / "none")))
