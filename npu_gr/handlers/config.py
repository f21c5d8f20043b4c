"""The section `generate`, and the ranker's part of the section `service`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import xxhash

from npu_gr.core.errors import ConfigError
from npu_gr.core.request import Normalise
from npu_gr.core.settings import Bytes, Count, Positive, SomeBytes

Token = Annotated[int, msgspec.Meta(ge=0)]


class RankingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of histories and candidates of a ranker, and its self-checks."""

    max_history_tokens: Count | None = None  # None = the model's own limit
    cut_step_tokens: Count = 256  # step of the start of the history window
    unknown_items: Literal["ignore", "reject"] = "ignore"  # ignore: they are counted
    # new items that the ranker may score, from its next version on; each takes 4 x dim bytes of
    # device memory, in bfloat16 2 x dim, and 4 x dim more if the ranker retrieves
    spare_items: Annotated[int, msgspec.Meta(ge=0)] = 4096
    # share of cached ranks that are scored again without cache
    selfcheck_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.001
    selfcheck_max_drift: Positive = 1e-3  # of the logits' standard deviation
    # with kv_cache.dtype int8: the same, against scores from keys and values as they are computed;
    # also of the self-test at start
    selfcheck_max_int8_drift: Positive = 0.1


class UserTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of user tokens, as in TIGER; each user has one."""

    first_token: Annotated[int, msgspec.Meta(ge=0)]
    count: Count

    def of(self, user_id: str) -> int:
        """Return a user's token: a numeric id, else its xxh3-64, modulo `count`."""
        is_number = user_id.isascii() and user_id.isdigit()
        number = int(user_id) if is_number else xxhash.xxh3_64_intdigest(user_id.encode())
        return self.first_token + number % self.count


class GenerateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generator, catalogue and beam search."""

    checkpoint: str  # Hugging Face folder: Qwen3 (MoE too), Qwen2, Llama, Mistral or T5
    catalogue: str  # .jsonl, .parquet or .bin: items and their semantic IDs
    # log of the changes by POST /v1/catalog/items; None = next to the catalogue, with the suffix
    # .changes; none = changes are lost when the instance stops
    change_log: str | None = None
    codes: tuple[Count, ...]  # codes per level of a semantic ID
    # token of code 0 of the first level; the other levels follow
    first_token: Annotated[int, msgspec.Meta(ge=0)] = 0
    # tokens before the items of a history: a begin token, an instruction
    tokens_before: tuple[Token, ...] = ()
    user_tokens: UserTokens | None = None  # the user's token after those, if any
    # tokens after the items; required for a T5, usually [1], and empty for decoders
    tokens_after: tuple[Token, ...] | None = None
    max_beams: Count = 512  # widest beam of a request
    # device memory for the keys, values and logits of `max_beams` beams, per stream
    beam_bytes: SomeBytes = 1_073_741_824
    beam_width: Count = 128  # default of requests
    # default of requests: the set of tokens over which the model was trained
    normalise: Normalise = "vocabulary"
    exclude_seen: bool = True  # default of requests: exclude items of the history
    max_prompt_tokens: Count = 1024  # longer histories are cut to the newest items
    # step of the start of the prompt, in items; 1 for a T5
    cut_step_items: Count = 32
    hbm_bytes: Bytes | Literal["auto"] = 268_435_456  # auto: see `KVConfig`
    dram_bytes: Bytes = 0
    # for masks of attribute queries: one byte per item and edge of the trie
    filter_cache_bytes: Bytes = 268_435_456

    @property
    def items(self) -> tuple[str, str | None, tuple[int, ...], int]:
        """The settings that determine items, their changes and their tokens."""
        return self.catalogue, self.change_log, self.codes, self.first_token

    @property
    def num_frame_tokens(self) -> int:
        """Number of prompt tokens that are not of items."""
        return (
            len(self.tokens_before) + (self.user_tokens is not None) + len(self.tokens_after or ())
        )

    def check_model(self, folder: str, vocab_size: int, *, is_divisible: bool) -> None:
        """Check that a model has all configured tokens, and fits `tokens_after`.

        Args:
            folder: Folder of the checkpoint, for messages.
            vocab_size: Vocabulary size of the model.
            is_divisible: Whether prompts have cacheable prefixes; False for encoder-decoders.

        Raises:
            ConfigError: they do not fit; the message names the setting.
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
                    f"generate.{name}: the last token is {token}, but the vocabulary of {folder} "
                    f"has {vocab_size}"
                )
        if is_divisible and self.tokens_after:
            raise ConfigError(
                f"generate.tokens_after: must be empty, since {folder} is a decoder: a cached "
                "prompt would end with them, and could not be the prefix of a longer one"
            )
        if not is_divisible and self.tokens_after is None:
            raise ConfigError(
                f"generate.tokens_after: required, since {folder} is an encoder-decoder; set the "
                "tokens that its training put after the items: [1] with T5's tokenizer, [] for "
                "none"
            )

    def check_beams(
        self, folder: str, kv_shape: tuple[int, int, int], vocab_size: int, element_bytes: int
    ) -> int:
        """Return the number of beams for which `beam_bytes` has room.

        Args:
            folder: Folder of the checkpoint, for messages.
            kv_shape: Layers, KV heads and width of a head of the model.
            vocab_size: Vocabulary size of the model.
            element_bytes: Bytes of an element of keys, values and logits.

        Raises:
            ConfigError: it has no room for `max_beams`.
        """
        num_slots = len(self.codes) - 1  # the last code of a beam is never read
        each = element_bytes * (2 * num_slots * math.prod(kv_shape) + vocab_size)
        room = self.beam_bytes // each
        if self.max_beams > room:
            raise ConfigError(
                f"generate.max_beams: {self.max_beams} beams of {folder} take "
                f"{self.max_beams * each} bytes, but generate.beam_bytes {self.beam_bytes} has "
                f"room for {room}"
            )
        return room

    def __post_init__(self) -> None:
        if not self.codes:
            raise ValueError("codes: needs at least one level")
        if self.beam_width > self.max_beams:
            raise ValueError(f"beam_width: {self.beam_width} exceeds max_beams {self.max_beams}")
        if self.max_prompt_tokens < len(self.codes) + self.num_frame_tokens:
            raise ValueError(
                f"max_prompt_tokens: {self.max_prompt_tokens} has no room for one item"
            )
