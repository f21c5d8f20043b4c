"""The door of an instance: who may come in now, who waits for a turn, and who is told at once that it will be too late.

    arrive --> inside (at most a window of work) --> leave
       |          ^                 |   ^
       |          |                 v   |
       |--> wait in turns        outside: waits for something else than this instance
       |
       '--> refused: it could not be answered in time

    window     of each kind: `share` of its objective over its pace, so that whoever is inside delays nobody for long
    pace       seconds a request, learnt from departures (`pace.py`)
    turns      classes one after the other by `Kind.priority`, tenants in turn within a class (`turns.py`); whoever
               holds more than its share of the places inside, or of the last slots, goes behind the other tenants,
               and whoever is full gets no more places (`tenants.py`)
    in time    now + the work ahead + its own <= arrival + an aim x what it has: its objective, or the caller's budget
               if that is smaller. Whoever joins the queue is looked at again when its turn comes, and every TICK_S
    earned     where tenants share the instance, a tenant may signal about as often as it ranks (`tenants.py`)

A request that finds the window open comes in without being asked whether it will be in time: an instance that is
nearly idle refuses nobody, whatever its estimates say. A request of an important class does not see the window of the
classes behind it.

Invariants:
  D1  a ticket is let in, refused or cancelled: exactly one of the three, once
  D2  `inside` counts the slots that have been let in, have not left, and are not outside
  D3  nobody waits while the window is open for the first in turn, but a tenant that is full

Sources: Little's law for the window; CoDel (RFC 8289) for the second aim; adaptive LIFO and CoDel at Facebook ("Fail at
scale", 2015) for the queue at the door.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.pace import Pace
from npu_gr.admission.tenants import Holder, Tenants
from npu_gr.admission.turns import Turns
from npu_gr.core.errors import Overloaded, Refusal
from npu_gr.core.kinds import KINDS, Kind, Priority

LEAST = 4  # requests that may be inside whatever the window is: it fills a pass, and lets a wrong objective serve
MOST = 64  # requests of a kind inside: more do not make the device faster, but the event loop's turns longer
MOST_SIGNALS = 2  # inside where tenants share: the loop does all that are inside before a rank that comes
GUESS = 0.02  # of the objective: the pace of a kind that uses the device, until it is learnt
HOST_GUESS_S = 0.0005  # the pace of the other kinds, until it is learnt: parsing and answering
AIM = 0.95  # of the time that a request has: the rest is for writing the answer
AIM_BURST = 1.15  # what may join a queue that just began: the pace may be wrong by that much, and is learnt meanwhile
AIM_STANDING = 0.75  # what may join one that has stood for STANDING_S, so that not everybody served is nearly late
STANDING_S = 0.1  # CoDel's interval
WHY = {
    Refusal.LATE: "it would not be answered in time: the instance is busy",
    Refusal.SHARE: "the tenant signals far more than it ranks, and others share the instance",
}
_NUM_CLASSES = len(Priority)
_NONE: Set[str] = frozenset()
_NEVER = -math.inf  # an instant
TICK_S = 0.004  # between two looks for requests whose turn will come too late


class Guest(Protocol):
    """Whoever arrives at the door. One of the two is called, once, at once or later."""

    def let_in(self, slot: Slot) -> None:
        """The request may be served; it holds the slot until it leaves."""
        ...

    def refuse(self, reason: Refusal) -> None:
        """The request could not be answered in time, or its tenant may not signal any more for now (`SHARE`)."""
        ...


class Ticket:
    """A request at the door."""

    __slots__ = ("arrived_at", "cost_s", "guest", "has_s", "is_gone", "kind", "queue", "tenant", "wanted_at")

    def __init__(self, kind: str, tenant: str, arrived_at: float, has_s: float, guest: Guest) -> None:
        self.kind = kind
        self.tenant = tenant
        self.arrived_at = arrived_at
        self.has_s = has_s  # from its arrival to its answer
        self.wanted_at = arrived_at + has_s
        self.guest = guest
        self.cost_s = 0.0
        self.queue = ""
        self.is_gone = False


class Slot:
    """The right to be served. Whoever got it calls `leave` when the answer is written, or when there is none."""

    __slots__ = ("_door", "_holder", "_lane", "arrived_at", "on_step")

    def __init__(self, door: Door, lane: _Lane, holder: Holder, arrived_at: float) -> None:
        self.on_step: Callable[[bool], None] | None = None  # told of each step: True = outside
        self._door: Door | None = door
        self._lane = lane
        self._holder = holder
        self.arrived_at = arrived_at  # of the request, on the clock of the door

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the slot back. Calls after the first one do nothing."""
        if self._door is not None:
            self._door._left(self._lane, self._holder)
            self._door = None

    def outside(self) -> AbstractContextManager[None]:
        """Hold no place while the block waits for something else than this instance; come back without a queue."""
        return nullcontext() if self._door is None else _Outside(self._door, self._lane, self._holder, self.on_step)


