"""The instances as this router sees them, and which of them gets a request.

The health of an instance, as its checks tell it (one check each `health.interval_s`; ready = 200, unready = another
status, failed = no answer):

                 ready x rise                     unready
    UNKNOWN ──────────────────────► UP ──────────────────────► DRAINING
       │                          ▲  │ ▲     ready x rise        │ │
       │ not ready                │  │ └─────────────────────────┘ │ unready and t_life_s over,
       │             ready x rise │  │ failed x fall               │ or failed x fall
       └────────────────────────► DOWN ◄───────────────────────────┘

A draining instance takes the ranks of its users and no signals. An operator can drain an instance as well. The circuit
breaker of an instance may keep it out, or let only a share of its users return. None of this changes the ring: a walk
around the ring for a user skips the instances that cannot take the request.

Invariants:
  M1  a rank goes where its signal went, as long as that instance takes ranks
  M2  users of instances that are up and not held back by a breaker stay where they are, whatever happens to the others
  M3  a draining instance gets no signal; after `t_life_s` of draining it gets nothing
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from npu_gr.core.errors import Overloaded, Unavailable
from npu_gr.router.breaker import Breaker
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.ring import Member, Placement, Ring, bound, fraction, spill
from npu_gr.router.upstream import UpstreamPool

log = logging.getLogger(__name__)


class Health(StrEnum):
    """The health of an instance; the module's docstring draws how it changes."""

    UNKNOWN = "unknown"  # not checked yet
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class Check(StrEnum):
    """The result of one health check."""

    READY = "ready"
    UNREADY = "unready"  # it answers, and does not want new work
    FAILED = "failed"  # it does not answer


class How(StrEnum):
    """The reason for which a request goes to its instance; the value of the `how` metric label."""

    HOME = "home"  # the instance owns the user
    SPILLED = "spilled"  # the owner had more than its share
    SIGNAL = "signal"  # a rank follows its signal
    SUCCESSOR = "successor"  # the owner does not take it
    NORMAL = "normal"  # by load


class Choice(NamedTuple):
    """The instance for a request, and the reason."""

    instance: InstanceState
    how: How


class InstanceState:
    """What the router knows of one instance, and its idle connections to it."""

    def __init__(self, config: InstanceConfig, router: RouterConfig, is_new: bool) -> None:
        self.config = config
        self.name = config.name
        self.breaker = Breaker(router.breaker)
        self.pool = UpstreamPool(router.limits.instance_idle)
        self.in_flight = 0
        self.is_drained = False  # an operator wants it out
        self.health = Health.UNKNOWN
        self.rank_times_s: deque[float] = deque(maxlen=1024)  # answer times of ranks in this interval
        self._health_config = router.health
        self._max_in_flight = router.limits.instance_inflight
        self._t_life_s = router.relay.t_life_s
        self._is_new = is_new  # joined a running router: its users come gradually
        self._drained_at = 0.0  # while it drains, it takes no ranks after this instant
        self._num_good = 0  # ready checks in a row
        self._num_bad = 0  # other checks in a row

    @property
    def has_room(self) -> bool:
        """Whether it is under its limit of requests in flight."""
        return self.in_flight < self._max_in_flight

    def takes_signals(self, now_at: float, user: bytes) -> bool:
        """Whether new work of this user may go to the instance."""
        return self.health is Health.UP and not self.is_drained and self._is_let_in(now_at, user)

    def takes_ranks(self, now_at: float) -> bool:
        """Whether a rank whose signal went to the instance may follow it."""
        return self._is_there(now_at) and not self.breaker.is_open(now_at)

    def takes_users(self, now_at: float, user: bytes) -> bool:
        """Whether a rank of this user without a signal may go to the instance."""
        return self._is_there(now_at) and self._is_let_in(now_at, user)

    def _is_there(self, now_at: float) -> bool:
        is_leaving = self.is_drained or self.health is Health.DRAINING
        return self.health in (Health.UP, Health.DRAINING) and not (is_leaving and now_at >= self._drained_at)

    def _is_let_in(self, now_at: float, user: bytes) -> bool:
        share = self.breaker.share(now_at)
        return share >= 1.0 or fraction(user) < share

    def drain(self, now_at: float) -> None:
        """Stop signals at once, and ranks after `t_life_s`."""
        if not self.is_drained and self.health is not Health.DRAINING:
            self._drained_at = now_at + self._t_life_s
        self.is_drained = True

    def undrain(self, now_at: float) -> None:
        """End the operator's drain; users return gradually."""
        if self.is_drained:
            self.is_drained = False
            self.breaker.come_back(now_at)

    def checked(self, check: Check, now_at: float) -> None:
        """Update the health after a check, or after a request that found nobody listening."""
        before = self.health
        if check is Check.READY:
            self._num_good += 1
            self._num_bad = 0
            if before is not Health.UP and self._num_good >= self._health_config.rise:
                self.health = Health.UP
                if before is not Health.UNKNOWN or self._is_new:
                    self.breaker.come_back(now_at)
        else:
            self._num_good = 0
            self._num_bad += 1
            self.health = self._health_after_bad(check, now_at)
        if self.health is not before:
            log.warning("instance %s: %s, was %s", self.name, self.health, before)
            if self.health is Health.DOWN:
                self.pool.close_idle()

    def _health_after_bad(self, check: Check, now_at: float) -> Health:
        if check is Check.UNREADY and self.health is Health.UP:
            if not self.is_drained:
                self._drained_at = now_at + self._t_life_s
            return Health.DRAINING
        if check is Check.UNREADY and self.health is Health.DRAINING:
            return Health.DOWN if now_at >= self._drained_at else Health.DRAINING
        if check is Check.UNREADY or self.health is Health.UNKNOWN or self._num_bad >= self._health_config.fall:
            return Health.DOWN
        return self.health

    def answered(self, took_s: float, is_rank: bool, now_at: float) -> None:
        """Record an answer that the instance gave `took_s` after it was sent the request."""
        self.breaker.succeeded(now_at)
        if is_rank:
            self.rank_times_s.append(took_s)


