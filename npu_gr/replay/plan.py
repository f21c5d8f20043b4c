"""From a query log to timed actions, one after the other. Pure: no clock, no I/O.

Records keep their order in time. They are scaled by `speed`, or ranks are paced anew at `rate` and the rest is spread
evenly between them. The cascade keeps its real seconds whatever the load, because it does not get faster with it:

    the log has signals        a signal belongs to the user's next rank within `PAIR_S` and keeps its distance to it
    a rank has delay_ms        `ts` is the user's arrival: signal at once, rank after the recorded delay
    rank_delay_s               the same with a modelled delay, log-normal, seeded
    signal_lead_s              `ts` is the rank's time: signal that much earlier

Invariants:
  I1  due times are sorted and the first one is 0
  I2  a user's ranks, generates and events are due in the log's order
  I3  the same records and options give the same plan
  I4  what is held is bounded by what happens within `PAIR_S` and the lead, never by the log's length
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice

import msgspec
import numpy as np
import xxhash

from npu_gr.core.request import UserKey
from npu_gr.replay.log import SCORED, Record
from npu_gr.replay.options import ReplayOptions

PAIR_S = 5.0  # log seconds from a signal to its rank, at most
MAX_BETWEEN = 10_000  # records between two paced ones that are held to be spread

_Z99 = 2.3263478740408408  # standard normal quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One request to send; its record's `kind` says which."""

    record: Record
    due_at: float  # from the run's start
    number: int  # of the record in the log's time order; a made signal has its rank's


def plan(records: Iterable[Record], options: ReplayOptions) -> Iterator[Action]:
    """Every request of the run, in the order of their due times. `records` come in time order."""
    start_s = None
    for due_at, _, number, record in _cascades(records, options):
        start_s = due_at if start_s is None else start_s
        yield Action(record=record, due_at=due_at - start_s, number=number)


def user_of(record: Record) -> UserKey:
    """Whose request it is."""
    return UserKey(record.tenant, record.user_id)


def share_of(user: UserKey, shares: int) -> int:
    """Which of `shares` equal parts the user belongs to."""
    return xxhash.xxh3_64_intdigest(f"{user.tenant}\0{user.user}".encode()) % shares


Timed = tuple[int, float, Record]  # number, seconds, record
Due = tuple[float, int, int, Record]  # due time, place among equals, number, record


def _chosen(records: Iterable[Record], options: ReplayOptions) -> Iterator[tuple[int, Record]]:
    first_s = None
    stop = None if options.limit is None else options.skip + options.limit
    for number, record in islice(enumerate(records), options.skip, stop):
        first_s = record.ts if first_s is None else first_s
        if record.ts - first_s < options.start_s:
            continue
        if options.sample_users < 1 and share_of(user_of(record), 1 << 20) >= options.sample_users * (1 << 20):
            continue
        yield number, record


def _timed(records: Iterable[Record], options: ReplayOptions) -> Iterator[Timed]:
    """Number, seconds at which each would be sent (ascending), record."""
    numbered = _chosen(records, options)
    found = _scaled(numbered, options.speed) if options.rate is None else _paced(numbered, options)
    for number, at_s, record in found:
        if options.duration_s is not None and at_s >= options.duration_s:
            return
        yield number, at_s, record


def _scaled(numbered: Iterator[tuple[int, Record]], speed: float) -> Iterator[Timed]:
    first_s = None
    for number, record in numbered:
        first_s = record.ts if first_s is None else first_s
        yield number, (record.ts - first_s) / speed, record


