"""Put what `npu-gr calibrate` measured on an instance into the settings of a simulation."""

from __future__ import annotations

from pathlib import Path

import msgspec

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import load
from npu_gr.relay.config import Calibration
from npu_gr.simulate.config import DeviceProfile, SimulateConfig


def calibrated(config: SimulateConfig, path: Path) -> SimulateConfig:
    """Replace the cost model, the copy bandwidth and the token size of `config.device` by those of the file.

    The relay of the simulation reads the others from the file: Q_m, T_life and kv_p99.

    Raises:
        ConfigError: the file cannot be used, or `config.device` is a path.
    """
    measured = load(path, Calibration)
    if not isinstance(config.device, DeviceProfile):
        raise ConfigError("device: must be a section, not a path, with --calibration: it has the times of the host")
    device = msgspec.structs.replace(
        config.device,
        a0_s=measured.cost.a0,
        a1_s=measured.cost.a1,
        a2_s=measured.cost.a2,
        b0_s=measured.cost.b0,
        b1_s=measured.cost.b1,
        copy_bytes_per_s=measured.copy_bytes_per_s,
        kv_token_bytes=measured.kv_token_bytes,
    )
    return msgspec.structs.replace(config, device=device, calibration=measured)
