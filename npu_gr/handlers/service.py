"""One request from start to end. Read this file first.

    serve      admission -> deadline -> handler of the kind -> metrics

    signal     history -> decide -> reserve pages -> start the prefill -> answer        versions.py
    rank       history -> lease of the prefix KV -> one pass over the candidates        versions.py
    generate   history -> lease of the prompt KV -> beam search                         versions.py
    match      history -> query vector -> one pass over the items for many requests     match.py
    recommend  history -> signal -> sources -> hook -> rank                             recommend.py
    events     append to the history store                                              writes.py
    ingest     write events of many users, each of which fails separately               writes.py
    erase      history store, cached histories, all memory tiers                        writes.py

`core/kinds.py` lists the kinds. An instance serves those whose section is configured.
Permit, deadline and lease are `with` blocks, so they are released however a request ends.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_gr.core.errors import ConfigError, DeltaError, NotFound, NotTaken, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import GENERATE, MATCH, RANK, RECOMMEND, SIGNAL, A, Kind, Q
from npu_gr.core.lifetime import within
from npu_gr.core.served import ModelInfo
from npu_gr.core.settings import LiveConfig, to_table
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.admin import CatalogueOfGenerator, VectorsOfMatch
from npu_gr.handlers.base import (
    AdmissionControl,
    Call,
    HeldPermit,
    KindJob,
    NoShadow,
    ShadowAdmin,
)
from npu_gr.handlers.deltas import Deltas
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.lookups import Lookups
from npu_gr.handlers.versions import ServedNames, Versions
from npu_gr.metrics.registry import Metrics
from npu_gr.relay.brownout import OBSERVE_S, BrownoutControl

MAX_FAILURES = 3  # consecutive device failures that make the instance unready


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a service, built by `app.py`."""

    settings: LiveConfig[Any]  # of the instance; a reload replaces it
    admission: AdmissionControl
    brownout: BrownoutControl
    scheduler: Scheduler
    jobs: Mapping[str, KindJob[Any, Any]]  # by name of the kind
    versions: Versions
    histories: Histories
    catalogue: CatalogueOfGenerator
    vectors: VectorsOfMatch
    names: ServedNames
    lookups: Lookups
    metrics: Metrics


