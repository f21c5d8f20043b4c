"""Work beside a block ends with it."""

from __future__ import annotations

import asyncio

import pytest

from npu_gr.core.lifetime import running


async def test_work_runs_until_the_block_ends_and_has_ended_then() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            seen.append("begun")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # its end takes turns of the loop, too
            seen.append("ended")

    async def fails() -> None:
        async with running(work()):
            await asyncio.sleep(0)
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        await fails()
    assert seen == ["begun", "ended"]


async def test_work_that_fails_leaves_the_block_alone_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        raise RuntimeError("of the work")

    async with running(work()):
        await asyncio.sleep(0)
    assert "a background task failed" in caplog.text
    assert "of the work" in caplog.text
