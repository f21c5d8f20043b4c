"""What was recorded is what was asked and answered.

Nothing waits for the disk, and every record is counted once.
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.request import SignalRequest
from npu_gr.replay.compare import compare
from npu_gr.replay.files import QueryLog, read, write
from npu_gr.replay.log import QueryRecord, digest
from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.recorder import RecordConfig, RecordedRequest, Recorder
from npu_gr.replay.run import replay
from npu_gr.vector_search.vectors import save
from tests.models import events
from tests.serving import FIRST_ID, columns, serving
from tests.vector_search.test_fold import make_folding
from tests.vector_search.vectors import KNOWN, make_vectors

HISTORY = columns(events(60))


def over(user: str = "a", num_events: int = 10) -> RecordedRequest:
    history = HistoryRef(events=Events.make(range(num_events), [0] * num_events, range(num_events)))
    key = UserKey("", user)
    request = SignalRequest(user=key, history=history)
    return RecordedRequest(
        kind="signal",
        arrived_at=time.time(),
        took_s=0.001,
        budget_s=1.0,
        user=key,
        status=202,
        request=request,
    )


def config(folder: Path, **values: Any) -> RecordConfig:
    users: Any = "hashed" if "hash_key_file" in values else "clear"
    return RecordConfig(folder=str(folder / "traffic"), enabled=True, users=users, **values)


def recorded(folder: Path) -> list[QueryRecord]:
    return [
        record for path in sorted((folder / "traffic").glob("traffic-*")) for record in read(path)
    ]


async def test_a_service_records_what_it_was_asked_and_a_replay_is_answered_the_same(
    tmp_path: Path,
) -> None:
    sections: dict[str, Any] = {
        "record": {"folder": str(tmp_path / "traffic"), "scores": True, "users": "clear"}
    }
    rank = {
        "user_id": "a",
        "tenant": "t",
        "candidates": [FIRST_ID, FIRST_ID + 5, 7],
        "history": HISTORY,
        "top_k": 1,
    }
    async with serving(tmp_path, **sections) as (client, _):
        assert (await client.post("/v1/rank", json=rank)).status == 200  # not on yet
        switched = await client.post("/debug/record", json={"duration_s": None})
        assert (switched.status, (await switched.json())["recording"]) == (200, True)
        headers = {"X-Request-Timeout-Ms": "5000"}
        assert (
            await client.post("/v1/signal", json={"user_id": "a", "history": HISTORY})
        ).status == 202
        answer = await (await client.post("/v1/rank", json=rank, headers=headers)).json()
        delta = {
            **rank,
            "history": None,
            "base": answer["history"]["fingerprint"],
            "timestamp": 1_700_000_000,
        }
        assert (await client.post("/v1/rank", json=delta)).status == 200
        assert (await client.post("/v1/rank", json={**delta, "base": "unknown"})).status == 409
        assert (
            await client.post("/v1/events", json={"user_id": "a", "events": HISTORY})
        ).status == 200
        assert (await client.get("/v1/models")).status == 200
        assert not (await (await client.delete("/debug/record")).json())["recording"]
        assert (await client.post("/v1/rank", json=rank)).status == 200  # not on any more
    signal, first, second, unknown, happened = recorded(tmp_path)
    assert [r.kind for r in (signal, first, second, unknown, happened)] == [
        "signal",
        "rank",
        "rank",
        "rank",
        "events",
    ]
    assert (first.user_id, first.tenant, first.top_k) == ("a", "t", 1)
    assert first.candidate_ids().tolist() == rank["candidates"]
    assert first.history is not None
    assert first.history.events().items.tolist() == HISTORY["items"]
    assert first.deadline_ms == pytest.approx(5000, abs=100)
    assert first.answer is not None
    assert first.answer.digest == digest(answer["scores"])
    assert (
        np.frombuffer(first.answer.scores["click"], "<f4")[:2].tolist()
        == answer["scores"]["click"][:2]
    )
    assert first.answer.fingerprint == answer["history"]["fingerprint"] == second.base
    assert unknown.answer is not None
    assert unknown.answer.status == 409
    assert happened.events is not None
    assert len(happened.events) == 60
    (path,) = (tmp_path / "traffic").iterdir()
    async with serving(tmp_path, watched=False) as (client, _):
        url = str(client.make_url(""))
        options = ReplayOptions(base_url=url, histories="whole")
        report = await replay(path, options, answers=tmp_path / "answers.jsonl.gz")
    assert report.errors == {"rank 409": 1}
    assert sum(report.logged_digests.values()) == 2
    drift = compare(path, tmp_path / "answers.jsonl.gz", 1.0).drift
    # bits may differ: one path was a hit
    assert (drift.num_with_values, drift.max_drift < 1e-5) == (2, True)


async def test_matches_are_recorded_and_a_replay_is_answered_the_same(tmp_path: Path) -> None:
    save(make_vectors(folding=make_folding()), tmp_path / "vectors")
    sections: dict[str, Any] = {
        "record": {
            "folder": str(tmp_path / "traffic"),
            "enabled": True,
            "suffix": ".jsonl",
            "users": "clear",
        }
    }
    match = {"vectors": str(tmp_path / "vectors")}
    new = {"items": [102, 108], "actions": [1, 1], "timestamps": [1, 2]}  # a stranger's
    async with serving(tmp_path, match=match, **sections) as (client, _):
        asked: list[dict[str, Any]] = [
            {"user_id": KNOWN, "num_items": 4, "deny_items": [100, 104], "exclude_seen": False},
            {"user_id": KNOWN, "allow_items": [106, 112], "num_items": 9},
            {"user_id": "stranger", "history": new},
            {"user_id": "stranger", "num_items": 1001},
        ]
        answers = []
        for body in asked:
            async with client.post("/v1/match", json=body) as response:
                answers.append((response.status, await response.json()))
    records = recorded(tmp_path)
    assert [record.kind for record in records] == ["match"] * 4
    for record, (status, answer) in zip(records, answers, strict=True):
        assert record.answer is not None
        assert record.answer.status == status
        if status == 200:
            told = (
                answer["basis"],
                answer["vectors_version"],
                digest({"": answer["scores"]}, answer["items"]),
            )
            assert (
                record.answer.outcome,
                record.answer.model_version,
                record.answer.digest,
            ) == told
    log = tmp_path / "log.jsonl.zst"
    write(log, records)
    for mode in ("logged", "delta"):
        async with serving(tmp_path, watched=False, match=match) as (client, _):
            options = ReplayOptions(base_url=str(client.make_url("")), histories=mode)
            report = await replay(log, options, answers=tmp_path / "answers.jsonl.gz")
        assert report.errors == {"match 422": 1}
        assert report.logged_digests == {"equal": 3}
        assert report.outcomes == {"folded": 1, "target": 2}


async def test_without_the_section_nothing_can_be_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        for method in ("GET", "POST", "DELETE"):
            async with client.request(method, "/debug/record") as answer:
                assert answer.status == 404
                assert "section `record`" in (await answer.json())["detail"]


@pytest.mark.parametrize("body", ['{"sample_ratio": 0}', '{"duration_s": -1}', '{"x": 1}', "["])
async def test_a_bad_order_is_rejected(tmp_path: Path, body: str) -> None:
    async with serving(tmp_path, record={"folder": str(tmp_path / "traffic")}) as (client, _):
        json = {"Content-Type": "application/json"}
        async with client.post("/debug/record", data=body, headers=json) as answer:
            assert answer.status == 422
        assert not (await (await client.get("/debug/record")).json())["recording"]


def test_a_disk_that_stands_still_makes_nobody_wait_and_drops_are_counted(tmp_path: Path) -> None:
    stuck, counts = threading.Event(), dict[str, int]()

    def count(result: str, num: int) -> None:
        counts[result] = counts.get(result, 0) + num
        if result == "written":
            stuck.wait(20)

    with Recorder(config(tmp_path, max_queue_bytes=20_000), count) as recorder:
        for i in range(100):
            recorder.offer(over(f"u{i}"))
        status = recorder.status()
        assert status.queued_bytes <= 20_000
        assert (
            status.dropped == 100 - 20_000 // over().num_bytes
            or status.dropped == 99 - 20_000 // over().num_bytes
        )
        stuck.set()
    assert counts["written"] + counts["dropped"] == 100
    assert len(recorded(tmp_path)) == counts["written"]


def test_files_end_at_their_size_and_the_oldest_go(tmp_path: Path) -> None:
    with Recorder(config(tmp_path, max_file_bytes=2000, max_files=3, suffix=".jsonl")) as recorder:
        for i in range(60):
            recorder.offer(over(f"u{i}"))
    files = sorted((tmp_path / "traffic").iterdir())
    assert len(files) == 3
    assert all(path.suffix == ".jsonl" for path in files)
    assert recorded(tmp_path)[-1].user_id == "u59"


def test_a_recording_ends_by_itself_and_gives_its_file_a_name(tmp_path: Path) -> None:
    with Recorder(RecordConfig(folder=str(tmp_path / "traffic"), users="clear")) as recorder:
        assert not recorder.wants(UserKey("", "a"))
        recorder.switch_on(1.0, 0.2)
        assert recorder.wants(UserKey("", "a"))
        recorder.offer(over())
        ends_at = time.monotonic() + 20
        while not list((tmp_path / "traffic").glob("*.gz")):
            assert time.monotonic() < ends_at, list((tmp_path / "traffic").iterdir())
            time.sleep(0.05)
        assert not recorder.is_on
    assert len(recorded(tmp_path)) == 1


def test_whole_users_are_sampled(tmp_path: Path) -> None:
    with Recorder(config(tmp_path, sample_ratio=0.25)) as recorder:
        wanted = [recorder.wants(UserKey("t", f"u{i}")) for i in range(2000)]
        assert wanted == [recorder.wants(UserKey("t", f"u{i}")) for i in range(2000)]
    assert sum(wanted) == pytest.approx(500, rel=0.15)


def test_with_a_key_identities_are_hashed_the_same_way_every_time_and_tenants_apart(
    tmp_path: Path,
) -> None:
    def names(key: bytes, tenant: str) -> tuple[str, str]:
        (tmp_path / "key").write_bytes(key)
        one = over("secret-name")
        with Recorder(config(tmp_path, hash_key_file=str(tmp_path / "key"))) as recorder:
            recorder.offer(dataclasses.replace(one, user=UserKey(tenant, "secret-name")))
        record = recorded(tmp_path)[-1]
        for path in (tmp_path / "traffic").iterdir():
            assert b"secret-name" not in gzip.decompress(path.read_bytes())
            path.unlink()
        return record.tenant, record.user_id

    key, other = b"0123456789abcdef", b"fedcba9876543210"
    assert names(key, "x") == names(key, "x")
    found = {names(key, "x"), names(key, "y"), names(other, "x"), names(key, "")}
    assert len({user for _, user in found}) == 4
    assert names(key, "")[0] == ""


def test_what_a_dead_process_left_is_readable_up_to_its_end(tmp_path: Path) -> None:
    with Recorder(config(tmp_path)) as recorder:
        for i in range(500):
            recorder.offer(over(f"u{i}"))
    (path,) = (tmp_path / "traffic").iterdir()
    part = path.with_name(path.name + ".part")
    part.write_bytes(path.read_bytes()[:-200])
    path.unlink()
    with Recorder(config(tmp_path)):
        pass
    log = QueryLog(path, "skip")
    assert 0 < len(list(log)) <= 500
    assert log.num_bad


def test_bad_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "short").write_bytes(b"abc")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"folder": str(tmp_path / "file")}, r"record\.folder"),
        (
            {"folder": str(tmp_path), "hash_key_file": str(tmp_path / "none")},
            "hash_key_file.*No such file",
        ),
        (
            {"folder": str(tmp_path), "hash_key_file": str(tmp_path / "short")},
            "3 bytes, the minimum is 16",
        ),
    )
    for values, field in cases:
        with pytest.raises(ConfigError, match=field):
            Recorder(RecordConfig(**values))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"record\.folder"):
        Recorder(config(tmp_path))


def test_a_disk_that_rejects_is_counted_and_recording_goes_on(tmp_path: Path) -> None:
    with Recorder(config(tmp_path)) as recorder:
        (tmp_path / "traffic").rmdir()
        recorder.offer(over())
        ends_at = time.monotonic() + 20
        while not recorder.status().failed:
            assert time.monotonic() < ends_at, recorder.status()
            time.sleep(0.02)
        (tmp_path / "traffic").mkdir()
        recorder.offer(over("b"))
    assert [record.user_id for record in recorded(tmp_path)] == ["b"]


def test_the_command_says_who_did_not_answer() -> None:
    done = CliRunner().invoke(main, ["record", "--url", "http://127.0.0.1:1", "--seconds", "1"])
    assert done.exit_code == 2
    assert "does not answer" in done.output