def _paced(numbered: Iterator[tuple[int, Record]], options: ReplayOptions) -> Iterator[Timed]:
    random = np.random.default_rng(options.seed)
    head = list(islice(numbered, 1000))
    any_rank = any(record.kind in SCORED for _, record in head)
    between: list[tuple[int, Record]] = []
    at_s = 0.0

    def gap_s() -> float:
        rate = options.rate or 0.0
        if options.ramp_to is not None:
            rate += (options.ramp_to - rate) * min(at_s / options.ramp_s, 1.0)
        return random.exponential(1 / rate) if options.arrival == "poisson" else 1 / rate

    def spread(until_s: float) -> Iterator[Timed]:
        for place, (number, record) in enumerate(between, 1):
            yield number, at_s + (until_s - at_s) * place / (len(between) + 1), record

    for number, record in chain(head, numbered):
        if any_rank and record.kind not in SCORED and len(between) < MAX_BETWEEN:
            between.append((number, record))
            continue
        next_s = at_s + gap_s()
        yield from spread(next_s)
        between, at_s = [], next_s
        yield number, at_s, record
    yield from spread(at_s + 1 / (options.rate or 1.0))


def _cascades(records: Iterable[Record], options: ReplayOptions) -> Iterator[Due]:
    """Everything with its due time, signals made or moved to their ranks, in the order of due times."""
    delays = np.random.default_rng([options.seed, 1])
    lead_s = options.signal_lead_s or 0.0
    ready: list[Due] = []
    signals: dict[int, Timed] = {}  # still without their rank, by number: oldest first
    waiting: dict[UserKey, list[int]] = {}  # their numbers by user
    last_s: dict[UserKey, float] = {}  # due time of the user's newest rank or events that is not over
    place = count()

    def push(due_at: float, number: int, record: Record) -> None:
        heapq.heappush(ready, (due_at, next(place), number, record))

    def settle(number: int) -> Timed:
        numbers = waiting[user := user_of(signals[number][2])]
        numbers.remove(number)
        if not numbers:
            del waiting[user]
        return signals.pop(number)

    for number, at_s, record in _timed(records, options):
        user = user_of(record)
        if record.kind == "signal":
            signals[number] = number, at_s, record
            waiting.setdefault(user, []).append(number)
        else:
            own = [settle(n) for n in list(waiting.get(user, ()))] if record.kind in SCORED else []
            delay_s = None if own or record.kind != "rank" else _delay_s(record, options, delays)
            due_at = at_s + (delay_s or 0.0)
            if delay_s is not None:
                push(at_s, number, _signal_of(record))
            elif not own and options.signal_lead_s is not None and record.kind == "rank":
                push(due_at - lead_s, number, _signal_of(record))
            if due_at < (newest_s := last_s.get(user, due_at)):
                due_at = newest_s  # I2
            for own_number, _, signal in own:
                push(due_at - (record.ts - signal.ts), own_number, signal)
            push(due_at, number, record)
            last_s[user] = due_at
        while signals and record.ts - (oldest := next(iter(signals.values())))[2].ts > PAIR_S:
            push(oldest[1], oldest[0], settle(oldest[0])[2])
        until_s = at_s - max(PAIR_S, lead_s)
        if signals:
            until_s = min(until_s, next(iter(signals.values()))[1])
        while ready and ready[0][0] <= until_s:
            yield heapq.heappop(ready)
        if len(last_s) > 2 * len(ready) + 1000:
            last_s = {user: due_at for user, due_at in last_s.items() if due_at > at_s}
    for number, at_s, record in signals.values():
        push(at_s, number, record)
    while ready:
        yield heapq.heappop(ready)


def _delay_s(record: Record, options: ReplayOptions, random: np.random.Generator) -> float | None:
    """From the user's arrival to the rank; None where `ts` is the rank's own time."""
    if record.delay_ms is not None:
        return record.delay_ms * 1e-3
    median_s, p99_s = options.rank_delay_s, options.rank_delay_p99_s
    if median_s is None or p99_s is None:
        return median_s
    return median_s * math.exp(random.standard_normal() * math.log(p99_s / median_s) / _Z99)


def _signal_of(rank: Record) -> Record:
    return msgspec.structs.replace(
        rank, kind="signal", labels={}, timestamp=None, top_k=None, delay_ms=None, answer=None
    )
