"""On Ray, signal and rank of a user meet in one replica; the scaling rule follows queue and SLO."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import to_table
from npu_gr.route.fan_out import Answered, Change
from npu_gr.route.ray_serve import QUEUE_DEPTH, RayOptions, RayReplica, target_instances
from tests.models import events
from tests.ports import free_port
from tests.serving import FIRST_ID, columns, make_config, write_checkpoint

OPTIONS = RayOptions(2, 6, target_queue_depth=8.0, max_late_ratio=0.01)


@pytest.mark.parametrize(
    ("current", "depths", "late", "want"),
    [
        (2, [0, 0], [0, 0], 2),  # never under the least
        (2, [20, 20], [0, 0], 5),  # as many as the queues need
        (2, [90, 90], [0, 0], 6),  # never over the most
        (3, [1, 1, 1], [0, 0.02, 0], 4),  # one more while ranks are late
        (4, [4, 4, 4, 1], [0, 0, 0, 0], 4),  # not quiet enough for one less
        (4, [2, 2, 2, 2], [0, 0, 0, 0], 3),
        (3, [], [], 2),
    ],
)
def test_the_scaling_rule(current: int, depths: list[float], late: list[float], want: int) -> None:
    assert target_instances(current, depths, late, OPTIONS) == want


def test_more_at_least_than_at_most_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_instances: 1"):
        RayOptions(2, 1)


class Replica(RayReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing: it is Ray that awaits a destructor."""


