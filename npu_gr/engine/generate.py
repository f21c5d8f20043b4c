"""The `generate` job on one device: a history of items in, the best items out. READ after `beam_search.py`.

A history is a prompt of semantic IDs: L tokens an item. Its KV lies in pages of an arena, wherever it came from: the
prompt was encoded now, or for an earlier request, or in parts. Only the last token runs again, for its logits.

All methods run on the device thread, one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.catalog.filters import Filter
from npu_gr.catalog.trie import DEAD, I32, Trie
from npu_gr.engine.beam_search import SearchOptions, Tables, search
from npu_gr.errors import Unprocessable
from npu_gr.kv.arena import KVArena
from npu_gr.kv.beam_arena import BeamArena
from npu_gr.kv.layout import KVLayout, Run
from npu_gr.model.decoder import Decoder, LayerSlabs
from npu_gr.request import F32, I64

SPLIT_FROM_TOKENS = 192  # below, one attention stage is faster: `xgr.md` 4.2; measured by `npu-gr bench generate`


class Status(StrEnum):
    """Whether there are as many items as were asked for."""

    COMPLETE = "complete"
    EXHAUSTED = "exhausted"  # the catalogue, the filter or the beam has no more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """Flat arrays, best first. n = items."""

    item_ids: I64  # [n]
    sids: I32  # [n, L]
    scores: F32  # [n] log-probability of the item's semantic ID; items that share one have equal scores
    status: Status


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """A history as the decoder reads it."""

    tokens: I64  # [items * L]
    unknown_items: int  # that the catalogue lacks; they are left out


def layout_of(decoder: Decoder, page_tokens: int = 64) -> KVLayout:
    """Pages for a decoder's prompts, in its own dtype."""
    config = decoder.config
    return KVLayout(
        num_layers=config.num_layers,
        num_heads=config.num_kv_heads,
        qk_dim=config.head_dim,
        v_dim=config.head_dim,
        page_tokens=page_tokens,
        dtype=str(decoder.dtype).removeprefix("torch."),
    )


def prompt_tokens(trie: Trie, item_ids: I64, max_tokens: int) -> PromptTokens:
    """Semantic IDs of a history, oldest first; of a longer one the newest items that fit.

    Args:
        trie: the catalogue.
        item_ids: [n] external ids.
        max_tokens: at least L.
    """
    leaves = trie.find(item_ids)
    known = leaves[leaves != DEAD]
    codes = trie.sid_of(known[max(0, len(known) - max_tokens // trie.num_levels) :])
    tokens = codes.astype(np.int64) + np.array(trie.codebooks.vocab_base, np.int64)
    return PromptTokens(tokens.ravel(), len(item_ids) - len(known))


class Generator:
    """A decoder, the pages of its prompts and the slab of its beams."""

    def __init__(self, decoder: Decoder, backend: Backend, arena: KVArena, max_beams: int, num_levels: int) -> None:
        """Allocate the beams' slab. `num_levels`: codes of a semantic ID, the same in every version of a catalogue."""
        config = decoder.config
        self.decoder, self.backend, self.arena = decoder, backend, arena
        self.beams = BeamArena(
            num_layers=config.num_layers,
            num_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_beams=max_beams,
            num_slots=num_levels - 1,
            dtype=decoder.dtype,
            device=backend.device,
        )

    def prefill(self, tokens: I64, runs: Sequence[Run], cached_tokens: int = 0) -> None:
        """Encode the tokens of a prompt behind `cached_tokens` that the pages hold already."""
        new = torch.from_numpy(tokens[cached_tokens:]).to(self.backend.device)

        def sink(layer: int, k: Tensor, v: Tensor) -> None:
            self.arena.write(layer, runs, cached_tokens, k, v)

        past = self._views(runs, cached_tokens) if cached_tokens else None
        self.decoder.prefill(self.backend, new, cached_tokens, past, sink)

    def generate(
        self,
        trie: Trie,
        tables: Tables,
        tokens: I64,
        runs: Sequence[Run],
        options: SearchOptions,
        num_items: int,
        allow: Filter | None = None,
    ) -> Generated:
        """The best items after a prompt whose KV is in the pages.

        Args:
            trie, tables: one version of the catalogue, and its tables on this device.
            tokens: the whole prompt, at least one token.
            runs: its pages.
            options: the beam.
            num_items: how many items are wanted.
            allow: the items that the request may see; None = all.

        Raises:
            Unprocessable: a beam or a prompt over the limit. FloatingPointError: the model's weights are broken.
        """
        if options.width > self.beams.max_beams:
            raise Unprocessable(f"beam_width: {options.width}, the limit is {self.beams.max_beams}")
        room = self.decoder.config.max_tokens - trie.num_levels + 1
        if not 0 < len(tokens) <= room:
            raise Unprocessable(f"history: {len(tokens)} tokens, the model takes 1 to {room}")
        device, last = self.backend.device, len(tokens) - 1
        newest = torch.from_numpy(tokens[last:]).to(device)
        hidden = self.decoder.prefill(self.backend, newest, last, self._views(runs, last) if last else None, None)
        found = search(
            self.decoder,
            self.backend,
            tables,
            self._views(runs, len(tokens)),
            len(tokens),
            hidden,
            self.beams,
            options,
            None if allow is None else tuple(torch.from_numpy(level).to(device) for level in allow.valid),
            split=len(tokens) >= SPLIT_FROM_TOKENS,
        )
        items = trie.items_of(found.leaves, allowed=None if allow is None else allow.allowed)
        item_ids = items.item_ids[:num_items]
        of_leaf = np.repeat(np.arange(len(found.leaves)), items.counts)[:num_items]
        return Generated(
            item_ids=item_ids,
            sids=trie.sid_of(found.leaves)[of_leaf],
            scores=found.scores[of_leaf],
            status=Status.COMPLETE if len(item_ids) == num_items else Status.EXHAUSTED,
        )

    def _views(self, runs: Sequence[Run], num_tokens: int) -> LayerSlabs:
        return lambda layer: self.arena.views(layer, runs, num_tokens)
