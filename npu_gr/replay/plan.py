"""Plan a replay: the requests of a query log with their due times. No clock, no I/O.

Records keep their order. Times are the log's divided by `speed`; or requests with scores are sent
at `rate`, with the others evenly between them. Delays within a cascade are real time, independent
of the speed:

    the log has signals    a signal belongs to the user's next rank within `PAIR_S`, and keeps its
                           distance from it
    a rank has delay_ms    `ts` is the user's arrival: signal at once, rank after the recorded delay
    rank_delay_s           the same with a random delay: log-normal, seeded
    signal_lead_s          `ts` is the rank's time: signal this much earlier

Invariants:
  I1  due times ascend from 0
  I2  a user's ranks, generates and events are due in the log's order
  I3  the same records and options give the same plan
  I4  memory is bounded by the records within `PAIR_S` and the lead, not by the log's length
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from npu_gr.core.history import UserKey
from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.core.settings import Count, Positive, Seconds
from npu_gr.replay.log import SCORED, QueryRecord

_Gap = Annotated[float, Meta(ge=0, le=3600)]


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a replay, validated also when constructed in code (ValueError).

    Arrivals are those of the log (`speed`), generated (`rate`), or a closed loop with a fixed
    number of requests in flight (`closed`).
    """

    base_url: Annotated[
        str, Meta(description="URL of a service or router, http or https, without /v1")
    ]
    api_key: Annotated[str | None, Meta(description="sent as a bearer token; never reported")] = (
        None
    )
    item_key: Annotated[
        bytes, Meta(description="key of the items' ids, which reads names in answers; not reported")
    ] = b""
    speed: Annotated[
        Positive, Meta(description="log seconds per second; not together with rate")
    ] = 1.0
    rate: Annotated[
        Positive | None, Meta(description="ranks per second instead of the log's times")
    ] = None
    arrival: Annotated[
        Literal["poisson", "constant"], Meta(description="gaps between ranks at rate")
    ] = "poisson"
    closed: Annotated[
        Count | None, Meta(description="requests in flight; the next one is sent when one ends")
    ] = None
    signal_lead_s: Annotated[
        _Gap | None,
        Meta(description="s from signal to rank if the log has no signal; None = only the log's"),
    ] = None
    rank_delay_s: Annotated[
        _Gap | None,
        Meta(description="median s from signal to rank if the log has neither signal nor delay_ms"),
    ] = None
    rank_delay_p99_s: Annotated[
        _Gap | None, Meta(description="its P99 (log-normal); None = always the median")
    ] = None
    histories: Annotated[
        Literal["logged", "whole", "delta"],
        Meta(description="how histories are sent; logged = as in the log"),
    ] = "logged"
    start_s: Annotated[float, Meta(ge=0, description="log seconds to skip at the start")] = 0.0
    limit: Annotated[Count | None, Meta(description="log records, oldest first; None = all")] = None
    sample_users: Annotated[
        float, Meta(gt=0, le=1, description="share of the users to replay, by hash")
    ] = 1.0
    duration_s: Annotated[
        Seconds | None, Meta(description="s of sending; None = the whole log")
    ] = None
    warmup_s: Annotated[float, Meta(ge=0, description="s at the start that are not counted")] = 0.0
    timeout_s: Annotated[
        Seconds, Meta(description="budget in s of a request without deadline_ms")
    ] = 1.0
    slo_s: Annotated[Seconds, Meta(description="latency objective in s, from the due time")] = 0.1
    bad_lines: Annotated[
        Literal["fail", "skip"], Meta(description="how to treat an invalid line of the log")
    ] = "fail"
    seed: Annotated[int, Meta(ge=0, description="seed of random arrivals and delays")] = 0

    def __post_init__(self) -> None:
        # msgspec validates decoded values, but not constructed ones
        for field in msgspec.structs.fields(self):
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                raise ValueError(f"{field.name}: {error}") from None
        if self.rate is not None and self.speed != 1.0:
            raise ValueError(f"rate: {self.rate} excludes speed {self.speed}; give one of them")
        if self.closed is not None and (self.rate is not None or self.speed != 1.0):
            raise ValueError(
                f"closed: {self.closed} excludes rate and speed, since a closed loop has no "
                "arrivals"
            )
        if self.signal_lead_s is not None and self.rank_delay_s is not None:
            raise ValueError(
                "rank_delay_s excludes signal_lead_s: the log's time is either the arrival or the "
                "rank"
            )
        if (
            self.rank_delay_p99_s is not None
            and not 0 < (self.rank_delay_s or 0) <= self.rank_delay_p99_s
        ):
            raise ValueError("rank_delay_p99_s: needs 0 < rank_delay_s <= rank_delay_p99_s")
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("base_url: expected http://host:port or https://host")
        if url.username or url.query or url.fragment:
            raise ValueError(
                "base_url: must have no user, query or fragment; a key goes into api_key"
            )


