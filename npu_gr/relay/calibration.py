"""The measurements of `npu-gr calibrate`, kept in a file beside the configuration that they belong to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from npu_gr.core.settings import Count, Positive, Seconds, SomeBytes
from npu_gr.engine.cost import CostModel


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint on one device under one traffic. The symbols are those of `trigger.py`."""

    version: str  # of the checkpoint
    device: str  # its name and kernels
    cost: CostModel  # seconds
    copy_bytes_per_s: Positive  # from DRAM to HBM
    kv_token_bytes: SomeBytes  # keys and values of one token, all layers
    kv_p99_tokens: Count  # P99 of the length of a prefix
    t_life_s: Seconds  # T_life: P99 of the time from a signal to the end of its rank
    q_m_per_s: Positive  # Q_m: pre-infers of kv_p99_tokens tokens a second, on a device that does nothing else


def beside(config_path: Path) -> Path:
    """Return the path of the calibration file of a configuration file."""
    return config_path.with_suffix(".calibration.yaml")
