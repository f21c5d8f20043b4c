"""What an instance ranks and generates with: the section `generate`, and a ranker's part of the section `service`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import xxhash

from npu_gr.core.errors import ConfigError
from npu_gr.core.request import Normalise
from npu_gr.core.settings import Bytes, Count, Positive

Token = Annotated[int, msgspec.Meta(ge=0)]


class RankingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which histories and candidates a ranker accepts, and how often it checks itself."""

    max_history_tokens: Count | None = None  # None = the model's own limit
    cut_step_tokens: Count = 256  # the window's start moves in steps of this
    unknown_items: Literal["ignore", "reject"] = "ignore"  # ignore: and count
    # items that the ranker was not trained with and may score, in force with its next version; each
    # takes 4 x dim bytes of the device, in bfloat16 2 x dim, and 4 x dim more where the ranker
    # retrieves
    spare_items: Annotated[int, msgspec.Meta(ge=0)] = 4096
    # share of cached ranks scored again, cold
    selfcheck_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.001
    selfcheck_max_drift: Positive = 1e-3  # of the logits' standard deviation


class UserTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of tokens, of which each user has one, as in TIGER."""

    first_token: Annotated[int, msgspec.Meta(ge=0)]
    count: Count

    def of(self, user_id: str) -> int:
        """Return a user's token: by the id % count where it is a number, else by xxh3-64 of its UTF-8 % count."""
        is_number = user_id.isascii() and user_id.isdigit()
        number = int(user_id) if is_number else xxhash.xxh3_64_intdigest(user_id.encode())
        return self.first_token + number % self.count


class GenerateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model generates, from which catalogue, and how wide it searches."""

    checkpoint: str  # Hugging Face folder: Qwen3 (MoE too), Qwen2, Llama, Mistral or T5
    catalogue: str  # .jsonl, .parquet or .bin: items and their semantic IDs
    codes: tuple[Count, ...]  # number of codes of each level of a semantic ID
    # token of level 1, code 0; the other levels follow
    first_token: Annotated[int, msgspec.Meta(ge=0)] = 0
    # in front of a history's items: a begin token, an instruction
    tokens_before: tuple[Token, ...] = ()
    user_tokens: UserTokens | None = None  # the user's own token stands behind those; absent = none
    # behind the items; only a T5 has any, and must say: [1]
    tokens_after: tuple[Token, ...] | None = None
    max_beams: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 512
    beam_width: Count = 128  # for a request that names none
    # for a request that names none: over what the model was trained to
    normalise: Normalise = "vocabulary"
    exclude_seen: bool = True  # leave out the items of the history, unless a request says otherwise
    max_prompt_tokens: Count = 1024  # of a longer history the prompt holds the newest items
    # the prompt's start moves in steps of this many items; a T5's in steps of one
    cut_step_items: Count = 32
    hbm_bytes: Bytes = 268_435_456
    dram_bytes: Bytes = 0
    # for masks of attribute queries: one byte for each item and each edge
    filter_cache_bytes: Bytes = 268_435_456

    @property
    def items(self) -> tuple[str, tuple[int, ...], int]:
        """The settings that decide which items are found, and by which tokens."""
        return self.catalogue, self.codes, self.first_token

    @property
    def num_frame_tokens(self) -> int:
        """Tokens of a prompt that are no item's."""
        return (
            len(self.tokens_before) + (self.user_tokens is not None) + len(self.tokens_after or ())
        )

    def check_model(self, folder: str, vocab_size: int, *, is_divisible: bool) -> None:
        """Check that a model has all tokens, and that a prompt is written as it reads one.

        Args:
            folder: of the checkpoint, for the message.
            vocab_size: of the model.
            is_divisible: whether the beginning of a prompt can be kept: not of an encoder-decoder.

        Raises:
            ConfigError: names the setting.
        """
        users = self.user_tokens
        last = {
            "codes": self.first_token + sum(self.codes) - 1,
            "tokens_before": max(self.tokens_before, default=0),
            "user_tokens": 0 if users is None else users.first_token + users.count - 1,
            "tokens_after": max(self.tokens_after or (), default=0),
        }
        for name, token in last.items():
            if token >= vocab_size:
                raise ConfigError(
                    f"generate.{name}: the last token would be {token}, the vocabulary of {folder} "
                    f"has {vocab_size}"
                )
        if is_divisible and self.tokens_after:
            raise ConfigError(
                f"generate.tokens_after: {list(self.tokens_after)} behind the items of {folder}, a "
                "decoder: a cached "
                "prompt would end in them, and no longer one could begin with it"
            )
        if not is_divisible and self.tokens_after is None:
            raise ConfigError(
                f"generate.tokens_after: {folder} is an encoder-decoder; say which tokens its "
                "training put behind the "
                "items: [1] where T5's tokenizer made the inputs, [] = none"
            )

    def __post_init__(self) -> None:
        if not self.codes:
            raise ValueError("codes: needs at least one level")
        if self.beam_width > self.max_beams:
            raise ValueError(f"beam_width: {self.beam_width} is over max_beams {self.max_beams}")
        if self.max_prompt_tokens < len(self.codes) + self.num_frame_tokens:
            raise ValueError(
                f"max_prompt_tokens: {self.max_prompt_tokens} has no room for one item"
            )
