"""Turns a user's history into model input: known items only, cut to the window, fingerprinted.

`tokenize` makes `Tokens`; the fingerprint of each of their prefixes is a cache key.
`ItemVocabulary` maps external item ids to the rows of the model's item table and back.

The length rule: at most `max_tokens` of the newest events remain, and the window starts at an event
whose index in the user's whole history is a multiple of `cut_step_tokens`. With max_tokens 4 and
cut_step_tokens 2:

    events 0 1 2 3              start 0
    events 0 1 2 3 4            start 2: 0 and 1 are cut
    events 0 1 2 3 4 5          start 2
    events 0 1 2 3 4 5 6        start 4

If an event is two tokens, its item and then its action, both limits are halved to count events.
All later stages count tokens.

Dropping the oldest token at every new event would change every score and invalidate every cached
prefix (rule E9 of docs/exactness.md); a start that moves only every `cut_step_tokens` events avoids
both.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import xxhash
from msgspec import field
from msgspec.structs import replace

from npu_gr.core.arrays import I64, largest, smallest
from npu_gr.core.errors import Unprocessable
from npu_gr.core.feature_schema.columns import NO_COLUMNS, ModelFeatures, OneRow
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.history import Events, HistoryReport
from npu_gr.model.weight_stamps import WeightStamps

UNKNOWN = -1
_DIRECT = 8  # most slots of a direct table per item; sparser ids use a binary search


class ItemVocabulary:
    """The items that the model knows, trained and new. Immutable.

    Ids without a gap, in order, need no memory. Other nearly dense ids (a range of at most about
    `_DIRECT` ids per item) use one table look-up, the rest a binary search: 16 k ids take tens of
    microseconds with the table, about a millisecond among ten million sparse ids.
    """

    def __init__(self, ids: I64, *, is_range: bool = False) -> None:
        """Index the trained items.

        Args:
            ids: int64 [num_items] id of each row, distinct, >= 0.
            is_range: Whether they are known to follow each other; then only the first is read.
        """
        self.ids = ids
        self._first_id = int(ids[0]) if is_range else None
        self._table: I64 | None = None
        self.number = 0  # of changes since the training
        self.weights: WeightStamps | None = None  # None = no delta has changed the weights
        # id of each row behind the trained ones, also of rows that `rows` does not find
        self.new_ids: I64 = np.empty(0, np.int64)
        self.stamps: I64 = self.new_ids  # digest of the content of each of these rows
        self._new_rows: I64 = self.new_ids  # rows of the new items, by ascending id
        self._new_sorted: I64 = self.new_ids
        if not is_range:
            self._index(ids)

    def _index(self, ids: I64) -> None:
        order = np.argsort(ids)
        self._sorted = ids[order]
        # one more entry, for ids beyond the largest
        self._order = np.append(order, UNKNOWN)
        self._found = np.append(self._sorted, UNKNOWN)
        if len(ids) and int(self._sorted[-1] - self._sorted[0]) < _DIRECT * len(ids) + 1024:
            # one slot an id from the smallest to the largest, and one at each end for ids outside
            self._before = int(self._sorted[0]) - 1  # id of the first slot
            self._table = np.full(int(self._sorted[-1]) - self._before + 2, UNKNOWN, np.int64)
            self._table[ids - self._before] = np.arange(len(ids))

    def __len__(self) -> int:
        """Number of rows, trained and new."""
        return len(self.ids) + len(self.new_ids)

    def with_new(self, ids: I64, stamps: I64, known: I64) -> ItemVocabulary:
        """Return this vocabulary with other new items; the tables of trained ids are shared.

        Args:
            ids: int64 [n], the id of each row behind the trained ones, none of a trained item.
            stamps: int64 [n], a digest of the content of each row.
            known: int64 [k], places in `ids` of the rows that are found; their ids are distinct.
        """
        made = copy.copy(self)
        made.number += 1
        made.new_ids = ids
        made.stamps = stamps
        order = known[np.argsort(ids[known])]
        made._new_sorted = ids[order]
        made._new_rows = len(self.ids) + order
        return made

    def with_weights(self, weights: WeightStamps) -> ItemVocabulary:
        """Return this vocabulary after a change of the weights; all tables are shared."""
        made = copy.copy(self)
        made.number += 1
        made.weights = weights
        return made

    def rows(self, ids: I64) -> I64:
        """Look up the row of each id, `UNKNOWN` if the model does not know it. [n] -> [n]."""
        found = self.trained_rows(ids)
        if len(self._new_sorted) and len(left := np.flatnonzero(found == UNKNOWN)):
            at = np.searchsorted(self._new_sorted, ids[left]).clip(max=len(self._new_sorted) - 1)
            found[left] = np.where(self._new_sorted[at] == ids[left], self._new_rows[at], UNKNOWN)
        return found

    def trained_rows(self, ids: I64) -> I64:
        """Look up the row of each id, `UNKNOWN` if it was not in training. [n] -> [n]."""
        if self._first_id is not None:
            rows: I64 = ids - self._first_id
            return np.where((rows >= 0) & (rows < len(self.ids)), rows, UNKNOWN)
        if self._table is not None:
            return self._table.take(ids - self._before, mode="clip")
        at = self._sorted.searchsorted(ids)
        found = self._order[at]
        found[self._found[at] != ids] = UNKNOWN
        return found

    def ids_of(self, rows: I64) -> I64:
        """Look up the id of each row, [n] -> [n]."""
        if not len(self.new_ids):
            return self._trained_ids(rows)
        is_new = rows >= len(self.ids)
        found = self._trained_ids(np.where(is_new, 0, rows))
        found[is_new] = self.new_ids[rows[is_new] - len(self.ids)]
        return found

    def _trained_ids(self, rows: I64) -> I64:
        return self.ids[rows] if self._first_id is None else rows + self._first_id


NO_FEATURES = ModelFeatures()


class Tokens(msgspec.Struct, frozen=True, eq=False):
    """The model's input for one user.

    e = events. The tokens are the user's, if the model has any, then the events'.
    """

    events: Events  # [e] with external item ids; the action of an item's own token is -1
    rows: I64  # [e] row of each item in the model
    report: HistoryReport
    # [1] the user's features; None = there are no tokens of the user
    user: Encoded | None = None
    features: Encoded | None = None  # [e] features of the events; None = the model has none
    # with which `rows` was made; as long as it lives, these rows keep their contents
    vocabulary: ItemVocabulary | None = None
    user_tokens: int = 1  # number of tokens of the user's features, which stay together
    plain: str = ""  # `Events.fingerprint` of all events without features; "" = not computed yet
    # by number of tokens; `report` has the fingerprint of the history as sent
    _fingerprints: dict[int, str] = field(default_factory=dict)

    @property
    def num_user(self) -> int:
        """Number of the user's tokens."""
        return 0 if self.user is None else self.user_tokens

    @property
    def is_divisible(self) -> bool:
        """Always True: a token's keys and values depend only on the tokens up to it."""
        return True

    def __len__(self) -> int:
        return len(self.rows) + (0 if self.user is None else self.user_tokens)

    def __getitem__(self, part: slice) -> Tokens:
        """Return some of the tokens; the user's tokens stay together.

        The report stays that of the complete history.
        """
        start, stop, _ = part.indices(len(self))
        own = slice(max(start - self.num_user, 0), max(stop - self.num_user, 0))
        user = self.user if start == 0 < stop else None
        return self._of(own, user)

    def without(self, first: int, last: int) -> Tokens:
        """Leave out the tokens [first, last), which are none of the user's."""
        own = np.r_[: first - self.num_user, last - self.num_user : len(self.rows)]
        return Tokens(
            self.events.take(own),
            self.rows[own],
            self.report,
            self.user,
            _some(self.features, own),
            self.vocabulary,
            self.user_tokens,
        )

    def newest(self, num_tokens: int) -> Tokens:
        """Return the user's tokens and the newest ones of events, `num_tokens` together."""
        return self._of(slice(max(len(self) - num_tokens, 0), None), self.user)

    def _of(self, own: slice, user: Encoded | None) -> Tokens:
        features = _some(self.features, own)
        known = self.vocabulary
        return Tokens(
            self.events[own], self.rows[own], self.report, user, features, known, self.user_tokens
        )

    @property
    def timestamps(self) -> I64:
        """Unix seconds of each token, int64 [n]; the user's tokens have the first event's."""
        times = self.events.timestamps
        if not self.num_user:
            return times
        return np.concatenate(
            (np.full(self.num_user, times[0] if len(times) else 0, np.int64), times)
        )

    def earlier(self, since_at: float) -> list[Tokens]:
        """Return these tokens as weights before read them that were served since an instant."""
        weights = None if self.vocabulary is None else self.vocabulary.weights
        if weights is None:
            return []
        return [self.under(then) for until_at, then in weights.earlier if until_at >= since_at]

    def under(self, weights: WeightStamps) -> Tokens:
        """Return these tokens as other weights read them."""
        assert self.vocabulary is not None
        return replace(self, vocabulary=self.vocabulary.with_weights(weights), _fingerprints={})

    def fingerprint(self, num_tokens: int) -> str:
        """Fingerprint the first `num_tokens` tokens; each length is computed once.

        It includes the contents of the rows of new items, since an item that is withdrawn and added
        again may have other features, and which deltas have changed what the tokens read.
        """
        known = self._fingerprints.get(num_tokens)
        if known is None:
            known = self._fingerprints[num_tokens] = self._fingerprint(num_tokens)
        return known

    def _fingerprint(self, num_tokens: int) -> str:
        """Compute a fingerprint; features count as encoded, so unknown and missing values agree."""
        num_events = max(num_tokens - self.num_user, 0)
        plain = self.plain if num_events == len(self.events) else ""
        if not plain:
            events = self.events[:num_events]
            plain = (
                replace(events, features=NO_COLUMNS) if events.features else events
            ).fingerprint()
        if self.vocabulary is not None and len(self.vocabulary.new_ids):
            first = len(self.vocabulary.ids)
            rows = self.rows[:num_events]
            if len(new := rows[rows >= first]):
                contents = self.vocabulary.stamps[new - first].tobytes()
                plain = xxhash.xxh3_128_hexdigest(plain.encode() + contents)
        if self.vocabulary is not None and self.vocabulary.weights is not None:
            plain = self.vocabulary.weights.marked(plain, self.rows[:num_events])
        if self.user is None and self.features is None:
            return plain
        digest = xxhash.xxh3_128(plain.encode())
        for encoded in (self.user, _some(self.features, slice(num_events))):
            for array in encoded or ():
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def _some(features: Encoded | None, rows: Any) -> Encoded | None:
    return None if features is None else Encoded(features.codes[rows], features.numbers[rows])


