"""The native kernels, once for each instruction set that this CPU has."""

from __future__ import annotations

import pytest

from npu_gr.backend.native import ISAS, Native, load, supported


@pytest.fixture(scope="session", params=ISAS)
def native(request: pytest.FixtureRequest) -> Native:
    if request.param not in supported():
        pytest.skip(f"{request.param}: not this CPU's, or no library was built")
    return load(request.param)
