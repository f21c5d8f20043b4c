"""The examples of docs/client.md run as they stand, in order, against a real instance."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.client.shop import shop
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "client.md").read_text()


async def test_the_examples_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) >= 7
    assert PAGE.count("http://localhost:8080") == PAGE.count("timeout_s=0.3") == 2
    monkeypatch.chdir(tmp_path)
    async with shop(tmp_path) as (url, _):
        names: dict[str, object] = {}

        def run(code: str) -> None:
            # a busy machine
            code = code.replace("http://localhost:8080", url).replace(
                "timeout_s=0.3", "timeout_s=30"
            )
            exec(compile(code, "docs/client.md", "exec"), names)  # noqa: S102  (ours)

        for block in blocks:
            await asyncio.to_thread(run, block)
        written = capsys.readouterr().out
        await asyncio.to_thread(names["client"].close)  # type: ignore[attr-defined]
    assert "422 history.actions history.actions:" in written
    assert "it has view, cart, purchase" in written
    assert "nan" not in written
    assert "Thing no. " in written