async def test_a_replica_serves_callers_what_is_public_and_reads_its_own_metrics(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    replica = Replica.__new__(Replica)
    config = make_config(tmp_path, history_store={"kind": "none"})
    await replica.__init__(config, "0.0.0.0")  # type: ignore[misc]
    try:
        body = {"user_id": "u", "candidates": [FIRST_ID], "history": columns(events(20))}
        # Ray's proxy alone reaches the socket, so any name is its callers'
        shop = {"Host": "shop.example"}
        async with replica._http.post("/v1/rank", json=body, headers=shop) as answer:
            assert answer.status == 200
        async with replica._http.post(
            "/v1/rank", json=body, headers={**shop, "Origin": "http://evil"}
        ) as answer:
            assert answer.status == 403
        for path in ("/metrics", "/debug/config"):
            async with replica._http.get(path) as answer:
                assert answer.status == 404
        assert (await replica.record_autoscaling_stats())[QUEUE_DEPTH] == 0.0
    finally:
        await replica._stack.aclose()


async def test_on_loopback_a_replica_serves_no_other_name_and_no_other_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's proxy passes on what the page of a browser sent."""
    responses = ModuleType("starlette.responses")  # the least of it, where Ray is not installed
    vars(responses)["Response"] = lambda body, status, headers: status
    monkeypatch.setitem(sys.modules, "starlette", ModuleType("starlette"))
    monkeypatch.setitem(sys.modules, "starlette.responses", responses)
    write_checkpoint(tmp_path / "checkpoint")
    replica = Replica.__new__(Replica)
    config = make_config(tmp_path, history_store={"kind": "none"})
    await replica.__init__(config, "127.0.0.1")  # type: ignore[misc]
    body = {"user_id": "u", "candidates": [FIRST_ID], "history": columns(events(20))}

    async def status(raw_path: str, host: str) -> Any:
        request: Any = SimpleNamespace(
            method="POST",
            headers={"host": host, "content-type": "application/json"},
            url=SimpleNamespace(path="/v1/rank", query=""),
            scope={"raw_path": raw_path.encode()},
            body=lambda: asyncio.sleep(0, json.dumps(body).encode()),
        )
        return await replica(request)

    try:
        assert await status("/v1/rank", "localhost:8090") == 200
        assert await status("/v1/rank", "evil.example") == 403
        assert await status("/v1/%72ank", "localhost:8090") == 404
    finally:
        await replica._stack.aclose()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The least of Ray that passes a change on: a broadcast calls `do` of each object."""
    replicas: list[Any] = []

    async def gather(change: Change) -> list[Any]:
        return await asyncio.gather(*(replica.do(change) for replica in replicas))

    def broadcast(method: str, change: Change) -> Any:
        assert method == "do"
        return SimpleNamespace(
            results_async=lambda timeout_s: gather(pickle.loads(pickle.dumps(change)))
        )

    serve = SimpleNamespace(
        get_deployment_handle=lambda name, app: SimpleNamespace(broadcast=broadcast)
    )
    modules: dict[str, dict[str, Any]] = {
        "ray": {"serve": serve},
        "ray.exceptions": {"RayError": type("RayError", (Exception,), {})},
        "ray.serve": {},
        "ray.serve.exceptions": {"RayServeException": type("RayServeException", (Exception,), {})},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return replicas


async def knows(replica: Replica) -> bool:
    async with replica._admin.post("/debug/user", json={"user_id": "ann"}) as answer:
        assert answer.status == 200
        return any((await answer.json())["places"].values())


async def test_an_erasure_is_done_when_every_replica_has_done_it(
    tmp_path: Path, told: list[Any]
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    replica = Replica.__new__(Replica)
    await replica.__init__(make_config(tmp_path), "127.0.0.1")  # type: ignore[misc]
    erasure = Change("DELETE", "/v1/users/ann", {"x-request-id": "of-the-caller"})
    try:
        rank = {"user_id": "ann", "candidates": [FIRST_ID], "history": columns(events(20))}
        async with replica._http.post("/v1/rank", json=rank) as answer:
            assert answer.status == 200
        assert await knows(replica)
        told.append(replica)
        assert (await replica._everywhere(erasure)).status == 204
        assert not await knows(replica)

        async def reject(_change: Change) -> tuple[str, Answered]:
            return "other", Answered(503, "it starts")

        told.append(SimpleNamespace(do=reject))
        told_no = await replica._everywhere(erasure)
        assert told_no.status == 503
        assert "not done at other (503)" in str(told_no.text)
        assert "of-the-caller" in str(told_no.text)

        async def break_off(_change: Change) -> None:
            raise TimeoutError("Timed out waiting for broadcast results.")

        told[1] = SimpleNamespace(do=break_off)
        told_nothing = await replica._everywhere(erasure)
        assert told_nothing.status == 503
        assert "Timed out" in str(told_nothing.text)
    finally:
        await replica._stack.aclose()


@pytest.mark.ray
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed: pip install 'npu_gr[ray]'",
)
async def test_replicas_with_an_npu_each_serve_their_users(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    sections = {
        "history_store": {"kind": "none"},
        "service": {"selfcheck_ratio": 0.0},
        "relay": {"t_life_s": 60.0},
    }
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(to_table(make_config(tmp_path, **sections)))
    )
    port = free_port()
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": os.getcwd(),
        "OMP_NUM_THREADS": "1",
    }
    # a busy machine
    environment |= {
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_agent_register_timeout_ms": "120000",
    }
    command = [
        sys.executable,
        "-m",
        "npu_gr",
        "fleet",
        "ray",
        "--config",
        str(tmp_path / "config.yaml"),
    ]
    command += [
        "--instances",
        "2",
        "--max-instances",
        "3",
        "--resource",
        "NPU",
        "--port",
        str(port),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: ASYNC220
    url, history = f"http://127.0.0.1:{port}/v1/", columns(events(48))
    try:
        async with aiohttp.ClientSession() as http:

            async def post(
                kind: str, user: str, **more: object
            ) -> tuple[int, dict[str, object], str]:
                body = {"user_id": user, "history": history, **more}
                async with http.post(url + kind, json=body, headers={"X-User-Id": user}) as answer:
                    found = await answer.json(content_type=None) if answer.status < 300 else {}
                    return answer.status, found, answer.headers.get("X-NpuGr-Instance", "")

            async def rank(user: str) -> tuple[str, str]:
                """Rank until it is answered: which replica did, and with what."""
                async with asyncio.timeout(300):
                    while True:
                        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                        with suppress(aiohttp.ClientError):
                            status, ranked, home = await post("rank", user, candidates=[1001, 1002])
                            if status == 200:
                                return home, str(ranked["reason"])
                        await asyncio.sleep(0.5)

            await rank("u")
            homes: dict[str, str] = {}
            for user in (f"u{i}" for i in range(30)):
                status, _, homes[user] = await post("signal", user)
                assert status == 202
                await asyncio.sleep(0.02)
                home, reason = await rank(user)
                assert home == homes[user]
                assert reason != "no_signal"
            assert len(set(homes.values())) == 2

            for user in list(homes)[:10]:  # half of them live where the erasure arrives
                async with http.delete(f"{url}users/{user}") as answer:
                    assert answer.status == 204, await answer.text()
                assert await rank(user) == (homes[user], "no_signal")

            lost = homes["u20"]
            os.kill(int(lost), signal.SIGKILL)
            for user, home in homes.items():
                there, _ = await rank(user)
                assert there == home or home == lost or there not in homes.values()
                assert there != lost
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        finally:
            process.kill()
