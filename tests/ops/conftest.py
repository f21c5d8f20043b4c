"""The emulator, compiled once: workers and later runs reuse a build with the same source hash."""

from __future__ import annotations

import shutil

import pytest

from tests.ops.ascend_emulator import Emulator


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the CPU emulator of the Ascend C kernels cannot be built")
    return Emulator()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`mutation` takes minutes: it runs where it is asked for, `-m mutation`."""
    if "mutation" in str(config.getoption("-m")):
        return
    for item in items:
        if item.get_closest_marker("mutation"):
            item.add_marker(
                pytest.mark.skip(reason="minutes of mutants: ask for them with -m mutation")
            )
