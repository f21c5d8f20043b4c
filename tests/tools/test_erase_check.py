"""`npu-gr erase-check` finds remaining data, never shows it, and names unsearchable places."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.history import UserKey
from npu_gr.core.secret import SecretUrl
from npu_gr.handlers.prefix_histories import KnownHistory
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.redis import RedisStore
from npu_gr.history_store.store import HistoryConfig
from npu_gr.replay import erased
from npu_gr.replay.erased import recorded_as
from npu_gr.replay.purge import purge
from npu_gr.replay.recorder import RecordConfig, Recorder
from npu_gr.server.access_log import hash_of
from npu_gr.tools import erase_check
from npu_gr.tools.erase_check import exit_code, search_memory
from npu_gr.vector_search.vectors import save
from tests.history_store.redis_server import redis_path
from tests.models import events
from tests.replay.test_recorder import over
from tests.serving import serving
from tests.vector_search.vectors import KNOWN, make_vectors

USER = UserKey("t", "anna")


def configured(folder: Path, **sections: Any) -> Path:
    table = {"checkpoint": "none", "history_store": {"kind": "none"}, **sections}
    (folder / "config.yaml").write_text(yaml.safe_dump(table))
    return folder / "config.yaml"


def checked(
    config: Path, *options: str, user: str = "anna", tenant: str = "t"
) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and of each verdict what was searched."""
    done = CliRunner().invoke(
        main, ["erase-check", user, "--tenant", tenant, "--config", str(config), "--json", *options]
    )
    answer = json.loads(done.output)
    assert done.exit_code == answer["exit_code"]
    found: dict[str, list[str]] = {"found": [], "not found": [], "not searched": []}
    for one in answer["places"]:
        found[one["verdict"]].append(Path(one["what"].removeprefix("rows of ")).name)
    return done.exit_code, found


def stored(folder: Path, work: Callable[[EmbeddedStore], Any]) -> None:
    async def run() -> None:
        store = EmbeddedStore(HistoryConfig(path=str(folder / "h.db"), check_s=0))
        await work(store)
        await store.close()

    asyncio.run(run())


def test_the_embedded_store(tmp_path: Path) -> None:
    config = configured(tmp_path, history_store={"path": str(tmp_path / "h.db")})
    assert checked(config) == (2, {"found": [], "not found": [], "not searched": ["h.db"]})
    stored(tmp_path, lambda store: store.append(USER, events(30), "once"))
    before = {path.name for path in tmp_path.iterdir()}
    code, found = checked(config)
    assert (code, found["found"]) == (1, ["h.db", "h.db"])  # rows, bytes
    assert checked(config, tenant="other")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == before  # nothing is made beside the store
    shutil.copy(tmp_path / "h.db", tmp_path / "h.db.backup")
    stored(tmp_path, lambda store: store.erase(USER))
    code, found = checked(config)
    assert (code, found["found"]) == (1, ["h.db.backup"])
    (tmp_path / "h.db.backup").unlink()
    assert checked(config)[0] == 0


