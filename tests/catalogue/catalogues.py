"""Hypothesis strategies of small catalogues, rich in shared SIDs and in equal order scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks, Trie


class Record(NamedTuple):
    """One item of a catalogue."""

    item_id: int
    sid: tuple[int, ...]
    order: float


@st.composite
def catalogues(draw: st.DrawFn, min_items: int = 0) -> tuple[list[Record], Codebooks]:
    """Up to 40 records of 1 to 8 levels; some codebooks are far larger than the codes in use."""
    num_levels = draw(st.integers(1, 8))
    code_count = draw(
        st.lists(st.sampled_from([1, 3, 300, 70_000]), min_size=num_levels, max_size=num_levels)
    )
    sid = st.tuples(*(st.integers(0, min(count, 4) - 1) for count in code_count))
    sids = draw(st.lists(sid, min_size=1, max_size=8))
    item_ids = draw(st.lists(st.integers(0, 2**62), min_size=min_items, max_size=40, unique=True))
    orders = st.sampled_from([-1.5, 0.0, -0.0, 0.25, 2.0])
    return [
        Record(i, draw(st.sampled_from(sids)), draw(orders)) for i in item_ids
    ], Codebooks.stacked(code_count)


def make_trie(records: list[Record], codebooks: Codebooks) -> Trie:
    """The trie of some records."""
    sids = np.array([record.sid for record in records], np.int32).reshape(
        len(records), len(codebooks)
    )
    item_ids = np.array([record.item_id for record in records], np.int64)
    return build_trie(
        sids, item_ids, codebooks, np.array([record.order for record in records], np.float32)
    )
