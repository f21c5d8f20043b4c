"""The commands from outside: SIGTERM drains a server, and an error is one line and exit code 2."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.forked import run
from tests.models import events
from tests.ports import free_port
from tests.serving import FIRST_ID, columns, make_config, write_checkpoint


def write(folder: Path, **sections: object) -> Path:
    from npu_gr.core.settings import to_table

    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(to_table(make_config(folder, **sections))))
    return path


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status, dict(response.getheaders())
    finally:
        connection.close()


@contextmanager
def served(folder: Path, grace_s: float) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    write_checkpoint(folder / "checkpoint")
    port = free_port()
    config = write(folder, server={"port": port, "drain_grace_s": grace_s})
    with subprocess.Popen(
        [sys.executable, "-m", "npu_gr", "serve", "--config", str(config)]
    ) as process:
        try:
            ends_at = time.monotonic() + 60
            while not is_ready(port):
                assert process.poll() is None
                assert time.monotonic() < ends_at, "not ready within 60 s"
                time.sleep(0.1)
            yield process, port
        finally:
            process.kill()


def is_ready(port: int) -> bool:
    try:
        return ask(port, "GET", "/readyz")[0] == 200
    except OSError:
        return False


RANK = {"user_id": "u", "candidates": [FIRST_ID], "history": columns(events(20))}


def test_sigterm_drains(tmp_path: Path) -> None:
    """Unready at once, still serving for the grace.

    A second signal ends that, and then it is gone with code 0.
    """
    with served(tmp_path, grace_s=600.0) as (process, port):
        assert ask(port, "POST", "/v1/rank", RANK)[0] == 200
        assert (
            ask(port, "POST", "/v1/events", {"user_id": "u", "events": columns(events(5))})[0]
            == 200
        )
        process.send_signal(signal.SIGTERM)
        status, headers = ask(port, "GET", "/readyz")
        while status == 200:
            status, headers = ask(port, "GET", "/readyz")
        assert status == 503
        assert headers["Connection"] == "close"
        assert ask(port, "POST", "/v1/rank", RANK)[0] == 200
        status, headers = ask(
            port, "POST", "/v1/signal", {"user_id": "u", "history": columns(events(5))}
        )
        assert (status, headers["X-NpuGr-Not-Taken"]) == (503, "1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        with pytest.raises(OSError):  # noqa: PT011
            ask(port, "GET", "/healthz")


def test_requests_that_have_begun_are_answered(tmp_path: Path) -> None:
    body = json.dumps(RANK).encode()
    with served(tmp_path, grace_s=600.0) as (process, port):
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(4)]
        for connection in connections:
            connection.putrequest("POST", "/v1/rank")
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
            connection.putheader("X-Request-Timeout-Ms", "30000")
            connection.endheaders(body[:-1])
        process.send_signal(signal.SIGTERM)
        while is_ready(port):
            pass
        for connection in connections:
            connection.send(body[-1:])
            assert connection.getresponse().status == 200
            connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_what_stops_a_start(tmp_path: Path) -> None:
    def fails(path: Path, *expected: str) -> None:
        done = run("serve", "--config", str(path))
        assert done.returncode == 2, done.stderr
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("npu-gr: ")
        for text in expected:
            assert text in line, done.stderr

    fails(tmp_path / "none.yaml", "none.yaml", "No such file")
    fails(write(tmp_path), "checkpoint", "config.json")
    write_checkpoint(tmp_path / "checkpoint")
    if not torch.cuda.is_available():
        fails(write(tmp_path, backend="cuda"), "backend 'cuda' is configured but cannot be loaded")
    fails(write(tmp_path, backend="npu"), "backend 'npu' is configured but cannot be loaded")
    fails(write(tmp_path, kv_cache={"hbm_bytes": 1000}), "kv_cache.hbm_bytes: 1000 holds 0 pages")
    fails(write(tmp_path, history_store={"path": "/proc/nowhere/h.db"}), "history_store.path")
    fails(
        write(tmp_path, server={"api_keys_file": str(tmp_path / "keys")}),
        "api_keys_file: ",
        "No such file",
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # before the checkpoint is read
        no_model = write(tmp_path, checkpoint="nowhere", server={"port": port})
        fails(no_model, f"cannot listen on 127.0.0.1:{port}")


def test_check_config_prints_everything(tmp_path: Path) -> None:
    words = ("check-config", "--config", str(write(tmp_path)), "--set", "kv_cache.hbm_bytes=77")
    done = run(*words, "--syntax-only")
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["kv_cache"]["hbm_bytes"] == 77
    assert "  hbm_bytes: 77  # --set" in done.stdout.splitlines()
    done = run(*words)  # there is no checkpoint
    assert done.returncode == 1
    assert "broken  checkpoint" in done.stderr
    write_checkpoint(tmp_path / "checkpoint")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "ok      checkpoint" in done.stderr
    done = run(*words, "--set", "backend=gpu")
    assert done.returncode == 2
    assert "'gpu' must be one of cpu, cuda, npu, reference" in done.stderr


def test_bulk_load(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    log = tmp_path / "x.inter"
    log.write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\nu\t1001\t2\t5\nu\t1002\t3\t6\n"
    )
    done = run("load", "--config", str(write(tmp_path)), str(log))
    told = "1 users: 2 events added, 0 events were already stored\n"
    assert (done.returncode, done.stdout) == (0, told), done.stderr
    log.write_text(log.read_text() + "u\t1001\t9\t7\n")
    done = run("load", "--config", str(write(tmp_path)), str(log))
    assert done.returncode == 2
    assert (
        "actions of the log that the model lacks: '9'; the model has: '1', '2', '3'"
    ) in done.stderr


def test_help_is_quick_and_names_every_command() -> None:
    done = run("--help")
    for command in ("serve", "train", "load", "replay", "dashboards", "check-config", "demo"):
        assert command in done.stdout
