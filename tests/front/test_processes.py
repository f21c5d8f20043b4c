"""A real instance with front workers: started by the command, with every fault that its processes can have."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_main import RANK, ask, free_port, write
from tests.keys import bearer, entry, write_keys
from tests.serving import write_checkpoint

NUM = 2
HEADERS = {"Content-Type": "application/json", "X-Request-Timeout-Ms": "20000", **bearer("operator")}


class Instance:
    """The supervisor's process, and what a test does to it."""

    def __init__(self, folder: Path, *, waits: bool = True) -> None:
        self.folder = folder
        self.port, self.admin_port = free_port(), free_port()
        write_checkpoint(folder / "checkpoint")
        keys = write_keys(folder / "keys", entry("operator"), entry("shop", tenant="shop"))
        self.config = write(
            folder,
            server={
                "port": self.port,
                "admin_port": self.admin_port,
                "drain_grace_s": 0.3,
                "default_budget_s": 20.0,
                "workers": NUM,
                "api_keys_file": keys,
            },
        )
        self.err = (folder / "err").open("wb")
        command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(self.config)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.err)
        until(lambda: not waits or self.answers() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log()

    def log(self) -> str:
        return (self.folder / "err").read_text()

    def answers(self) -> bool:
        try:
            return self.call("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def call(self, method: str, path: str, body: object = None, *, key: str = "operator") -> tuple[int, Any]:
        is_admin = path.startswith(("/debug", "/metrics", "/v1/models/reload"))
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port if is_admin else self.port, timeout=30)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**HEADERS, **bearer(key)})
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers.get_content_type() in ("application/json", "application/problem+json")
            return response.status, json.loads(text) if is_json and text else text
        finally:
            connection.close()

    def children(self) -> dict[str, int]:
        """The processes of the instance: `engine` and the workers' numbers -> their ids."""
        found = {}
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in tasks:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "npu_gr.cli.front" in words:  # not one that is over, or is not yet what it will be
                found["engine" if "engine" in words else words[-2]] = int(pid)
        return found

    def metric(self, sample: str) -> float:
        status, text = self.call("GET", "/metrics")
        assert status == 200
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0


