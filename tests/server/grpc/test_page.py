"""The examples of docs/protocols.md run as they stand, in order, against a real instance."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.client.shop import shop
from tests.ports import free_port
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "protocols.md").read_text()


async def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    port = free_port()
    async with shop(tmp_path, grpc_port=port) as (url, _):
        names: dict[str, object] = {}

        def run(code: str) -> None:
            code = code.replace("localhost:8080", url.removeprefix("http://").rstrip("/"))
            code = code.replace("localhost:8083", f"127.0.0.1:{port}")
            # a busy machine
            code = code.replace("timeout=0.3", "timeout=30").replace("300_000", "30_000_000")
            exec(compile(code, "docs/protocols.md", "exec"), names)  # noqa: S102  (ours)

        def run_all() -> None:  # in one thread, as gevent wants it
            try:
                for code in blocks:
                    run(code)
            finally:
                for client in ("client", "over_grpc"):
                    names[client].close()  # type: ignore[attr-defined]

        await asyncio.to_thread(run_all)
    written = capsys.readouterr().out
    assert (
        "['scores.click', 'scores.like', 'top', 'top.names', 'titles', 'missing_features']"
    ) in written
    assert re.search(r"\[ ?-?[\d.]+ +-?[\d.]+ +nan\] \[b'(SKU-0005-C|30)'", written), written
