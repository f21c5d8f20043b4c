"""What one address opens, announces or asks beyond its rate takes nothing from the others.

And many tenants or time budgets cost an instance what one does.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest

from benchmarks.loadgen import LoadStream
from benchmarks.servers import Traffic, write_bodies
from npu_gr.model.weights import load
from tests.chaos.open_loop import Ask, OpenLoop
from tests.chaos.rig import SHORT, Bodies, Instance, Scale, check, drive_all, each_scale, running
from tests.keys import bearer, entry, write_keys

PER_S = 40.0
RATE_PER_S = 5.0  # of the greedy client's key
CONNECTIONS = 66  # of 4 MiB they announce more than `server.max_receiving_bytes`
ANNOUNCED = 4 << 20
WAVES = 5
MANY = 256
FAILED = 'npu_gr_slo_requests_total{kind="rank",result="failed"}'
OVER_RATE = 'npu_gr_admissions_total{kind="rank",verdict="over_rate"}'


def head(request: str) -> bytes:
    return (
        f"{request} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {ANNOUNCED}\r\n\r\n"
    ).encode()


async def silent(port: int, sent: bytes) -> None:
    """Announce a body that never comes, and again when the connection is closed."""
    for _ in range(WAVES):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            while await reader.read(1 << 16):
                pass
        except OSError:
            pass
        finally:
            writer.transport.abort()


@each_scale
async def test_one_address_shuts_nobody_out(
    scale: Scale, bodies: Bodies, checkpoint: Path, tmp_path: Path
) -> None:
    """Bodies that are announced without a key, and a key at forty times its rate."""
    keys = write_keys(
        tmp_path / "keys",
        entry("shop", tenant="shop"),
        entry("greedy", tenant="greedy", rate_per_s=RATE_PER_S),
        entry(),
    )
    instance = Instance(tmp_path, checkpoint, f"server.api_keys_file={keys}")
    instance.headers = bearer()

    def asked(name: str, per_s: float) -> OpenLoop:
        def ask(number: int) -> Ask:
            body = {**bodies.ranks[number % len(bodies.ranks)], "tenant": name}
            return Ask(body=body, headers=bearer(name))

        return OpenLoop(instance.url, ask, per_s)

    shops, greedy = asked("shop", PER_S), asked("greedy", RATE_PER_S * 40)
    async with running(instance):
        async with shops.running():
            quiet = await shops.over(scale.load_s / 2)
            from_at = time.monotonic()
            failed = await instance.metric(FAILED)
            hurting = [
                asyncio.create_task(silent(instance.port, head(request)))
                for request in ("GET /healthz", "POST /v1/rank")
                for _ in range(CONNECTIONS)
            ]
            async with greedy.running():
                hurt = await shops.over(scale.load_s)
            for task in hurting:
                task.cancel()
            await asyncio.gather(*hurting, return_exceptions=True)
        check(hurt, quiet, scale)
        refused = (await greedy.between(from_at, math.inf)).statuses
        assert set(refused) <= {200, 429}
        over_rate = await instance.metric(OVER_RATE)
        assert RATE_PER_S * scale.load_s < over_rate <= refused[429]
        # those refusals burn no budget; what a busy machine refuses does
        busy = len((await shops.between(from_at, math.inf)).failed) + refused[429] - over_rate
        assert await instance.metric(FAILED) - failed <= busy


@each_scale
async def test_many_tenants_and_budgets_cost_what_one_does(
    scale: Scale, checkpoint: Path, tmp_path: Path
) -> None:
    ranker = load(checkpoint)

    def written(name: str, tenants: int = 0, budgets_ms: tuple[float, float] = (5e3, 5e3)) -> Path:
        ranks = Traffic(num_users=MANY, num_tenants=tenants).bodies(ranker, "", 1, name)
        return write_bodies(tmp_path / name, ranks, budgets_ms, copies=1)

    files = {
        "one": written("one"),
        "tenants": written("tenants", tenants=MANY),
        "budgets": written("budgets", budgets_ms=(4e3, 6e3)),
    }
    rounds, each_s = (2, 0.5) if scale is SHORT else (2, 10.0)
    loads = [
        LoadStream(
            name=f"{name} {round_}",
            mode="closed",
            bodies=files[name],
            from_s=each_s * place,
            to_s=each_s * (place + 1),
            connections=4,
        )
        for place, (round_, name) in enumerate((n, name) for n in range(rounds) for name in files)
    ]
    async with running(Instance(tmp_path, checkpoint)) as instance:
        report = await drive_all(instance, loads, deadline_s=5.0)
    cpu_s = dict.fromkeys(files, float("inf"))
    for one in loads:
        counts = report.stream(one.name)
        assert counts.other + counts.errors + counts.timeouts == 0, counts
        assert counts.answered > counts.rejected  # of a busy machine
        name = one.name.split()[0]
        cpu_s[name] = min(cpu_s[name], counts.server_cpu_s / counts.answered)
    most = 2.5 if scale is SHORT else 1.25  # the CPU of a request depends on what runs beside
    assert {name: spent / cpu_s["one"] for name, spent in cpu_s.items()} == pytest.approx(
        dict.fromkeys(files, 1.0), abs=most - 1
    )
