"""`python -m benchmarks delta --only day`: the end of a log in time order, with hourly deltas.

A ranker is trained on the first nine tenths of MovieLens-100K. The last tenth, which stands for a
day, is cut into 24 slices of as many events each, since a day of MovieLens has a few hundred events
and whole days have none. Slice by slice the events are asked for over HTTP, each with the history
that its user had, and then the ranker is trained on with them (`train rank --continue`), and the
instance takes the delta. Three arms, each an instance of its own:

    frozen    no deltas
    rows      the rows of items alone (`--only-items`)
    whole     the whole model

A hit is a next item among the ten best of all items that the user has not had. The interval is of
the mean over users of the difference, resampled by users.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.frame import Line, tell
from benchmarks.servers import ask, instance, running
from npu_gr.core.arrays import I64
from npu_gr.core.names import value_name
from npu_gr.history_store.interactions import Interactions, movielens_100k, read_interactions
from npu_gr.model.delta_log import write_next
from npu_gr.model.weights import Checkpoint, load, save
from npu_gr.train.data import number_log
from npu_gr.train.metrics import F64, difference_of_users
from npu_gr.train.options import warm
from npu_gr.train.rank.continued import continue_ranker
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.options import LIKE, NEXT, QUICK, TrainOptions
from tests.ports import free_port

ARMS = ("frozen", "rows", "whole")
HOURS = 24
QUARTERS = 4
MOST_EVENTS = 512  # of a history
TOP = 10


class Day(NamedTuple):
    """A log in two parts, in time order."""

    log: Interactions
    bounds: I64  # [HOURS + 1] events at which the slices begin, and the end
    asked: I64  # events of the slices that are asked for, ascending: of items that are known

    @classmethod
    def of(cls, log: Interactions, share: float, num_asked: int) -> Day:
        """Cut the last share of a log into slices, and choose the events to ask for."""
        first = int(len(log) * (1 - share))
        bounds = np.linspace(first, len(log), HOURS + 1).astype(np.int64)
        known = np.isin(log.items, log.items[:first]) & (np.arange(len(log)) >= first)
        places = np.flatnonzero(known)
        chosen = np.linspace(0, len(places) - 1, min(num_asked, len(places))).astype(np.int64)
        return cls(log, bounds, places[np.unique(chosen)])

    def hours(self) -> I64:
        """Return the slice of each event that is asked for."""
        return np.searchsorted(self.bounds, self.asked, side="right") - 1


def first_ranker(day: Day, options: TrainOptions) -> Checkpoint:
    """Train on the events before the slices."""
    before = day.log[: int(day.bounds[0])]
    log = number_log(before, np.unique(before.items)).all_trained()
    fitted = fit(log, [], (NEXT, LIKE), options, [], "ranker: train", lambda _: None)
    return Checkpoint(
        model=fitted.model, item_ids=log.item_ids, name="day", action_values=log.action_values
    )


def write_deltas(
    day: Day, old: Path, folder: Path, options: TrainOptions, *, only_items: bool
) -> list[Path]:
    """Train on after each slice but the last one, and write the deltas."""
    on = msgspec.structs.replace(options, epochs=warm(options.epochs))
    deltas, newest = [], old
    for hour in range(HOURS - 1):
        until = int(day.bounds[hour + 1])
        since = int(day.log.timestamps[day.bounds[hour]])
        found = continue_ranker(load(newest), day.log[:until], since, on, only_items=only_items)
        new = folder / f"v{hour + 1}"
        save(found.checkpoint, new)
        deltas.append(write_next(folder / "deltas", newest, new)[0])
        newest = new
    return deltas


def body(log: Interactions, own: I64, event: int, candidates: I64) -> dict[str, Any]:
    """Make the rank of an event: the history before it, and items that it has not."""
    past = own[own < event][-MOST_EVENTS:]
    left = candidates[~np.isin(candidates, log.items[own[own < event]])]
    return {
        "user_id": log.user_names[int(log.users[event])],
        "history": {
            "items": log.items[past].tolist(),
            "actions": [value_name(value) for value in log.values[past].tolist()],
            "timestamps": log.timestamps[past].tolist(),
        },
        "candidates": left.tolist(),
        "timestamp": int(log.timestamps[event]),
    }


def replayed(day: Day, checkpoint: Path, deltas: Sequence[Path], folder: Path, name: str) -> F64:
    """Ask an instance for the events, which takes a delta after each slice; 1 = a hit."""
    from benchmarks.delta import post

    log, ids = day.log, load(checkpoint).item_ids
    events_of = {int(user): np.flatnonzero(log.users == user) for user in np.unique(log.users)}
    admin_port = free_port()
    hours, hits = day.hours(), np.zeros(len(day.asked))
    # of its own: the arms have one checkpoint
    own = [f"server.admin_port={admin_port}", f"models.deltas_from={folder / f'{name}.deltas'}"]
    process = instance(f"day {name}", checkpoint, folder, own)
    with running(name, process) as server:
        for hour in range(HOURS):
            for row in np.flatnonzero(hours == hour).tolist():
                event = int(day.asked[row])
                asked = body(log, events_of[int(log.users[event])], event, ids)
                if log.items[event] not in asked["candidates"]:
                    continue  # the user has it again, which nothing here can hit
                (answer,) = ask(server.port, [asked])
                scores = np.array(answer["scores"][NEXT.name])
                mine = scores[asked["candidates"].index(int(log.items[event]))]
                hits[row] = (scores > mine).sum() < TOP
            if hour < len(deltas):
                post(admin_port, deltas[hour].read_bytes())
    return hits


def lines(
    share: float, num_asked: int, options: TrainOptions = QUICK, log: Interactions | None = None
) -> Iterator[Line]:
    """Replay the last share of a log by all arms.

    Args:
        share: Share of the log's events.
        num_asked: Most events that are asked for.
        options: Options of the first training; the others take a quarter of its epochs.
        log: The log; None = MovieLens-100K of the package recbole.
    """
    log = log or read_interactions(movielens_100k())
    day = Day.of(log, share, num_asked)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        began_at = time.process_time()
        save(first_ranker(day, options), folder / "v0")
        tell("delta", f"trained on {day.bounds[0]} events: {time.process_time() - began_at:.0f} s")
        hits: dict[str, F64] = {}
        for arm in ARMS:
            began_at, made = time.process_time(), list[Path]()
            if arm != "frozen":
                made = write_deltas(
                    day, folder / "v0", folder / arm, options, only_items=arm == "rows"
                )
            took_s = (time.process_time() - began_at) / (HOURS - 1)
            tell("delta", f"{arm}: {took_s:.1f} CPU s a delta")
            hits[arm] = replayed(day, folder / "v0", made, folder, arm)
            tell("delta", f"{arm}: HR@{TOP} by slice {_by_slice(day, hits[arm])}")
    hours = day.hours()
    for arm in ARMS[1:]:
        for quarter in (None, *range(QUARTERS)):
            is_in = (
                np.ones(len(hours), np.bool_)
                if quarter is None
                else hours // (HOURS // QUARTERS) == quarter
            )
            yield _line(day, hits[arm], hits["frozen"], is_in, arm, quarter)


def _by_slice(day: Day, hits: F64) -> str:
    hours = day.hours()
    return " ".join(f"{hits[hours == hour].mean():.3f}" for hour in range(HOURS))


def _line(day: Day, ours: F64, frozen: F64, is_in: Any, arm: str, quarter: int | None) -> Line:
    users = day.log.users[day.asked[is_in]]
    _, of_user = np.unique(users, return_inverse=True)
    counts = np.bincount(of_user)
    mine, theirs = (np.bincount(of_user, one[is_in]) / counts for one in (ours, frozen))
    gap = difference_of_users(mine, theirs)
    when = "all" if quarter is None else f"quarter {quarter + 1}"
    return Line(
        bench="delta",
        case=f"day, {arm}, {when} of {HOURS} slices, {len(users):,} events of {len(counts)} users",
        ours=float(mine.mean()),
        unit=f"HR@{TOP}",
        baseline="frozen",
        baseline_value=float(theirs.mean()),
        ratio=float(mine.mean() / theirs.mean()) if theirs.any() else float("nan"),
        target=1.0 if quarter is None else None,
        ok=gap.low > 0 if quarter is None else None,
        low=gap.low,
        high=gap.high,
    )
