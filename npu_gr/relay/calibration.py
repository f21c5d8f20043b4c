"""What `npu-gr calibrate` has measured, kept beside the configuration it was measured with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from npu_gr.engine.cost import CostModel

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one checkpoint on one device under one traffic; symbols as in `trigger.py`."""

    version: str  # of the checkpoint
    device: str  # its name and kernels
    cost: CostModel  # seconds
    copy_bytes_per_s: Positive  # from DRAM to HBM
    kv_token_bytes: Count  # keys and values of one token, all layers
    kv_p99_tokens: Count  # 99 of 100 prefixes are no longer
    t_life_s: Positive  # from a signal to the end of its rank, of 99 of 100
    q_m_per_s: Positive  # Q_m: pre-infers of kv_p99_tokens that the device completes when it does nothing else


def beside(config_path: Path) -> Path:
    """Where the calibration of a configuration file lies."""
    return config_path.with_suffix(".calibration.yaml")
