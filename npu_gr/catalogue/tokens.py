"""Turn a user's history into model input: known items only, cut to the window, with a fingerprint of every prefix.

The length rule: at most `max_tokens` of the newest events remain, and the window starts at an event whose index in the
user's whole history is a multiple of `cut_step_tokens`. With max_tokens 4 and cut_step_tokens 2:

    events 0 1 2 3              start 0
    events 0 1 2 3 4            start 2: 0 and 1 are cut
    events 0 1 2 3 4 5          start 2
    events 0 1 2 3 4 5 6        start 4

Dropping the oldest token at every new event would change every score and make every cached prefix useless (rule E9 of
docs/exactness.md); a start that moves only every `cut_step_tokens` events keeps both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import xxhash

from npu_gr.catalogue.items import UNKNOWN, ItemVocabulary
from npu_gr.core.arrays import I64
from npu_gr.core.errors import Unprocessable
from npu_gr.core.history import Events, HistoryReport


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The model's input for one user. n = number of tokens."""

    events: Events  # [n] with external item ids
    rows: I64  # [n] row of each item in the model
    report: HistoryReport
    first_new_row: int = 1 << 62  # rows from this one on are of items that the model was not trained with
    _fingerprints: dict[int, str] = field(default_factory=dict)  # of the tokens alone; `report` names what was sent

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Tokens:
        """Return some of the tokens; the report stays that of the whole history."""
        return Tokens(self.events[part], self.rows[part], self.report, self.first_new_row)

    @property
    def timestamps(self) -> I64:
        """Unix seconds of each event, int64 [n]."""
        return self.events.timestamps

    def fingerprint(self, num_tokens: int) -> str:
        """Fingerprint the first `num_tokens` tokens; each length is computed once.

        The rows of new items belong to it: one that is withdrawn and added again, with other features, has another row.
        """
        known = self._fingerprints.get(num_tokens)
        if known is None:
            known = self.events[:num_tokens].fingerprint()
            rows = self.rows[:num_tokens]
            if len(new := rows[rows >= self.first_new_row]):
                known = xxhash.xxh3_128_hexdigest(known.encode() + new.tobytes())
            self._fingerprints[num_tokens] = known
        return known


def window_start(first_index: int, num_events: int, max_tokens: int, step: int) -> int:
    """Compute how many of the oldest given events to cut. Pure.

    Args:
        first_index: index of the first given event in the user's whole history.
        num_events: number of given events.
        max_tokens: most events that may remain.
        step: once anything is cut, the index of the first remaining event in the whole history is a multiple of this.

    Returns:
        0 .. num_events: all of them if no multiple of `step` lies within the newest `max_tokens` events.
    """
    if num_events <= max_tokens and first_index == 0:
        return 0
    earliest = first_index + max(0, num_events - max_tokens)
    aligned = -(-earliest // step) * step
    return min(aligned - first_index, num_events)


def tokenize(
    events: Events,
    vocabulary: ItemVocabulary,
    num_actions: int,
    *,
    max_tokens: int,
    cut_step_tokens: int,
    refuse_unknown: bool,
    first_index: int = 0,
    name: str = "",
) -> Tokens:
    """Check a history, cut it and map its items to rows.

    Args:
        events: with external item ids, oldest first.
        vocabulary: the items that the model knows.
        num_actions: actions that the model knows: 0 .. num_actions - 1.
        max_tokens: longest history that the model reads.
        cut_step_tokens: the window's start moves in steps of this many events.
        refuse_unknown: raise for an unknown item; False: drop it.
        first_index: index of the first event in the user's whole history, of which a caller may send the end alone.
        name: fingerprint of the history, for the report.

    Raises:
        Unprocessable: an action the model does not know, or an unknown item with `refuse_unknown`.
    """
    if len(events) and (int(events.actions.min()) < 0 or int(events.actions.max()) >= num_actions):
        worst = int(events.actions.max()) if int(events.actions.min()) >= 0 else int(events.actions.min())
        raise Unprocessable(f"history.actions: {worst} is no index of an action, they are 0..{num_actions - 1}")
    cut = window_start(first_index, len(events), max_tokens, cut_step_tokens)
    events = events[cut:]
    rows = vocabulary.rows(events.items)
    known = rows != UNKNOWN
    unknown = len(rows) - int(np.count_nonzero(known))
    if unknown and refuse_unknown:
        raise Unprocessable(f"history.items: {unknown} unknown, the first is {int(events.items[~known][0])}")
    if unknown:
        events = Events(events.items[known], events.actions[known], events.timestamps[known], events.origin)
        rows = rows[known]
    report = HistoryReport(
        fingerprint=name,
        num_tokens=len(rows),
        cut_tokens=first_index + cut,
        unknown_items=unknown,
        origin=events.origin,
    )
    return Tokens(events, rows, report, len(vocabulary.ids))