class Service:
    """Answers requests, and performs admin operations. Event loop only."""

    def __init__(self, parts: Parts) -> None:
        """Begin as not ready.

        Args:
            parts: Started parts.
        """
        self.parts = parts
        self.versions = parts.versions
        self.admission = parts.admission  # HTTP uses it before parsing a request
        self.names = parts.names  # of actions and items
        self.catalogue = parts.catalogue  # of generates
        self.vectors = parts.vectors  # of matches
        self.lookups = parts.lookups  # of users and items
        self.on_reload: Callable[[], Awaitable[None]] = _reject_reload
        self.on_rollback: Callable[[], Awaitable[None]] = _reject_reload
        self.deltas: Deltas | None = None  # of the ranker
        self.shadow: ShadowAdmin = NoShadow()
        self.num_begun = 0  # requests since the start
        self._not_ready = "starting"

    # ---- requests

    async def serve(
        self, kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None = None
    ) -> A:
        """Answer one request from start to end.

        Args:
            kind: An entry of `KINDS`.
            request: Request of the type `kind.request`.
            budget_s: Time limit in seconds, from now on.
            permit: Permit of the request, which the caller releases; None to acquire one here.

        Raises:
            NotFound: this instance does not serve the kind.
            Overloaded: the request would miss its objective or budget.
            NotTaken: a pass on the device hangs, or scores are wrong.
            DeadlineExceeded: `budget_s` has passed; what a pass on the device still uses is
                released when the pass ends.
        """
        arrived_at = time.monotonic() if permit is None else permit.arrived_at
        job: KindJob[Q, A] = self._job(kind)
        tenant = request.user.tenant
        self.num_begun += 1

        async def asked(deadline_at: float) -> A:
            if permit is not None:
                return await job.run(request, Call(arrived_at, deadline_at, permit, tenant))
            with await self.admission.enter(kind.name, tenant, time.monotonic(), budget_s) as own:
                return await job.run(request, Call(arrived_at, deadline_at, own, tenant))

        if kind.must_finish:
            answer = await job.run(request, Call(arrived_at, float("inf"), tenant=tenant))
        elif why_not := self.parts.metrics.health.why_not_ready():
            raise NotTaken(why_not)
        else:
            answer = await within(budget_s, asked)
        self.parts.metrics.requests.served(kind, tenant, answer, time.monotonic() - arrived_at)
        return answer

    def _job(self, kind: Kind[Any, Any]) -> KindJob[Any, Any]:
        job = self.parts.jobs.get(kind.name)
        if job is None:
            missing = (
                "no checkpoint" if kind.section == "checkpoint" else f"no section {kind.section}"
            )
            raise NotFound(f"this instance does not {kind.name}; its configuration has {missing}")
        return job

    # ---- load

    async def watch(self) -> None:
        """Measure the load, and set the brownout level of all relays, until cancelled."""
        worker = self.parts.metrics.health.add("brownout")
        async for _ in worker.turns(OBSERVE_S):
            pressure = self.parts.scheduler.pressure + self.admission.pressure
            level = self.parts.brownout.observe(pressure, time.monotonic())
            for model in self.versions.current():
                model.relay.settings.brownout = level

    # ---- administration

    async def reload_models(self) -> list[ModelInfo]:
        """Reload the configuration file; requests in progress keep their version.

        Raises:
            Unprocessable: the new configuration cannot be served; the current one stays.
        """
        try:
            await self.on_reload()
        except ConfigError as error:
            raise Unprocessable(f"reload: {error}") from error
        return self.versions.models()

    async def rollback_models(self, delta: int | None = None) -> list[ModelInfo]:
        """Serve the previous models; requests in progress keep their version.

        Args:
            delta: Serve the ranker's weights after this delta instead, 0 for its checkpoint's.

        Raises:
            Unprocessable: there are none, or they cannot be served; the current ones stay.
            NotFound: a delta is named, and there is no ranker.
        """
        try:
            if delta is None:
                await self.on_rollback()
            else:
                await _of_ranker(self.deltas).roll_back(delta)
        except (ConfigError, DeltaError) as error:
            raise Unprocessable(f"rollback: {error}") from error
        return self.versions.models()

    async def add_delta(self, body: bytes) -> list[ModelInfo]:
        """Make a delta of the ranker's weights durable, and serve it.

        Raises:
            Unprocessable: it is damaged, or not the next one of this model; nothing is changed.
            NotFound: there is no ranker.
        """
        try:
            await _of_ranker(self.deltas).add(body)
        except DeltaError as error:
            raise Unprocessable(str(error)) from error
        return self.versions.models()

    def models(self) -> list[ModelInfo]:
        """Describe the current models, the default first, and draining ones."""
        return self.versions.models()

    def kind_versions(self) -> dict[str, tuple[str, ...]]:
        """Return the versions of each served kind, the current one first; () without versions."""
        vectors = self.vectors.versions()
        rankers = self.versions.of_ranker()
        of_kind = {GENERATE.name: self.versions.of_generator(), MATCH.name: vectors}
        of_kind |= dict.fromkeys((SIGNAL.name, RANK.name, RECOMMEND.name), rankers)
        return {name: of_kind.get(name, ()) for name in self.parts.jobs}

    async def effective_config(self) -> dict[str, Any]:
        """Return the current configuration as plain types."""
        return to_table(self.parts.settings.config)

    async def knows(self, user: UserKey) -> dict[str, bool]:
        """Return whether each memory of this process has data of the user."""
        shadow = self.versions.shadow
        return {
            "histories": self.parts.histories.knows(user)
            or (shadow is not None and shadow.knows(user)),
            "prefixes": any(model.relay.knows(user) for model in self.versions.all()),
            "vectors": self.vectors.knows(user),
        }

    # ---- readiness

    def is_ready(self) -> tuple[bool, str]:
        """Whether the instance is ready, and if not, why."""
        if self._not_ready:
            return False, self._not_ready
        failures = self.parts.scheduler.failures_in_a_row
        if failures >= MAX_FAILURES:
            return False, f"the device failed {failures} times in a row"
        why_not = self.parts.metrics.health.why_not_ready()
        return not why_not, why_not

    def why_dead(self) -> str:
        """Say what has not moved for so long that only a new process helps; "" = nothing."""
        return self.parts.metrics.health.why_dead()

    def set_ready(self, why_not: str = "") -> None:
        """Become ready, or unready with a reason."""
        self._not_ready = why_not

    async def stop(self) -> None:
        """Stop the background work of all handlers; `app.py` stops the models later."""
        for job in self.parts.jobs.values():
            await job.stop()


async def _reject_reload() -> None:
    raise ConfigError("this instance has no configuration file to reload")


def _of_ranker(deltas: Deltas | None) -> Deltas:
    if deltas is None:
        raise NotFound("this instance has no ranker, so there are no weights to change")
    return deltas
