"""One thread a test process, because the runner already uses every core.

Threads that spin for each other cost more. The garbage collector rests while tests are collected,
and never looks at what that leaves: a million objects that stay.
"""

import gc
import os

import pytest

from npu_gr.core.process import freeze_imports
from tests.certificates import Authority

gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Let the collector work again, on what tests make."""
    gc.enable()
    freeze_imports()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of tests."""
    return Authority(tmp_path_factory.mktemp("authority"))
