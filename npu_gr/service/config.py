"""The configuration of an instance: one YAML file, validated; sections are next to their code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from npu_gr.backend.names import AttentionMode, BackendName, NativeMode
from npu_gr.core import settings
from npu_gr.core.kinds import KINDS
from npu_gr.core.secret import SecretUrl
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

FOLDER_SUFFIX = ".deltas"  # of the folder of deltas next to a checkpoint


class ServiceConfig(RankingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cached histories, and what a ranker accepts."""

    known_prefix_bytes: Bytes = 268_435_456  # of histories cached for deltas
    # policy for a history out of time order: reject it, or sort it and report the number of moved
    # events
    unsorted_history: Literal["reject", "sort"] = "reject"


class ModelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deltas of the ranker's weights, and the memory of its item rows."""

    # folder of deltas that this instance follows, and others may; absent: CHECKPOINT.deltas, which
    # only `POST /v1/models/delta` fills
    deltas_from: str | None = None
    # Redis with the stream of a fleet's deltas: redis://HOST:6379/0#NAME, rediss:// or unix://; the
    # folder is then this instance's copy
    deltas_stream: SecretUrl | None = None
    # memory of the device for the item rows of a sharded checkpoint that are read most; the kernel
    # caches others in free memory of the host
    hot_item_bytes: Bytes = 536_870_912

    @property
    def is_following(self) -> bool:
        """Whether deltas come from elsewhere too."""
        return self.deltas_from is not None or self.deltas_stream is not None

    def folder(self, checkpoint: str) -> Path:
        """Return the folder of the deltas of a checkpoint."""
        if self.deltas_from is not None:
            return Path(self.deltas_from)
        return Path(checkpoint.rstrip("/") + FOLDER_SUFFIX)


class _Ratios(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    latency_ratio: Ratio = 0.99  # target share of the answers within the latency objective
    availability_ratio: Ratio = 0.999  # target share of the requests that are answered

    def objective_s(self, kind: str) -> float:
        """Return the latency objective of a kind, in seconds."""
        seconds: float = getattr(self, f"{kind}_s")
        return seconds

    def objectives(self) -> list[Objective]:
        """Return the objective of each kind.

        Thresholds are bucket edges of the histograms, so attainment is exact.
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
else:  # one field per kind: `rank_s`, `signal_s`, ...
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
    """The configuration of an instance."""

    # folder of the ranker: config.json, model.safetensors; absent: no ranks
    checkpoint: str | None = None
    backend: BackendName = "cpu"
    # index of the GPU or NPU, among those that the process may see; absent: the first
    device: Annotated[int, msgspec.Meta(ge=0)] | None = None
    # native kernels of CPU and NPU: auto = use them if built, require = do not start without them,
    # off
    native: NativeMode = "auto"
    # library with Huawei's mxrec::hstu_paged, for rankers with `relative_bias: none` on NPUs
    hstu_library: str | None = None
    # attention of rankers on accelerators: auto = the fastest one in the warm-up
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
    # result of `npu-gr calibrate`; absent: CONFIG.calibration.yaml, if it exists
    calibration: Calibration | None = None
    brownout: BrownoutConfig = BrownoutConfig()
    kv_cache: KVConfig = KVConfig()
    history_store: HistoryConfig = HistoryConfig()
    # source of user features; absent: requests have them
    feature_store: FeatureStoreConfig | None = None
    models: ModelsConfig = ModelsConfig()
    generate: GenerateConfig | None = None  # absent: no generates
    match: MatchConfig | None = None  # absent: no matches
    recommend: RecommendConfig | None = None  # absent: no recommends
    record: RecordConfig | None = None  # absent: no recorder

    def __post_init__(self) -> None:
        if self.checkpoint is None and self.generate is None:
            raise ValueError(
                "set `checkpoint` (a ranker) or the section `generate`, since an instance must "
                "serve a model"
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
        """Return the trigger's settings, with the objective of ranks as the default budget."""
        if self.trigger.rank_budget_s is not None:
            return self.trigger
        return msgspec.structs.replace(self.trigger, rank_budget_s=self.slo.objective_s("rank"))


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file, and the calibration next to it.

    Args:
        path: YAML file.
        overrides: Settings as `section.key=value`; later ones win, over the environment, over the
            file.

    Raises:
        ConfigError: a value is invalid; the message names the file, the field and the limit.
    """
    config = settings.load(path, Config, overrides, os.environ)
    if config.calibration is None and calibration_path(path).exists():
        return msgspec.structs.replace(
            config, calibration=settings.load(calibration_path(path), Calibration)
        )
    return config


def from_table(table: dict[str, Any], where: str = "config") -> Config:
    """Validate a table; error messages begin with `where`."""
    return settings.from_table(table, Config, where)
