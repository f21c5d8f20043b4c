"""On Ray, signal and rank of a user meet in one replica; the scaling rule follows queue and SLO."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import to_table
from npu_gr.route.ray_serve import QUEUE_DEPTH, RayOptions, RayReplica, wanted
from tests.models import events
from tests.route.fake import free_port
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
    assert wanted(current, depths, late, OPTIONS) == want


def test_more_at_least_than_at_most_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_instances: 1"):
        RayOptions(2, 1)


class Replica(RayReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Do nothing: it is Ray that awaits a destructor."""


async def test_a_replica_serves_callers_what_is_public_and_reads_its_own_metrics(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    replica = Replica.__new__(Replica)
    await replica.__init__(make_config(tmp_path, features={"kind": "none"}))  # type: ignore[misc]
    try:
        body = {"user_id": "u", "candidates": [FIRST_ID], "history": columns(events(20))}
        shop = {"Host": "shop.example"}  # Ray's proxy alone reaches the socket, so any name is its callers'
        async with replica._http.post("/v1/rank", json=body, headers=shop) as answer:
            assert answer.status == 200
        async with replica._http.post("/v1/rank", json=body, headers={**shop, "Origin": "http://evil"}) as answer:
            assert answer.status == 403
        for path in ("/metrics", "/debug/config"):
            async with replica._http.get(path) as answer:
                assert answer.status == 404
        assert (await replica.record_autoscaling_stats())[QUEUE_DEPTH] == 0.0
    finally:
        await replica._stack.aclose()


@pytest.mark.ray
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'npu_gr[ray]'")
async def test_two_replicas_with_an_npu_each_serve_their_users(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    table = to_table(make_config(tmp_path, features={"kind": "none"}, service={"selfcheck_ratio": 0.0}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(table))
    port = free_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "npu_gr", "fleet", "ray", "--config", str(tmp_path / "config.yaml")]
    command += ["--instances", "2", "--max-instances", "3", "--resource", "NPU", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: ASYNC220
    url, history = f"http://127.0.0.1:{port}/v1/", columns(events(48))
    try:
        async with aiohttp.ClientSession() as http:

            async def post(kind: str, user: str, **more: object) -> tuple[int, dict[str, object], str]:
                body = {"user_id": user, "history": history, **more}
                async with http.post(url + kind, json=body, headers={"X-User-Id": user}) as answer:
                    found = await answer.json(content_type=None) if answer.status < 300 else {}
                    return answer.status, found, answer.headers.get("X-NpuGr-Instance", "")

            async with asyncio.timeout(150):
                while True:
                    assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                    try:
                        if (await post("rank", "u", candidates=[1001]))[0] == 200:
                            break
                    except aiohttp.ClientError:
                        pass
                    await asyncio.sleep(0.5)
            homes = set()
            for i in range(30):
                status, _, home = await post("signal", f"u{i}")
                assert status == 202
                await asyncio.sleep(0.02)
                status, ranked, there = await post("rank", f"u{i}", candidates=[1001, 1002])
                assert (status, there) == (200, home)
                assert ranked["reason"] != "no_signal"
                homes.add(home)
            assert len(homes) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        finally:
            process.kill()
