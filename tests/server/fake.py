"""A service without models, for tests of HTTP alone.

It answers what a test gives it, and notes what it was asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Literal

import numpy as np
from aiohttp.test_utils import TestClient
from prometheus_client import CollectorRegistry

from npu_gr.core.arrays import I64
from npu_gr.core.errors import NotFound
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.history import Events, UserKey
from npu_gr.core.kinds import KINDS, RANK, A, Kind, Q
from npu_gr.core.names import ActionNames, item_ids
from npu_gr.core.served import KnownUser, LookedUpItems, ModelInfo, VectorsInfo
from npu_gr.handlers.base import HeldPermit, NoShadow, ShadowAdmin
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.slo import Objective
from npu_gr.server.admission.controller import AdmissionConfig, AdmissionController
from npu_gr.server.config import ServerConfig
from npu_gr.server.routes import build_web_app
from npu_gr.server.service_protocol import CatalogueAdmin, PublishedAdmin
from tests.serving import InstanceServer

MAX_INFLIGHT = 4

MODEL = ModelInfo(
    name="fake",
    version="1",
    tasks=("click",),
    actions=("1", "2"),
    num_items=1,
    max_history_tokens=1,
    device="none",
    dtype="float32",
)


class FakeNames:
    """An item is named by its id; a title has the items below ten."""

    unsorted_history: Literal["reject", "sort"] = "reject"
    _features = ModelFeatures(MODEL.features)

    def actions(self, version: str | None) -> ActionNames:
        return ActionNames(MODEL.actions)

    def features(self, version: str | None) -> ModelFeatures:
        return self._features

    def item_ids(self, names: Sequence[str | int]) -> I64:
        return item_ids(names)

    def items(self, ids: I64) -> list[str | int]:
        names: list[str | int] = ids.tolist()
        return names

    def titles(self, ids: I64) -> list[str | None]:
        return [f"title of {one}" if one < 10 else None for one in ids.tolist()]


class FakeLookups:
    """It knows every user and item, and no events."""

    async def user(self, user: UserKey, num_events: int) -> KnownUser:
        return KnownUser(0, Events.empty(), (), in_vectors=True)

    def example_user(self) -> UserKey | None:
        return UserKey("shop", "u7")

    async def similar(self, item: int, num_items: int, pairs: Sequence[str]) -> LookedUpItems:
        return LookedUpItems("vectors", np.array([1]), np.array([0.5], np.float32))

    async def trending(self, tenant: str, window_s: float, num_items: int) -> LookedUpItems:
        return LookedUpItems("nothing", np.empty(0, np.int64), np.empty(0, np.float32))


class FakeService:
    """A `ServiceProtocol`.

    `answers`: name of a kind -> what every request of it is answered, or the error raised.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = dict(answers)
        self.served: list[tuple[str, Any, float]] = []  # (name of the kind, request, budget_s)
        self.admission = AdmissionController(
            AdmissionConfig(max_inflight=MAX_INFLIGHT), lambda kind: KINDS[kind].objective_s
        )
        self.why_not_ready = ""
        self.names = FakeNames()
        self.lookups = FakeLookups()
        # set as soon as a request waits, which it then does for ever
        self.waits: asyncio.Event | None = None

    def models(self) -> list[ModelInfo]:
        return [MODEL]

    def kind_versions(self) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(self.answers, (MODEL.version,))

    def is_ready(self) -> tuple[bool, str]:
        return not self.why_not_ready, self.why_not_ready

    def why_dead(self) -> str:
        return ""

    async def knows(self, user: UserKey) -> dict[str, bool]:
        return {"histories": user.user == "known"}

    async def effective_config(self) -> dict[str, Any]:
        return {}

    async def fill(self) -> ExitStack:
        """Take every permit, until the stack that is returned is closed."""
        slots = ExitStack()
        for _ in range(MAX_INFLIGHT):
            slots.enter_context(await self.admission.enter(RANK.name, "", time.monotonic(), 1.0))
        return slots

    async def serve(
        self, kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None = None
    ) -> A:
        self.served.append((kind.name, request, budget_s))
        if self.waits is not None:
            self.waits.set()
            await asyncio.Event().wait()
        answer: Any = self.answers[kind.name]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, kind.answer)
        return answer

    shadow: ShadowAdmin = NoShadow()

    async def reload_models(self) -> list[ModelInfo]:
        return self.models()

    async def rollback_models(self, delta: int | None = None) -> list[ModelInfo]:
        return self.models()

    async def add_delta(self, body: bytes) -> list[ModelInfo]:
        return self.models()

    @property
    def catalogue(self) -> CatalogueAdmin:
        raise NotFound("a fake has no catalogue")

    @property
    def vectors(self) -> PublishedAdmin[VectorsInfo]:
        raise NotFound("a fake has no vectors")


def metrics_of_all_kinds() -> Metrics:
    return Metrics(
        CollectorRegistry(),
        [
            Objective(
                kind=kind.name,
                threshold_s=kind.objective_s,
                latency_ratio=0.99,
                availability_ratio=0.999,
            )
            for kind in KINDS.values()
        ],
    )


@asynccontextmanager
async def serving_fake(
    service: FakeService, **settings: Any
) -> AsyncIterator[tuple[TestClient[Any, Any], Metrics]]:
    metrics = metrics_of_all_kinds()
    app = build_web_app(service, ServerConfig(**settings), metrics)
    async with TestClient(InstanceServer(app)) as client:
        yield client, metrics