# ---- the plan

PAIR_S = 5.0  # maximum log seconds from a signal to its rank
MAX_BETWEEN = 10_000  # buffered records between two paced ones; further ones are paced too

_Z99 = 2.3263478740408408  # standard normal quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A planned request; the `kind` of its record determines the route."""

    record: QueryRecord
    due_at: float  # seconds after the run began
    number: int  # of the record in the log's time order; a generated signal has its rank's


def plan(records: Iterable[QueryRecord], options: ReplayOptions) -> Iterator[Action]:
    """Yield all requests of the run by due time. `records` must be in time order."""
    first_at = None
    for due_at, _, number, record in _cascades(records, options):
        first_at = due_at if first_at is None else first_at
        yield Action(record=record, due_at=due_at - first_at, number=number)


def user_of(record: QueryRecord) -> UserKey:
    """Return the user of a request."""
    return UserKey(record.tenant, record.user_id)


def share_of(user: UserKey, shares: int) -> int:
    """Return the part of a user among `shares` equal parts, by a hash of the name."""
    return xxhash.xxh3_64_intdigest(f"{user.tenant}\0{user.user}".encode()) % shares


Timed = tuple[int, float, QueryRecord]  # number, seconds after the start, record
Due = tuple[float, int, int, QueryRecord]  # due time, tie-breaker, number, record


def _chosen(
    records: Iterable[QueryRecord], options: ReplayOptions
) -> Iterator[tuple[int, QueryRecord]]:
    first_ts = None
    for number, record in islice(enumerate(records), options.limit):
        first_ts = record.ts if first_ts is None else first_ts
        if record.ts - first_ts < options.start_s:
            continue
        if options.sample_users < 1 and share_of(
            user_of(record), 1 << 20
        ) >= options.sample_users * (1 << 20):
            continue
        yield number, record


def _timed(records: Iterable[QueryRecord], options: ReplayOptions) -> Iterator[Timed]:
    """Yield the selected records with their times before cascades are applied, ascending."""
    numbered = _chosen(records, options)
    timed = _scaled(numbered, options.speed) if options.rate is None else _paced(numbered, options)
    for number, sent_at, record in timed:
        if options.duration_s is not None and sent_at >= options.duration_s:
            return
        yield number, sent_at, record


def _scaled(numbered: Iterator[tuple[int, QueryRecord]], speed: float) -> Iterator[Timed]:
    first_ts = None
    for number, record in numbered:
        first_ts = record.ts if first_ts is None else first_ts
        yield number, (record.ts - first_ts) / speed, record


