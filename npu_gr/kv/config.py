"""Sizes of the memory tiers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class KVConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets in bytes; both tiers are allocated and touched at start."""

    page_tokens: Literal[32, 64, 128, 256] = 64  # tokens of one page; Ascend's paged op knows 32, 128 and 256
    hbm_bytes: Annotated[int, msgspec.Meta(ge=1)] = 536_870_912  # device memory for prefix KV
    dram_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1_073_741_824  # host memory behind it; 0 = no DRAM tier
    dram_ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0  # a copy unused for this long is gone
    dram_ttl_jitter_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1  # spread, so that no herd expires at once
    dtype: Literal["float32", "bfloat16"] | None = None  # of stored keys and values; None = the model's
