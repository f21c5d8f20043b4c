"""xBeam: beam search over semantic IDs.

All rounds run to completion; every beam is valid in every round.

    round 0      the last row of the prompt gives logits; the best first codes are the beams
    round r      the decoder runs the beams' tokens over the shared prompt KV and each beam's own
                 slots 0..r-1; then constrain, select, fork
    last round   the leaves, ordered by score

Several prompts, each with its own width and filter, share the rounds: one product with the weights
for all beams.

Before the last round the beams are ordered by their codes, not by their scores. So a fork never
overwrites a row that is still to be read, and ties of scores are broken by the semantic ID.

Source: xGR (arXiv:2512.11529), xBeam.
Invariants: an invalid item cannot be scored; a beam as wide as the catalogue equals brute force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend, Slab
from npu_gr.backend.calls import Choices, Continuations, Over, TopkCall
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.arrays import F32, I64
from npu_gr.core.request import Normalise
from npu_gr.core.settings import Count
from npu_gr.engine.kv_cache.arena import BeamArena, fork_ancestry
from npu_gr.model.generative import BeamStep, GenerativeModel, LayerSlabs, UnsharedKV

Fork = Literal["move", "ancestry"]

# A dot product by itself costs as much as this many dot products of a whole matrix product;
# measured on a CPU.
GATHER_BELOW = 6


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one beam search.

    normalise: set of tokens over which a token's probability is normalised before the probabilities
        of a beam are multiplied. The sets rank the continuations of one beam alike, but compare
        beams differently.
            vocabulary  the whole vocabulary: the model's own log-probability, as in constrained
                        generation of Hugging Face transformers
            codebook    the codes of the level
            valid       the codes that continue the beam to an allowed item
    """

    width: Count = 128
    normalise: Normalise = "vocabulary"
    temperature: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A catalogue's trie on the device. n_l = states of level l."""

    codebooks: Codebooks
    indptr: tuple[Tensor, ...]  # L x int64 [n_l + 1]
    code: tuple[Tensor, ...]  # L x int32 [n_{l+1}]

    @classmethod
    def upload(cls, trie: Trie, device: torch.device) -> Tables:
        """Copy the arrays of a trie that the search reads to a device."""
        return cls(
            trie.codebooks,
            tuple(
                torch.from_numpy(pointers.astype(np.int64)).to(device) for pointers in trie.indptr
            ),
            tuple(torch.from_numpy(code.astype(np.int32)).to(device) for code in trie.token),
        )

    def follow(self, level: int, states: Tensor, allowed: Tensor | None) -> Continuations:
        """Look up the continuations of beams.

        Args:
            level: Level of the trie.
            states: int64 [beams] states of that level.
            allowed: bool [n_{level+1}] edges that the request may take; None = all.
        """
        pointers = self.indptr[level]
        lo = pointers[states]
        return Continuations(lo, pointers[states + 1] - lo, self.code[level], allowed)


@dataclass(frozen=True, slots=True, eq=False)
class BeamResult:
    """The result of a search, best first; w <= width, as the filter may leave fewer leaves."""

    leaves: I64  # [w] leaves of the trie
    scores: F32  # [w] log-probabilities


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BeamQuery:
    """One request's beam search, whose prompt is encoded already."""

    tables: Tables
    prompt: LayerSlabs  # KV of the prompt
    num_prompt_tokens: int  # at least 1
    hidden: Tensor  # [1, dim], result of `GenerativeModel.begin`
    begun: Sequence[Slab] = ()  # result of `GenerativeModel.begin`
    options: SearchOptions
    # L x bool [n_{l+1}] edges that lead to an allowed item; None = all
    allowed: tuple[Tensor, ...] | None = None
    split: bool = True  # two attention stages or one; see `BeamStep`


class _Search:
    """The beams of one query between two rounds."""

    def __init__(self, query: BeamQuery, arena: BeamArena, fork: Fork) -> None:
        self.query = query
        self.arena = arena
        self._fork = fork
        device = query.hidden.device
        self.states = torch.zeros(1, dtype=torch.int64, device=device)
        self.acc = torch.zeros(1, dtype=torch.float32, device=device)
        self._ancestry = torch.empty(0, 1, dtype=torch.int64, device=device)
        self.hidden = query.hidden
        self.found: BeamResult | None = None

    def advance(self, backend: Backend, chosen: Choices, level: int) -> None:
        """Make the round's selection the beams of the next round, or the result of the last one."""
        if not len(chosen.edge):
            self.found = BeamResult(np.empty(0, np.int64), np.empty(0, np.float32))
            return
        if level == len(self.query.tables.codebooks) - 1:
            self.found = _fetched(chosen)
            return
        # By edge: then codes ascend, and parents do not decrease, as `move` needs.
        order = backend.order_of(chosen.edge)
        self.acc = chosen.score[order]
        self.states = chosen.edge[order]
        parent = chosen.parent[order]
        if self._fork == "ancestry":
            self._ancestry = fork_ancestry(self._ancestry, parent)
        elif level:
            self.arena.move(parent, level)

    def follow(self, level: int) -> Continuations:
        """Look up the continuations of each beam."""
        allowed = self.query.allowed
        return self.query.tables.follow(
            level, self.states, None if allowed is None else allowed[level]
        )

    def step(self, level: int) -> BeamStep:
        """Return the model's next step."""
        query = self.query
        tables = query.tables
        ancestry = self._ancestry if self._fork == "ancestry" else None
        return BeamStep(
            tokens=tables.code[level][self.states].long() + tables.codebooks.vocab_base[level],
            position=query.num_prompt_tokens + level,
            shared=query.prompt,
            unshared=UnsharedKV(slabs=self.arena.slabs, step=level, ancestry=ancestry),
            begun=query.begun,
            split=query.split,
        )