def test_a_store_that_runs_is_searched_with_its_log(tmp_path: Path) -> None:
    config = configured(tmp_path, history_store={"path": str(tmp_path / "a #1%?" / "h.db")})
    code = (
        "import asyncio, sys; from tests.tools.test_erase_check import appended; "
        "asyncio.run(appended(sys.argv[1]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a #1%?" / "h.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        assert running.stdout.readline() == b"ready\n"
        code_, found = checked(config)
        assert (code_, found["found"]) == (1, ["h.db", "h.db-wal"])  # rows; bytes in the log alone
        running.stdin.close()


async def appended(path: str) -> None:
    """Hold a store open, with a user who is in its log, until standard input ends."""
    store = EmbeddedStore(HistoryConfig(path=path, check_s=0))
    await store.append(USER, events(30))
    print("ready", flush=True)  # noqa: T201
    await asyncio.to_thread(sys.stdin.read)
    await store.close()


def test_rows_that_were_deleted_without_being_overwritten(tmp_path: Path) -> None:
    config = configured(tmp_path, history_store={"path": str(tmp_path / "h.db")})
    stored(tmp_path, lambda store: store.append(USER, events(30)))
    with sqlite3.connect(tmp_path / "h.db") as db:
        db.execute("PRAGMA secure_delete=OFF")
        for table in ("users", "chunks"):
            db.execute(f"DELETE FROM {table}")
    db.close()
    code, found = checked(config)
    assert (code, found["found"]) == (1, ["h.db"])
    assert "h.db" in found["not found"]  # as rows


@pytest.mark.parametrize("users", ["hashed", "clear"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_recordings(tmp_path: Path, suffix: Any, users: Any) -> None:
    folder = tmp_path / "traffic"
    config = configured(tmp_path, record={"folder": str(folder)})
    with Recorder(
        RecordConfig(folder=str(folder), enabled=True, users=users, suffix=suffix)
    ) as recorder:
        recorder.offer(over("anna"))
        recorder.offer(over("bert"))
    (path,) = folder.glob("traffic-*")
    assert checked(config, tenant="") == (
        1,
        {"found": [path.name], "not found": [], "not searched": []},
    )
    part = path.rename(path.with_name(path.name + ".part"))
    assert checked(config, tenant="")[1]["found"] == [part.name]
    path = part.rename(path)
    key = None if users == "clear" else (folder / "hash-key").read_bytes().strip()
    erased.add(folder, [recorded_as(UserKey("", "anna"), key)], at=2e9)
    assert checked(config, tenant="")[0] == 1  # hidden, and still there
    purge(folder)
    assert checked(config, tenant="")[0] == 0
    assert checked(config, user="bert", tenant="")[0] == 1
    (folder / "traffic-9.jsonl").write_bytes(b'{"user_id": "an')
    assert checked(config, tenant="") == (
        2,
        {"found": [], "not found": [path.name], "not searched": ["traffic-9.jsonl"]},
    )


def test_logs_hold_the_user_or_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erase_check, "_PIECE_BYTES", 5)  # what is searched lies across pieces
    key = b"0123456789abcdef"
    (tmp_path / "key").write_bytes(key)
    config = configured(tmp_path, server={"log_user_key_file": str(tmp_path / "key")})
    (tmp_path / "a.log").write_text(f'{{"user": "{hash_of(USER, key)}"}}\n')
    (tmp_path / "b.log").write_text("nothing\n")
    (tmp_path / "c.log.gz").write_bytes(gzip.compress(b"GET /v1/users/anna"))
    options = [
        word
        for name in ("a.log", "b.log", "c.log.gz", "d.log")
        for word in ("--logs", str(tmp_path / name))
    ]
    assert checked(config, *options) == (
        1,
        {"found": ["a.log", "c.log.gz"], "not found": ["b.log"], "not searched": ["d.log"]},
    )
    assert checked(config, *options[2:4])[0] == 0


def test_vectors_that_were_trained_with_the_user(tmp_path: Path) -> None:
    save(make_vectors(), tmp_path / "vectors")
    config = configured(tmp_path, match={"vectors": str(tmp_path / "vectors")})
    code, found = checked(config, user=KNOWN, tenant="")
    assert (code, found["found"]) == (1, ["vectors.safetensors"])
    assert (tmp_path / "vectors" / "vectors.safetensors").stat().st_mode & 0o777 == 0o600
    assert checked(config, user="somebody-else")[0] == 0


def test_redis(tmp_path: Path) -> None:
    async def work(path: str, erases: bool) -> None:
        store = await RedisStore.connect(
            HistoryConfig(kind="redis", url=SecretUrl(f"unix://{path}"), timeout_s=30.0)
        )
        await (store.erase(USER) if erases else store.append(USER, events(3), "once"))
        await store.close()

    with redis_path(tmp_path) as path:
        config = configured(
            tmp_path, history_store={"kind": "redis", "url": f"unix://{path}", "timeout_s": 30.0}
        )
        asyncio.run(work(path, erases=False))
        assert checked(config)[0] == 1
        asyncio.run(work(path, erases=True))
        unseen = ["files of Redis"]
        assert checked(config) == (
            2,
            {"found": [], "not found": ["keys of Redis"], "not searched": unseen},
        )
    assert checked(config)[1]["not searched"] == ["Redis", *unseen]


async def test_the_memory_of_instances(tmp_path: Path) -> None:
    async with serving(tmp_path, watched=False) as (client, service):
        url = str(client.make_url(""))
        user = UserKey("", "u")
        assert [one.verdict for one in await search_memory(user, [url], None)] == ["not found"]
        service.parts.histories.cache.remember(user, "x", KnownHistory(events(3), 0))
        found = await search_memory(user, [url, "http://127.0.0.1:1"], None)
        assert [one.verdict for one in found] == ["found", "not searched"]
        assert found[0].note == "histories"


def test_nothing_of_a_history_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    config = configured(
        tmp_path, record={"folder": str(folder)}, history_store={"path": str(tmp_path / "h.db")}
    )
    stored(tmp_path, lambda store: store.append(UserKey("", "anna"), events(30)))
    with Recorder(RecordConfig(folder=str(folder), enabled=True, users="clear")) as recorder:
        recorder.offer(over("anna"))
    done = CliRunner().invoke(main, ["erase-check", "anna", "--config", str(config)])
    assert done.exit_code == 1
    for line in done.output.splitlines():
        assert line.split("  ")[0].strip() in ("found", "not found", "not searched")
        assert "items" not in line


def test_found_outweighs_what_could_not_be_searched() -> None:
    def of(*verdicts: Any) -> int:
        return exit_code(
            [erase_check.Searched(place="", what="", verdict=verdict) for verdict in verdicts]
        )

    assert of("not found") == 0
    assert of("not found", "not searched") == 2
    assert of("not searched", "found") == 1
