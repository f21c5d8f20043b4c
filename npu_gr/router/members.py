"""The instances as this router sees them, and which of them gets a request.

An instance is up, draining (takes ranks of its users, no signals), down or unknown; its breaker may keep it out or let
only a share of its users return. Neither changes the ring: a user's walk around it skips who cannot take the request.

Invariants:
  M1  a rank goes where its signal went, as long as that instance takes ranks
  M2  users of instances that are up and whole stay where they are, whatever happens to the others
  M3  a draining instance gets no signal; after `t_life_s` of draining it gets nothing
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from npu_gr.core.errors import Overloaded, Unavailable
from npu_gr.router.breaker import Breaker
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.ring import Member, Placement, Ring, bound, fraction, spill

if TYPE_CHECKING:
    from npu_gr.router.upstream import Upstream

log = logging.getLogger(__name__)


class Health(StrEnum):
    """What the checks say."""

    UNKNOWN = "unknown"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class Check(StrEnum):
    """One look at an instance."""

    READY = "ready"
    UNREADY = "unready"  # it answers, and does not want new work
    FAILED = "failed"  # it does not answer


class How(StrEnum):
    """What decided where a request goes; the value of the `how` metric label."""

    HOME = "home"
    SPILLED = "spilled"  # the owner had more than its share
    SIGNAL = "signal"  # it follows its signal
    SUCCESSOR = "successor"  # the owner does not take it
    NORMAL = "normal"  # by load


class Choice(NamedTuple):
    """Where to, and why there."""

    instance: Instance
    how: How


class Instance:
    """One instance. Its idle connections are kept here; `proxy.py` takes and returns them."""

    def __init__(self, config: InstanceConfig, router: RouterConfig, is_new: bool) -> None:
        self.config, self.name = config, config.name
        self.breaker = Breaker(router.breaker)
        self.idle: deque[Upstream] = deque()
        self.in_flight = 0
        self.is_drained = False  # an operator wants it out
        self.health = Health.UNKNOWN
        self.ranks_s: deque[float] = deque(maxlen=1024)  # answer times since the last look
        self._health_config, self._limit, self._t_life_s = (
            router.health,
            router.limits.instance_inflight,
            router.relay.t_life_s,
        )
        self._is_new = is_new  # joined a running router: its users come slowly
        self._drained_s = 0.0  # takes no ranks after that
        self._good, self._bad = 0, 0  # checks in a row

    @property
    def has_room(self) -> bool:
        """Whether it is under its limit of requests in flight."""
        return self.in_flight < self._limit

    def takes_signals(self, now_at: float, user: bytes) -> bool:
        """Whether new work of this user may go there."""
        return self.health is Health.UP and not self.is_drained and self._is_let_in(now_at, user)

    def takes_ranks(self, now_at: float) -> bool:
        """Whether a rank whose signal went there may follow it."""
        return self._is_there(now_at) and not self.breaker.is_open(now_at)

    def takes_users(self, now_at: float, user: bytes) -> bool:
        """Whether a rank without a signal may go there."""
        return self._is_there(now_at) and self._is_let_in(now_at, user)

    def _is_there(self, now_at: float) -> bool:
        is_leaving = self.is_drained or self.health is Health.DRAINING
        return self.health in (Health.UP, Health.DRAINING) and not (is_leaving and now_at >= self._drained_s)

    def _is_let_in(self, now_at: float, user: bytes) -> bool:
        share = self.breaker.share(now_at)
        return share >= 1.0 or fraction(user) < share

    def drain(self, now_at: float) -> None:
        """Signals stop at once, ranks after `t_life_s`."""
        if not self.is_drained and self.health is not Health.DRAINING:
            self._drained_s = now_at + self._t_life_s
        self.is_drained = True

    def undrain(self, now_at: float) -> None:
        """Take it back, slowly."""
        if self.is_drained:
            self.is_drained = False
            self.breaker.come_back(now_at)

    def checked(self, check: Check, now_at: float) -> None:
        """Learn from a check, or from a request that found nobody listening."""
        before = self.health
        self._good, self._bad = (self._good + 1, 0) if check is Check.READY else (0, self._bad + 1)
        if check is Check.READY:
            if before is not Health.UP and self._good >= self._health_config.rise:
                self.health = Health.UP
                if before is not Health.UNKNOWN or self._is_new:
                    self.breaker.come_back(now_at)
        elif check is Check.UNREADY and before is Health.UP:
            self.health = Health.DRAINING
            if not self.is_drained:
                self._drained_s = now_at + self._t_life_s
        elif check is Check.UNREADY and before is Health.DRAINING:
            if now_at >= self._drained_s:
                self.health = Health.DOWN
        elif check is Check.UNREADY or before is Health.UNKNOWN or self._bad >= self._health_config.fall:
            self.health = Health.DOWN
        if self.health is not before:
            log.warning("instance %s: %s, was %s", self.name, self.health, before)
            if self.health is Health.DOWN:
                self.close_idle()

    def answered(self, took_s: float, is_rank: bool, now_at: float) -> None:
        """It answered a request after so long."""
        self.breaker.succeeded(now_at)
        if is_rank:
            self.ranks_s.append(took_s)

    def close_idle(self, before_s: float = float("inf")) -> None:
        """Close connections unused since `before_s`, the longest unused first."""
        while self.idle and self.idle[0].idle_since_s < before_s:
            self.idle.popleft().close()


class Members:
    """All instances of one router."""

    def __init__(self, config: RouterConfig, seed: int = 0) -> None:
        self._config = config
        self._random = random.Random(seed)
        self.instances: dict[str, Instance] = {}
        self.ring = Ring(())
        self._signalled: dict[bytes, tuple[str, float]] = {}  # user -> (instance, until), oldest first
        self._on_open: Callable[[str, str], None] = lambda _name, _why: None

    def observe(self, on_open: Callable[[str, str], None]) -> None:
        """Tell of instances that breakers take out, and why."""
        self._on_open = on_open

    def replace(self, configs: Iterable[InstanceConfig], ring: Ring) -> list[Instance]:
        """These are the instances now; the ones that stay keep their state. Returns those that left."""
        is_new, before = bool(self.instances), self.instances
        self.instances = {}
        for config in configs:
            kept = before.get(config.name)
            if kept is not None and (kept.config.host, kept.config.port) == (config.host, config.port):
                kept.config = config
                self.instances[config.name] = kept
            else:
                self.instances[config.name] = Instance(config, self._config, is_new)
        self.ring = ring
        kept_ones = set(map(id, self.instances.values()))
        return [instance for instance in before.values() if id(instance) not in kept_ones]

    # ---- where a request goes

    def for_signal(self, user: bytes, now_at: float, tried: Collection[str] = ()) -> tuple[Choice, Placement]:
        """Decide on a pair: the rank follows. Those in `tried` have not taken it.

        Raises:
            Unavailable: nobody takes signals. Overloaded: the one that would is at its limit.
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
        """After its signal; without one to the owner; where that does not take it, to the next one, as a miss.

        Raises:
            Unavailable: nobody is left. Overloaded: all who are left are at their limits.
        """
        for name in (brought.instance if brought else None, self._placed(user, now_at)):
            instance = self.instances.get(name) if name is not None and name not in tried else None
            if instance is not None and instance.takes_ranks(now_at) and instance.has_room:
                return Choice(instance, How.SIGNAL)
        is_home = not tried
        for name in self.ring.walk(user):
            instance = self.instances[name]
            if name not in tried and instance.takes_users(now_at, user):
                if instance.has_room:
                    return Choice(instance, How.HOME if is_home else How.SUCCESSOR)
                break  # too many users, not too many dead: by load, then
            is_home = False
        return self.for_any(now_at, tried)

    def for_any(self, now_at: float, tried: Collection[str] = ()) -> Choice:
        """The less loaded of two random ones of the normal service, or of all where it has none.

        Raises:
            Unavailable: nobody is left. Overloaded: all who are left are at their limits.
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
        """Whether one more signal leaves it within its bound."""
        up = [one for one in map(self.instances.__getitem__, self.ring.names) if one.health is Health.UP]
        total, weight = sum(one.in_flight for one in up), sum(one.config.weight for one in up)
        one = self.instances[name]
        return one.in_flight < bound(total, one.config.weight, weight, self._config.relay.load_factor)

    def _remember(self, user: bytes, name: str, now_at: float) -> None:
        kept = self._signalled
        kept.pop(user, None)
        kept[user] = (name, now_at + self._config.relay.t_life_s)
        while len(kept) > self._config.relay.max_remembered or next(iter(kept.values()))[1] <= now_at:
            del kept[next(iter(kept))]

    def _placed(self, user: bytes, now_at: float) -> str | None:
        name, until_s = self._signalled.get(user, (None, 0.0))
        return name if now_at < until_s else None

    # ---- what requests teach

    def failed(self, instance: Instance, now_at: float) -> None:
        """An instance failed a request: no connection, no answer in time, 502, 503 or 504."""
        if instance.breaker.failed(now_at):
            self._open(instance, "failures", now_at)

    def compare(self, now_at: float) -> None:
        """Once an interval: take out who is far slower than the rest."""
        least = self._config.breaker.slow_min_requests
        times = {one.name: median(one.ranks_s) for one in self.instances.values() if len(one.ranks_s) >= least}
        for name, time_s in times.items():
            others = [value for other, value in times.items() if other != name]
            is_slow = bool(others) and time_s > self._config.breaker.slow_ratio * median(others)
            instance = self.instances[name]
            instance.ranks_s.clear()
            if instance.breaker.was_slow(is_slow) and not instance.breaker.is_open(now_at):
                self._open(instance, "slow", now_at)

    def _open(self, instance: Instance, why: str, now_at: float) -> None:
        num_open = sum(one.breaker.is_open(now_at) for one in self.instances.values())
        if num_open + 1 > self._config.breaker.max_open_ratio * len(self.instances):
            return  # better a bad one than none
        log.warning("instance %s: out for %.1f s (%s)", instance.name, instance.breaker.open(now_at), why)
        self._on_open(instance.name, why)


def ring_of(configs: Iterable[InstanceConfig]) -> Ring:
    """The special instances; the others have no users."""
    return Ring(Member(config.name, config.weight) for config in configs if config.special)