def _fetched(chosen: Choices) -> BeamResult:
    """Copy the result to the host. Most searches wait for the device only here."""
    scores = chosen.score.float().cpu().numpy()
    if np.isnan(scores).any():
        raise FloatingPointError("a logit is not a number")
    found = int((scores > -np.inf).sum())  # empty places come last
    return BeamResult(chosen.edge[:found].cpu().numpy(), scores[:found])


@torch.inference_mode()
def search(
    model: GenerativeModel,
    backend: Backend,
    queries: Sequence[BeamQuery],
    arena: BeamArena,
    fork: Fork = "move",
) -> list[BeamResult]:
    """Run several searches in shared rounds. Each finds what it would find alone.

    Args:
        model: Model that scores the codes.
        backend: Backend of the model's device.
        queries: One or more; widths and filters may differ, the number of levels may not.
        arena: Memory for the beams' own KV, with max_beams >= the sum of the widths and num_slots
            >= levels - 1. Its contents do not matter.
        fork: How the beams' KV follows the beams: `move` copies rows, `ancestry` keeps a table. The
            result is the same.

    Returns:
        One result for each query, in the order of the queries.

    Raises:
        FloatingPointError: the model gives a logit that is not a number.
    """
    num_levels = len(queries[0].tables.codebooks)
    assert all(len(query.tables.codebooks) == num_levels for query in queries)
    assert num_levels - 1 <= arena.num_slots
    searches: list[_Search] = []
    first = 0
    for query in queries:
        searches.append(_Search(query, arena.part(first, query.options.width), fork))
        first += query.options.width
    for level in range(num_levels):
        live = [each for each in searches if each.found is None]
        for each in live:
            if each.query.options.normalise != "vocabulary":
                each.advance(
                    backend, _select_by_codebook(model, backend, each, level, arena), level
                )
        together = [each for each in live if each.query.options.normalise == "vocabulary"]
        for each, logits in zip(together, _vocabulary_logits(model, together, arena), strict=True):
            each.advance(backend, _select(backend, each, level, logits), level)
        live = [each for each in live if each.found is None]
        if not live:
            break
        steps = [each.step(level) for each in live]
        hidden = model.decode(backend, steps).split([len(step.tokens) for step in steps])
        for each, rows in zip(live, hidden, strict=True):
            each.hidden = rows
    return [each.found for each in searches if each.found is not None]


def _vocabulary_logits(
    model: GenerativeModel, searches: Sequence[_Search], arena: BeamArena
) -> list[Tensor]:
    """Compute the logits over the whole vocabulary, for all searches in one product."""
    if not searches:
        return []
    rows = [each.hidden for each in searches]
    made = model.logits(torch.cat(rows) if len(rows) > 1 else rows[0], None, arena.logits)
    return list(made.split([len(part) for part in rows]))


def _select(backend: Backend, search: _Search, level: int, logits: Tensor) -> Choices:
    """Select the round's beams, given logits over the whole vocabulary."""
    books = search.query.tables.codebooks
    options = search.query.options
    base = books.vocab_base[level]
    codes = slice(base, base + books.code_count[level])
    scale = 1.0 / options.temperature
    return backend.beam_topk(
        TopkCall(logits, search.acc, search.follow(level), options.width, "row", codes, scale)
    )


def _select_by_codebook(
    model: GenerativeModel, backend: Backend, search: _Search, level: int, arena: BeamArena
) -> Choices:
    """Select the round's beams, given logits over the codebook or its valid codes only."""
    books = search.query.tables.codebooks
    options = search.query.options
    hidden = search.hidden
    base = books.vocab_base[level]
    count = books.code_count[level]
    follow = search.follow(level)
    scale = 1.0 / options.temperature
    is_valid = options.normalise == "valid"
    if (
        is_valid
        and backend.gathers_head
        and int(follow.degree.sum()) * GATHER_BELOW < len(search.states) * count
    ):
        weight = model.head_weight[base : base + count]
        return backend.gathered_topk(hidden, weight, search.acc, follow, options.width, scale)
    over: Over = "valid" if is_valid else "row"
    logits = model.logits(hidden, (base, base + count), arena.logits)
    return backend.beam_topk(TopkCall(logits, search.acc, follow, options.width, over, None, scale))
