"""A simulated instance: production relay, cache tiers and admission over a simulated engine.

A request takes the same steps as in `service.service`; `tests/simulate/validation.py` compares the
two. The time of HTTP and Python is one number per request, spent one request after the other, as on
an event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import NamedTuple

import msgspec

from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Overloaded
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.core.request import Fetched, Outcome, Verdict
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.kv_cache.tiers import open_tiers
from npu_gr.engine.scheduler import Scheduler
from npu_gr.relay.brownout import OBSERVE_S, BrownoutControl
from npu_gr.relay.relay import Relay
from npu_gr.server.admission.controller import AdmissionController, Permit
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.device import (
    PassTimes,
    RankWork,
    SimulatedEngine,
    SimulatedPrefix,
    VirtualStreams,
)
from npu_gr.simulate.pool import SimulatedCalls, SimulatedPool
from npu_gr.simulate.users import TrafficRequest

_PRODUCING = (Verdict.PREINFER, Verdict.EXTEND, Verdict.RELOAD)


class RankResult(NamedTuple):
    """The result of a rank."""

    outcome: Outcome | None  # None = it failed
    error: str  # class name of the error; "" = none
    latency_s: float
    prefix_tokens: int


class SimulatedInstance:
    """One instance. Create it inside the virtual loop; call `start`, and `stop` at the end."""

    def __init__(
        self,
        config: SimulateConfig,
        profile: DeviceProfile,
        name: str,
        pool: SimulatedPool | None = None,
    ) -> None:
        self.name = name
        self._config = config
        self._profile = profile
        self._loop = asyncio.get_running_loop()
        self._source = random.Random(f"{config.seed} {name}")  # noqa: S311  (simulated)
        clock = self._loop.time
        times = PassTimes(profile, self._source)
        self.scheduler = Scheduler(
            config.scheduler, streams=VirtualStreams(config.scheduler, times)
        )
        self.scheduler.on_worked = self._worked
        self.busy_s = 0.0  # device time so far, all streams together
        self.scheduler.weigh(config.admission.tenant_weights)
        self.engine = SimulatedEngine(profile, self.scheduler, times, config.slo_s)
        self.tiers = open_tiers(
            config.kv_cache,
            _layout(profile, config.kv_cache.page_tokens),
            None,
            t_life_s=config.relay.t_life_s,
            clock=clock,
            seed=config.seed,
        )
        trigger = config.trigger
        if trigger.rank_budget_s is None:
            trigger = msgspec.structs.replace(trigger, rank_budget_s=config.slo_s)
        self.relay: Relay[SimulatedPrefix] = Relay(
            config.relay,
            trigger,
            self.engine,
            self.tiers,
            "simulated",
            clock,
            config.calibration,
            config.admission.tenant_weights,
            pool=(
                None
                if pool is None or self.tiers.dram is None
                else SimulatedCalls(pool, self.tiers.dram)
            ),
        )
        self._admission = AdmissionController(
            config.admission,
            lambda _kind: config.slo_s,
            batch_requests=config.scheduler.max_batch_requests * config.scheduler.streams,
            clock=clock,
        )
        self._brownout = BrownoutControl(config.brownout)
        self._host_free_at = 0.0  # when the event loop has no more work
        self._observing: asyncio.Task[None] | None = None
        self.num_produced = 0  # prefills and reloads of signals
        self.num_first_used = 0  # prefixes that a rank has read
        self.num_dram_hits = 0
        self.fetches = Counter[Fetched]()  # from the pool, by outcome

        def first_use(_waited_s: float) -> None:
            self.num_first_used += 1

        self.relay.on_first_use = first_use
        if self.relay.pool_copies is not None:
            self.relay.pool_copies.on_fetch = self._fetched

    def start(self) -> None:
        """Start to run passes, and to observe the load if brown-out is enabled."""
        self.scheduler.start()
        if self._config.brownout.enabled:
            self._observing = self._loop.create_task(self._observe_load())

    async def stop(self) -> None:
        """End the background work."""
        if self._observing is not None:
            self._observing.cancel()
            await asyncio.gather(self._observing, return_exceptions=True)
        await self.relay.stop()

    @property
    def num_wasted(self) -> int:
        """Count the prefills and reloads of signals that no rank has used."""
        return max(0, self.num_produced - (self.num_first_used - self.num_dram_hits))

    def forget_counts(self) -> None:
        """Reset the counts after the warm-up."""
        self.num_produced = 0
        self.num_first_used = 0
        self.num_dram_hits = 0
        self.busy_s = 0.0
        self.fetches.clear()

    def _fetched(self, outcome: Fetched) -> None:
        self.fetches[outcome] += 1

    def _worked(self, _kind: str, seconds: float) -> None:
        self.busy_s += seconds

    # ---- requests

    async def signal(self, request: TrafficRequest) -> Verdict | None:
        """Decide on a prefill and start it, as `Service` does; None = rejected."""
        began_at = self._loop.time()
        try:
            slot = await self._admission.enter(
                SIGNAL.name, request.tenant, began_at, self._config.budget_s
            )
        except Overloaded:
            return None
        with slot:
            await self._on_host(self._profile.signal_host_s)
        verdict = self.relay.signal(
            UserKey(request.tenant, request.user), self._prefix(request), request.num_candidates
        )
        self.num_produced += verdict in _PRODUCING
        return verdict

    async def rank(self, request: TrafficRequest) -> RankResult:
        """Rank, as `Service` does; errors are returned as results."""
        began_at = self._loop.time()
        try:
            with await self._admission.enter(
                RANK.name, request.tenant, began_at, self._config.budget_s
            ) as slot:
                await self._on_host(self._source.choice(self._profile.rank_host_s))
                try:
                    async with asyncio.timeout_at(began_at + self._config.budget_s):
                        outcome, prefix_tokens = await self._score(request, began_at, slot)
                except TimeoutError as error:
                    raise DeadlineExceeded("its budget ran out") from error
            took_s = self._loop.time() - began_at
        except NpuGrError as error:
            return RankResult(None, type(error).__name__, self._loop.time() - began_at, 0)
        self.num_dram_hits += outcome is Outcome.DRAM_HIT
        return RankResult(outcome, "", took_s, prefix_tokens)

    async def _score(
        self, request: TrafficRequest, arrived_at: float, slot: Permit
    ) -> tuple[Outcome, int]:
        tokens = self._prefix(request)
        deadline_at = arrived_at + self._config.budget_s
        async with self.relay.lease(
            UserKey(request.tenant, request.user),
            tokens,
            request.num_candidates,
            deadline_at,
            slot.suspended,
        ) as lease:
            cached = lease.cached.num_tokens if lease.cached else 0
            work = RankWork(
                len(tokens) - max(cached, lease.first_token), cached, request.num_candidates
            )
            await self.engine.rank(work, deadline_at, arrived_at, request.tenant)
        return lease.outcome, cached

    def _prefix(self, request: TrafficRequest) -> SimulatedPrefix:
        return SimulatedPrefix(
            request.num_tokens, self._profile.max_history_tokens, self._profile.cut_step_tokens
        )

    async def _on_host(self, takes_s: float) -> None:
        """Wait for the event loop, then occupy it."""
        now_at = self._loop.time()
        self._host_free_at = max(self._host_free_at, now_at) + takes_s
        if self._host_free_at > now_at:
            await asyncio.sleep(self._host_free_at - now_at)

    async def _observe_load(self) -> None:
        while True:
            await asyncio.sleep(OBSERVE_S)
            pressure = self.scheduler.pressure + self._admission.pressure
            self.relay.settings.brownout = self._brownout.observe(pressure, self._loop.time())


def _layout(profile: DeviceProfile, page_tokens: int) -> KVLayout:
    """Make a layout with the profile's bytes per token."""
    key_bytes = profile.kv_token_bytes // 2
    return KVLayout(
        num_layers=1,
        num_heads=1,
        qk_dim=key_bytes,
        v_dim=profile.kv_token_bytes - key_bytes,
        page_tokens=page_tokens,
        dtype="uint8",
        window_tokens=profile.attention_window_tokens,
        first_tokens=profile.attention_first_tokens,
    )
