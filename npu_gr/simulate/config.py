"""The settings of a simulation. `configs/simulate.yaml` lists them with their meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from npu_gr.core.errors import ConfigError
from npu_gr.core.setting_types import IN_BYTES
from npu_gr.core.settings import (
    Count,
    Positive,
    Ratio,
    Seconds,
    SecondsOrZero,
    SomeBytes,
    load,
)
from npu_gr.engine.cost import CostModel
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.relay.brownout import BrownoutConfig
from npu_gr.relay.config import Calibration, RelayConfig, TriggerConfig
from npu_gr.server.admission.controller import AdmissionConfig

NotNegative = Annotated[float, msgspec.Meta(ge=0)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# equally likely values; a single one is a constant
Values = Annotated[list[float], msgspec.Meta(min_length=1)]


class Lateness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The noise of one class of passes: their extra time relative to the cost model.

    Passes are classed by their length, because an interruption may delay a short pass by many times
    its length.
    """

    # longest expected pass of the class; the last class also has all longer passes
    up_to_s: Seconds = 1e9
    # 0.1 = 10 % longer; may be negative
    ratios: Values = msgspec.field(default_factory=lambda: [0.0])


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device and the host of one instance. `npu-gr simulate fit-device` measures them.

    The first six fields are the cost model of `engine.cost`: T(n, c) = a0 + a1 n + a2 n^2 + c (b0
    + b1 n).
    """

    a0_s: SecondsOrZero
    a1_s: SecondsOrZero
    a2_s: SecondsOrZero = 0.0
    b0_s: SecondsOrZero = 0.0
    b1_s: SecondsOrZero = 0.0
    most_tokens: CountOrZero = 0
    late: Annotated[list[Lateness], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [Lateness()]
    )
    # time on the instance's event loop, one request after the other
    signal_host_s: SecondsOrZero = 0.0
    rank_host_s: Values = msgspec.field(default_factory=lambda: [0.0])
    copy_bytes_per_s: Positive = 1e10  # between HBM and DRAM
    copy_host_s: SecondsOrZero = 0.0  # a copy's fixed part
    # keys and values of one token, all layers
    kv_token_bytes: Annotated[int, msgspec.Meta(ge=2, extra_json_schema=IN_BYTES)]
    # the ranker's attention window, which decides the bytes of a prefix; 0 = the whole history
    attention_window_tokens: CountOrZero = 0
    attention_first_tokens: CountOrZero = 0
    # the oldest events of a longer history are cut, in steps of `cut_step_tokens`
    max_history_tokens: Count = 16_384
    cut_step_tokens: Count = 256

    @property
    def cost(self) -> CostModel:
        """The cost model with which the trigger and the queue estimate passes."""
        return CostModel(self.a0_s, self.a1_s, self.a2_s, self.b0_s, self.b1_s, self.most_tokens)


class Lognormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One log-normal component of a mixture."""

    weight: Positive = 1.0  # relative to the other components
    median: Positive
    sigma: NotNegative  # standard deviation of the natural logarithm


class UsersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The users' popularity, returns and history lengths.

    `npu-gr simulate fit-users` fits them to a query log.
    """

    num_users: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    zipf: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.9  # exponent of the popularity of users
    # share of requests that follow another request of the same user
    return_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    return_s: list[Lognormal] = []  # seconds between the two
    history_tokens: Lognormal
    # new events between two requests of a user
    growth_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    candidates: Count = 200
    lead_s: SecondsOrZero = 0.05  # from signal to rank, median
    lead_sigma: NotNegative = 0.0  # log-normal spread of the lead
    dropout_ratio: Share = 0.0  # share of signals without a rank

    def __post_init__(self) -> None:
        if self.return_ratio and not self.return_s:
            raise ValueError("return_s: needed, because return_ratio is above 0")


class PoolProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool behind the DRAM tiers of a fleet, which all instances share."""

    num_bytes: SomeBytes  # the least recently put or fetched value is dropped for a new one
    bytes_per_s: Positive  # of one call; calls do not slow each other down
    call_s: SecondsOrZero = 0.0  # fixed part of a call


class SimulateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one run. The sections from `admission` on are those of an instance."""

    device: DeviceProfile | str  # a profile, or the path of one
    users: UsersConfig | str | None = None  # a model, or its path; None = replay a query log
    qps: Positive = 100.0  # ranks a second of the whole fleet
    duration_s: Seconds = 60.0
    warmup_s: SecondsOrZero = 10.0  # at the start, not counted
    instances: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    # simulate only this many of them, with their users; None = all
    sampled_instances: Count | None = None
    # bounded load of the router: 0 = off; 1.25 = an instance gets at most 1.25 x its fair share
    load_factor: NotNegative = 0.0
    slo_s: Seconds = 0.05
    budget_s: Seconds = 1.0  # a rank is cancelled after this time
    target_ratio: Ratio = 0.99  # share of ranks within the SLO that the capacity search requires
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    # set by `--calibration`, which also replaces the costs of `device`
    calibration: Calibration | None = None
    admission: AdmissionConfig = AdmissionConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    relay: RelayConfig = RelayConfig()
    trigger: TriggerConfig = TriggerConfig()
    brownout: BrownoutConfig = BrownoutConfig()
    kv_cache: KVConfig = KVConfig()
    pool: PoolProfile | None = None  # None = there is none

    def __post_init__(self) -> None:
        if self.warmup_s >= self.duration_s:
            raise ValueError(
                f"warmup_s: {self.warmup_s} leaves nothing of duration_s: {self.duration_s}"
            )
        if self.kv_cache.pool is not None:
            raise ValueError(
                "kv_cache.pool: an address is no key of a simulation; its section pool has the "
                "pool's size and speed"
            )
        if self.pool is not None and not self.kv_cache.dram_bytes:
            raise ValueError("pool: it needs a DRAM tier; set kv_cache.dram_bytes over 0")
        if self.kv_cache.dtype is not None:
            raise ValueError(
                "kv_cache.dtype: no key of a simulation; device.kv_token_bytes are the bytes of a "
                "token, with the scales of int8, as npu-gr calibrate writes them"
            )
        if self.sampled_instances is not None and self.load_factor:
            raise ValueError(
                "sampled_instances: not together with load_factor, which needs all instances"
            )


def write(settings: msgspec.Struct, path: Path) -> None:
    """Write settings as YAML that `settings.load` reads."""
    path.write_text(yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False))


def calibrated(config: SimulateConfig, path: Path) -> SimulateConfig:
    """Put the results of `npu-gr calibrate` into the settings of a simulation.

    They replace the cost model, the copy bandwidth and the token size of `config.device`. The
    simulated relay also reads Q_m, T_life and kv_p99 from them.

    Raises:
        ConfigError: The file cannot be used, or `config.device` is a path.
    """
    measured = load(path, Calibration)
    if not isinstance(config.device, DeviceProfile):
        raise ConfigError(
            "device: must be a section, not a path, with --calibration: it has the "
            "times of the host"
        )
    device = msgspec.structs.replace(
        config.device,
        a0_s=measured.cost.a0,
        a1_s=measured.cost.a1,
        a2_s=measured.cost.a2,
        b0_s=measured.cost.b0,
        b1_s=measured.cost.b1,
        most_tokens=measured.cost.most_tokens,
        copy_bytes_per_s=measured.copy_bytes_per_s,
        kv_token_bytes=measured.kv_token_bytes,
    )
    return msgspec.structs.replace(config, device=device, calibration=measured)
