"""The section `match` of an instance."""

from __future__ import annotations

from typing import Literal

import msgspec

from npu_gr.core.settings import Count

IndexName = Literal["exact", "hnsw"]


class MatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which vectors are searched, and how much a request may ask for."""

    # folder with manifest.json and vectors.safetensors, as `npu-gr train match` writes
    vectors: str
    index: IndexName = "exact"  # hnsw: approximate, for catalogues of many millions
    max_items: Count = 1000  # that a request may ask for
    max_batch_requests: Count = 64  # in one pass over the items
    max_history_events: Count = 1000  # newest events that a vector is folded in from
