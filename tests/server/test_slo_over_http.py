"""The error budget is the server's: callers' mistakes count apart, and no recording moves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from npu_gr.core.errors import Overloaded, Rejection, StoreFailed
from tests.keys import secret, write_keys
from tests.metrics.test_rules import RULES, promtool
from tests.server.examples import EXAMPLES
from tests.server.raw import Site, site

KIND = "recommend"  # the most patient objective: a busy machine makes no answer slow
KEY = secret("all").encode()
BODY = json.dumps(EXAMPLES[KIND].body).encode()
HEAD = (
    b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: "
    b"Bearer " + KEY + b"\r\n"
)
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
RESULTS = ("good", "slow", "failed")
MALFORMED = (
    HEAD + b"Content-Length: x\r\n\r\n",
    b"nonsense\r\n\r\n",
    b"GET / HTTP/1.1\r\nno header\r\n\r\n",
    b"GET /healthz\r\n\r\n",  # as HTTP/0.9
    b"GET /healthz\nX: HTTP/1.1\r\n\r\n",
    HEAD + b"Content-Length: 3\r\n\r\n{{{",
    HEAD + b"Content-Length: 2\r\n\r\n{}",
    WHOLE.replace(b"Host: x", b"Host: x\r\nX-Request-Timeout-Ms: soon"),
    WHOLE.replace(b"Host: x", b"Host: x\r\nContent-Encoding: gzip"),
    WHOLE.replace(b"application/json", b"text/plain"),
)


@asynccontextmanager
async def keyed(folder: Path) -> AsyncIterator[Site]:
    async with site(api_keys_file=write_keys(folder / "keys"), body_timeout_s=20.0) as at:
        yield at


async def ask(at: Site, sent: bytes) -> int:
    raw = await at.connect()
    raw.send(sent)
    status = (await raw.answer())[0]
    raw.writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await raw.writer.wait_closed()
    at.raws.remove(raw)
    return status


def granting(ms: float, sent: bytes = WHOLE) -> bytes:
    return sent.replace(b"Host: x", b"Host: x\r\nX-Request-Timeout-Ms: %g" % ms)


async def trickle(at: Site, sent: bytes, seconds: float) -> int:
    """Take so long for the body."""
    raw = await at.connect()
    for part in range(4):
        raw.send(sent[-10 * (4 - part) : (-10 * (3 - part)) or None] if part else sent[:-30])
        if part < 3:
            await asyncio.sleep(seconds / 3)
    return (await raw.answer())[0]


def counted(at: Site) -> dict[str, float]:
    """The requests as the objectives count them."""
    return {
        result: at.count("slo_requests_total", kind=KIND, result=result) or 0.0
        for result in RESULTS
    }


def admitted(at: Site, verdict: str) -> float | None:
    return at.count("admissions_total", kind=KIND, verdict=verdict)


def recorded(folder: Path, counts: dict[str, float], burn: float) -> None:
    """The real rules record this burn rate of both promises when the counters come to that."""
    (folder / "rules.yml").write_text(yaml.safe_dump(RULES))
    series = [
        {
            "series": f'npu_gr_slo_requests_total{{kind="{KIND}",result="{result}"}}',
            "values": f"0x5 {count:g}x10",
        }
        for result, count in counts.items()
    ]
    exprs = [
        {
            "expr": f"{name}{{{labels}}}",
            "eval_time": "10m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for name, labels, value in (
            ("sum(round(slo:current_burn_rate:ratio", f'sloth_slo="{KIND}-availability"', burn),
            ("sum(round(slo:current_burn_rate:ratio", f'sloth_slo="{KIND}-latency"', 0),
        )
    ]
    for expr in exprs:
        expr["expr"] = f"{expr['expr']}))"
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": exprs}]
    (folder / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    done = promtool("test", "rules", str(folder / "tests.yml"))
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]


async def test_what_callers_do_wrong_leaves_the_objectives_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed(tmp_path) as at:
        for _ in range(19):
            assert await ask(at, WHOLE) == 200
        before = counted(at)
        assert before == {"good": 19, "slow": 0, "failed": 0}
        with caplog.at_level(logging.WARNING):
            for _ in range(50):
                assert await ask(at, WHOLE.replace(b"Bearer " + KEY, b"Bearer \xff")) == 401
            for turn in range(50):
                assert await ask(at, MALFORMED[turn % len(MALFORMED)]) in (400, 415, 422)
            for _ in range(20):
                assert await ask(at, granting(0.01)) in (429, 504)
            assert await trickle(at, granting(500), 1.3) == 408
        assert not any(
            record.exc_info or "Traceback" in record.getMessage() for record in caplog.records
        )
        assert sum("aiohttp" in record.name for record in caplog.records) == 0
        assert counted(at) == before
        # in time: it was its caller who took 1.3 s
        assert await trickle(at, granting(30_000), 1.3) == 200
        assert counted(at) == {"good": 20, "slow": 0, "failed": 0}
        assert admitted(at, "impossible") == 20
        assert at.count("requests_total", route="/v1/recommend", code="408") == 1
        assert at.count("slo_attainment_ratio", kind=KIND, slo="availability", window="5m") == 1.0
        assert at.count("slo_budget_remaining_ratio", kind=KIND, slo="availability") == 1.0
        after = counted(at)
    recorded(tmp_path, after, burn=0)


async def test_what_the_server_does_wrong_burns_the_budget(tmp_path: Path) -> None:
    """One request of 20 that the server fails is a twentieth, 50 times what may be lost."""
    async with keyed(tmp_path) as at:
        for _ in range(19):
            assert await ask(at, WHOLE) == 200
        at.service.answers[KIND] = StoreFailed("the disk is full")
        assert await ask(at, granting(1.0)) in (503, 504)  # whatever its caller grants
        if admitted(at, "impossible"):
            assert await ask(at, WHOLE) == 503
        assert counted(at) == {"good": 19, "slow": 0, "failed": 1}
        after = counted(at)
    recorded(tmp_path, after, burn=50)


async def test_a_key_over_its_rate_burns_no_budget(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        at.service.answers[KIND] = Overloaded(
            "the key may send 5 requests a second", reason=Rejection.RATE
        )
        for _ in range(10):
            assert await ask(at, WHOLE) == 429
        assert counted(at) == {"good": 0, "slow": 0, "failed": 0}
        assert admitted(at, "over_rate") == 10
        at.service.answers[KIND] = Overloaded("the queue is full", reason=Rejection.QUEUE)
        assert await ask(at, WHOLE) == 429
        assert counted(at) == {"good": 0, "slow": 0, "failed": 1}