class _Outside(AbstractContextManager[None]):
    """A block in which a request holds no place."""

    __slots__ = ("_door", "_holder", "_lane", "_on_step")

    def __init__(self, door: Door, lane: _Lane, holder: Holder, on_step: Callable[[bool], None] | None) -> None:
        self._door = door
        self._lane = lane
        self._holder = holder
        self._on_step = on_step

    def __enter__(self) -> None:
        self._door._stepped_out(self._lane, self._holder)
        if self._on_step is not None:
            self._on_step(True)

    def __exit__(self, *_: object) -> None:
        self._door._stepped_in(self._lane, self._holder)
        if self._on_step is not None:
            self._on_step(False)


class _Lane:
    """What the door knows of one kind."""

    __slots__ = ("inside", "kind", "most", "objective_s", "outside", "pace", "priority", "slots", "waiting")

    def __init__(self, kind: Kind[Any, Any], objective_s: float) -> None:
        self.kind = kind
        self.objective_s = objective_s
        self.priority = int(kind.priority)
        self.most = MOST_SIGNALS if kind.priority is Priority.SIGNAL else math.inf  # inside, where tenants share
        self.pace = Pace(GUESS * objective_s if kind.uses_device else HOST_GUESS_S)
        self.slots = math.inf  # inside, where doors share an instance
        self.inside = 0
        self.outside = 0
        self.waiting = 0


