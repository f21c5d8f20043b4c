"""From a query log to timed actions. Pure: no clock, no I/O.

Records keep their order in time (`ts`, then file order). Ranks and events are scaled by `speed`, or paced anew at
`rate`; a signal belongs to the user's next rank and keeps its distance to it in real seconds, because the cascade
between the two does not get faster with the load.

Invariants:
  I1  due times are sorted and the first one is 0
  I2  a user's ranks and events are due in the log's order, and events name every rank they have to wait for
  I3  the same records and options give the same plan
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.replay.log import Record
from npu_gr.replay.options import ReplayOptions
from npu_gr.request import UserKey

F64 = npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """An action before its place in the plan is known."""

    record: Record
    due_s: float
    after: list[_Entry] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One request to send; its record's `kind` says which."""

    record: Record
    due_s: float  # from the run's start
    after: tuple[int, ...] = ()  # indices of earlier actions that must be over first


def plan(records: Iterable[Record], options: ReplayOptions) -> list[Action]:
    """Every request of the run, in the order of their due times."""
    ordered = sorted(records, key=attrgetter("ts"))[: options.limit]
    times_s = _times(ordered, options)
    keep = len(ordered) if options.duration_s is None else int(np.searchsorted(times_s, options.duration_s))
    entries = _entries(ordered[:keep], times_s.tolist()[:keep], options.signal_lead_s)
    entries.sort(key=attrgetter("due_s"))  # stable: what is due together keeps the log's order, signal first
    place = {id(entry): index for index, entry in enumerate(entries)}
    start_s = entries[0].due_s if entries else 0.0
    return [
        Action(
            record=entry.record,
            due_s=entry.due_s - start_s,
            after=tuple(place[id(earlier)] for earlier in entry.after),
        )
        for entry in entries
    ]


def _times(records: Sequence[Record], options: ReplayOptions) -> F64:
    """[len(records)] seconds at which each would be sent, ascending, whatever its kind."""
    ts = np.array([record.ts for record in records], np.float64)
    if options.rate is None or not len(ts):
        scaled: F64 = (ts - ts[:1]) / options.speed
        return scaled
    is_rank = np.array([record.kind == "rank" for record in records])
    paced = np.flatnonzero(is_rank) if is_rank.any() else np.arange(len(records))
    gap_s = 1 / options.rate
    if options.arrival == "poisson":
        gaps_s = np.random.default_rng(options.seed).exponential(gap_s, len(paced))
    else:
        gaps_s = np.full(len(paced), gap_s)
    arrivals_s = np.cumsum(gaps_s)
    # what is not paced itself is spread evenly between its neighbours that are
    places = [-1, *paced, len(records)]
    times_s: F64 = np.interp(np.arange(len(records)), places, [0.0, *arrivals_s, arrivals_s[-1] + gap_s])
    return times_s


def _entries(records: Sequence[Record], times_s: Sequence[float], lead_s: float | None) -> list[_Entry]:
    entries: list[_Entry] = []
    signals: defaultdict[UserKey, list[_Entry]] = defaultdict(list)  # still without their rank
    unsettled: defaultdict[UserKey, list[_Entry]] = defaultdict(list)  # what the user's next events wait for
    for record, due_s in zip(records, times_s, strict=True):
        user = UserKey(record.tenant, record.user_id)
        entry = _Entry(record=record, due_s=due_s)
        match record.kind:
            case "signal":
                signals[user].append(entry)
            case "rank":
                own = signals.pop(user, [])
                for signal in own:
                    signal.due_s = due_s - (record.ts - signal.record.ts)
                if not own and lead_s is not None:
                    entries.append(_Entry(record=_signal_of(record), due_s=due_s - lead_s))
                unsettled[user].append(entry)
            case "events":
                entry.after = unsettled[user]
                unsettled[user] = [entry]
        entries.append(entry)
    return entries


def _signal_of(rank: Record) -> Record:
    return msgspec.structs.replace(rank, kind="signal", labels={}, timestamp=None, top_k=None)
