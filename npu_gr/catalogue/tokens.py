"""A history as the model reads it: known items only, cut to the window, with a fingerprint of every prefix.

The length rule: at most `max_tokens` of the newest events, and the window's start moves in steps of
`cut_step_tokens` of the event's index in the user's whole history. Dropping single old tokens would change every
score and every cached prefix (E9 of `relaygr.md` 3.1); a start that stands still between steps keeps both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from npu_gr.catalogue.items import UNKNOWN, ItemVocabulary
from npu_gr.core.errors import Unprocessable
from npu_gr.core.request import I64, Events, HistoryReport


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The model's input for one user. n = number of tokens."""

    events: Events  # [n] in external ids
    rows: I64  # [n] the items' rows in the model
    report: HistoryReport
    _fingerprints: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Tokens:
        """Some of the tokens; the report stays that of all."""
        return Tokens(self.events[part], self.rows[part], self.report)

    @property
    def timestamps(self) -> I64:
        """[n] unix seconds."""
        return self.events.timestamps

    def fingerprint(self, num_tokens: int) -> str:
        """Of the first `num_tokens`; made once each."""
        known = self._fingerprints.get(num_tokens)
        if known is None:
            known = self._fingerprints[num_tokens] = self.events[:num_tokens].fingerprint()
        return known


def window_start(first_index: int, num_events: int, max_tokens: int, step: int) -> int:
    """How many of the oldest events to leave out. Pure.

    Args:
        first_index: index of the first given event in the user's whole history.
        num_events: given events.
        max_tokens: most that may remain.
        step: the start's index in the whole history is a multiple of this once anything is cut.
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
) -> Tokens:
    """Map, check and cut a history.

    Raises:
        Unprocessable: an action the model does not know, or an unknown item while `refuse_unknown`.
    """
    if len(events) and (int(events.actions.min()) < 0 or int(events.actions.max()) >= num_actions):
        worst = int(events.actions.max()) if int(events.actions.min()) >= 0 else int(events.actions.min())
        raise Unprocessable(f"history.actions: {worst} is not an action of the model, which has 0..{num_actions - 1}")
    cut = window_start(first_index, len(events), max_tokens, cut_step_tokens)
    events = events[cut:]
    rows = vocabulary.rows(events.items)
    known = rows != UNKNOWN
    unknown = len(rows) - int(np.count_nonzero(known))
    if unknown and refuse_unknown:
        raise Unprocessable(f"history.items: {unknown} unknown, the first is {int(events.items[~known][0])}")
    if unknown:
        events = Events(events.items[known], events.actions[known], events.timestamps[known])
        rows = rows[known]
    fingerprint = events.fingerprint()
    report = HistoryReport(fingerprint=fingerprint, num_tokens=len(rows), cut_tokens=cut, unknown_items=unknown)
    return Tokens(events, rows, report, {len(rows): fingerprint})