class Members:
    """All instances of one router."""

    def __init__(self, config: RouterConfig, seed: int = 0) -> None:
        self._config = config
        self._random = random.Random(seed)
        self.instances: dict[str, InstanceState] = {}
        self.ring = Ring(())
        self._signalled: dict[bytes, tuple[str, float]] = {}  # user -> (instance, expires_at), oldest first
        self._on_open: Callable[[str, str], None] = lambda _name, _why: None

    def observe(self, on_open: Callable[[str, str], None]) -> None:
        """Call `on_open(instance, why)` each time a breaker takes an instance out."""
        self._on_open = on_open

    def replace(self, configs: Iterable[InstanceConfig], ring: Ring) -> list[InstanceState]:
        """Replace the list of instances. An instance that keeps its name and address keeps its state.

        Returns:
            The instances that left.
        """
        before = self.instances
        is_new = bool(before)
        self.instances = {}
        for config in configs:
            kept = before.get(config.name)
            if kept is not None and (kept.config.host, kept.config.port) == (config.host, config.port):
                kept.config = config
                self.instances[config.name] = kept
            else:
                self.instances[config.name] = InstanceState(config, self._config, is_new)
        self.ring = ring
        kept_ids = set(map(id, self.instances.values()))
        return [instance for instance in before.values() if id(instance) not in kept_ids]

    # ---- where a request goes

    def for_signal(self, user: bytes, now_at: float, tried: Collection[str] = ()) -> tuple[Choice, Placement]:
        """Choose the instance for a signal and for the ranks that follow it.

        Args:
            user: the value of the user header.
            now_at: the instant, of the monotonic clock.
            tried: names of instances that have not taken the signal.

        Raises:
            Unavailable: no instance takes signals.
            Overloaded: the instance that would take it is at its limit.
        """
        others = (name for name in self.ring.walk(user) if name not in tried)
        able = (name for name in others if self.instances[name].takes_signals(now_at, user))
        name, is_spilled = spill(able, self._has_share if self._config.relay.load_factor else lambda _name: True)
        if name is None:
            raise Unavailable("no instance takes signals now")
        instance = self.instances[name]
        if not instance.has_room:
            raise Overloaded(f"{name} serves {instance.in_flight} requests already")
        self._remember(user, name, now_at)
        how = How.SPILLED if is_spilled else How.HOME if name == self.ring.owner(user) else How.SUCCESSOR
        return Choice(instance, how), Placement(name, self.ring.epoch, is_spilled)

    def for_rank(self, user: bytes, brought: Placement | None, now_at: float, tried: Collection[str]) -> Choice:
        """Choose the instance for a rank.

        In this order: the instance that the rank's placement header names; the one that this router remembers for the
        user's signal; the first on the ring that takes the user; any instance, by load.

        Args:
            user: the value of the user header.
            brought: the placement that the rank brings from its signal's answer.
            now_at: the instant, of the monotonic clock.
            tried: names of instances that have failed the rank.

        Raises:
            Unavailable: no instance is left.
            Overloaded: all that are left are at their limits.
        """
        for name in (brought.instance if brought else None, self._signalled_to(user, now_at)):
            instance = self.instances.get(name) if name is not None and name not in tried else None
            if instance is not None and instance.takes_ranks(now_at) and instance.has_room:
                return Choice(instance, How.SIGNAL)
        is_home = not tried
        for name in self.ring.walk(user):
            instance = self.instances[name]
            if name not in tried and instance.takes_users(now_at, user):
                if instance.has_room:
                    return Choice(instance, How.HOME if is_home else How.SUCCESSOR)
                break  # it is up but full: its overflow goes by load, not all to one successor
            is_home = False
        return self.for_any(now_at, tried)

    def for_any(self, now_at: float, tried: Collection[str] = ()) -> Choice:
        """Choose by load: the less loaded of two random instances with `normal`, or of all where none has it.

        Raises:
            Unavailable: no instance is left.
            Overloaded: all that are left are at their limits.
        """
        there = [one for one in self.instances.values() if one.name not in tried and one.takes_ranks(now_at)]
        there = [one for one in there if one.config.normal] or there
        if not there:
            raise Unavailable("no instance is available")
        free = [one for one in there if one.has_room]
        if not free:
            raise Overloaded("every instance is at its limit of requests in flight")
        two = self._random.sample(free, min(2, len(free)))
        return Choice(min(two, key=lambda one: one.in_flight), How.NORMAL)

    def _has_share(self, name: str) -> bool:
        """Whether the instance stays within its bounded load with one more signal."""
        up = [one for one in map(self.instances.__getitem__, self.ring.names) if one.health is Health.UP]
        total = sum(one.in_flight for one in up)
        total_weight = sum(one.config.weight for one in up)
        one = self.instances[name]
        return one.in_flight < bound(total, one.config.weight, total_weight, self._config.relay.load_factor)

    def _remember(self, user: bytes, name: str, now_at: float) -> None:
        kept = self._signalled
        kept.pop(user, None)
        kept[user] = (name, now_at + self._config.relay.t_life_s)
        while len(kept) > self._config.relay.max_remembered or next(iter(kept.values()))[1] <= now_at:
            del kept[next(iter(kept))]

    def _signalled_to(self, user: bytes, now_at: float) -> str | None:
        name, expires_at = self._signalled.get(user, (None, 0.0))
        return name if now_at < expires_at else None

    # ---- what requests teach

    def failed(self, instance: InstanceState, now_at: float) -> None:
        """Record that an instance failed a request: no connection, no answer in time, 502, 503 or 504."""
        if instance.breaker.failed(now_at):
            self._open(instance, "failures", now_at)

    def compare(self, now_at: float) -> None:
        """Take out instances that are far slower than the others; call it once in a health interval."""
        least = self._config.breaker.slow_min_requests
        times_s = {
            one.name: median(one.rank_times_s) for one in self.instances.values() if len(one.rank_times_s) >= least
        }
        for name, time_s in times_s.items():
            others_s = [value for other, value in times_s.items() if other != name]
            is_slow = bool(others_s) and time_s > self._config.breaker.slow_ratio * median(others_s)
            instance = self.instances[name]
            instance.rank_times_s.clear()
            if instance.breaker.was_slow(is_slow) and not instance.breaker.is_open(now_at):
                self._open(instance, "slow", now_at)

    def _open(self, instance: InstanceState, why: str, now_at: float) -> None:
        num_open = sum(one.breaker.is_open(now_at) for one in self.instances.values())
        if num_open + 1 > self._config.breaker.max_open_ratio * len(self.instances):
            return  # a bad instance is better than none
        log.warning("instance %s: out for %.1f s (%s)", instance.name, instance.breaker.open(now_at), why)
        self._on_open(instance.name, why)


def ring_of(configs: Iterable[InstanceConfig]) -> Ring:
    """Make the ring of the instances with `special`; the others own no users."""
    return Ring(Member(config.name, config.weight) for config in configs if config.special)
