"""A beam as wide as the catalogue is brute force; a narrow one is beam search by the book.

Nothing invalid, ever.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.filters import allow_items
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.engine.beam_search import BeamQuery, BeamResult, Fork, SearchOptions, Tables, search
from npu_gr.engine.kv_cache.arena import BeamArena
from npu_gr.model.decoder import Decoder, DecoderConfig

CPU = CPUBackend()
Normalise = Literal["vocabulary", "codebook", "valid"]
MODES: tuple[Normalise, ...] = ("vocabulary", "codebook", "valid")


def model(vocab_size: int, seed: int = 0, num_layers: int = 2) -> Decoder:
    torch.manual_seed(seed)
    config = DecoderConfig(
        vocab_size=vocab_size,
        dim=16,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=32,
        max_tokens=64,
        rope_theta=1e4,
        norm_eps=1e-6,
        qk_norm=True,
        qkv_bias=False,
        tied_head=False,
    )
    made = Decoder(config).double().eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return made


def catalogue(num_levels: int, num_codes: int, num_items: int, seed: int = 0) -> Trie:
    random = np.random.default_rng(seed)
    sids = random.integers(0, num_codes, (num_items, num_levels))
    return build_trie(
        sids, np.arange(num_items), Codebooks.stacked([num_codes] * num_levels, first_token=3)
    )


class Prompt:
    """A prompt, encoded."""

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self.decoder, self.tokens = decoder, tokens
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        self.hidden = decoder.prefill(
            CPU, tokens, 0, None, lambda layer, k, v: self.kv.update({layer: (k, v)})
        )

    def search(
        self,
        trie: Trie,
        options: SearchOptions,
        allowed: Any = None,
        fork: Fork = "move",
        **how: Any,
    ) -> BeamResult:
        config = self.decoder.config
        arena = BeamArena(
            num_layers=config.num_layers,
            num_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_beams=options.width,
            num_slots=trie.num_levels - 1,
            dtype=self.decoder.dtype,
            device=torch.device("cpu"),
        )
        for layer in range(config.num_layers):  # what an earlier request left behind
            for plane in arena.slabs(layer):
                plane.fill_(float("nan"))
        tables = Tables.upload(trie, torch.device("cpu"))
        [found] = search(
            self.decoder, CPU, [self.query(tables, options, allowed, **how)], arena, fork
        )
        return found

    def query(
        self, tables: Tables, options: SearchOptions, allowed: Any = None, split: bool = True
    ) -> BeamQuery:
        return BeamQuery(
            tables=tables,
            prompt=lambda layer: [self.kv[layer]],
            num_prompt_tokens=len(self.tokens),
            hidden=self.hidden,
            options=options,
            allowed=allowed,
            split=split,
        )


def level_logprobs(
    decoder: Decoder,
    prompt: Tensor,
    trie: Trie,
    codes: list[int],
    level: int,
    mode: Normalise,
    valid: set[int],
) -> dict[int, float]:
    """Log-probability of every code of a level after some codes: a whole forward pass, no cache."""
    books = trie.codebooks
    tokens = torch.tensor(
        [*prompt.tolist(), *(books.vocab_base[i] + code for i, code in enumerate(codes))]
    )
    logits = decoder.logits(decoder.prefill(CPU, tokens, 0, None, None))[0]
    base, count = books.vocab_base[level], books.code_count[level]
    over = {
        "vocabulary": logits,
        "codebook": logits[base : base + count],
        "valid": logits[[base + code for code in sorted(valid)]],
    }[mode]
    norm = over.logsumexp(0)
    return {code: float(logits[base + code] - norm) for code in valid}


def by_the_book(
    decoder: Decoder,
    prompt: Tensor,
    trie: Trie,
    width: int,
    mode: Normalise,
    sids: set[tuple[int, ...]],
) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search over sets of tuples: (log-probability, semantic ID), best first."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for level in range(trie.num_levels):
        found = []
        for score, codes in beams:
            valid = {sid[level] for sid in sids if sid[:level] == codes}
            for code, logprob in level_logprobs(
                decoder, prompt, trie, list(codes), level, mode, valid
            ).items():
                found.append((score + logprob, (*codes, code)))
        beams = sorted(found, key=lambda beam: (-beam[0], beam[1]))[:width]
    return beams


def same(trie: Trie, got: BeamResult, want: list[tuple[float, tuple[int, ...]]]) -> None:
    assert [tuple(sid) for sid in trie.sid_of(got.leaves).tolist()] == [sid for _, sid in want]
    np.testing.assert_allclose(got.scores, [score for score, _ in want], rtol=1e-5, atol=1e-5)


def all_sids(trie: Trie) -> set[tuple[int, ...]]:
    return {tuple(sid) for sid in trie.sid_of(np.arange(len(trie.leaf_ptr) - 1)).tolist()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_levels", "num_codes"), [(1, 9), (2, 6), (3, 4), (4, 3), (8, 2)])
@pytest.mark.parametrize("width", [1, 3, 7, 1000])
def test_any_width_and_length_is_beam_search_by_the_book(
    mode: Normalise, num_levels: int, num_codes: int, width: int
) -> None:
    trie = catalogue(num_levels, num_codes, 30)
    decoder = model(3 + num_levels * num_codes + 5)
    prompt = torch.tensor([3, 7, 1, 4, 5])
    want = by_the_book(decoder, prompt, trie, width, mode, all_sids(trie))
    got = Prompt(decoder, prompt).search(trie, SearchOptions(width=width, normalise=mode))
    same(trie, got, want)
    if width == 1000:
        assert {tuple(sid) for sid in trie.sid_of(got.leaves).tolist()} == all_sids(trie)


@pytest.mark.parametrize("fork", ["move", "ancestry"])
@pytest.mark.parametrize("split", [True, False])
def test_every_way_to_fork_and_to_attend_is_the_same(fork: Fork, split: bool) -> None:
    trie, prompt = catalogue(4, 5, 200), torch.arange(3, 20)
    decoder = model(40)
    encoded = Prompt(decoder, prompt)
    for width in (1, 5, 16, 33):
        options = SearchOptions(width=width)
        want = encoded.search(trie, options)
        got = encoded.search(trie, options, fork=fork, split=split)
        assert np.array_equal(got.leaves, want.leaves)
        np.testing.assert_allclose(got.scores, want.scores, rtol=1e-6)


def test_equal_scores_are_decided_by_the_semantic_id() -> None:
    """All weights of the head zero: every code is as likely as any other."""
    trie = catalogue(3, 4, 40)
    decoder = model(30)
    torch.nn.init.zeros_(decoder.head.weight)
    got = Prompt(decoder, torch.tensor([1, 2])).search(trie, SearchOptions(width=10))
    assert got.leaves.tolist() == list(range(10))


def test_temperature_is_applied_before_the_normalisation() -> None:
    trie, prompt = catalogue(3, 4, 40), torch.tensor([4, 5, 6])
    decoder = model(30)
    hot = Prompt(decoder, prompt).search(trie, SearchOptions(width=6, temperature=2.5))
    with torch.no_grad():
        decoder.head.weight.div_(2.5)
    same_again = Prompt(decoder, prompt).search(trie, SearchOptions(width=6))
    assert np.array_equal(hot.leaves, same_again.leaves)
    np.testing.assert_allclose(hot.scores, same_again.scores, rtol=1e-6)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    seed=st.integers(0, 10**6), width=st.integers(1, 40), spike=st.sampled_from([0.0, 1e3, 1e30])
)
def test_nothing_invalid_nothing_twice_and_as_many_as_there_are(
    seed: int, width: int, spike: float
) -> None:
    """Whatever the logits say, spikes on tokens that may not follow included."""
    trie = catalogue(3, 5, 25, seed)
    decoder = model(25, seed)
    with torch.no_grad():
        decoder.head.weight[torch.randperm(25)[:4]] *= 1 + spike
    got = Prompt(decoder, torch.tensor([2, 9, 4])).search(trie, SearchOptions(width=width))
    assert len(set(got.leaves.tolist())) == len(got.leaves)
    assert ((got.leaves >= 0) & (got.leaves < len(trie.leaf_ptr) - 1)).all()
    assert (np.diff(got.scores) <= 0).all()
    if spike == 0.0 and width >= 25:
        assert len(got.leaves) == len(trie.leaf_ptr) - 1


def test_a_narrow_filter_is_a_smaller_catalogue() -> None:
    """Edges that lead to no allowed item are closed before the top-k, in every mode."""
    trie, prompt = catalogue(3, 4, 40), torch.tensor([4, 5, 6])
    decoder = model(30)
    keep = {leaf for leaf in range(len(trie.leaf_ptr) - 1) if leaf % 3 == 0}
    sids = trie.sid_of(np.arange(len(trie.leaf_ptr) - 1))
    kept = {tuple(sids[leaf].tolist()) for leaf in keep}
    open_ = []
    for level in range(3):
        prefixes = [tuple(p) for p in np.unique(sids[:, : level + 1], axis=0).tolist()]
        open_.append(
            torch.tensor([any(sid[: level + 1] == prefix for sid in kept) for prefix in prefixes])
        )
    for mode, width in itertools.product(MODES, (2, 100)):
        got = Prompt(decoder, prompt).search(
            trie, SearchOptions(width=width, normalise=mode), tuple(open_)
        )
        same(trie, got, by_the_book(decoder, prompt, trie, width, mode, kept))
    nothing = tuple(torch.zeros_like(level) for level in open_)
    assert not len(Prompt(decoder, prompt).search(trie, SearchOptions(), nothing).leaves)


def test_an_empty_catalogue_gives_nothing() -> None:
    trie = build_trie(
        np.empty((0, 3), np.int64), np.empty(0, np.int64), Codebooks.stacked([4, 4, 4])
    )
    assert not len(Prompt(model(20), torch.tensor([1])).search(trie, SearchOptions()).leaves)


def test_a_nan_in_the_weights_is_said() -> None:
    decoder = model(30)
    with torch.no_grad():
        decoder.head.weight[7, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not a number"):
        Prompt(decoder, torch.tensor([1, 2])).search(catalogue(3, 4, 40), SearchOptions())


def test_searches_that_share_rounds_find_what_each_finds_alone() -> None:
    """Searches of mixed lengths, widths, normalisations and filters give what each gives alone."""
    decoder, trie = model(80), catalogue(3, 20, 150)
    tables, random = Tables.upload(trie, torch.device("cpu")), np.random.default_rng(0)
    nothing = tuple(torch.zeros(len(codes), dtype=torch.bool) for codes in trie.token)
    some = allow_items(trie, trie.leaf_item[:40]).valid
    alone, queries = [], []
    for number, width in enumerate((1, 40, 7, 12, 5, 20)):
        prompt = Prompt(decoder, torch.from_numpy(random.integers(0, 60, 3 + 5 * number)))
        options = SearchOptions(
            width=width, normalise=MODES[number % 3], temperature=1.0 + number % 2
        )
        allowed = {2: tuple(map(torch.from_numpy, some)), 4: nothing}.get(number)
        alone.append(prompt.search(trie, options, allowed))
        queries.append(prompt.query(tables, options, allowed))
    config = decoder.config
    for fork in ("move", "ancestry"):
        arena = BeamArena(
            num_layers=config.num_layers,
            num_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_beams=85,
            num_slots=2,
            dtype=decoder.dtype,
            device=torch.device("cpu"),
        )
        together = search(decoder, CPU, queries, arena, fork)
        assert not len(together[4].leaves)
        for got, want in zip(together, alone, strict=True):
            assert np.array_equal(got.leaves, want.leaves)
            np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5, atol=1e-6)
