"""Both stores, for tests of what every store does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from npu_gr.core.secret import SecretUrl
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig, HistoryStore
from tests.history_store.redis_server import redis_path


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_path(tmp_path_factory.mktemp("redis")) as path:
        yield f"unix://{path}"


@pytest.fixture(params=["embedded", "redis"])
async def config(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HistoryConfig]:
    if request.param == "embedded":
        yield HistoryConfig(
            kind="embedded", path=str(tmp_path / "deep" / "h.db"), max_events_per_user=1000
        )
        return
    import redis.asyncio as redis

    url = request.getfixturevalue("redis_url")
    async with redis.from_url(url) as client:
        await client.flushall()
    yield HistoryConfig(kind="redis", url=SecretUrl(url), max_events_per_user=1000, timeout_s=30.0)


@pytest.fixture
async def store(config: HistoryConfig) -> AsyncIterator[HistoryStore]:
    opened = await open_store(config)
    assert opened is not None
    yield opened
    await opened.close()
