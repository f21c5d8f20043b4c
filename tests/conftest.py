"""One thread a test process: the runner already uses every core, and threads that spin for each other cost more."""

import os

import pytest

from tests.certificates import Authority

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of tests."""
    return Authority(tmp_path_factory.mktemp("authority"))
