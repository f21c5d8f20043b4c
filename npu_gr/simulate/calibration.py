"""What `npu-gr calibrate` found of an instance, put into a simulation in place of the same settings there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from npu_gr.errors import ConfigError
from npu_gr.settings import load
from npu_gr.simulate.config import DeviceProfile, SimulateConfig


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """`engine/cost.py`'s coefficients, in seconds."""

    a0: float
    a1: float
    a2: float
    b0: float
    b1: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `<config>.calibration.yaml` that a simulation reads."""

    cost: CostTable
    q_m: float | None = None  # pre-infers a second
    t_life_s: float | None = None


def calibrated(config: SimulateConfig, path: Path) -> SimulateConfig:
    """The settings with the file's cost model, Q_m and T_life.

    Raises:
        ConfigError: the file cannot be used, or the device is in a file of its own.
    """
    found = load(path, Calibration)
    if not isinstance(config.device, DeviceProfile):
        raise ConfigError("device: with a calibration it must be a section, not a path: the rest of it is needed")
    cost = {f"{name}_s": value for name, value in msgspec.structs.asdict(found.cost).items()}
    replace = msgspec.structs.replace
    relay, trigger = config.relay, config.trigger
    return replace(
        config,
        device=replace(config.device, **cost),
        relay=relay if found.t_life_s is None else replace(relay, t_life_s=found.t_life_s),
        trigger=trigger if found.q_m is None else replace(trigger, q_m_per_s=found.q_m),
    )