def _paced(numbered: Iterator[tuple[int, QueryRecord]], options: ReplayOptions) -> Iterator[Timed]:
    random = np.random.default_rng(options.seed)
    head = list(islice(numbered, 1000))
    any_scored = any(record.kind in SCORED for _, record in head)
    between: list[tuple[int, QueryRecord]] = []
    paced_at = 0.0  # time of the newest paced record

    def gap_s() -> float:
        rate = options.rate or 0.0
        return random.exponential(1 / rate) if options.arrival == "poisson" else 1 / rate

    def spread(until_at: float) -> Iterator[Timed]:
        for place, (number, record) in enumerate(between, 1):
            yield number, paced_at + (until_at - paced_at) * place / (len(between) + 1), record

    for number, record in chain(head, numbered):
        if any_scored and record.kind not in SCORED and len(between) < MAX_BETWEEN:
            between.append((number, record))
            continue
        next_at = paced_at + gap_s()
        yield from spread(next_at)
        between = []
        paced_at = next_at
        yield number, paced_at, record
    yield from spread(paced_at + 1 / (options.rate or 1.0))


def _cascades(records: Iterable[QueryRecord], options: ReplayOptions) -> Iterator[Due]:
    """Yield all requests by due time, with signals generated or aligned with their ranks."""
    delays = np.random.default_rng([options.seed, 1])
    lead_s = options.signal_lead_s or 0.0
    ready: list[Due] = []
    signals: dict[int, Timed] = {}  # by number, oldest first: signals without a rank yet
    waiting: dict[UserKey, list[int]] = {}  # numbers of these signals by user
    # due time of the user's newest request that is not a signal
    newest_at: dict[UserKey, float] = {}
    place = count()

    def push(due_at: float, number: int, record: QueryRecord) -> None:
        heapq.heappush(ready, (due_at, next(place), number, record))

    def settle(number: int) -> Timed:
        numbers = waiting[user := user_of(signals[number][2])]
        numbers.remove(number)
        if not numbers:
            del waiting[user]
        return signals.pop(number)

    for number, sent_at, record in _timed(records, options):
        user = user_of(record)
        if record.kind == SIGNAL.name:
            signals[number] = number, sent_at, record
            waiting.setdefault(user, []).append(number)
        else:
            own = [settle(n) for n in list(waiting.get(user, ()))] if record.kind in SCORED else []
            delay_s = None if own or record.kind != RANK.name else _delay_s(record, options, delays)
            due_at = sent_at + (delay_s or 0.0)
            if delay_s is not None:
                push(sent_at, number, _signal_of(record))
            elif not own and options.signal_lead_s is not None and record.kind == RANK.name:
                push(due_at - lead_s, number, _signal_of(record))
            due_at = max(due_at, newest_at.get(user, due_at))  # I2
            for own_number, _, signal in own:
                push(due_at - (record.ts - signal.ts), own_number, signal)
            push(due_at, number, record)
            newest_at[user] = due_at
        while signals and record.ts - (oldest := next(iter(signals.values())))[2].ts > PAIR_S:
            push(oldest[1], oldest[0], settle(oldest[0])[2])
        settled_at = sent_at - max(PAIR_S, lead_s)  # no later record is due earlier
        if signals:
            settled_at = min(settled_at, next(iter(signals.values()))[1])
        while ready and ready[0][0] <= settled_at:
            yield heapq.heappop(ready)
        if len(newest_at) > 2 * len(ready) + 1000:
            newest_at = {user: due_at for user, due_at in newest_at.items() if due_at > sent_at}
    for number, sent_at, record in signals.values():
        push(sent_at, number, record)
    while ready:
        yield heapq.heappop(ready)


def _delay_s(
    record: QueryRecord, options: ReplayOptions, random: np.random.Generator
) -> float | None:
    """Return the seconds from the user's arrival to the rank; None if `ts` is the rank's time."""
    if record.delay_ms is not None:
        return record.delay_ms * 1e-3
    median_s = options.rank_delay_s
    p99_s = options.rank_delay_p99_s
    if median_s is None or p99_s is None:
        return median_s
    return median_s * math.exp(random.standard_normal() * math.log(p99_s / median_s) / _Z99)


def _signal_of(rank: QueryRecord) -> QueryRecord:
    return msgspec.structs.replace(
        rank, kind=SIGNAL.name, labels={}, timestamp=None, top_k=None, delay_ms=None, answer=None
    )
