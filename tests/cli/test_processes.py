"""Real processes and their bad neighbours: a stopped reader, a freeze, unexpected signals."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.cli.forked import run
from tests.cli.test_main import RANK, ask, write
from tests.ports import free_port
from tests.serving import write_checkpoint


@contextmanager
def started(
    kind: str, folder: Path, out: int, err: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An instance or a router that answers. Yields the process and the port of its `/metrics`."""
    port = free_port()
    if kind == "serve":
        write_checkpoint(folder / "checkpoint")
        config = write(folder, server={"port": port, "admin_port": port, "drain_grace_s": 0.1})
    else:
        config = folder / "router.yaml"
        instances = [{"name": "a", "host": "127.0.0.1", "port": free_port()}]
        table = {
            "port": free_port(),
            "admin_port": port,
            "discovery": {"instances": instances},
            "drain_grace_s": 0.1,
        }
        config.write_text(yaml.safe_dump(table))
    command = [sys.executable, "-m", "npu_gr", kind, "--config", str(config)]
    with subprocess.Popen(command, stdout=out, stderr=err) as process:
        try:
            until(lambda: answers(port, "/metrics") or process.poll() is not None)
            assert process.poll() is None
            yield process, port
        finally:
            process.kill()


def answers(port: int, path: str = "/healthz") -> bool:
    try:
        return ask(port, "GET", path)[0] == 200
    except OSError:
        return False


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    ends_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_at, "not in time"
        time.sleep(0.05)


def read(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def value(port: int, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", read(port, "/metrics"), re.M)
    return float(found[1]) if found else 0.0


def test_a_standard_output_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """5,000 requests are answered, lost lines are counted, and SIGTERM ends the process in time."""
    reader, writer = os.pipe()
    with (
        (tmp_path / "err").open("wb") as err,
        started("serve", tmp_path, writer, err.fileno()) as (process, port),
    ):
        os.close(writer)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = json.dumps(RANK)
        for number in range(5000):
            is_rank = number % 10 == 0
            path = "/v1/rank" if is_rank else "/healthz"
            headers = {"Content-Type": "application/json", "X-Request-Timeout-Ms": "30000"}
            connection.request(
                "POST" if is_rank else "GET", path, body if is_rank else None, headers
            )
            response = connection.getresponse()
            response.read()
            assert response.status == 200
        connection.close()
        assert value(port, 'npu_gr_log_lines_dropped_total{stream="stdout"}') > 0
        assert value(port, 'npu_gr_log_lines_dropped_total{stream="stderr"}') == 0
        process.send_signal(signal.SIGUSR1)  # the other stream is not stuck with it
        until(lambda: "stacks at SIGUSR1" in (tmp_path / "err").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "stopped" in (tmp_path / "err").read_text()
    os.close(reader)


@pytest.mark.parametrize("kind", ["serve", "route"])
def test_a_standard_error_that_nobody_reads_stops_nothing(tmp_path: Path, kind: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 65536)  # it is full from the first line on
    except BlockingIOError:
        os.set_blocking(writer, True)
    with started(kind, tmp_path, subprocess.DEVNULL, writer) as (process, port):
        for _ in range(3):
            process.send_signal(signal.SIGUSR1)
            assert answers(port, "/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    os.close(writer)
    os.close(reader)


def test_an_instance_says_what_ails_it(tmp_path: Path) -> None:
    with (
        (tmp_path / "err").open("wb") as err,
        started("serve", tmp_path, subprocess.DEVNULL, err.fileno()) as (process, port),
    ):
        process.send_signal(signal.SIGUSR1)
        until(lambda: "stacks at SIGUSR1" in (tmp_path / "err").read_text())
        freezes = value(port, "npu_gr_event_loop_freezes_total")
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)  # the fault: a freeze of one second
        process.send_signal(signal.SIGCONT)
        until(lambda: value(port, "npu_gr_event_loop_freezes_total") > freezes)
        lag = "npu_gr_event_loop_lag_seconds"
        late = value(port, f"{lag}_count") - value(port, f'{lag}_bucket{{le="0.5"}}')
        # of the 40 timers that were due in that second, 20 are over half of it late
        assert late >= 15
        bundle = urllib.request.urlopen(f"http://127.0.0.1:{port}/debug/bundle", timeout=60).read()
        assert read(port, "/debug/profile?seconds=1").count("\n") > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
        files = {name.partition("/")[2]: archive.extractfile(name) for name in archive.getnames()}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert "npu_gr_log_lines_dropped_total" in texts["metrics.txt"]
    assert "the event loop stood still for" in texts["log.txt"]
    assert json.loads(texts["status.json"])["name"] == "instance"
    assert json.loads(texts["environment.json"])["gc"]["frozen"] > 10_000
    told = (tmp_path / "err").read_text()
    assert "MainThread" in told
    assert "Traceback" not in told


def test_an_instance_serves_callers_and_operators_apart(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    port, admin_port = free_port(), free_port()
    record = {"folder": str(tmp_path / "traffic")}
    config = write(
        tmp_path,
        server={"port": port, "admin_port": admin_port, "drain_grace_s": 0.1},
        record=record,
    )
    url = "http://127.0.0.1:{}".format
    command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(config)]
    with (tmp_path / "err").open("wb") as err, subprocess.Popen(command, stderr=err) as process:
        try:
            until(lambda: answers(port) or process.poll() is not None)
            assert [
                ask(port, "POST", "/v1/rank", RANK)[0],
                ask(admin_port, "POST", "/v1/rank", RANK)[0],
            ] == [200, 404]
            for where, code in ((url(port), 2), (url(admin_port), 0)):
                done = run("record", "--status", "--url", where)
                assert done.returncode == code, done.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    log = (tmp_path / "err").read_text()
    assert f" listening on 127.0.0.1:{port}\n" in log
    assert f" admin listening on 127.0.0.1:{admin_port}\n" in log
    assert f" requests http://127.0.0.1:{port}, status page http://127.0.0.1:{admin_port}/," in log
