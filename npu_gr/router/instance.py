"""One instance as this router sees it: its health, how much it is trusted with, and how quickly it answers.

The health, as its checks tell it (one check each `health.interval_s`; ready = 200, unready = another status, failed =
no answer, gone = nobody listens):

                 ready x rise                     unready
    UNKNOWN ──────────────────────► UP ──────────────────────► DRAINING
       │                          ▲  │ ▲     ready x rise        │ │
       │ not ready                │  │ └─────────────────────────┘ │ unready and t_life_s over,
       │             ready x rise │  │ failed or gone, x fall      │ or failed or gone, x fall
       └────────────────────────► DOWN ◄───────────────────────────┘

A draining instance takes the ranks of its users and no signals. An operator can drain an instance as well. The circuit
breaker of an instance may keep it out, or let only a share of its users return.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import StrEnum

from npu_gr.router.breaker import Breaker
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.upstream import UpstreamPool

log = logging.getLogger(__name__)
_REFUSES_S = 1.0  # an instance that refused for load is thought to have too much to do for this long
_TYPICAL = 0.1  # the weight of the newest answer in the typical answer time


class Health(StrEnum):
    """The health of an instance; the module's docstring draws how it changes."""

    UNKNOWN = "unknown"  # not checked yet
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


_UP = Health.UP  # in Python 3.11 a member's own name costs several times as much


class Check(StrEnum):
    """The result of one health check."""

    READY = "ready"
    UNREADY = "unready"  # it answers, and does not want new work
    FAILED = "failed"  # it does not answer: perhaps it has too much to do
    GONE = "gone"  # nobody listens at its address, or its name has none


class InstanceState:
    """What the router knows of one instance, and its idle connections to it."""

    def __init__(self, config: InstanceConfig, router: RouterConfig, is_new: bool) -> None:
        self.config = config
        self.name = config.name
        self.header = b"X-NpuGr-Instance: %s\r\n" % config.name.encode()  # of every answer that it gives
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
        self._last_check: Check | None = None
        self._typical_s = 0.0  # answer time of a rank
        self._refused_at = float("-inf")  # the last time for load
        self._heard_at = 0.0  # its last answer, or the beginning of its first request after a pause

    @property
    def has_room(self) -> bool:
        """Whether it is under its limit of requests in flight."""
        return self.in_flight < self._max_in_flight

    @property
    def is_gone(self) -> bool:
        """Whether nobody listens at its address: it does not run."""
        return self._last_check is Check.GONE

    def takes_signals(self, now_at: float) -> bool:
        """Whether new work may go to the instance; `share` says of which users."""
        return self.health is Health.UP and not self.is_drained and not self.breaker.is_open(now_at)

    def takes_ranks(self, now_at: float) -> bool:
        """Whether a rank whose signal went to the instance may follow it."""
        is_leaving = self.is_drained or self.health is Health.DRAINING
        is_there = self.health in (Health.UP, Health.DRAINING) and not (is_leaving and now_at >= self._drained_at)
        return is_there and not self.breaker.is_open(now_at)

    def takes_every_rank(self, now_at: float) -> bool:
        """Whether it takes ranks of all of its users, and has room for one more."""
        is_well = self.health is _UP and not self.is_drained
        has_room = self.in_flight < self._max_in_flight
        return has_room and (is_well or self.takes_ranks(now_at)) and self.breaker.is_closed(now_at)

    def is_suspect(self, now_at: float) -> bool:
        """Whether it is out only because it does not answer, or fails: an overload looks like that as well.

        An instance that says that it wants no work, whose operator says so, or at whose address nobody listens is
        none: there is no doubt.
        """
        if self.is_drained or self.is_gone or self._last_check is Check.UNREADY:
            return False
        return self.health is Health.DOWN or self.breaker.is_open(now_at)

    def refused(self, now_at: float) -> None:
        """Record that it refused a request for load."""
        self._refused_at = now_at
        self._heard_at = now_at

    def refuses(self, now_at: float) -> bool:
        """Whether it refused a request for load a moment ago."""
        return now_at - self._refused_at < _REFUSES_S

    def is_silent(self, limit_s: float, now_at: float) -> bool:
        """Whether it has answered nothing for this long although it has work."""
        return self.in_flight > 0 and now_at - self._heard_at > limit_s

    def is_slow(self, limit_s: float, now_at: float) -> bool:
        """Whether it usually takes longer than this to answer a rank, or has been silent for as long with work."""
        return self.in_flight > 0 and (self._typical_s > limit_s or self.is_silent(limit_s, now_at))

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
        self._last_check = check
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

    def begun(self, now_at: float) -> None:
        """Count one more request at the instance."""
        if not self.in_flight:
            self._heard_at = now_at
        self.in_flight += 1

    def answered(self, took_s: float, is_rank: bool, now_at: float) -> None:
        """Record an answer that the instance gave `took_s` after it was sent the request."""
        self.breaker.succeeded(now_at)
        self.ended(took_s, is_rank, now_at)

    def ended(self, took_s: float, is_rank: bool, now_at: float) -> None:
        """Record the end of a request whose answer the router was not shown."""
        self._heard_at = now_at
        if is_rank:
            self.rank_times_s.append(took_s)
            self._typical_s += _TYPICAL * (took_s - self._typical_s)