class Door:
    """Admission control of one instance. Event loop only."""

    def __init__(
        self,
        config: AdmissionConfig,
        objective_s: Callable[[str], float],
        *,
        batch_requests: int = LEAST,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """Nobody is inside yet.

        Args:
            config: whether anybody is refused at all, and by which bounds.
            objective_s: seconds within which a kind, by its name, should be answered.
            batch_requests: of one pass; so many may always be inside.
            clock: seconds that never go back.
            call_later: calls a function after so many seconds; None = the running event loop's.
        """
        self._config = config
        self._least = max(LEAST, batch_requests)
        self._most = max(MOST, 2 * batch_requests)
        self._clock = clock
        self._call_later = call_later
        self._lanes = {kind.name: _Lane(kind, objective_s(kind.name)) for kind in KINDS.values()}
        self._classes = [
            (Turns(config.tenant_weights), [lane for lane in self._lanes.values() if lane.kind.priority <= priority])
            for priority in Priority
        ]
        self._queues = [turns for turns, _ in self._classes]
        self._departed_at = _NEVER  # the last departure that left something to do
        self._admitted = 0
        self._tenants = Tenants(config, self._least, clock)
        self._waiting = 0
        self._inside = 0
        self._inside_known_s: list[float | None] = []  # by priority; see `_inside_s`
        self._changed()
        self._standing_since_at: float | None = None  # since when somebody has waited, without a break
        self._last = self._classes[0][1][0]  # the kind that departed last
        self._is_ticking = False
        self._will_serve = False  # a place became free by a step outside
        self.on_room: Callable[[int], None] = lambda _places: None  # nobody waits, and so many places are free
        self.on_device: Callable[[str], None] = lambda _tenant: None  # a tenant's request to the device came in

    def reconfigure(self, config: AdmissionConfig, objective_s: Callable[[str], float]) -> None:
        """Apply other settings from now on; what was learnt stays."""
        self._config = self._tenants.config = config
        for lane in self._lanes.values():
            lane.objective_s = objective_s(lane.kind.name)
        for turns, _ in self._classes:
            turns.weights = config.tenant_weights

    # ---- where several doors share an instance

    def share(self, slots: Mapping[str, int]) -> None:
        """Bound what may be inside.

        Args:
            slots: requests of each kind; a kind that is not named has no bound. What is inside stays.
        """
        for name, lane in self._lanes.items():
            lane.slots = slots.get(name, math.inf)
        if self._waiting:
            self._serve_next()

    def earned_elsewhere(self, tenant: str, num: int) -> None:
        """Note that so many requests of a tenant to the device came in at another door."""
        self._tenants.earned_elsewhere(tenant, num)

    def wanted(self) -> dict[str, int]:
        """Count the requests of each kind that wait or are inside; zeros are left out."""
        return {name: num for name, lane in self._lanes.items() if (num := lane.waiting + lane.inside)}

    def wanting(self) -> dict[str, int]:
        """Count the requests of each tenant that wait or are inside; zeros are left out."""
        counts = Counter(self._tenants.inside())
        for turns, _ in self._classes:
            counts.update(turns.counts())
        return dict(counts)

    # ---- what may be seen of it

    @property
    def admitted(self) -> int:
        """Requests that hold a slot, inside and outside."""
        return self._admitted

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._waiting

    @property
    def pressure(self) -> float:
        """Waiting work over the objectives of its requests, while the queue stands; 0 for a burst that passes."""
        if self._standing_since_at is None or self._clock() - self._standing_since_at <= STANDING_S:
            return 0.0
        return sum(lane.waiting * lane.pace.seconds / lane.objective_s for lane in self._lanes.values())

    def counts(self, kind: str) -> dict[str, int]:
        """Count a kind's requests by where they are: waiting, inside, outside."""
        lane = self._lanes[kind]
        return {"waiting": lane.waiting, "inside": lane.inside, "outside": lane.outside}

    def pace_s(self, kind: str) -> float:
        """Seconds a request of a kind."""
        return self._lanes[kind].pace.seconds

    def window(self, kind: str) -> int:
        """How many requests of a kind may be inside where there are no others."""
        return int(self._window(self._lanes[kind]))

    # ---- arriving

    def arrive(self, kind: str, tenant: str, arrived_at: float, budget_s: float, guest: Guest) -> Ticket | None:
        """Let a request in, let it wait, or refuse it.

        Args:
            kind: its name.
            tenant: whose turn it takes.
            arrived_at: when its last byte came, on the door's clock.
            budget_s: what the caller grants, from then on.
            guest: is told which; maybe within this call.

        Returns:
            what `cancel` takes; None = it was refused.
        """
        self._tenants.saw(tenant)
        lane = self._lanes[kind]
        turns, lanes = self._classes[lane.priority]
        has_s = min(lane.objective_s, budget_s)
        if lane.priority == Priority.SIGNAL and not self._tenants.may_signal(tenant, lane.pace.seconds):
            guest.refuse(Refusal.SHARE)
            return None
        has_place = self._has_room(lane, lanes) and not self._tenants.is_full(tenant)
        if not self._config.enabled or (has_place and self._nobody_before(lane)):
            ticket = Ticket(kind, tenant, arrived_at, has_s, guest)
            self._let_in(ticket, lane)
            return ticket
        now_at = self._clock()
        cost_s = lane.pace.seconds
        done_at = now_at + self._ahead_s(lane, turns, tenant, arrived_at + has_s) + cost_s
        if done_at > arrived_at + self._aim(now_at) * has_s:
            guest.refuse(Refusal.LATE)
            return None
        ticket = Ticket(kind, tenant, arrived_at, has_s, guest)
        ticket.cost_s = cost_s
        turns.push(ticket)
        self._waiting += 1
        lane.waiting += 1
        if self._standing_since_at is None:
            self._standing_since_at = now_at
        self._tick_later()
        if has_place:
            self._serve_next()  # those who wait before it may all be full
        return ticket

    def room(self, kind: str, tenant: str, budget_s: float, on_its_way: float = 0.0) -> int:
        """How many requests that came now would not be refused at once.

        Args:
            kind, tenant, budget_s: as for `arrive`.
            on_its_way: share of its time that passes until a request is here; who waits now is before it.
        """
        lane = self._lanes[kind]
        turns, lanes = self._classes[lane.priority]
        if not self._config.enabled:
            return self._config.max_inflight
        now_at = self._clock()
        has_s = min(lane.objective_s, budget_s)
        rest_s = (self._aim(now_at) - on_its_way) * has_s - self._ahead_s(lane, turns, tenant, now_at + has_s)
        if rest_s >= lane.pace.seconds:
            return int(rest_s / lane.pace.seconds)
        return int(self._has_room(lane, lanes) and not self._tenants.is_full(tenant) and self._nobody_before(lane))

    def _aim(self, now_at: float) -> float:
        """The share of its time within which a request must be done that joins the queue now."""
        stands = self._standing_since_at is not None and now_at - self._standing_since_at > STANDING_S
        return AIM_STANDING if stands else AIM_BURST

    def is_late(self, kind: str, arrived_at: float, budget_s: float) -> bool:
        """Whether a request could not be answered in time even if nothing else were to do.

        Args:
            kind, arrived_at, budget_s: as for `arrive`.
        """
        lane = self._lanes[kind]
        has_s = min(lane.objective_s, budget_s)
        return self._clock() + lane.pace.seconds > arrived_at + AIM * has_s

    def has_room(self, kind: str) -> bool:
        """Whether a request of the kind that came now would be let in at once."""
        lane = self._lanes[kind]
        return self._nobody_before(lane) and self._has_room(lane, self._classes[lane.priority][1])

    def cancel(self, ticket: Ticket | None) -> None:
        """Forget a request whose caller hung up while it waited; one that waits no more is left alone."""
        if ticket is not None and not ticket.is_gone:
            self._drop(ticket)

    async def enter(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> Slot:
        """Wait until the request is let in.

        Args:
            kind, tenant, arrived_at, budget_s: as for `arrive`.

        Raises:
            Overloaded: it could not be answered in time.
        """
        awaiting = _Awaiting()
        ticket = self.arrive(kind, tenant, arrived_at, budget_s, awaiting)
        try:
            return await awaiting.slot
        except asyncio.CancelledError:
            self.cancel(ticket)
            if awaiting.slot.done() and not awaiting.slot.cancelled() and awaiting.slot.exception() is None:
                awaiting.slot.result().leave()
            raise

    def _let_in(self, ticket: Ticket, lane: _Lane) -> None:
        ticket.is_gone = True
        to_device = lane.kind.uses_device
        if to_device:
            self.on_device(ticket.tenant)
        holder = self._tenants.let_in(ticket.tenant, to_device)
        self._admitted += 1
        self._add(lane)
        ticket.guest.let_in(Slot(self, lane, holder, ticket.arrived_at))

    def _add(self, lane: _Lane) -> None:
        if not self._inside:
            self._departed_at = _NEVER  # what comes after a pause in work tells nothing of the pace
        self._inside += 1
        lane.inside += 1
        self._changed()

    def _window(self, lane: _Lane) -> float:
        size = min(self._config.share * lane.objective_s / max(lane.pace.seconds, 1e-9), lane.slots)
        return min(max(size, self._least), self._most)

    def _has_room(self, lane: _Lane, lanes: list[_Lane]) -> bool:
        """Whether one more of a kind may come in beside those that matter as much, or more."""
        if self._admitted >= self._config.max_inflight:
            return False
        if lane.inside >= lane.most and self._tenants.are_sharing():
            return False
        num_inside = 0
        used = 1 / self._window(lane)
        for other in lanes:
            if other.inside:
                num_inside += other.inside
                used += other.inside / self._window(other)
        return num_inside < self._least or used <= 1.0 + 1e-9

    def _nobody_before(self, lane: _Lane) -> bool:
        return not self._waiting or not any(map(len, self._queues[: lane.priority + 1]))

    def _ahead_s(self, lane: _Lane, turns: Turns, tenant: str, wanted_at: float) -> float:
        """Seconds until a request's own work would begin, if nobody more important came after it."""
        ahead_s = self._inside_s(lane.priority) + turns.ahead_s(tenant, wanted_at)
        for more_important, _ in self._classes[: lane.priority]:
            ahead_s += more_important.cost_s
        return ahead_s

    def _inside_s(self, priority: int) -> float:
        """Seconds of work inside: all that matters as much, and one request of what matters less, if it has begun."""
        known_s = self._inside_known_s[priority]
        if known_s is not None:
            return known_s
        inside = [lane for lane in self._lanes.values() if lane.inside]
        inside_s = sum(lane.inside * lane.pace.seconds for lane in inside if lane.priority <= priority)
        inside_s += max((lane.pace.seconds for lane in inside if lane.priority > priority), default=0.0)
        self._inside_known_s[priority] = inside_s
        return inside_s

    def _changed(self) -> None:
        """Forget what was computed from who is inside."""
        self._inside_known_s = [None] * _NUM_CLASSES

    # ---- leaving

    def _left(self, lane: _Lane, holder: Holder) -> None:
        now_at = self._clock()
        if self._departed_at > _NEVER:
            lane.pace.observe(now_at - self._departed_at)
        lane.inside -= 1
        self._inside -= 1
        self._admitted -= 1
        self._tenants.left(holder)
        self._changed()
        self._departed_at = now_at if self._inside else _NEVER
        self._last = lane
        self._serve_next()

    def _stepped_out(self, lane: _Lane, holder: Holder) -> None:
        lane.inside -= 1
        self._inside -= 1
        holder.inside -= 1
        lane.outside += 1
        self._changed()
        if self.waiting and not self._will_serve:
            # later, because a block that need not wait at all is back before then
            self._will_serve = True
            self._later(0.0, self._serve_stepped_out)

    def _serve_stepped_out(self) -> None:
        self._will_serve = False
        self._serve_next()

    def _stepped_in(self, lane: _Lane, holder: Holder) -> None:
        lane.outside -= 1
        holder.inside += 1
        self._add(lane)

    # ---- waiting

    def _serve_next(self) -> None:
        """Let in whoever is first in turn, as long as there is room; refuse whoever would be late by now."""
        while (found := self._first()) is not None:
            ticket, turns, lanes = found
            lane = self._lanes[ticket.kind]
            if not self._has_room(lane, lanes):
                return  # those who will be late are told by `_tick`
            if self._is_late(ticket, lane) and not self._is_idle():
                self._drop(ticket)
                ticket.guest.refuse(Refusal.LATE)
            else:
                lane.waiting -= 1
                self._waiting -= 1
                turns.take(ticket)
                self._let_in(ticket, lane)
        if self._waiting:  # all of them are full
            return
        self._standing_since_at = None
        self.on_room(max(0, int(self._window(self._last)) - self._inside))

    def _first(self) -> tuple[Ticket, Turns, list[_Lane]] | None:
        if not self._waiting:
            return None
        full = self._tenants.full()
        for turns, lanes in self._classes:
            over = _NONE
            if len(turns.queues) > 1:
                of_slots = self._admitted + 1 >= self._config.max_inflight  # the last one is about to go
                num = self._admitted if of_slots else self._inside
                over = self._tenants.over_their_share(turns.queues, num, of_slots)
            if (ticket := turns.head(over, full)) is not None:
                return cast("Ticket", ticket), turns, lanes
            if len(turns):
                return None  # a class behind it must not take what they may not have
        return None

    def _is_idle(self) -> bool:
        return self._inside < self._least

    def _drop(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.kind]
        lane.waiting -= 1
        self._waiting -= 1
        self._classes[lane.priority][0].drop(ticket)
        if not self.waiting:
            self._standing_since_at = None

    def _tick_later(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self._later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Tell those whose turn will come too late; once more while somebody waits."""
        self._is_ticking = False
        for turns, _ in self._classes:
            while late := [ticket for ticket in self._heads(turns) if self._is_late(ticket, self._lanes[ticket.kind])]:
                for ticket in late:
                    self._drop(ticket)
                    ticket.guest.refuse(Refusal.LATE)
        self._serve_next()
        if self.waiting:
            self._tick_later()

    def _heads(self, turns: Turns) -> list[Ticket]:
        return cast("list[Ticket]", turns.heads())

    def _is_late(self, ticket: Ticket, lane: _Lane) -> bool:
        """Whether a request would be late even if it were let in now."""
        return self._clock() + self._inside_s(lane.priority) + ticket.cost_s > ticket.arrived_at + AIM * ticket.has_s

    def _later(self, after_s: float, function: Callable[[], None]) -> None:
        if self._call_later is None:
            self._call_later = asyncio.get_running_loop().call_later
        self._call_later(after_s, function)


class _Awaiting:
    """A guest that a coroutine waits for."""

    def __init__(self) -> None:
        self.slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()

    def let_in(self, slot: Slot) -> None:
        if self.slot.done():  # cancelled in this very turn of the loop
            slot.leave()
        else:
            self.slot.set_result(slot)

    def refuse(self, reason: Refusal) -> None:
        if not self.slot.done():
            self.slot.set_exception(Overloaded(WHY[reason], reason=reason))