def until(holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
    ends_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_at, "not in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    made = Instance(tmp_path_factory.mktemp("front"))
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.err.close()


def test_it_serves_through_processes_without_torch(instance: Instance) -> None:
    assert set(instance.children()) == {"engine", "0", "1"}
    status, answer = instance.call("POST", "/v1/rank", RANK)
    assert status == 200
    history = RANK["history"]
    status, appended = instance.call("POST", "/v1/events", {"user_id": "stored", "events": history})
    assert (status, appended["num_events"]) == (200, 20)
    status, from_store = instance.call("POST", "/v1/rank", {**RANK, "user_id": "stored", "history": None})
    assert status == 200
    assert from_store["scores"] == answer["scores"]
    assert from_store["history"]["source"] == "store"
    assert instance.call("DELETE", "/v1/users/stored")[0] in (202, 204)
    assert instance.call("POST", "/v1/signal", {"user_id": "v", "history": history})[0] == 202
    assert instance.call("POST", "/v1/generate", {"user_id": "u", "history": history})[0] == 404
    for number in map(str, range(NUM)):
        maps = Path(f"/proc/{instance.children()[number]}/maps").read_text()
        assert "libtorch" not in maps
    supervisor = Path(f"/proc/{instance.process.pid}/maps").read_text()
    assert "libtorch" not in supervisor
    assert "aiohttp" not in supervisor
    assert "numpy" not in supervisor


def test_keys_and_tenants_hold_at_every_worker(instance: Instance) -> None:
    for _ in range(6):
        assert instance.call("POST", "/v1/rank", RANK, key="nobody")[0] == 401
        assert instance.call("POST", "/v1/rank", {**RANK, "tenant": "other"}, key="shop")[0] == 403
        assert instance.call("POST", "/v1/rank", RANK, key="shop")[0] == 200


def test_a_worker_that_is_killed_loses_its_own_requests_alone(instance: Instance) -> None:
    """Callers without a break: after a moment everybody is answered again, and nobody but its callers noticed."""
    outcomes: list[str] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                outcomes.append(str(instance.call("POST", "/v1/rank", RANK)[0]))
            except (OSError, http.client.HTTPException) as error:
                outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for one in threads:
        one.start()
    until(lambda: len(outcomes) > 20)
    before = instance.children()
    os.kill(before["0"], signal.SIGKILL)
    until(lambda: instance.children().get("0", before["0"]) != before["0"])
    until(lambda: instance.metric('npu_gr_front_worker_connected{worker="0"}') == 1.0)
    num = len(outcomes)
    until(lambda: len(outcomes) > num + 20)
    stop.set()
    for one in threads:
        one.join()
    lost = [one for one in outcomes if one != "200"]
    assert set(lost) <= {"ConnectionResetError", "RemoteDisconnected"}
    assert len(lost) <= len(threads)  # each caller has one request at a time
    assert instance.metric('npu_gr_front_worker_starts_total{worker="0"}') == 2.0
    assert instance.children()["engine"] == before["engine"]
    assert instance.children()["1"] == before["1"]


def test_a_worker_that_stands_still_is_killed_and_replaced(instance: Instance) -> None:
    before = instance.children()["1"]
    os.kill(before, signal.SIGSTOP)
    until(lambda: "front worker 1 is killed: it has said nothing for 10 s" in instance.log())
    until(lambda: instance.children().get("1", before) != before)


def test_a_reload_is_the_engines_and_every_worker_knows(instance: Instance) -> None:
    write_checkpoint(instance.folder / "checkpoint", dim=48)
    (before,) = instance.call("GET", "/v1/models")[1]["models"]
    instance.process.send_signal(signal.SIGHUP)
    until(lambda: _served(instance)[0]["version"] != before["version"])
    status, answer = instance.call("POST", "/v1/rank", RANK)
    assert (status, answer["model_version"]) == (200, _served(instance)[0]["version"])
    for _ in range(6):  # whichever worker is asked
        assert _served(instance)[0]["version"] == answer["model_version"]


def _served(instance: Instance) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = instance.call("GET", "/v1/models")[1]["models"]
    return models


def test_stacks_of_every_process_go_to_the_log(instance: Instance) -> None:
    num = instance.log().count("stacks at SIGUSR1")
    instance.process.send_signal(signal.SIGUSR1)
    until(lambda: instance.log().count("stacks at SIGUSR1") >= num + 1 + NUM)


def test_an_engine_that_is_killed_is_503_until_the_next_one_serves(instance: Instance) -> None:
    before = instance.children()
    os.kill(before["engine"], signal.SIGKILL)
    until(lambda: not instance.answers())
    status, _ = instance.call("POST", "/v1/rank", RANK)
    assert status == 503
    assert instance.call("GET", "/readyz")[0] == 503
    assert instance.call("GET", "/healthz")[0] == 200  # it is being restarted: killing everything would not be faster
    until(instance.answers)
    status, answer = instance.call("POST", "/v1/rank", RANK)
    assert status == 200, (answer, instance.log())
    after = instance.children()
    assert after["engine"] != before["engine"]
    assert {name: pid for name, pid in after.items() if name != "engine"} == {
        name: pid for name, pid in before.items() if name != "engine"
    }


def test_a_second_instance_on_the_port_is_refused(instance: Instance) -> None:
    command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(instance.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"server.host, server.port: cannot listen on 127.0.0.1:{instance.port}" in done.stderr


def test_it_drains_and_ends_with_all_its_processes(instance: Instance) -> None:
    """SIGTERM: unready and still serving, then gone, with what had begun answered and what was counted told."""
    pids = [*instance.children().values()]
    connection = http.client.HTTPConnection("127.0.0.1", instance.port, timeout=30)
    connection.connect()
    body = json.dumps(RANK).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    raw = connection.sock
    assert raw is not None
    raw.sendall(f"POST /v1/rank HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode())
    raw.sendall(body[:10])  # half a request when the signal comes
    time.sleep(0.1)
    instance.process.send_signal(signal.SIGTERM)
    until(lambda: not instance.answers())
    raw.sendall(body[10:])
    answer = raw.recv(65_536)
    connection.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert instance.process.wait(60) == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(OSError):  # noqa: PT011
        ask(instance.port, "GET", "/healthz")
    assert "Traceback" not in instance.log()


def test_a_bad_configuration_ends_the_start_in_words(tmp_path: Path) -> None:
    """The engine finds it, and the supervisor ends with its code; nothing is left running."""
    config = write(tmp_path, server={"port": 0, "admin_port": 0, "workers": 1})
    command = [sys.executable, "-m", "npu_gr", "serve", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("npu-gr: ") == 1
    assert str(tmp_path / "checkpoint") in done.stderr


def test_nothing_outlives_the_supervisor(tmp_path: Path) -> None:
    instance = Instance(tmp_path, waits=False)
    until(lambda: len(instance.children()) == 1 + NUM)
    time.sleep(1.0)  # their first lines have run
    pids = [*instance.children().values()]
    instance.process.kill()
    instance.process.wait()
    instance.err.close()
    until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
