"""A ranker's weights on the device: rows for new items, changes by deltas, and what may be read.

Only device threads read and write them. A pass whose prefix is older than the weights would mix the
two, and one that keeps its keys and values would leave them under the key of older weights: neither
runs (`current`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.core.arrays import I64
from npu_gr.core.errors import StaleEntry
from npu_gr.model.feature_rows import NewItems
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hot_rows import RowReads
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_input import shown_term
from npu_gr.model.served_weights import Patch
from npu_gr.model.weight_stamps import WeightStamps

R = TypeVar("R")
W = TypeVar("W")


class PrefixPass(Protocol):
    """What decides whether a pass may run; see `RankPass`."""

    @property
    def tokens(self) -> Tokens:
        """The history, as it was when the prefix was looked up."""
        ...

    @property
    def cached(self) -> object:
        """The prefix that it reads; None = none."""
        ...

    @property
    def keep(self) -> object:
        """Where it leaves one; None = nowhere."""
        ...


class DeviceWeights:
    """The weights of one ranker on one device."""

    def __init__(self, model: HSTU, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        # [rows, d] fp32 item vectors with which u is multiplied, spare rows included.
        self._items: torch.Tensor | None = None
        self._stamps: WeightStamps | None = None  # of the weights as they are now
        self._new_items: dict[int, NewItems] = {}  # inputs of the vector of each spare row
        self.shown = shown_term(model)  # as the weights are now
        # called with item rows whose vectors were written, before a pass reads them
        self.on_written: Callable[[I64], None] = lambda _rows: None

    def table(self) -> torch.Tensor:
        """Return the item vectors with which u is multiplied, fp32 [rows, d]."""
        if self._items is None:
            self._items = self._model.items.vectors()
        return self._items

    def expect(self, rows: I64) -> None:
        """Read rows [n] of a sharded checkpoint ahead of their pass; any thread, does not wait."""
        if (sharded := self._model.items.sharded) is not None:
            sharded.prefetch(rows)

    @property
    def row_reads(self) -> RowReads:
        """Return the reads of item rows; all 0 unless the checkpoint is sharded."""
        sharded = self._model.items.sharded
        return RowReads() if sharded is None else sharded.reads

    def write_items(self, rows: I64, new: NewItems) -> None:
        """Write the vectors of new items into rows [n] that no request reads."""
        items = self._model.items
        assert self._model.config.num_items <= rows.min()
        assert rows.max() < items.num_rows
        parts = {row: new.take(np.array([i])) for i, row in enumerate(rows.tolist())}
        self._new_items |= parts
        self._write_rows(rows, items.new_vectors(new))
        self._backend.synchronize()

    def write(self, patch: Patch, stamps: WeightStamps) -> None:
        """Write what a delta changes, while no pass runs.

        Args:
            patch: The values.
            stamps: Stamps of the weights afterwards.
        """
        items, device = self._model.items, self._backend.device
        state = self._model.state_dict()
        with torch.no_grad():  # counts the write, so that packed copies are made again
            for name, (rows, values) in patch.changes.items():
                if rows is None:
                    state[name].copy_(values)
                else:
                    state[name][self._backend.upload(rows)] = values.to(device)
        if len(rows_ := patch.item_rows):
            folded = items.fold(self._backend.upload(rows_), patch.residuals.to(device))
            self._write_rows(rows_, folded)
        if len(patch.restored):
            assert items.sharded is not None
            items.sharded.restore(patch.restored)
        if patch.reaches_new_items and self._new_items:
            new = NewItems.joined([*self._new_items.values()])
            self._write_rows(np.array([*self._new_items]), items.new_vectors(new))
        if "next_item" in patch.changes:
            at = self._backend.upload(np.array([items.num_rows]))
            items.write(at, self._model.next_item[None])
        self._stamps = stamps
        self._backend.synchronize()
        self.shown = shown_term(self._model)

    @torch.inference_mode()
    def _write_rows(self, rows: I64, vectors: torch.Tensor) -> None:
        at = self._backend.upload(rows)
        self._model.items.write(at, vectors)
        # The copy that the search reads, if the model is bf16 or normalises its items.
        if self._items is not None:
            self._items[at] = self._model.items.compared(vectors)
        self.on_written(rows)

    def current(
        self,
        works: Sequence[W],
        pass_of: Callable[[W], PrefixPass],
        run: Callable[[Sequence[W]], list[R]],
    ) -> list[R | StaleEntry]:
        """Run works, but those between whose lookup and now a delta changed what they read."""
        old = [self._is_outdated(pass_of(work)) for work in works]
        if not any(old):
            return [*run(works)]
        left = [work for work, is_old in zip(works, old, strict=True) if not is_old]
        results = iter(run(left) if left else [])
        why = "a delta has changed what the prefix read"
        return [StaleEntry(why) if is_old else next(results) for is_old in old]

    def _is_outdated(self, work: PrefixPass) -> bool:
        now, vocabulary = self._stamps, work.tokens.vocabulary
        if now is None or vocabulary is None or vocabulary.weights is now:
            return False
        if work.cached is None and work.keep is None:
            return False  # it reads and leaves no prefix
        rows = work.tokens.rows
        then = vocabulary.weights or WeightStamps.none(len(now.rows))
        return then.read_by(rows) != now.read_by(rows)
