"""One YAML file -> one frozen, typed, validated `Config`.

Each concept owns its section, next to its code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from npu_gr.backend.names import AttentionMode, BackendName, NativeMode
from npu_gr.core import settings
from npu_gr.core.kinds import KINDS
from npu_gr.core.settings import Bytes, Count, Ratio, Seconds
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.handlers.cascade_plan import SECTIONS, RecommendConfig
from npu_gr.handlers.config import GenerateConfig, RankingConfig
from npu_gr.history_store.store import FeatureStoreConfig, HistoryConfig
from npu_gr.metrics.slo import Objective
from npu_gr.relay.brownout import BrownoutConfig
from npu_gr.relay.config import Calibration, RelayConfig, TriggerConfig, calibration_path
from npu_gr.replay.recorder import RecordConfig
from npu_gr.server.admission.controller import AdmissionConfig
from npu_gr.server.config import ServerConfig
from npu_gr.vector_search.config import MatchConfig


class ServiceConfig(RankingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered of requests, and what a ranker accepts."""

    known_prefix_bytes: Bytes = 268_435_456  # histories remembered for deltas
    # of a request whose rows run backwards in time: reject, or sort by time and count the late ones
    # in the answer
    unsorted_history: Literal["reject", "sort"] = "reject"


class _Ratios(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    latency_ratio: Ratio = 0.99  # of the answered requests, in time
    availability_ratio: Ratio = 0.999  # of all requests, answered

    def objective_s(self, kind: str) -> float:
        """Seconds within which a request of this kind should be answered."""
        seconds: float = getattr(self, f"{kind}_s")
        return seconds

    def objectives(self) -> list[Objective]:
        """One for each kind of request.

        Each time is a bucket edge of its histogram, so attainment is exact.
        """
        return [
            Objective(
                kind=kind,
                threshold_s=self.objective_s(kind),
                latency_ratio=self.latency_ratio,
                availability_ratio=self.availability_ratio,
            )
            for kind in KINDS
        ]


if TYPE_CHECKING:
    SLOConfig = _Ratios
else:  # one field a kind: `rank_s`, `signal_s`, ...
    SLOConfig = msgspec.defstruct(
        "SLOConfig",
        [(f"{kind.name}_s", Seconds, kind.objective_s) for kind in KINDS.values()],
        bases=(_Ratios,),
        module=__name__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that an instance is started with."""

    # the ranker's folder: config.json, model.safetensors; None: does not rank
    checkpoint: str | None = None
    backend: BackendName = "cpu"
    # our own kernels, CPU or NPU: auto = use them if they were built, require = reject to start
    # without them, off
    native: NativeMode = "auto"
    # with Huawei's mxrec::hstu_paged: NPU, rankers of `relative_bias: none`
    hstu_library: str | None = None
    # of rankers, on accelerators: auto = the fastest, measured at the warm-up
    attention: AttentionMode = "auto"
    dtype: Literal["float32", "bfloat16", "checkpoint"] = "checkpoint"  # of the matrix products
    threads: Count = 1  # intra-op threads of the device thread (CPU)
    slo: SLOConfig = SLOConfig()
    server: ServerConfig = ServerConfig()
    admission: AdmissionConfig = AdmissionConfig()
    service: ServiceConfig = ServiceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    relay: RelayConfig = RelayConfig()
    trigger: TriggerConfig = TriggerConfig()
    # of `npu-gr calibrate`; absent: CONFIG.calibration.yaml, if it exists
    calibration: Calibration | None = None
    brownout: BrownoutConfig = BrownoutConfig()
    kv_cache: KVConfig = KVConfig()
    history_store: HistoryConfig = HistoryConfig()
    # of the features of users; absent: requests bring them
    feature_store: FeatureStoreConfig | None = None
    generate: GenerateConfig | None = None  # absent: the instance does not generate
    match: MatchConfig | None = None  # absent: the instance does not match
    recommend: RecommendConfig | None = None  # absent: no cascade in one call
    record: RecordConfig | None = None  # absent: requests cannot be recorded

    def __post_init__(self) -> None:
        if self.checkpoint is None and self.generate is None:
            raise ValueError(
                "set `checkpoint` (ranker) or a `generate:` section: an instance must serve at "
                "least one model"
            )
        if self.recommend is not None:
            for section in ("checkpoint", *(SECTIONS[name] for name in self.recommend.sources)):
                if getattr(self, section) is None:
                    raise ValueError(f"recommend: needs {section}, which is not configured")
            if (
                self.match
                and (wanted := self.recommend.sources.get("match", 0)) > self.match.max_items
            ):
                raise ValueError(
                    f"recommend: sources.match: {wanted} is over match.max_items "
                    f"{self.match.max_items}"
                )

    def trigger_with_budget(self) -> TriggerConfig:
        """Return the trigger's settings, with the rank's objective as its budget if none is set."""
        if self.trigger.rank_budget_s is not None:
            return self.trigger
        return msgspec.structs.replace(self.trigger, rank_budget_s=self.slo.objective_s("rank"))


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and the calibration beside it.

    Args:
        path: YAML.
        overrides: `section.key=value`, later ones win; they win over the environment, and that over
            the file.

    Raises:
        ConfigError: names the file, the field and the limit.
    """
    config = settings.load(path, Config, overrides, os.environ)
    if config.calibration is None and calibration_path(path).exists():
        return msgspec.structs.replace(
            config, calibration=settings.load(calibration_path(path), Calibration)
        )
    return config


def from_table(table: dict[str, Any], where: str = "config") -> Config:
    """Validate a table that YAML gave; `where` begins the error's text."""
    return settings.from_table(table, Config, where)
