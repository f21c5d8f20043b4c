"""How deltas change the weights of a ranker in service.

    deltas on the way to the served one -> `Patch` (any thread) -> `write` (a device thread)

Serving holds no residual rows of items, only the table of their sums. So the residuals of the rows
that change are read from the checkpoint's file, which stays open, and from the deltas. A sharded
checkpoint has no residuals: a row that no delta on the way has is served from its files again, and
a delta that changes what items share is rejected.

A prefix's keys and values depend on the vectors of the items of its history, and on all weights but
those that only candidates read. `WeightStamps` says which delta last changed each; a fingerprint
has the stamps of what its prefix reads. So a prefix that a delta does not touch keeps its key and
its bits, and a touched one is never found again.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DeltaError
from npu_gr.core.served import DeltaInfo
from npu_gr.core.text_format import quoted
from npu_gr.model.delta import (
    Delta,
    ModelIdentity,
    TensorChange,
    apply,
    check_fits,
    check_indices,
    read_delta,
)
from npu_gr.model.delta_log import CHECKPOINT, DeltaLog, Link
from npu_gr.model.hstu import HSTU
from npu_gr.model.weight_stamps import WeightStamps
from npu_gr.model.weights import RESIDUALS, WEIGHTS, combined, versions_of

MOST_EARLIER = 8  # weights before of which stale prefixes are served
# Weights that only candidates and NEXT read: no cached keys and values depend on them.
_AFTER_PREFIX = (
    "candidate.",
    "clock.",
    "factors_of_",
    "features.cross.",
    "features.request.",
    "head.",
    "next_item",
    "norm_head.",
    "norm_next.",
    "vector.",
)
# Rows of items, and tables whose rows items share. Passes read their sums.
_OF_ITEMS = ("codes.of_item", "feature_ids_", "item.", "item_feature_")
_SHARED = ("codes.levels.", "feature.", "features.item.")
# Process-wide, since rankers that follow each other share the tiers in which prefixes lie.
_numbers = itertools.count(1)
_NO_ROWS = np.empty(0, np.int64)


class Patch(NamedTuple):
    """What a move to another delta writes; n = item rows."""

    way: list[Link]  # to the delta that is served afterwards
    changes: Mapping[str, TensorChange]  # by name, without `RESIDUALS`; in the dtypes of the model
    item_rows: I64  # [n] ascending rows of the table of sums
    residuals: Tensor  # [n, dim] their residual rows
    restored: I64  # [m] rows of a sharded checkpoint that no delta changes any more
    reaches_new_items: bool  # tables that items without residual rows share change too
    reaches_every_prefix: bool
    num_rows: int  # that deltas on the way have

    @property
    def reaches_prefixes(self) -> bool:
        """Whether some prefixes have read what changes."""
        num_rows = len(self.item_rows) + len(self.restored)
        return self.reaches_every_prefix or self.reaches_new_items or num_rows > 0


class ServedWeights:
    """The weights of one ranker: the checkpoint's file, and the deltas that are applied."""

    def __init__(self, folder: Path, log: DeltaLog) -> None:
        """Open the weights of a checkpoint that is about to be loaded.

        Args:
            folder: Folder of the checkpoint.
            log: Its deltas.

        Raises:
            CheckpointError: a file is missing, or the weights are not those of config.json.
        """
        self.log = log
        # version that the first delta names, and digest of what deltas do not change; "" = nothing
        self.base, self._rest = versions_of(folder)
        self.way: list[Link] = []  # the deltas that are applied, in order
        self.stamps: WeightStamps | None = None  # None = no delta since the model was opened
        self._file = os.open(folder / WEIGHTS, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def serve(self, model: HSTU, identity: ModelIdentity) -> None:
        """Serve this model, which has the weights of the checkpoint."""
        self._model = model
        self._identity = identity

    def replay(self) -> None:
        """Apply the deltas of `way` to the model as it was loaded, before its table is frozen.

        Raises:
            DeltaError: one is damaged, or does not fit the model.
        """
        state = self._model.state_dict()
        for link in self.way:
            delta = read_delta(link.path)
            self._identity.check(delta.manifest)
            self._check_fits(delta)
            apply(delta, state)
        self._model.items.thaw()

    @property
    def sequence(self) -> int:
        """Number of the served delta; `CHECKPOINT` = none."""
        return self.way[-1].sequence if self.way else CHECKPOINT

    @property
    def version(self) -> str:
        """Digest of the served weights."""
        return self.way[-1].manifest.result if self.way else self.base

    def info(self) -> DeltaInfo:
        """Describe the served delta."""
        made_at = self.way[-1].manifest.made_at if self.way else 0.0
        return DeltaInfo(sequence=self.sequence, weights=self.version, made_at=made_at)

    def check(self, delta: Delta) -> None:
        """Check that a delta is the next one, of this model.

        Raises:
            DeltaError: it is not; the message has its number, the field and the limit.
        """
        self._identity.check(delta.manifest)
        self.log.check_next(delta.manifest, self.version)
        self._check_fits(delta)

    def _check_fits(self, delta: Delta) -> None:
        state = self._model.state_dict()
        config = self._model.config
        dim = self._model.item.weight.shape[1]
        residuals = state[RESIDUALS].new_empty(1, 1).expand(config.num_items, dim)
        check_fits(delta, state | {RESIDUALS: residuals})
        if self._model.items.sharded is not None:
            _check_shards(delta)
        tables = {
            f"feature_ids_{index}": state[f"feature.{index}.weight"]
            for index in range(len(config.item_features))
        }
        if (codes := state.get("features.item.codes.weight")) is not None:
            tables["item_feature_codes"] = codes
        check_indices(delta, config, tables)

    def patch(self, way: list[Link], added: Delta | None = None) -> Patch:
        """Compute what a move to another way writes. Changes nothing.

        Args:
            way: Deltas from the checkpoint to the wanted one.
            added: The last of them, if it has been read and checked; others are read.

        Raises:
            DeltaError: a delta does not fit the model, or its file is damaged or gone.
        """
        pairs = zip(self.way, way, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        leaving, entering = self.way[common:], way[common:]
        read = {} if added is None else {way[-1].path: added}
        for link in entering:
            if link.path not in read:
                read[link.path] = delta = read_delta(link.path)
                self._identity.check(delta.manifest)
                self._check_fits(delta)
        for link in leaving:
            read.setdefault(link.path, read_delta(link.path, is_checked=False))
        touched = _union([read[link.path] for link in (*leaving, *entering)])
        state = self._model.state_dict()
        item_rows = self._item_rows(touched)
        # What leaves makes way for what was there before, which any older delta may have written.
        links = way if leaving else entering
        own = touched.get(RESIDUALS, _NO_ROWS)
        is_own = own is None or len(own) == len(item_rows)
        residuals, is_changed = self._values(RESIDUALS, item_rows, links if is_own else way, read)
        restored = _NO_ROWS
        if self._model.items.sharded is not None:
            restored, residuals = item_rows[~is_changed], residuals[torch.from_numpy(is_changed)]
            item_rows = item_rows[is_changed]
        changes = {
            name: TensorChange(rows, self._values(name, rows, links, read)[0].to(state[name].dtype))
            for name, rows in touched.items()
            if name != RESIDUALS
        }
        others = [name for name in changes if not name.startswith((*_OF_ITEMS, *_SHARED))]
        return Patch(
            way,
            changes,
            item_rows,
            residuals.to(self._model.dtype),
            restored,
            any(name.startswith(_SHARED) for name in changes),
            any(not name.startswith(_AFTER_PREFIX) for name in others),
            sum(read[link.path].num_rows for link in (*leaving, *entering)),
        )

    def _values(
        self, name: str, rows: I64 | None, links: Sequence[Link], read: dict[Path, Delta]
    ) -> tuple[Tensor, npt.NDArray[np.bool_]]:
        """Return rows of a tensor, None = all, after these deltas, and which of them have one."""
        newest = read.get(links[-1].path) if links else None
        if newest and (change := newest.changes.get(name)) and _are_equal(change.rows, rows):
            # most often: neither the file nor older deltas are read
            count = len(change.values) if change.values.ndim else 1
            return change.values.clone(), np.ones(count, np.bool_)
        with safe_open(f"/proc/self/fd/{self._file}", framework="pt") as file:
            base: Tensor = file.get_tensor(name)
        wanted = slice(None) if rows is None else torch.from_numpy(rows)
        if rows is not None and name == RESIDUALS and self._model.items.sharded is not None:
            found = base.new_zeros(len(rows), base.shape[1])
        else:
            found = base[wanted].clone() if base.ndim else base.clone()
        is_changed = np.zeros(len(found) if found.ndim else 1, np.bool_)
        for link in links:
            delta = read.get(link.path) or read_delta(link.path, is_checked=False)
            if (change := delta.changes.get(name)) is None:
                continue
            if change.rows is None:
                found.copy_(change.values[wanted] if base.ndim else change.values)
                is_changed[:] = True
            else:
                at, places = change.rows, np.arange(len(change.rows))
                if rows is not None:
                    _, at, places = np.intersect1d(
                        rows, change.rows, assume_unique=True, return_indices=True
                    )
                found[torch.from_numpy(at)] = change.values[torch.from_numpy(places)]
                is_changed[at] = True
        return found, is_changed

    def _item_rows(self, touched: Mapping[str, I64 | None]) -> I64:
        """Return the item rows whose sums change, ascending."""
        model = self._model
        num_items = model.config.num_items
        changed = np.zeros(num_items, np.bool_)
        for name, rows in touched.items():
            if name.startswith(_OF_ITEMS):
                changed[slice(None) if rows is None else rows] = True
            elif name.startswith("feature."):
                ids = getattr(model, f"feature_ids_{name.split('.')[1]}")
                changed |= _reading(ids, rows)
            elif name.startswith("codes.levels."):
                changed |= _reading(model.codes.of_item[:, int(name.split(".")[2]), None], rows)
            elif name == "features.item.codes.weight":
                changed |= _reading(model.item_feature_codes, rows)
            elif name.startswith("features.item."):
                changed[:] = True
        return np.flatnonzero(changed)

    def current(self) -> WeightStamps:
        """Return the stamps of the weights as they are."""
        return self.stamps or WeightStamps.none(self._model.config.num_items)

    def stamped(self, patch: Patch, keep_stale_s: float) -> WeightStamps:
        """Return the stamps of prefixes once a patch is written.

        Args:
            patch: What is written.
            keep_stale_s: Seconds for which prefixes of earlier weights may still be found.
        """
        before = self.current()
        number = next(_numbers)
        rows = before.rows
        if len(patch.item_rows) + len(patch.restored):
            rows = rows.copy()
            rows[patch.item_rows] = number
            rows[patch.restored] = number
        now_at = time.monotonic()
        earlier = ((now_at, before._replace(earlier=())), *before.earlier)
        return WeightStamps(
            rows,
            number if patch.reaches_every_prefix else before.every,
            number if patch.reaches_new_items else before.new_items,
            tuple(one for one in earlier[:MOST_EARLIER] if now_at - one[0] < keep_stale_s),
        )

    def moved(self, patch: Patch, stamps: WeightStamps) -> None:
        """Record that a patch was written."""
        self.stamps = stamps
        self.way = patch.way

    def combined(self) -> str:
        """Return the version of the model: of the served weights, and of what deltas leave."""
        return combined(self.version, self._rest)


def _check_shards(delta: Delta) -> None:
    """Check that a delta changes no more of items than some own rows.

    Raises:
        DeltaError: it does; the message names the tensor.
    """
    for name, (rows, _) in delta.changes.items():
        is_own = name == RESIDUALS
        if (rows is None) if is_own else name.startswith((*_OF_ITEMS, *_SHARED)):
            why = (
                "more than half of its rows change" if is_own else "rows of many items depend on it"
            )
            raise DeltaError(
                f"delta {delta.manifest.sequence}: {quoted(name)}: {why}, and the checkpoint is "
                "sharded; shard the new checkpoint (npu-gr shard), and reload"
            )


def _union(deltas: Sequence[Delta]) -> dict[str, I64 | None]:
    """Return the rows that deltas change, by name; None = all."""
    touched: dict[str, list[I64] | None] = {}
    for delta in deltas:
        for name, (rows, _) in delta.changes.items():
            so_far = touched.setdefault(name, [])
            if rows is None:
                touched[name] = None
            elif so_far is not None:
                so_far.append(rows)
    return {name: None if parts is None else _merged(parts) for name, parts in touched.items()}


def _merged(parts: Sequence[I64]) -> I64:
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _are_equal(a: I64 | None, b: I64 | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _reading(ids: Tensor, rows: I64 | None) -> npt.NDArray[np.bool_]:
    """Return which items, of ids [items, n], read one of the rows of a table; None = all rows."""
    host = ids.cpu().numpy()
    if rows is None:
        return np.ones(len(host), np.bool_)
    found: npt.NDArray[np.bool_] = np.any(np.isin(host, rows), axis=1)
    return found
