"""xBeam: semantic-ID beam search over one prompt, all rounds to completion, every beam valid in every round.

    round 0      the prompt's last row gives logits; the best first codes are the beams
    round r      their tokens run through the decoder: shared prompt KV, own slots 0..r-1; constrain, select, fork
    last round   leaves in the order of their scores

Beams stand in the order of their codes, not of their scores, until the last round: forks then never move a row onto
one that is still to be read, and equal scores are decided by the semantic ID, lexicographically.

Source: xGR (arXiv:2512.11529); `xgr.md` 2.
Invariants: an invalid item cannot be scored; a beam as wide as the catalogue is brute force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend, Choices, Continuations, Over
from npu_gr.catalog.trie import Codebooks, Trie
from npu_gr.kv.beam_arena import BeamArena, fork_ancestry
from npu_gr.model.decoder import Decoder, LayerSlabs, UnsharedKV
from npu_gr.request import F32, I64

Fork = Literal["move", "ancestry"]

GATHER_BELOW = 6  # a dot by itself costs as much as this many of a whole product: measured on a CPU


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is searched for.

    normalise: what a token's probability is normalised over, before it is multiplied along the beam.
        vocabulary: the model's whole vocabulary: its own log-probability, what constrained generation of Hugging Face
            transformers gives. codebook: the codes of the level. valid: the codes that continue the beam to an
            (allowed) item. Within one beam all three order alike; they differ in how beams compare.
    """

    width: Annotated[int, msgspec.Meta(ge=1)] = 128
    normalise: Literal["vocabulary", "codebook", "valid"] = "vocabulary"
    temperature: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A catalogue's trie on the device. n_l = states of level l."""

    codebooks: Codebooks
    indptr: tuple[Tensor, ...]  # L x int64 [n_l + 1]
    code: tuple[Tensor, ...]  # L x int32 [n_{l+1}]

    @classmethod
    def upload(cls, trie: Trie, device: torch.device) -> Tables:
        """Copies of what the search reads."""
        return cls(
            trie.codebooks,
            tuple(torch.from_numpy(pointers.astype(np.int64)).to(device) for pointers in trie.indptr),
            tuple(torch.from_numpy(code.astype(np.int32)).to(device) for code in trie.token),
        )

    def follow(self, level: int, states: Tensor, allowed: Tensor | None) -> Continuations:
        """What may follow beams in these states of a level."""
        pointers = self.indptr[level]
        lo = pointers[states]
        return Continuations(lo, pointers[states + 1] - lo, self.code[level], allowed)


@dataclass(frozen=True, slots=True, eq=False)
class Beams:
    """What was found: [w] leaves of the trie and their log-probabilities, best first, w <= width."""

    leaves: I64
    scores: F32


@torch.inference_mode()
def search(
    decoder: Decoder,
    backend: Backend,
    tables: Tables,
    prompt: LayerSlabs,
    num_prompt_tokens: int,
    hidden: Tensor,
    arena: BeamArena,
    options: SearchOptions,
    allowed: tuple[Tensor, ...] | None = None,
    fork: Fork = "move",
    split: bool = True,
) -> Beams:
    """Search one prompt's best items.

    Args:
        prompt: KV of the prompt, num_prompt_tokens >= 1 tokens.
        hidden: [1, dim] of its last token, as `Decoder.prefill` gives it.
        arena: for the beams' own KV: max_beams >= width, num_slots >= levels - 1. Its contents do not matter.
        allowed: L x bool [n_{l+1}] which edges lead to an item that the request may see.
        fork: how the beams' KV follows them; both give the same.
        split: two attention stages or one; see `Decoder.decode`.

    Raises:
        FloatingPointError: the model gives a logit that is not a number.
    """
    num_levels = len(tables.codebooks)
    assert options.width <= arena.max_beams
    assert num_levels - 1 <= arena.num_slots
    states = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    acc = torch.zeros(1, dtype=torch.float32, device=hidden.device)
    ancestry = torch.empty(0, 1, dtype=torch.int64, device=hidden.device)
    for level in range(num_levels):
        chosen = _select(decoder, backend, tables, level, states, hidden, acc, options, allowed)
        if not len(chosen.edge):
            return Beams(np.empty(0, np.int64), np.empty(0, np.float32))
        if level == num_levels - 1:
            return _fetched(chosen)
        # codes ascend with the edges, and the parents do not decrease
        order = torch.argsort(chosen.edge)
        acc, parent, states = chosen.score[order], chosen.parent[order], chosen.edge[order]
        if fork == "ancestry":
            ancestry = fork_ancestry(ancestry, parent)
        elif level:
            arena.move(parent, level)
        tokens = tables.code[level][states].long() + tables.codebooks.vocab_base[level]
        own = UnsharedKV(slabs=arena.slabs, step=level, ancestry=ancestry if fork == "ancestry" else None)
        hidden = decoder.decode(backend, tokens, num_prompt_tokens + level, prompt, own, split)
    raise AssertionError("a catalogue has a level")


def _fetched(chosen: Choices) -> Beams:
    """The one wait for the device, where its backend needs none to select."""
    scores = chosen.score.float().cpu().numpy()
    if np.isnan(scores).any():
        raise FloatingPointError("a logit is not a number")
    found = int((scores > -np.inf).sum())  # places that nothing fills stand last
    return Beams(chosen.edge[:found].cpu().numpy(), scores[:found])


def _select(
    decoder: Decoder,
    backend: Backend,
    tables: Tables,
    level: int,
    states: Tensor,
    hidden: Tensor,
    acc: Tensor,
    options: SearchOptions,
    allowed: tuple[Tensor, ...] | None,
) -> Choices:
    base, count = tables.codebooks.vocab_base[level], tables.codebooks.code_count[level]
    follow = tables.follow(level, states, None if allowed is None else allowed[level])
    scale = 1.0 / options.temperature
    if options.normalise == "vocabulary":
        codes = slice(base, base + count)
        return backend.beam_topk(decoder.logits(hidden), acc, follow, options.width, "row", codes, scale)
    if options.normalise == "valid" and int(follow.degree.sum()) * GATHER_BELOW < len(states) * count:
        weight = decoder.head_weight[base : base + count]
        return backend.gathered_topk(hidden, weight, acc, follow, options.width, scale)
    over: Over = "valid" if options.normalise == "valid" else "row"
    return backend.beam_topk(
        decoder.logits(hidden, (base, base + count)), acc, follow, options.width, over, None, scale
    )