def window_start(first_index: int, num_events: int, max_tokens: int, step: int) -> int:
    """Compute how many of the oldest given events to cut.

    Args:
        first_index: Index of the first given event in the user's complete history.
        num_events: Number of given events.
        max_tokens: Largest number of remaining events.
        step: If anything is cut, the index of the first remaining event in the complete history is
            a multiple of this.

    Returns:
        0 .. num_events: all of them if no multiple of `step` lies within the newest `max_tokens`
        events.
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
    reject_unknown: bool,
    first_index: int = 0,
    name: str = "",
    plain: str = "",
    tokens_per_event: int = 1,
    features: ModelFeatures = NO_FEATURES,
    user_features: OneRow | None = None,
) -> Tokens:
    """Check a history, cut it and map its items to rows.

    Args:
        events: Events with external item ids, oldest first.
        vocabulary: Items that the model knows.
        num_actions: Number of actions that the model knows; they are 0 .. num_actions - 1.
        max_tokens: Longest history that the model reads.
        cut_step_tokens: Step of the window's start, in tokens.
        reject_unknown: True: raise for an unknown item; False: drop it.
        first_index: Index of the first event in the user's complete history, of which a client may
            send only the end.
        name: Fingerprint of the history, for the report.
        plain: `Events.fingerprint` of the events without features; "" = compute it when needed.
        tokens_per_event: 2 = a token of the item, then one of the action.
        features: Features that the model reads.
        user_features: Values of the user's features.

    Raises:
        Unprocessable: An action is unknown, an item is unknown and `reject_unknown`, or a feature
            of the user is unknown or has a wrong value.
    """
    # as unsigned numbers, negative actions are large
    if len(events) and largest(events.actions.view(np.uint16)) >= num_actions:
        least = smallest(events.actions)
        worst = least if least < 0 else largest(events.actions)
        raise Unprocessable(
            f"history.actions: {worst} is no index of an action, they are 0..{num_actions - 1}"
        )
    given = events
    step = -(-cut_step_tokens // tokens_per_event)
    cut = window_start(first_index, len(events), max_tokens // tokens_per_event, step)
    if cut:
        events = events[cut:]
    rows = vocabulary.rows(events.items)
    unknown = 0
    if len(rows) and smallest(rows) == UNKNOWN:
        known = rows != UNKNOWN
        unknown = len(rows) - int(np.count_nonzero(known))
        if reject_unknown:
            raise Unprocessable(
                f"history.items: {unknown} unknown, the first is {int(events.items[~known][0])}"
            )
        events = events.take(known)
        rows = rows[known]
    if tokens_per_event == 2:
        actions = np.repeat(events.actions, 2)
        actions[::2] = -1
        events = Events(
            np.repeat(events.items, 2), actions, np.repeat(events.timestamps, 2), events.origin
        )
        rows = np.repeat(rows, 2)
    user = of_events = None
    missing: tuple[str, ...] = ()
    if features.features:
        try:
            user = features.row(features.user, user_features)
        except ValueError as error:
            raise Unprocessable(f"features.user.{error}") from None
        missing = features.missing(user=user_features or {}, event=events.features.given)
        of_events = features.rows(features.event, events.features, len(rows))
    report = HistoryReport(
        fingerprint=name,
        num_tokens=len(rows) + features.num_user_tokens,
        read_events=len(rows) // tokens_per_event,
        cut_tokens=first_index + cut,
        unknown_items=unknown,
        missing_features=missing,
        origin=events.origin,
    )
    return Tokens(
        events,
        rows,
        report,
        user,
        of_events,
        vocabulary,
        features.num_user_tokens,
        plain if events is given else "",
    )
