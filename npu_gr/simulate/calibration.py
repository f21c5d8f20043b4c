"""What `npu-gr calibrate` found of an instance, put into a simulation in place of the same settings there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import load
from npu_gr.relay.calibration import Calibration
from npu_gr.simulate.config import DeviceProfile, SimulateConfig


def calibrated(config: SimulateConfig, path: Path) -> SimulateConfig:
    """The settings with the file's cost model, copies and token size; its Q_m, T_life and kv_p99 are for the relay.

    Raises:
        ConfigError: the file cannot be used, or the device is in a file of its own.
    """
    found = load(path, Calibration)
    if not isinstance(config.device, DeviceProfile):
        raise ConfigError("device: with a calibration it must be a section, not a path: the host's times are in it")
    device = msgspec.structs.replace(
        config.device,
        a0_s=found.cost.a0,
        a1_s=found.cost.a1,
        a2_s=found.cost.a2,
        b0_s=found.cost.b0,
        b1_s=found.cost.b1,
        copy_bytes_per_s=found.copy_bytes_per_s,
        kv_token_bytes=found.kv_token_bytes,
    )
    return msgspec.structs.replace(config, device=device, calibration=found)
