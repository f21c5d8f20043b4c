"""The statistics extension of the Open Inference Protocol: what the metrics have counted since the start, by model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.registry.requests import AdmissionResult
from npu_gr.server.insight import Insight

_ADMISSIONS = "npu_gr_admissions_total"
_DURATION = "npu_gr_request_duration_seconds"
_STAGES = "npu_gr_stage_duration_seconds"
_NAMES = (_ADMISSIONS, *(f"{family}_{part}" for family in (_DURATION, _STAGES) for part in ("count", "sum")))
_BEFORE = frozenset({"door", "history", "lease", "preprocess"})  # stages that make the device's input


class CallTimes(msgspec.Struct, frozen=True):
    """How often something was done, and how long it took in all."""

    count: int = 0
    ns: int = 0


class InferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests, and where the time of those that were answered went."""

    success: CallTimes
    fail: CallTimes  # refused and failed ones: how long they took is not measured
    queue: CallTimes
    compute_input: CallTimes  # reading, history, lease
    compute_infer: CallTimes
    compute_output: CallTimes  # part of the input's: writing is not measured apart

    def items(self) -> list[tuple[str, CallTimes]]:
        """List all of them by name."""
        return [(field.name, getattr(self, field.name)) for field in msgspec.structs.fields(self)]


class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model."""

    name: str
    version: str  # in service; what is counted is of all versions
    last_inference: int = 0  # is not kept
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    batch_stats: tuple[()] = ()  # are not counted by size


class _Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


async def statistics(insight: Insight, models: Iterable[tuple[str, str]]) -> list[ModelStatistics]:
    """Read the statistics of models.

    Args:
        insight: has the metrics of the whole instance.
        models: name and version of each.
    """
    text, _ = await insight.exposition("", _NAMES)
    samples = [
        _Sample(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.labels.get("kind") in KINDS
    ]
    return [
        _of_model(name, version, [one for one in samples if one.labels["kind"] == name]) for name, version in models
    ]


def _of_model(name: str, version: str, samples: list[_Sample]) -> ModelStatistics:
    def total(family: str, stages: Iterable[str] = ("",)) -> CallTimes:
        """Add the times of stages; their count is that of the one that was measured most often."""
        own = [one for one in samples if one.labels.get("stage", "") in stages]
        counts = [int(one.value) for one in own if one.name == f"{family}_count"]
        seconds = sum(one.value for one in own if one.name == f"{family}_sum")
        return CallTimes(max(counts, default=0), round(seconds * 1e9))

    failed = sum(
        int(one.value)
        for one in samples
        if one.name == _ADMISSIONS and one.labels["verdict"] != AdmissionResult.ADMITTED.value
    )
    success = total(_DURATION)
    others = frozenset(KINDS[name].stages) - _BEFORE - {"queue"}
    return ModelStatistics(
        name=name,
        version=version,
        inference_count=success.count,
        execution_count=success.count,
        inference_stats=InferStatistics(
            success=success,
            fail=CallTimes(failed),
            queue=total(_STAGES, ("queue",)),
            compute_input=total(_STAGES, _BEFORE),
            compute_infer=total(_STAGES, others),
            compute_output=CallTimes(),
        ),
    )
