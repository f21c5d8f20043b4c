"""The batches of an epoch, of which a block is in memory at a time.

A log of at most `BLOCK_EVENTS` is one block: its windows are sorted by length, batched, and the
batches shuffled. Of a larger one, pieces of neighbouring users are dealt to blocks anew each epoch,
and the blocks follow each other. So a batch has users of pieces from anywhere in the log, the disk
reads runs of events, and memory does not grow with the log.

Where the events are makes no difference: arrays in memory and mapped files give the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.train.data import (
    BLOCK_EVENTS,
    Batch,
    Batches,
    InteractionLog,
    batches,
    events_of,
    windows,
)

Vary = Callable[[InteractionLog, np.random.Generator], InteractionLog]
PIECE_EVENTS = 1 << 14  # about so many events of neighbouring users stay together


def epoch(
    log: InteractionLog,
    window_tokens: int,
    batch_tokens: int,
    random: np.random.Generator,
    block_events: int = BLOCK_EVENTS,
    piece_events: int = PIECE_EVENTS,
    *,
    vary: Vary | None = None,
) -> Sequence[Batch]:
    """Draw the batches of an epoch, each made when it is read.

    Args:
        log: Log to train on.
        window_tokens: Most events of a window; see `windows`.
        batch_tokens: Most tokens of a batch; see `batches`.
        random: Generator of all draws.
        block_events: Most events of a log that is one block, and about those of a block.
        piece_events: About the events of a piece.
        vary: Function that draws another log of a block's; `Batch.events` are then indices into
            that. None = the events as they are.
    """
    if len(log.items) <= block_events:
        log = log if vary is None else vary(log, random)
        return batches(log, windows(log, window_tokens, random), batch_tokens, random)
    return _Blocks(log, window_tokens, batch_tokens, random, block_events, piece_events, vary)


class _Blocks(Sequence[Batch]):
    """The batches of all blocks, one block after the other."""

    def __init__(
        self,
        log: InteractionLog,
        window_tokens: int,
        batch_tokens: int,
        random: np.random.Generator,
        block_events: int,
        piece_events: int,
        vary: Vary | None,
    ) -> None:
        self._log = log
        self._window_tokens = window_tokens
        self._batch_tokens = batch_tokens
        self._vary = vary
        mean = len(log.items) / log.num_users
        self._piece_users = max(1, round(piece_events / mean))
        num_pieces = -(-log.num_users // self._piece_users)
        num_blocks = -(-len(log.items) // block_events)
        self._pieces = np.array_split(random.permutation(num_pieces), min(num_blocks, num_pieces))
        self._seeds = random.integers(2**63, size=len(self._pieces)).tolist()
        self._made: tuple[int, Batches] | None = None
        # each block is cut once for its number of batches, and again when it is read
        sizes = [len(self._block(number)) for number in range(len(self._pieces))]
        self._ends: I64 = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, place: int) -> Batch: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Batch]: ...
    def __getitem__(self, place: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(place, slice):
            return _Part(self, range(len(self))[place])
        if not 0 <= place < len(self):
            raise IndexError(place)
        number = int(np.searchsorted(self._ends, place, "right"))
        begin = 0 if number == 0 else int(self._ends[number - 1])
        return self._block(number)[place - begin]

    def _block(self, number: int) -> Batches:
        if self._made is None or self._made[0] != number:
            first = self._pieces[number][:, None] * self._piece_users
            users = (first + np.arange(self._piece_users)).ravel()
            users = users[users < self._log.num_users]
            random = np.random.default_rng(self._seeds[number])
            if self._vary is None:
                log, only = self._log, users
            else:
                log, only = self._vary(events_of(self._log, users), random), None
            cut = windows(log, self._window_tokens, random, only)
            self._made = number, batches(log, cut, self._batch_tokens, random)
        return self._made[1]


class _Part(Sequence[Batch]):
    """Some of the batches, those that an interrupted epoch has left."""

    def __init__(self, of: _Blocks, places: range) -> None:
        self._of = of
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Batch: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Batch]: ...
    def __getitem__(self, place: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(place, slice):
            return _Part(self._of, self._places[place])
        return self._of[self._places[place]]
