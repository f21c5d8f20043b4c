"""One instance on the virtual clock: the relay, tiers, limiter and brownout that serve, over a simulated device.

The order of a request is that of `service.py`; a test plays both against each other. What stands for HTTP and Python is
one number a request, taken one request after the other, as an event loop does.
"""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import msgspec
import torch

from npu_gr.admission.brownout import BrownoutControl
from npu_gr.admission.gate import Gate
from npu_gr.admission.gradient import GradientLimit
from npu_gr.admission.limiter import Expected, Limiter
from npu_gr.core.errors import ConfigError, DeadlineExceeded, NpuGrError, Overloaded
from npu_gr.core.kinds import Priority
from npu_gr.core.request import Brownout, Outcome, UserKey, Verdict
from npu_gr.kv.arena import KVArena
from npu_gr.kv.dram_store import DramStore
from npu_gr.kv.layout import KVLayout
from npu_gr.kv.prefix_pool import PrefixPool
from npu_gr.kv.tiers import Tiers
from npu_gr.relay.relay import Relay
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.device import Device, RankWork, SimulatedPrefix
from npu_gr.simulate.users import Ask

_WATCH_S = 0.05  # as the service
_PRODUCING = (Verdict.PREINFER, Verdict.EXTEND, Verdict.RELOAD)


class Served(NamedTuple):
    """How a rank ended."""

    outcome: Outcome | None  # None = it failed
    error: str
    latency_s: float
    prefix_tokens: int


class SimulatedInstance:
    """Make it inside the virtual loop; `start`, and `stop` at the end."""

    def __init__(self, config: SimulateConfig, profile: DeviceProfile, name: str) -> None:
        self._config, self._profile, self.name = config, profile, name
        self._loop = asyncio.get_running_loop()
        source = random.Random(f"{config.seed} {name}")
        layout = _layout(profile, config.kv.page_tokens)
        self.device = Device(profile, config.scheduler, config.slo_s, source)
        clock = self._loop.time
        self.pool = PrefixPool(
            _arena("kv.hbm_bytes", config.kv.hbm_bytes, layout), config.kv.hbm_bytes, config.relay.t_life_s, clock
        )
        self.dram: DramStore | None = None
        if config.kv.dram_bytes >= layout.page_bytes:
            self.dram = DramStore(
                _arena("kv.dram_bytes", config.kv.dram_bytes, layout),
                ttl_s=config.kv.dram_ttl_s,
                ttl_jitter_ratio=config.kv.dram_ttl_jitter_ratio,
                seed=config.seed,
                clock=clock,
            )
        trigger = config.trigger
        if trigger.rank_budget_s is None:
            trigger = msgspec.structs.replace(trigger, rank_budget_s=config.slo_s)
        self.relay: Relay[SimulatedPrefix] = Relay(
            config.relay, trigger, self.device, Tiers(self.pool, self.dram), "simulated", clock, config.calibration
        )
        least, most = min(config.admission.min_inflight, config.admission.max_inflight), config.admission.max_inflight
        adaptive = GradientLimit(least, most, share=config.admission.share) if config.admission.adaptive else None
        self._gate = Gate()
        self._limiter = Limiter(most, adaptive, clock)
        self._control = BrownoutControl(config.brownout)
        self._host_free_s = 0.0
        self._source = source
        self._watching: asyncio.Task[None] | None = None
        self.num_produced = self.num_first_used = self.num_dram_hits = 0

        def first_use(_waited_s: float) -> None:
            self.num_first_used += 1

        self.relay.on_first_use = first_use

    def start(self) -> None:
        """Follow the load."""
        if self._config.brownout.enabled:
            self._watching = self._loop.create_task(self._watch())

    async def stop(self) -> None:
        """End what runs in the background."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.relay.stop()

    @property
    def num_wasted(self) -> int:
        """Pre-infers and reloads of signals that no rank has used."""
        return max(0, self.num_produced - (self.num_first_used - self.num_dram_hits))

    def forget_counts(self) -> None:
        """The warm-up is over."""
        self.num_produced = self.num_first_used = self.num_dram_hits = 0
        self.device.busy_s = 0.0

    # ---- requests

    async def signal(self, ask: Ask) -> Verdict | None:
        """As `Service.signal`; None = refused."""
        await self._on_host(self._profile.signal_host_s)
        try:
            self._check(Priority.SIGNAL)
        except Overloaded:
            return None
        verdict = self.relay.signal(UserKey("", ask.user), self._prefix(ask), ask.num_candidates)
        self.num_produced += verdict in _PRODUCING
        return verdict

    async def rank(self, ask: Ask) -> Served:
        """As `Service.rank`; never fails."""
        began_at = self._loop.time()
        try:
            await self._on_host(self._source.choice(self._profile.rank_host_s))
            budget_s = self._config.budget_s - (self._loop.time() - began_at)
            self._check(Priority.RANK)
            expected = Expected(self._config.slo_s, self.device.queue_s, self._gate)
            if expected.wait_s > budget_s:
                raise Overloaded("more work waits for the device than the request has time")
            with self._limiter.admit(Priority.RANK, expected):
                try:
                    async with asyncio.timeout(max(budget_s, 0.0)):
                        outcome, prefix_tokens = await self._score(ask, began_at)
                except TimeoutError as error:
                    raise DeadlineExceeded("its budget ran out") from error
            took_s = self._loop.time() - began_at
        except NpuGrError as error:
            return Served(None, type(error).__name__, self._loop.time() - began_at, 0)
        self.num_dram_hits += outcome is Outcome.DRAM_HIT
        return Served(outcome, "", took_s, prefix_tokens)

    async def _score(self, ask: Ask, arrived_at: float) -> tuple[Outcome, int]:
        tokens, deadline_at = self._prefix(ask), arrived_at + self._config.budget_s
        async with self.relay.lease(UserKey("", ask.user), tokens, ask.num_candidates, deadline_at) as lease:
            cached = lease.cached.num_tokens if lease.cached else 0
            work = RankWork(len(tokens) - max(cached, lease.first_token), cached, ask.num_candidates)
            await self.device.rank(work, deadline_at, arrived_at)
        return lease.outcome, cached

    def _prefix(self, ask: Ask) -> SimulatedPrefix:
        return SimulatedPrefix(ask.num_tokens, self._profile.max_history_tokens, self._profile.cut_step_tokens)

    def _check(self, priority: Priority) -> None:
        self._limiter.check(priority)
        if self._control.step is Brownout.REJECT and priority is not Priority.RANK:
            raise Overloaded("overloaded: ranks come first")

    async def _on_host(self, takes_s: float) -> None:
        now_at = self._loop.time()
        self._host_free_s = max(self._host_free_s, now_at) + takes_s
        if self._host_free_s > now_at:
            await asyncio.sleep(self._host_free_s - now_at)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            self.relay.settings.brownout = self._control.observe(self.device.pressure, self._loop.time())


def _layout(profile: DeviceProfile, page_tokens: int) -> KVLayout:
    """Of a token as many bytes as the profile says."""
    keys = profile.kv_token_bytes // 2
    return KVLayout(
        num_layers=1,
        num_heads=1,
        qk_dim=keys,
        v_dim=profile.kv_token_bytes - keys,
        page_tokens=page_tokens,
        dtype="uint8",
    )


def _arena(field: str, num_bytes: int, layout: KVLayout) -> KVArena:
    """Pages without memory."""
    pages = num_bytes // layout.page_bytes
    if not pages:
        raise ConfigError(f"{field}: {num_bytes} is less than one page of {layout.page_bytes} bytes")
    return KVArena(layout, pages, torch.device("meta"))
