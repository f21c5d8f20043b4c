"""Settings of the memory tiers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from npu_gr.core.settings import Bytes, Seconds, SomeBytes


class KVConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets of the two tiers. Both are allocated, and every page touched, at start."""

    # tokens of one page; Ascend's paged attention takes 32, 128 and 256
    page_tokens: Literal[32, 64, 128, 256] = 64
    hbm_bytes: SomeBytes = 536_870_912  # device memory for prefix KV
    dram_bytes: Bytes = 1_073_741_824  # host memory for copies; 0 = no DRAM tier
    dram_ttl_s: Seconds = 600.0  # a copy that is not used for this long expires
    # spreads the TTLs, so that copies made together do not expire together
    dram_ttl_jitter_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    # dtype of the stored keys and values; None = the model's
    dtype: Literal["float32", "bfloat16"] | None = None
