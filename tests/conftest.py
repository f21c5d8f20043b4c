"""One thread a test process, because the runner already uses every core.

Threads that spin for each other cost more: a test that trains on two leaves one behind. The garbage
collector rests while tests are collected, and never looks at what that leaves: a million objects
that stay.
"""

import gc
import os
import resource
import sys
from pathlib import Path

import pytest
from aiohttp import web_app

from npu_gr.core.process import freeze_imports
from tests.certificates import Authority

GROWTH_BYTES = 512 << 20  # after which garbage is collected; instances in it hold tensors

gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `set_up_process` has it


def pytest_collection_finish() -> None:
    """Let the collector work again, on what tests make."""
    gc.enable()
    freeze_imports()


def pytest_runtest_logfinish() -> None:
    """Take back the threads of finished tests, and free their instances, 42 MB each.

    aiohttp keeps the last 1,024 handlers, and with them a hundred instances; the collector counts
    objects, and not their bytes.
    """
    global _freed_at_bytes
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # commands that train set two, of the process
    web_app._cached_build_middleware.cache_clear()
    if _resident_bytes() > _freed_at_bytes + GROWTH_BYTES:
        gc.collect()
        _freed_at_bytes = _resident_bytes()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


_freed_at_bytes = 0


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of tests."""
    return Authority(tmp_path_factory.mktemp("authority"))
