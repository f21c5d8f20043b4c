"""Commands call an instance over TLS or mutual TLS, and trust only whom they were told to."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from npu_gr.core.calling import VARIABLES, calling_context
from npu_gr.core.errors import ConfigError
from tests.certificates import Authority
from tests.server.test_tls import Running, serving_tls


@pytest.fixture
async def instance(authority: Authority) -> AsyncIterator[Running]:
    # on loopback it would speak in clear
    settings = {"admin_host": "0.0.0.0", "allow_unauthenticated": True}
    async with serving_tls(authority, authority.ca, **settings) as one:
        yield one


async def run(*words: str) -> tuple[int, str]:
    """Run a command; returns its exit code and what it wrote."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "npu_gr", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )
    async with asyncio.timeout(120):
        written, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, written.decode()


def files(authority: Authority) -> Sequence[str]:
    own = authority.issue("operator")
    return ("--ca", str(authority.ca), "--cert", str(own.certificate), "--cert-key", str(own.key))


async def test_a_replay(authority: Authority, instance: Running, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = (
        {"ts": 0.01 * i, "kind": "rank", "user_id": f"u{i}", "candidates": [1, 2, 3]}
        for i in range(20)
    )
    log.write_text("".join(json.dumps(one) + "\n" for one in lines))
    words = (
        "replay",
        str(log),
        "--url",
        instance.url,
        "--no-signals",
        "--closed",
        "1",
        "--timeout-ms",
        "20000",
    )
    code, text = await run(*files(authority), *words)
    assert code == 0, text
    answered = [
        instance.count("requests_total", route="/v1/rank", code=code) or 0
        for code in ("200", "429")
    ]
    assert sum(answered) == 20, text  # on a busy machine some are rejected
    assert answered[0] > 0, text


async def test_a_status_of_the_recorder(authority: Authority, instance: Running) -> None:
    words = ("record", "--status", "--url", instance.admin_url)
    code, text = await run(*files(authority), *words)
    # it was asked, and has no recorder
    assert (code, text) == (2, "npu-gr: the service answered 404: Not Found\n")
    code, text = await run(*words)  # trusts nobody
    assert code == 2
    assert "certificate" in text.lower(), text


def test_files_that_cannot_be_used_are_rejected(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    calling_context()
    monkeypatch.setenv("NPU_GR_CA", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--ca, .*none: not usable for TLS: No such file"):
        calling_context()
    monkeypatch.setenv("NPU_GR_CA", "")
    monkeypatch.setenv("NPU_GR_CERT", str(authority.ca))
    with pytest.raises(
        ConfigError,
        match=r"NPU_GR_CERT_KEY\): certificate, key: give both or "
        r"neither",
    ):
        calling_context()
