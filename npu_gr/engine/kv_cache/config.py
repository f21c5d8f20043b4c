"""Settings of the memory tiers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from npu_gr.core.secret import Secret
from npu_gr.core.settings import Bytes, Seconds, SomeBytes

_LEAST_KEY = 16  # characters


class KVConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets of the two tiers. Both are allocated, and every page touched, at start."""

    # tokens of one page; Ascend's paged attention takes 32, 128 and 256
    page_tokens: Literal[32, 64, 128, 256] = 64
    # device memory for prefix KV; auto = a share of what is free after the weights
    hbm_bytes: SomeBytes | Literal["auto"] = 536_870_912
    dram_bytes: Bytes = 1_073_741_824  # host memory for copies; 0 = no DRAM tier
    dram_ttl_s: Seconds = 600.0  # a copy that is not used for this long expires
    # spreads the TTLs, so that copies made together do not expire together
    dram_ttl_jitter_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    # pool behind the DRAM tier, for prefixes that outlive the instance; None = none
    pool: str | None = None
    # a value that was put without this key is not used, so that who else writes to the pool cannot
    # change scores; the same for all instances; None = values are not authenticated
    pool_key: Secret | None = None
    # dtype of the stored keys and values; None = the model's; int8 takes half the memory of
    # bfloat16, and moves the scores a little, see docs/exactness.md
    dtype: Literal["float32", "bfloat16", "int8"] | None = None

    def __post_init__(self) -> None:
        if self.pool_key is not None and len(self.pool_key.reveal()) < _LEAST_KEY:
            raise ValueError(f"pool_key: has fewer than {_LEAST_KEY} characters")
