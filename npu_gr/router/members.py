"""The instances of one router, and which of them gets a request.

Nothing that happens to an instance changes the ring: a walk around the ring for a user skips the instances that do not
take the request. `trust.py` says whom the others make up for.

Invariants:
  M1  a rank goes where its signal went, as long as that instance takes ranks
  M2  users of instances that are up and not held back by a breaker stay where they are, whatever happens to the others
  M3  a draining instance gets no signal that another takes; after `t_life_s` of draining it gets nothing
  M4  nobody is refused because of the health of instances while an instance is up, or while nobody knows better
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from npu_gr.core.errors import Overloaded, Unavailable
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.instance import Health, InstanceState
from npu_gr.router.ring import Member, Placement, Ring, bound, spill
from npu_gr.router.trust import Trust, trust

log = logging.getLogger(__name__)


class How(StrEnum):
    """The reason for which a request goes to its instance; the value of the `how` metric label."""

    HOME = "home"  # the instance owns the user
    SPILLED = "spilled"  # the owner had more than its share
    SIGNAL = "signal"  # a rank follows its signal
    SUCCESSOR = "successor"  # the owner does not take it
    NORMAL = "normal"  # by load
    BLIND = "blind"  # no instance takes it as far as is known; this one is asked all the same


class Choice(NamedTuple):
    """The instance for a request, and the reason."""

    instance: InstanceState
    how: How


Takes = Callable[[InstanceState, float], bool]  # whether an instance takes one kind of work of anybody, at an instant


class Members:
    """All instances of one router."""

    def __init__(self, config: RouterConfig, seed: int = 0) -> None:
        self._config = config
        self._random = random.Random(seed)  # noqa: S311  (load)
        self.instances: dict[str, InstanceState] = {}
        self.ring = Ring(())
        self._homes: dict[str, Choice] = {}  # name of an instance -> the choice of the owner
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
        self._homes = {name: Choice(one, How.HOME) for name, one in self.instances.items()}
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
        able = (one.name for one in self._takers(user, now_at, InstanceState.takes_signals) if one.name not in tried)
        name, is_spilled = spill(able, self._has_share if self._config.relay.load_factor else lambda _name: True)
        how = How.SPILLED if is_spilled else How.HOME if name == self.ring.owner_or_none(user) else How.SUCCESSOR
        if name is None:
            how = How.BLIND
            others = self._blind(self.ring.walk(user), tried, now_at, InstanceState.takes_signals)
            name = others[0].name if others else None
        if name is None:
            raise Unavailable("no instance takes signals now")
        instance = self.instances[name]
        if not instance.has_room:
            raise Overloaded(f"{name} serves {instance.in_flight} requests already")
        self.remember(user, name, now_at)
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
        if brought is not None or user in self._signalled:
            for name in (brought.instance if brought is not None else None, self._signalled_to(user, now_at)):
                one = self.instances.get(name) if name is not None and name not in tried else None
                if one is not None and self._takes(one, now_at, InstanceState.takes_ranks) and one.has_room:
                    return Choice(one, How.SIGNAL)
        owner = self.ring.owner_or_none(user)
        if owner is not None and not tried:  # the usual case, without a walk
            home = self._homes[owner]
            if home.instance.takes_every_rank(now_at):
                return home
        for instance in self._takers(user, now_at, InstanceState.takes_ranks):
            if instance.name not in tried:
                if instance.has_room:
                    return Choice(instance, How.HOME if instance.name == owner else How.SUCCESSOR)
                break  # it is up but full: its overflow goes by load, not all to one successor
        return self.for_any(now_at, tried)

    def second(self, user: bytes, first: InstanceState, now_at: float, tried: Collection[str]) -> InstanceState | None:
        """Choose whom a gateway asks for a rank if the first one fails; None: there is nobody.

        Args:
            user: the value of the user header.
            first: as `for_rank` has chosen.
            now_at: the instant, of the monotonic clock.
            tried: names of instances that the gateway cannot ask.
        """
        owner, successor = self.ring.first_two(user)
        name = successor if owner == first.name else owner
        if name is not None and name not in tried:  # the usual case, without a walk
            instance = self.instances[name]
            if instance.takes_every_rank(now_at):
                return instance
        try:
            return self.for_rank(user, None, now_at, [*tried, first.name]).instance
        except (Unavailable, Overloaded):
            return None

    def for_any(self, now_at: float, tried: Collection[str] = ()) -> Choice:
        """Choose by load: the less loaded of two random instances with `normal`, or of all where none has it.

        Raises:
            Unavailable: no instance is left.
            Overloaded: all that are left are at their limits.
        """
        how = How.NORMAL
        there = [one for one in self.instances.values() if one.name not in tried]
        there = [one for one in there if self._takes(one, now_at, InstanceState.takes_ranks)]
        if not there:
            how = How.BLIND
            there = self._blind(self.instances, tried, now_at, InstanceState.takes_ranks)
        there = [one for one in there if one.config.normal] or there
        if not there:
            raise Unavailable("no instance is available")
        free = [one for one in there if one.has_room]
        if not free:
            raise Overloaded("every instance is at its limit of requests in flight")
        two = self._random.sample(free, min(2, len(free)))
        return Choice(min(two, key=lambda one: one.in_flight), how)

    def for_overflow(self, now_at: float, tried: Collection[str]) -> Choice:
        """Choose by load for a rank that its instance refused, unless half of the instances refuse.

        An instance that refused a moment ago is not asked: then the whole fleet has too much to do, not one hot owner.

        Raises:
            Unavailable: there is no such instance.
            Overloaded: all that are left are at their limits.
        """
        refusing = [one.name for one in self.instances.values() if one.refuses(now_at)]
        if 2 * len(refusing) > len(self.instances):
            raise Unavailable("most instances refuse for load")
        return self.for_any(now_at, {*tried, *refusing})

    def may_hedge(self, limit_s: float, now_at: float) -> bool:
        """Whether not most instances take longer than this: then all have too much to do, and a hedge makes it more."""
        slow = sum(one.is_slow(limit_s, now_at) for one in self.instances.values())
        return 2 * slow <= len(self.instances)

    def trust(self, now_at: float) -> Trust:
        """Judge all instances together."""
        return trust(self.instances.values(), now_at, self._config.health.panic_ratio)

    def is_served(self, now_at: float) -> bool:
        """Whether an instance is known, or in a panic is hoped, to serve."""
        up = (one for one in self.instances.values() if one.health is not Health.DRAINING)
        return any(self._takes(one, now_at, InstanceState.takes_ranks) for one in up)

    def _takers(self, user: bytes, now_at: float, takes: Takes) -> Iterator[InstanceState]:
        """The instances that take work of a user, the owner first.

        Args:
            user: the value of the user header.
            now_at: the instant, of the monotonic clock.
            takes: whether an instance takes this kind of work of anybody.
        """
        judged: Trust | None = None
        for name in self.ring.walk(user):
            one = self.instances[name]
            if takes(one, now_at):
                if one.breaker.share(now_at) < 1.0:
                    judged = judged or self.trust(now_at)
                    if not judged.lets_in(one, user, now_at):
                        continue
                yield one
            elif one.is_suspect(now_at):
                judged = judged or self.trust(now_at)
                if judged.is_panic:
                    yield one

    def _takes(self, one: InstanceState, now_at: float, takes: Takes) -> bool:
        return takes(one, now_at) or (one.is_suspect(now_at) and self.trust(now_at).is_panic)

    def _blind(self, names: Iterable[str], tried: Collection[str], now_at: float, takes: Takes) -> list[InstanceState]:
        """Where nobody takes the request: whom no operator has taken out. Asking in vain is better than refusing."""
        asked = [self.instances[name] for name in names]
        if any(self._takes(one, now_at, takes) for one in asked):
            return []  # those have been tried
        return [one for one in asked if one.name not in tried and not one.is_drained]

    def _has_share(self, name: str) -> bool:
        """Whether the instance stays within its bounded load with one more signal."""
        up = [one for one in map(self.instances.__getitem__, self.ring.names) if one.health is Health.UP]
        if not up:
            return True  # a panic: nobody has a share
        total = sum(one.in_flight for one in up)
        total_weight = sum(one.config.weight for one in up)
        one = self.instances[name]
        return one.in_flight < bound(total, one.config.weight, total_weight, self._config.relay.load_factor)

    def remember(self, user: bytes, name: str, now_at: float) -> None:
        """Let the ranks of a user follow a signal to this instance."""
        kept = self._signalled
        kept.pop(user, None)
        kept[user] = (name, now_at + self._config.relay.t_life_s)
        while len(kept) > self._config.relay.max_remembered or next(iter(kept.values()))[1] <= now_at:
            del kept[next(iter(kept))]

    def forget(self, user: bytes) -> None:
        """Forget where the signal of an erased user went."""
        self._signalled.pop(user, None)

    def knows(self, user: bytes) -> bool:
        """Whether a placement of the user is remembered."""
        return user in self._signalled

    def _signalled_to(self, user: bytes, now_at: float) -> str | None:
        signalled = self._signalled.get(user)
        return signalled[0] if signalled is not None and now_at < signalled[1] else None

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
