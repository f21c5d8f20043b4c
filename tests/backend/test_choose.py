"""One process uses one device: `device` picks it by hiding the others."""

from __future__ import annotations

import os

import pytest

from npu_gr.backend.choose import choose
from npu_gr.core.errors import ConfigError


@pytest.mark.parametrize(
    ("seen", "device", "now"), [(None, 3, "3"), ("2,3", 1, "3"), ("GPU-1f, GPU-2e", 0, "GPU-1f")]
)
def test_the_process_sees_only_its_device(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, device: int, now: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose("cuda", device=device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == now


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="device: 2, but ASCEND_RT_VISIBLE_DEVICES has 2: 4,5"):
        choose("npu", device=2)
    with pytest.raises(ConfigError, match="device: is for the backends cuda and npu, not cpu"):
        choose("cpu", device=0)
