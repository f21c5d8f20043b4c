"""One request from start to end. READ THIS FILE FIRST.

    serve      admission -> deadline -> the kind's job -> metrics

    signal     history -> decide -> reserve pages -> start the prefill -> answer at once     jobs/versions.py
    rank       history -> lease of the prefix KV -> one pass over the candidates             jobs/versions.py
    generate   history -> lease of the prompt KV -> beam search                              jobs/versions.py
    match      history -> the user's vector -> one pass over the items for many requests     jobs/match.py
    recommend  history -> signal -> sources -> hook -> rank                                  jobs/recommend.py
    events     append to the history store                                                   jobs/writes.py
    ingest     write the events of many users, each of whom fails alone                      jobs/writes.py
    erase      history store, known prefixes, every memory tier                              jobs/writes.py

`core/kinds.py` lists the kinds. An instance serves those whose section its configuration has.
HeldPermit, deadline and lease are released by indentation, however a request ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_gr.core.errors import ConfigError, NotFound, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import GENERATE, MATCH, RANK, RECOMMEND, SIGNAL, A, Kind, Q
from npu_gr.core.lifetime import deadline
from npu_gr.core.served import ModelInfo
from npu_gr.core.settings import LiveConfig, to_table
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.admin import CatalogueOfGenerator, VectorsOfMatch
from npu_gr.handlers.base import AdmissionControl, Call, HeldPermit, KindJob
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.versions import ServedNames, Versions
from npu_gr.metrics.registry import Metrics
from npu_gr.relay.brownout import OBSERVE_S, BrownoutControl

MAX_FAILURES = 3  # device failures in a row that make the instance unready


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a service is made of; `app.py` builds it once."""

    settings: LiveConfig[Any]  # of the instance; a reload replaces it
    admission: AdmissionControl
    brownout: BrownoutControl
    scheduler: Scheduler
    jobs: Mapping[str, KindJob[Any, Any]]  # by the name of their kind
    versions: Versions
    histories: Histories
    catalogue: CatalogueOfGenerator
    vectors: VectorsOfMatch
    names: ServedNames
    metrics: Metrics


class Service:
    """Everything behind HTTP. Event loop only."""

    def __init__(self, parts: Parts) -> None:
        """Serve nothing until `set_ready`.

        Args:
            parts: built and started.
        """
        self.parts = parts
        self.versions = parts.versions
        self.admission = parts.admission  # HTTP asks it before a request is parsed
        self.names = parts.names  # of actions and items
        self.catalogue = parts.catalogue  # that generates find items in
        self.vectors = parts.vectors  # that matches search
        self.on_reload: Callable[[], Awaitable[None]] = _reject_reload
        self._not_ready = "starting"

    # ---- requests

    async def serve(
        self, kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None = None
    ) -> A:
        """Answer one request from start to end.

        Args:
            kind: an entry of `KINDS`.
            request: of `kind.request`.
            budget_s: seconds that the caller grants, from now on.
            permit: of the request; its holder leaves it. None = the request is admitted here.

        Raises:
            NotFound: this instance does not serve the kind.
            Overloaded: it could not be answered in time.
            DeadlineExceeded: `budget_s` is over; everything that the request held is released.
        """
        arrived_at = time.monotonic() if permit is None else permit.arrived_at
        job: KindJob[Q, A] = self._job(kind)
        tenant = request.user.tenant
        if kind.must_finish:
            answer = await job.run(request, Call(arrived_at, float("inf"), tenant=tenant))
        else:
            async with deadline(budget_s) as deadline_at:
                if permit is not None:
                    answer = await job.run(request, Call(arrived_at, deadline_at, permit, tenant))
                else:
                    with await self.admission.enter(
                        kind.name, tenant, time.monotonic(), budget_s
                    ) as own:
                        answer = await job.run(request, Call(arrived_at, deadline_at, own, tenant))
        self.parts.metrics.requests.served(kind, tenant, answer, time.monotonic() - arrived_at)
        return answer

    def _job(self, kind: Kind[Any, Any]) -> KindJob[Any, Any]:
        job = self.parts.jobs.get(kind.name)
        if job is None:
            missing = (
                "no checkpoint" if kind.section == "checkpoint" else (f"no section {kind.section}")
            )
            raise NotFound(f"this instance does not {kind.name}: its configuration has {missing}")
        return job

    # ---- load

    async def watch(self) -> None:
        """Follow the load, and set the brown-out level of every relay, until cancelled."""
        while True:
            await asyncio.sleep(OBSERVE_S)
            pressure = self.parts.scheduler.pressure + self.admission.pressure
            level = self.parts.brownout.observe(pressure, time.monotonic())
            for model in self.versions.current():
                model.relay.settings.brownout = level

    # ---- administration

    async def reload_models(self) -> list[ModelInfo]:
        """Read the configuration file again and serve what it says.

        Requests in progress keep their version.

        Raises:
            Unprocessable: the new configuration cannot be served; everything is as before.
        """
        try:
            await self.on_reload()
        except ConfigError as error:
            raise Unprocessable(f"reload: {error}") from error
        return self.versions.models()

    def models(self) -> list[ModelInfo]:
        """Describe the models that serve, the default first, and those that drain."""
        return self.versions.models()

    def kind_versions(self) -> dict[str, tuple[str, ...]]:
        """Name the versions of each kind that this instance serves, the current one first; () = it has no versions."""
        vectors = self.vectors.versions()
        rankers = self.versions.of_ranker()
        of_kind = {GENERATE.name: self.versions.of_generator(), MATCH.name: vectors}
        of_kind |= dict.fromkeys((SIGNAL.name, RANK.name, RECOMMEND.name), rankers)
        return {name: of_kind.get(name, ()) for name in self.parts.jobs}

    async def effective_config(self) -> dict[str, Any]:
        """Return the configuration in force as plain types."""
        return to_table(self.parts.settings.config)

    async def knows(self, user: UserKey) -> dict[str, bool]:
        """Say of each memory of this process whether the user can be found in it."""
        return {
            "histories": self.parts.histories.knows(user),
            "prefixes": any(model.relay.knows(user) for model in self.versions.all()),
            "vectors": self.vectors.knows(user),
        }

    # ---- readiness

    def is_ready(self) -> tuple[bool, str]:
        """Whether new work is welcome, and if not, why."""
        if self._not_ready:
            return False, self._not_ready
        failures = self.parts.scheduler.failures_in_a_row
        if failures >= MAX_FAILURES:
            return False, f"the device failed {failures} times in a row"
        return True, ""

    def set_ready(self, why_not: str = "") -> None:
        """Become ready, or with a reason, unready."""
        self._not_ready = why_not

    async def stop(self) -> None:
        """End what the jobs run in the background.

        The models that they use are stopped after them, by `app.py`.
        """
        for job in self.parts.jobs.values():
            await job.stop()


async def _reject_reload() -> None:
    raise ConfigError("this instance was not started from a configuration file")
