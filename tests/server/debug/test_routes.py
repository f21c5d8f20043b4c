"""The debug routes tell what a process does, keep secrets, and let it go on serving."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import Overloaded
from npu_gr.server.debug.stacks import Profiler, folded_stacks
from tests.keys import bearer, write_keys
from tests.models import events
from tests.serving import FIRST_ID, columns, serving
from tests.sources import ROOT

RANK = {"user_id": "somebody", "candidates": [FIRST_ID], "history": columns(events(20))}


def unpacked(data: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        files = {one.name: archive.extractfile(one) for one in archive.getmembers()}
        return {
            name.partition("/")[2]: file.read().decode()
            for name, file in files.items()
            if file is not None
        }


async def test_they_need_a_key(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys")
    async with serving(tmp_path, watched=False, server={"api_keys_file": keys}) as (client, _):
        for path in ("/debug/stacks", "/debug/profile?seconds=1", "/debug/bundle"):
            assert (await client.get(path)).status == 401
        allowed = await client.get("/debug/stacks", headers=bearer())
        assert allowed.status == 200
        assert "MainThread" in await allowed.text()


async def test_the_bundle_is_whole_and_names_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        config = service.parts.settings.config
        assert (
            await client.post("/v1/rank", json=RANK, headers={"X-Request-Id": "the-first"})
        ).status == 200
        answer = await client.get("/debug/bundle")
        assert answer.content_type == "application/gzip"
        assert re.search(
            r'filename="npu_gr-\d{8}T\d{6}Z\.tar\.gz"', answer.headers["Content-Disposition"]
        )
        files = unpacked(await answer.read())
    assert set(files) == {
        *(
            "config.json",
            "status.json",
            "metrics.txt",
            "requests.jsonl",
            "stacks.txt",
            "log.txt",
            "environment.json",
        ),
    }
    assert json.loads(files["config.json"])["checkpoint"] == config.checkpoint
    assert json.loads(files["status.json"])["ready"] is True
    assert "npu_gr_log_lines_dropped_total" in files["metrics.txt"]
    assert json.loads(files["requests.jsonl"].splitlines()[-1])["request_id"] == "the-first"
    assert "MainThread" in files["stacks.txt"]
    environment = json.loads(files["environment.json"])
    assert environment["packages"]["aiohttp"]
    assert not [name for name in environment["variables"] if "KEY" in name or "TOKEN" in name]
    assert not [name for name, text in files.items() if "somebody" in text]


async def test_credentials_stay_in_the_process(tmp_path: Path) -> None:
    async with serving(tmp_path, watched=False) as (client, service):
        table = await service.effective_config()
        table["history_store"]["url"] = "redis://me:s3cret@db:6379/0"

        async def with_a_password() -> dict[str, Any]:
            return table

        service.effective_config = with_a_password  # type: ignore[method-assign]
        assert "redis://***@db:6379/0" in await (await client.get("/debug/config")).text()
        files = unpacked(await (await client.get("/debug/bundle")).read())
    assert "redis://***@db:6379/0" in files["config.json"]
    assert not [name for name, text in files.items() if "s3cret" in text]


async def test_a_profile_is_taken_beside_requests_one_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        both = [asyncio.create_task(client.get("/debug/profile?seconds=1")) for _ in range(2)]
        assert (await client.post("/v1/rank", json=RANK)).status == 200
        taken, rejected = sorted(await asyncio.gather(*both), key=lambda answer: answer.status)
        assert (taken.status, rejected.status) == (200, 429)
        assert "another profile" in (await rejected.json())["detail"]
        text = await taken.text()
        for seconds in ("0", "61", "nan", "inf", "x", ""):
            bad = await client.get(f"/debug/profile?seconds={seconds}")
            assert bad.status == 400, seconds
            assert "is not a number from 1 to 60" in (await bad.json())["detail"]
    lines = text.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(r".+;.+ \d+", line), line
    assert any(line.startswith("MainThread;") for line in lines)


async def test_a_caller_that_leaves_ends_its_profile() -> None:
    profiler = Profiler()
    first = asyncio.create_task(profiler.profile(60.0))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await profiler.profile(60.0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await profiler.profile(0.1)  # the next one may


def test_the_busy_function_is_on_top() -> None:
    stop = threading.Event()

    def burns() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=burns, name="burner")
    thread.start()
    text = folded_stacks(0.5, threading.Event())
    stop.set()
    thread.join()
    burning = [line for line in text.splitlines() if line.startswith("burner;")]
    assert sum("burns (" in line for line in burning) == len(burning) > 0


async def test_runbooks_are_named_and_read(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        names = (await (await client.get("/debug/runbooks")).text()).split()
        assert set(names) == {page.stem for page in (ROOT / "docs/runbooks").glob("*.md")}
        for name in names:
            async with client.get("/debug/runbooks", params={"name": name}) as response:
                assert response.content_type == "text/plain"
                assert await response.text() == (ROOT / "docs/runbooks" / f"{name}.md").read_text()
        for name in ("", "nothing", "..", "../http", "/etc/passwd", "x" * 1000):
            async with client.get("/debug/runbooks", params={"name": name}) as bad:
                assert bad.status == 404, name
                assert len(await bad.text()) < 500
