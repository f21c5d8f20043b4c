"""The next event of each user of a log, as a case to ask a service for: the history before it, and the right answer."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_gr.features.interactions import Interactions
from npu_gr.train.next_item import MANY_REPEATS

JUDGED_USERS = 300  # who judge a site's cascade; others choose it
MISSED = float("inf")  # the place of an item that was not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class NextEventCase:
    """A user's history, oldest first, and the event that came next."""

    user: str
    items: list[int]  # ids
    values: list[float]
    actions: list[str | float]  # names
    timestamps: list[int]  # unix seconds
    target: int  # the item of the next event
    happened_at: int  # unix seconds of the next event

    def body(self, tenant: str) -> dict[str, Any]:
        """The part of a request body that every route reads: the user and the history.

        Args:
            tenant: a tenant of its own keeps the requests of one way from warming the cache of another.
        """
        return {
            "user_id": self.user,
            "tenant": tenant,
            "history": {
                "items": raw_column(self.items),
                "actions": self.actions,
                "timestamps": self.timestamps,
            },
        }


def next_events(log: Interactions, known: npt.NDArray[np.bool_], num_users: int | None = None) -> list[NextEventCase]:
    """One case for each user who has known events and then others: the first of these others.

    Args:
        log: n events.
        known: [n] the events that the models may have seen.
        num_users: keep so many cases at most, drawn at random (seed 0); None = all.
    """
    cases = []
    for user, name in enumerate(log.user_names):
        mine = log.users == user
        own = log[mine]
        at = int(known[mine].sum())
        if 0 < at < len(own):
            cases.append(
                NextEventCase(
                    user=name,
                    items=own.items[:at].tolist(),
                    values=own.values[:at].tolist(),
                    actions=_names(own.values[:at], log.action_names),
                    timestamps=own.timestamps[:at].tolist(),
                    target=int(own.items[at]),
                    happened_at=int(own.timestamps[at]),
                )
            )
    if num_users is None or num_users >= len(cases):
        return cases
    chosen = np.random.default_rng(0).choice(len(cases), num_users, replace=False)
    return [cases[index] for index in sorted(chosen.tolist())]


def hides_seen(cases: Sequence[NextEventCase]) -> bool:
    """Whether to leave out what each user had before: not where most of the next items are repeats."""
    return repeat_ratio(cases) <= MANY_REPEATS


def repeat_ratio(cases: Sequence[NextEventCase]) -> float:
    """Return the share of the next items that their users had before; 0 of none."""
    return sum(case.target in case.items for case in cases) / max(1, len(cases))


def _names(values: npt.NDArray[np.float64], names: Sequence[str]) -> list[str | float]:
    """Name the action of each value; a value of a log without names stands for its own."""
    return [names[int(value)] if names else value for value in values.tolist()]


def raw_column(items: Sequence[int]) -> str:
    """Write ids as a raw column: a list would be read as names."""
    return b64encode(np.array(items, "<i8").tobytes()).decode()
