"""What an instance ranks and generates with: the section `generate`, and a ranker's part of the section `service`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from npu_gr.core.settings import Bytes, Count, Positive


class RankingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which histories and candidates a ranker accepts, and how often it checks itself."""

    max_history_tokens: Count | None = None  # None = the model's own limit
    cut_step_tokens: Count = 256  # the window's start moves in steps of this
    unknown_items: Literal["ignore", "refuse"] = "ignore"  # ignore: and count
    # items that the ranker was not trained with and may score, in force with its next version; each takes 4 x dim bytes
    # of the device, in bfloat16 2 x dim, and 4 x dim more where the ranker retrieves
    spare_items: Annotated[int, msgspec.Meta(ge=0)] = 4096
    selfcheck_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.001  # share of cached ranks scored again, cold
    selfcheck_max_drift: Positive = 1e-3  # of the logits' standard deviation


class GenerateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model generates, from which catalogue, and how wide it searches."""

    checkpoint: str  # Hugging Face folder: Qwen3 (MoE too), Qwen2, Llama or Mistral
    catalogue: str  # .jsonl, .parquet or .bin: items and their semantic IDs
    codes: tuple[Count, ...]  # number of codes of each level of a semantic ID
    first_token: Annotated[int, msgspec.Meta(ge=0)] = 0  # token of level 1, code 0; the other levels follow
    max_beams: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 512
    beam_width: Count = 128  # for a request that names none
    exclude_seen: bool = True  # leave out the items of the history, unless a request says otherwise
    max_prompt_tokens: Count = 1024  # of a longer history the prompt holds the newest items
    cut_step_items: Count = 32  # the prompt's start moves in steps of this many items
    hbm_bytes: Bytes = 268_435_456
    dram_bytes: Bytes = 0
    filter_cache_bytes: Bytes = 268_435_456  # for masks of attribute queries: one byte for each item and each edge

    @property
    def items(self) -> tuple[str, tuple[int, ...], int]:
        """The settings that decide which items are found, and by which tokens."""
        return self.catalogue, self.codes, self.first_token

    def __post_init__(self) -> None:
        if not self.codes:
            raise ValueError("codes: needs at least one level")
        if self.beam_width > self.max_beams:
            raise ValueError(f"beam_width: {self.beam_width} is over max_beams {self.max_beams}")
        if self.max_prompt_tokens < len(self.codes):
            raise ValueError(f"max_prompt_tokens: {self.max_prompt_tokens} has no room for one item")
