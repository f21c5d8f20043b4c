"""`npu-gr load` leaves one copy of a log: run twice, killed, beside a service, and through one."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.history import Events, UserKey
from npu_gr.history_store.open import open_store
from npu_gr.service.config import load as load_config
from tests.cli.forked import run
from tests.cli.test_main import is_ready, write
from tests.history_store.redis_server import redis_path
from tests.ports import free_port
from tests.serving import FIRST_ID, write_checkpoint

Histories = dict[str, list[tuple[int, int, int]]]  # (item, action, time), oldest first


def histories(num_users: int, num_events: int, seed: int = 0) -> Histories:
    random = np.random.default_rng(seed)
    return {
        f"u{user}": [
            (
                FIRST_ID + int(random.integers(100)),
                int(random.integers(3)),
                1_600_000_000 + 10 * place,
            )
            for place in range(num_events)
        ]
        for user in range(num_users)
    }


def write_log(path: Path, users: Histories) -> Path:
    """Ratings 1, 2, 3 are the actions 0, 1, 2 of the checkpoint."""
    with path.open("w") as file:
        for user, rows in users.items():
            for item, action, at in rows:
                file.write(
                    json.dumps(
                        {"user_id": user, "item_id": item, "rating": action + 1, "timestamp": at}
                    )
                    + "\n"
                )
    return path


def stored(config: Path, users: Histories, tenant: str = "") -> Histories:
    async def read() -> Histories:
        store = await open_store(load_config(config).history_store)
        assert store is not None
        found = {
            user: rows_of((await store.read(UserKey(tenant, user), 9999)).events) for user in users
        }
        await store.close()
        return found

    return asyncio.run(read())


def rows_of(events: Events) -> list[tuple[int, int, int]]:
    return list(
        zip(events.items.tolist(), events.actions.tolist(), events.timestamps.tolist(), strict=True)
    )


def loaded(log: Path, *words: str, code: int = 0) -> str:
    done = run("load", str(log), *words)
    assert done.returncode == code, done.stderr
    return done.stdout.strip() if code == 0 else done.stderr


@contextmanager
def service(config: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "npu_gr", "serve", "--config", str(config)]
    ) as process:
        try:
            ends_at = time.monotonic() + 60
            while not is_ready(port):
                assert process.poll() is None
                assert time.monotonic() < ends_at, "not ready within 60 s"
                time.sleep(0.1)
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_second_time_changes_nothing_and_a_grown_log_adds_what_is_new(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    config = write(tmp_path)
    small, grown = histories(6, 5), histories(8, 7)
    small = {user: grown[user][:5] for user in small}
    log = write_log(tmp_path / "small.jsonl", small)
    assert loaded(log, "--config", str(config)) == (
        "6 users: 30 events added, 0 events were already stored"
    )
    assert loaded(log, "--config", str(config)) == (
        "6 users: 0 events added, 30 events were already stored"
    )
    assert stored(config, small) == small
    more = write_log(tmp_path / "grown.jsonl", grown)
    assert loaded(more, "--config", str(config)) == (
        "8 users: 26 events added, 30 events were already stored"
    )
    assert stored(config, grown) == grown

    other = {"u0": histories(1, 3, seed=1)["u0"]}
    replaced = write_log(tmp_path / "other.jsonl", other)
    assert loaded(replaced, "--config", str(config), "--replace") == (
        "1 users: 3 events added, 1 replaced"
    )
    assert stored(config, grown) == {**grown, **other}


def test_actions_that_the_model_lacks_are_listed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    config = write(tmp_path)
    log = write_log(tmp_path / "log.jsonl", {"u": [(FIRST_ID, 0, 1), (FIRST_ID, 4, 2)]})
    told = loaded(log, "--config", str(config), code=2)
    assert "the model lacks: '5'; the model has: '1', '2', '3'; the log has: '1', '5'" in told
    assert stored(config, {"u": []}) == {"u": []}
    assert "--config or --url" in loaded(log, code=2)


def test_it_goes_through_the_service_that_has_the_store(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    port = free_port()
    config = write(tmp_path, server={"port": port, "drain_grace_s": 0.1})
    users = histories(40, 30)
    log = write_log(tmp_path / "log.jsonl", users)
    with service(config, port):
        done = run("load", str(log), "--config", str(config))
        assert done.returncode == 0, done.stderr
        assert f"in use by another process; writing through http://127.0.0.1:{port}" in done.stderr
        assert "1200 events added" in done.stdout
        assert "0 events added" in loaded(log, "--url", f"http://127.0.0.1:{port}")
        assert ("1200 events added, 40 replaced") in loaded(
            log, "--url", f"http://127.0.0.1:{port}", "--replace"
        )
    assert stored(config, users) == users
    told = loaded(log, "--url", f"http://127.0.0.1:{free_port()}", code=2)
    assert "no answer" in told


@contextmanager
def embedded(folder: Path) -> Iterator[tuple[dict[str, Any], Callable[[], int]]]:
    def count() -> int:
        try:
            with closing(sqlite3.connect(f"file:{folder}/history.db?mode=ro", uri=True)) as db:
                return int(db.execute("SELECT count(*) FROM users").fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    yield {}, count


@contextmanager
def on_redis(folder: Path) -> Iterator[tuple[dict[str, Any], Callable[[], int]]]:
    import redis

    with redis_path(folder) as path, redis.Redis(unix_socket_path=path) as client:
        yield (
            {"kind": "redis", "url": f"unix://{path}", "timeout_s": 30.0},
            lambda: len(client.keys("npu_gr:*:log")),
        )


@pytest.mark.parametrize(
    ("store", "mode"), [(embedded, []), (on_redis, []), (on_redis, ["--replace"])]
)
def test_killed_in_the_middle_and_run_again_is_one_copy(
    store: Any, mode: list[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    users = histories(1500, 12)
    log = write_log(tmp_path / "log.jsonl", users)
    with store(tmp_path) as (features, count):
        config = write(tmp_path, history_store=features)
        command = [sys.executable, "-m", "npu_gr", "load", str(log), "--config", str(config), *mode]
        with subprocess.Popen(command) as process:
            ends_at = time.monotonic() + 60
            while not count():
                assert process.poll() is None, "it ended before it could be killed"
                assert time.monotonic() < ends_at, "nothing was stored within 60 s"
            process.send_signal(signal.SIGKILL)
            assert process.wait(30) == -signal.SIGKILL
        before = count()
        assert 0 < before < 1500
        told = loaded(log, "--config", str(config), *mode)
        assert told.startswith("1500 users: ")
        if not mode:
            added = int(told.split()[2])
            assert added == 12 * (1500 - before)  # of each user all or nothing was there
        assert stored(config, users) == users
