"""Start a generator at an earlier one, whose items keep their semantic IDs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npu_gr.catalogue.records import read_items
from npu_gr.catalogue.trie import I32
from npu_gr.core.arrays import F32, I64
from npu_gr.model import hf
from npu_gr.model.decoder import Decoder
from npu_gr.train.generate.codes import ItemCodes, codes_of_new


class KnownItems(NamedTuple):
    """Items with semantic IDs. n = items, L = levels."""

    item_ids: I64  # [n]
    sids: I32  # [n, L]


class GeneratorStart(NamedTuple):
    """An earlier generator."""

    items: KnownItems
    decoder: Decoder

    @classmethod
    def read(cls, folder: Path, catalogue: str) -> GeneratorStart:
        """Read the folder of a generator.

        Raises:
            NpuGrError: it cannot be read.
        """
        return cls(read_known(folder / catalogue), hf.load(folder))


class GeneratorStarts(NamedTuple):
    """The generators to start at."""

    evaluated: GeneratorStart  # trained without the held-out events of its time
    served: GeneratorStart


def read_known(path: Path) -> KnownItems:
    """Read the items of a catalogue.

    Raises:
        DataError: it cannot be read.
    """
    items = read_items(path)
    return KnownItems(items.item_ids, items.sids)


def kept_codes(
    known: KnownItems, item_ids: I64, vectors: F32, code_count: Sequence[int]
) -> ItemCodes | None:
    """Keep the codes of known items, and code new ones near the known items like them.

    A code's centroid is the mean of its known items in `vectors`, because the vectors of another
    log stand in another space.

    Args:
        known: Items of the earlier generator.
        item_ids: int64 [N] ids of the log's items.
        vectors: float32 [N, d] their vectors.
        code_count: Number of codes of each level.

    Returns:
        The codes; None = the earlier generator has other numbers of codes, or none of the items.
    """
    place = {item: row for row, item in enumerate(known.item_ids.tolist())}
    at = np.array([place.get(item, -1) for item in item_ids.tolist()])
    is_known = at >= 0
    has_levels = known.sids.shape[1] == len(code_count)
    if not is_known.any() or not has_levels or (known.sids.max(axis=0) >= code_count).any():
        return None
    sids = np.empty((len(item_ids), len(code_count)), np.int32)
    sids[is_known] = known.sids[at[is_known]]
    old = ItemCodes(sids[is_known], tuple(code_count))
    centroids = tuple(old.means(vectors[is_known]))
    if not is_known.all():
        old = ItemCodes(old.sids, old.code_count, centroids)
        sids[~is_known] = codes_of_new(old, vectors[is_known], vectors[~is_known])
    return ItemCodes(sids, tuple(code_count), centroids)
