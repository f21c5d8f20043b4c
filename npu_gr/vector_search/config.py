"""Settings of the section `match`."""

from __future__ import annotations

from typing import Literal

import msgspec

from npu_gr.core.settings import Count

IndexName = Literal["exact", "ivf"]


class MatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The vectors to search, and the limits of a request."""

    # folder with manifest.json and vectors.safetensors, written by `npu-gr train match`
    vectors: str
    index: IndexName = "exact"  # ivf: approximate, for many millions of items
    max_items: Count = 1000  # most items of a request
    max_batch_requests: Count = 64  # most requests in one pass over the items
    # default of requests: exclude items of the history and of the training data
    exclude_seen: bool = True
    max_history_events: Count = 1000  # newest events from which a vector is folded in
