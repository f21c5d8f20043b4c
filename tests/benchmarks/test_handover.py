"""What the clients of `benchmarks handover` see, and the lines that follow from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from benchmarks import handover
from benchmarks.frame import Line
from benchmarks.handover import Pair, Run, Users, compared_runs, described, summed
from npu_gr.core.errors import ConfigError

NUM = 6
BODIES: list[dict[str, Any]] = [
    {"user_id": f"user-{number}", "tenant": "", "history": {}, "candidates": []}
    for number in range(NUM)
]
EVENT_AT = 1000.0
HIT = Pair(
    user=0,
    due_at=0.0,
    took_s=0.01,
    signal=202,
    verdict="already_resident",
    rank=200,
    outcome="hbm_hit",
    instance="a",
    scores="1.0",
)


async def answered(request: web.Request) -> web.Response:
    """Answer as an instance behind a router; it has no prefix of user 1, and rejects user 2."""
    user = int(request.headers["X-User-Id"].rpartition("-")[2])
    body = await request.json()
    assert body["user_id"] == f"user-{user}"
    assert ("candidates" in body) == (request.path == "/v1/rank")
    if request.path == "/v1/signal":
        verdict = "preinfer" if user == 1 else "already_resident"
        return web.json_response({"verdict": verdict}, status=202)
    if user == 2:
        return web.json_response({}, status=503)
    return web.json_response(
        {"outcome": "hbm_hit", "scores": {"click": [float(user)]}},
        headers={"X-NpuGr-Instance": "a"},
    )


async def test_clients_ask_before_and_after_the_event() -> None:
    app = web.Application()
    app.router.add_post("/v1/{kind}", answered)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    seen: list[int] = []
    try:
        users = Users(runner.addresses[0][1], BODIES, lead_s=0.0)
        await users.warm_up()
        assert len(users.pairs) == handover.ROUNDS * NUM
        at, _ = await users.load(200.0, 0.2, lambda: seen.append(len(users.pairs)), 0)
    finally:
        await runner.cleanup()
    assert len(seen) == 1
    assert len(users.pairs) == handover.ROUNDS * NUM + 80
    assert sum(pair.due_at >= at for pair in users.pairs) == 40
    assert users.in_flight == 0
    for pair in users.pairs:
        assert pair.is_hit == (pair.user not in (1, 2))
        assert pair.num_failed == (pair.user == 2)
        want = "null" if pair.user == 2 else f'{{"click": [{pair.user}.0]}}'
        assert pair.scores == want


def run(*after: Pair, **fetched: int) -> Run:
    """A warm-up, a rank of users 0 to 4 before the event, and then `after`."""
    warm = [replace(HIT, user=user) for user in range(NUM)] * handover.ROUNDS
    before = [replace(HIT, user=user, due_at=EVENT_AT - 1) for user in range(NUM - 1)]
    late = [replace(pair, due_at=EVENT_AT + pair.due_at) for pair in after]
    clients: Any = SimpleNamespace(pairs=[*warm, *before, *late])
    return summed(clients, BODIES, EVENT_AT, 1, Counter(fetched))


MOVED = replace(HIT, instance="b")
WELL = run(
    MOVED,
    replace(MOVED, user=1, verdict="preinfer"),
    replace(MOVED, user=1, due_at=1.0),
    replace(HIT, user=2),
    replace(HIT, user=5),  # seen in the warm-up alone
)


def by_name(pool: Run, alone: Run) -> dict[tuple[str, str], Line]:
    return {(line.case, line.baseline): line for line in compared_runs("x", pool, alone)}


def test_hits_are_of_prefixes_that_were_found() -> None:
    assert (WELL.before.hits, WELL.after.hits) == (1.0, 0.8)
    assert [pair.user for pair in WELL.first.pairs] == [0, 1]
    assert WELL.first.hits == 0.5
    found = by_name(WELL, WELL)
    assert found["x: hits after it", "before it"].ok is False
    assert found["x: P99 after it", "before it"].ok
    assert all(line.ok is not False for key, line in found.items() if "hits" not in key[0])
    assert "80.0% hits" in described("planned", "pool", WELL)


def test_a_fetch_that_led_to_nothing_is_no_hit() -> None:
    most = run(MOVED, HIT, pool_hit=9, slower=9, busy=9, absent=1)
    assert most.after.hits == 0.5
    assert by_name(most, most)["x: hits after it", "before it"].ok is False
    assert {"absent", "torn", "forged", "timeout"} <= handover.FRUITLESS


def test_what_fails_or_differs_misses_its_target() -> None:
    lost = replace(HIT, rank=0, outcome="", instance="", scores="null")
    no_signal = replace(HIT, signal=503, verdict="")
    for late, names in (
        ([lost], set[str]()),  # it was on its way
        ([lost, no_signal], {"x: requests without an answer"}),
        ([replace(HIT, scores="1.0000001")], {"x: ranks with another score"}),
        ([replace(HIT, took_s=1.0)], {"x: P99 after it"}),
    ):
        ill = run(*late, *[HIT] * 30)
        missed = {key[0] for key, line in by_name(ill, ill).items() if line.ok is False}
        assert missed == names


def test_without_mooncake_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(_num_bytes: int) -> None:
        raise ImportError("libibverbs.so.1")

    monkeypatch.setattr(handover, "mooncake", missing)
    given: dict[str, Any] = {
        "config": tmp_path, "tokens": 20, "layers": 1, "users": 2, "rate": 1.0, "seconds": 1.0,
        "lead": 0.0, "parts": ("planned",), "overrides": (), "seed": 0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="libibverbs"):
        list(handover.lines(**cast(Any, given)))
