"""Query logs out of what there is: rating data, and Mooncake traces laid over rating data.

Nobody publishes a recommender's log with users and arrivals in milliseconds. The honest composite is real arrivals and
returns (a Mooncake trace: requests, and the prefix blocks they share) over real histories (ratings), joined by a rule
with a seed. Figures from it must say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.request import I64, Events
from npu_gr.features.interactions import Interactions
from npu_gr.features.lines import read_lines
from npu_gr.replay.log import LoggedHistory, Record

LIKE = 4.0  # a rating of at least this

Labels = dict[str, list[int | None]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Catalogue:
    """What the served model knows: its items, and what its action ids stand for."""

    item_ids: I64
    action_values: tuple[float, ...]

    @classmethod
    def of(cls, log: Interactions) -> Catalogue:
        """Every item of a log; its distinct values, ascending, as the trainer numbers them."""
        return cls(item_ids=np.unique(log.items), action_values=tuple(np.unique(log.values).tolist()))

    def events(self, part: Interactions) -> Events:
        """Behaviours of one user. Raises DataError for a value that the model has no action for."""
        ids = {value: index for index, value in enumerate(self.action_values)}
        try:
            return Events.make(part.items, [ids[value] for value in part.values.tolist()], part.timestamps)
        except KeyError as error:
            raise DataError(f"value {error} is none of the model's actions {self.action_values}") from error


def users_of(log: Interactions) -> list[tuple[str, Interactions]]:
    """Each user's name and events in time order; users in the order of their codes."""
    order = np.argsort(log.users, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(log.users[order])) + 1) if len(order) else []
    return [(log.user_names[log.users[part[0]]], log[part]) for part in parts]


def _shown(
    next_: Interactions, others: I64, num_candidates: int, random: np.random.Generator
) -> tuple[list[int], Labels]:
    """Candidates in a random order: what the user took next, and items drawn from the others.

    Labels: click = taken, like = rated `LIKE` or more; what was drawn has no like label.
    """
    drawn = random.choice(others, num_candidates - len(next_), replace=False)
    shuffled = random.permutation(num_candidates)
    shown = np.concatenate([next_.items, drawn])[shuffled].tolist()
    click = np.concatenate([np.ones(len(next_), int), np.zeros(len(drawn), int)])[shuffled].tolist()
    rated = np.concatenate([next_.values, np.full(len(drawn), np.nan)])[shuffled].tolist()
    return shown, {"click": click, "like": [None if v != v else int(v >= LIKE) for v in rated]}


def from_ratings(
    heldout: Interactions,
    catalogue: Catalogue,
    *,
    before: Interactions | None = None,
    slice_events: int = 20,
    num_candidates: int = 100,
    seed: int = 0,
) -> list[Record]:
    """Ranks, and the events that happened after each, in time order.

    A user's held-out events come in slices; each is a rank whose candidates hold them, and then those events. Rating
    data have poor arrivals (of MovieLens half of the stamps repeat the one before), so replay it at a rate.

    Args:
        before: the users' earlier events, sent whole with every rank; None = the service's history store has them,
            and the log carries events records that append to it.
    """
    random = np.random.default_rng(seed)
    known = dict(users_of(before)) if before is not None else {}
    records = []
    for user, part in users_of(heldout):
        others = np.setdiff1d(catalogue.item_ids, part.items)
        history = catalogue.events(known[user]) if user in known else Events.empty()
        for start in range(0, len(part), slice_events):
            next_ = part[start : start + slice_events]
            shown, labels = _shown(next_, others, num_candidates, random)
            at, happened = int(next_.timestamps[0]), catalogue.events(next_)
            records.append(
                Record(
                    ts=float(at),
                    kind="rank",
                    user_id=user,
                    history=None if before is None else LoggedHistory.of(history),
                    candidates=shown,
                    timestamp=at,
                    labels=labels,
                )
            )
            history = history + happened
            if before is None:
                records.append(Record(ts=float(at), kind="events", user_id=user, events=LoggedHistory.of(happened)))
    return sorted(records, key=attrgetter("ts"))


class MooncakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace; blocks of 512 tokens, equal ids mean equal content up to there."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int]

    def session(self, number: int) -> int:
        """Requests with the same second block belong together: the first is everybody's system prompt."""
        return self.hash_ids[1] if len(self.hash_ids) > 1 else -1 - number


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trace is laid over users."""

    lengths: Literal["real", "trace"] = "real"
    scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # of lengths "trace": events a token of the trace
    spread_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # requests of one stamp are spread over so long
    num_candidates: Annotated[int, msgspec.Meta(ge=1)] = 100
    split_ratio: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.8  # of a user's events, known before the first visit
    max_slice: Annotated[int, msgspec.Meta(ge=1)] = 20  # events between two visits
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_mooncake(path: Path) -> list[MooncakeRequest]:
    """A trace, whole. Raises DataError: names the file, the line and the reason."""
    decode = msgspec.json.Decoder(MooncakeRequest).decode
    requests = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            requests.append(decode(line))
        except msgspec.MsgspecError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    return requests


def from_mooncake(
    trace: Sequence[MooncakeRequest], log: Interactions, catalogue: Catalogue, options: MooncakeOptions
) -> Iterator[Record]:
    """One rank a request, at its time; a session of the trace is a user of its own with a real user's history.

    Session k has the history of the k-th user of a seeded permutation; once every user was taken, they are taken again
    under another name, so that nobody returns who does not in the trace. Histories come whole.

    lengths "real": at a first visit the oldest `split_ratio` of the user's events; at every later one some more.
    lengths "trace": input_length x scale events, the user's own over and over: synthetic beyond their real number.
    """
    random = np.random.default_rng(options.seed)
    sessions = [request.session(number) for number, request in enumerate(trace)]
    users = users_of(log)
    permutation = random.permutation(len(users))
    places = {session: place for place, session in enumerate(dict.fromkeys(sessions))}
    visits, made, longest = Counter(sessions), Counter[int](), Counter[int]()
    for at_s, request, session in _timed(trace, sessions, options.spread_s, random):
        place = places[session]
        name, part = users[permutation[place % len(users)]]
        visit, made[session] = made[session], made[session] + 1
        if options.lengths == "real":
            length, next_ = _real(part, visit, visits[session], options)
        else:
            longest[session] = max(longest[session], round(request.input_length * options.scale), 1)
            length, next_ = longest[session], part[:0]
        history = _over_and_over(catalogue.events(part), length)
        shown, labels = _shown(next_, np.setdiff1d(catalogue.item_ids, part.items), options.num_candidates, random)
        yield Record(
            ts=at_s,
            kind="rank",
            user_id=f"{name}.{place // len(users)}",
            history=LoggedHistory.of(history),
            candidates=np.array(shown, "<i8").tobytes(),
            timestamp=int(next_.timestamps[0]) if len(next_) else int(history.timestamps[-1]) + 1,
            labels=labels if len(next_) else {},
        )


def _timed(
    trace: Sequence[MooncakeRequest], sessions: Sequence[int], spread_s: float, random: np.random.Generator
) -> Iterator[tuple[float, MooncakeRequest, int]]:
    """Seconds, request, session. Of equal stamps the order stays."""
    rows: Iterable[tuple[MooncakeRequest, int]] = zip(trace, sessions, strict=True)
    for stamp, group in groupby(rows, key=lambda row: row[0].timestamp):
        together = list(group)
        offsets = np.sort(random.uniform(0.0, spread_s, len(together))) if spread_s else np.zeros(len(together))
        for (request, session), offset_s in zip(together, offsets.tolist(), strict=True):
            yield stamp * 1e-3 + offset_s, request, session


def _real(part: Interactions, visit: int, visits: int, options: MooncakeOptions) -> tuple[int, Interactions]:
    """How many events the user has had at a visit, and those until the next one."""
    known = max(1, round(len(part) * options.split_ratio))
    step = min(options.max_slice, options.num_candidates, max(1, (len(part) - known) // visits))
    length = min(known + visit * step, len(part))
    return length, part[length : length + step]


def _over_and_over(events: Events, length: int) -> Events:
    """The first `length` events of an endless repetition, each round later than the one before."""
    if length <= len(events):
        return events[:length]
    rounds, place = np.divmod(np.arange(length), len(events))
    span_s = int(events.timestamps[-1] - events.timestamps[0]) + 1
    return Events(events.items[place], events.actions[place], events.timestamps[place] + rounds * span_s)
