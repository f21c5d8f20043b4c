"""The instance under attack: one for all tests of a file, because it takes seconds to start."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fuzz.test_fuzz import Fuzzed, attacked


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fuzzed]:
    async with attacked(tmp_path_factory.mktemp("fuzz")) as one:
        yield one
