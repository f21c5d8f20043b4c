"""Start a generator at an earlier one, whose items keep their semantic IDs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from npu_gr.catalogue.trie import I32, Codebooks
from npu_gr.core.arrays import F32, I64
from npu_gr.model.decoder import Decoder
from npu_gr.train.generate.codes import ItemCodes, codes_of_new


class KnownItems(NamedTuple):
    """Items with semantic IDs. n = items, L = levels."""

    item_ids: I64  # [n]
    sids: I32  # [n, L]


class GeneratorStart(NamedTuple):
    """An earlier generator. L = levels."""

    items: KnownItems  # with the codes
    nodes: I32 | None  # [n, L], the tokens of the items; None = the codes are
    token_count: tuple[int, ...]  # tokens of each level
    decoder: Decoder

    def kept_nodes(self, item_ids: I64, codes: ItemCodes) -> I32 | None:
        """Find the nodes that items of these codes have here, for `nodes_of`."""
        at = _places(self.items.item_ids, item_ids)
        is_same = (self.items.sids[at] == codes.sids).all(axis=1) | (at < 0)
        if self.nodes is None or not is_same.all():
            return None
        return np.where(at[:, None] < 0, np.int32(-1), self.nodes[at])


class GeneratorStarts(NamedTuple):
    """The generators to start at."""

    evaluated: GeneratorStart  # trained without the held-out events of its time
    served: GeneratorStart


def begin_at(model: Decoder, codes: ItemCodes, item_ids: I64, start: GeneratorStart) -> None:
    """Copy an earlier generator's weights, in place; the tokens' rows go by the items.

    A model of other sizes stays as it is.

    Args:
        model: Decoder over `codes`.
        codes: Tokens of the items.
        item_ids: int64 [N] ids of the items.
        start: The earlier generator.
    """
    before = start.decoder.config
    if msgspec.structs.replace(before, vocab_size=model.config.vocab_size) != model.config:
        return
    if codes.given is None and before == model.config:
        model.load_state_dict(start.decoder.state_dict())
        return
    table = model.embedding.weight.detach().clone()
    at = _places(item_ids, start.items.item_ids)
    is_known = at >= 0
    tokens = start.items.sids if start.nodes is None else start.nodes
    bases = Codebooks.stacked(codes.code_count).vocab_base
    bases_before = Codebooks.stacked(start.token_count).vocab_base
    for level, (base, base_before) in enumerate(zip(bases, bases_before, strict=True)):
        new = base + codes.sids[at[is_known], level].astype(np.int64)
        old = base_before + tokens[is_known, level].astype(np.int64)
        table[new] = start.decoder.embedding.weight.detach()[old]
    weights = {**start.decoder.state_dict(), "embedding.weight": table}
    model.load_state_dict(weights)


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
    at = _places(known.item_ids, item_ids)
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


def _places(known: I64, item_ids: I64) -> I64:
    """Find items among known ones, int64 [items]; -1 = it is not known."""
    place = {item: row for row, item in enumerate(known.tolist())}
    return np.array([place.get(item, -1) for item in item_ids.tolist()], np.int64)
