"""`python -m benchmarks generate`: the semantic-ID beam search of one request, beside other ways with the same weights.

    dense         a mask over the vocabulary, log_softmax, torch.topk over all beams; every beam has a copy of the
                  prompt's KV
    no cache      ours, but the prompt is encoded first
    transformers  the constrained beam search of Hugging Face (PrefixConstrainedLogitsProcessor), if it is installed; it
                  runs once a case, because it takes seconds to minutes

The weights are random, on which the times do not depend. All results are compared before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.line import Line, percentiles, timed_in_turn
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.arrays import I64
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, PromptKV, layout_of
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.pages import PageRun
from npu_gr.model.decoder import Decoder, DecoderConfig, DecoderLayer
from npu_gr.model.hf import tensor_places

NUM_CODES = 8192  # one vocabulary for all levels
NUM_LEVELS = 3
PROMPT_TOKENS = 1024
NUM_ITEMS = 1_000_000
WIDTHS = (128, 512)
TARGETS = {"transformers": 30.0, "dense": 3.5, "no cache": 1.3}
TOLERANCE = 1e-3  # of a log-probability


def config() -> DecoderConfig:
    """The shape that the targets hold for: d 256, 4 layers, 4 heads of 64, 2 of them for keys and values."""
    return DecoderConfig(
        vocab_size=NUM_CODES,
        dim=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=768,
        max_tokens=4096,
        rope_theta=1e4,
        norm_eps=1e-6,
        qk_norm=True,
        qkv_bias=False,
        tied_head=False,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """The baseline `dense`: beam search without a trie on the device and without a split of shared and unshared KV."""

    decoder: Decoder
    trie: Trie
    prompt: Tensor  # int64 [n]
    kv: list[tuple[Tensor, Tensor]]  # of every layer [n, Hkv, D]
    hidden: Tensor  # [1, dim] of the last token

    def search(self, width: int) -> tuple[Tensor, Tensor]:
        """The best `width` items: their leaves in the trie and their log-probabilities, both [width]."""
        states = torch.zeros(1, dtype=torch.int64)
        acc = torch.zeros(1)
        hidden = self.hidden
        own: list[tuple[Tensor, Tensor]] = []
        for level in range(NUM_LEVELS):
            logits = self.decoder.logits(hidden).log_softmax(1)
            children = self.trie.children(level, states.numpy())
            row = np.repeat(np.arange(len(states)), children.degree)
            edge = np.arange(children.degree.sum()) + np.repeat(
                children.lo - (np.cumsum(children.degree) - children.degree), children.degree
            )
            code = self.trie.token[level][edge].astype(np.int64)
            mask = torch.full_like(logits, -torch.inf)
            mask[torch.from_numpy(row), torch.from_numpy(code)] = 0.0
            flat = (logits + mask + acc[:, None]).flatten()
            acc, chosen = flat.topk(min(width, len(edge)))
            parent = chosen // NUM_CODES
            token = chosen % NUM_CODES
            edge_of = np.full(logits.shape, -1)
            edge_of[row, code] = edge
            states = torch.from_numpy(edge_of[parent.numpy(), token.numpy()])
            if level < NUM_LEVELS - 1:
                own = [(k[parent], v[parent]) for k, v in own]
                hidden = self._step(token, len(self.prompt) + level, own)
        return states, acc

    def _step(self, tokens: Tensor, position: int, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        model = self.decoder
        shape = model.config
        rows = len(tokens)
        group = shape.num_heads // shape.num_kv_heads
        cos, sin = shape.angles(position, 1, tokens.device)
        x = model.embedding(tokens)
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.project(x, cos, sin)
            mine = (k[:, None], v[:, None])
            if index < len(own):
                mine = tuple(torch.cat([old, new], 1) for old, new in zip(own[index], mine, strict=True))  # type: ignore[assignment]
                own[index] = mine
            else:
                own.append(mine)
            keys, values = (
                torch.cat([prompt.expand(rows, *prompt.shape), new], 1).transpose(1, 2)
                for prompt, new in zip(self.kv[index], mine, strict=True)
            )
            queries = q.unflatten(1, (shape.num_kv_heads, group))
            out = scaled_dot_product_attention(queries, keys, values)
            x = layer.finish(x, out.flatten(1, 2))
        hidden: Tensor = model.norm(x)
        return hidden


def lines(backend_name: BackendName, seed: int, budget_s: float, with_transformers: bool) -> Iterator[Line]:
    """One line for each baseline and beam width.

    Args:
        backend_name: as in a configuration.
        seed: of weights, catalogue and prompt.
        budget_s: to time each beam width for.
        with_transformers: run that baseline too.

    Raises:
        AssertionError: results differ; nothing was timed.
    """
    backend = choose(backend_name)
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    decoder = Decoder(config()).to(backend.device).eval()
    trie = catalogue(random)
    tables = Tables.upload(trie, backend.device)
    layout = layout_of(decoder)
    arena = KVArena(layout, layout.pages(PROMPT_TOKENS), backend.device)
    made = Generator(decoder, backend, max(WIDTHS), NUM_LEVELS)
    pages = PromptKV(arena, (PageRun(0, arena.num_pages),), PROMPT_TOKENS)
    tokens = random.integers(0, NUM_CODES, PROMPT_TOKENS)
    kv: dict[int, tuple[Tensor, Tensor]] = {}
    prompt = torch.from_numpy(tokens).to(backend.device)
    hidden = decoder.prefill(backend, prompt, 0, None, lambda layer, k, v: kv.update({layer: (k, v)}))
    dense = Dense(decoder, trie, prompt, [kv[layer] for layer in range(len(kv))], hidden)
    made.encode(tokens, [], pages)
    for width in WIDTHS:
        options = SearchOptions(width=width)

        def ours(options: SearchOptions = options, width: int = width) -> np.ndarray:
            return made.generate(trie, tables, tokens, [pages], options, width).scores

        def cold(ours: Callable[[], object] = ours) -> None:
            made.encode(tokens, [], pages)
            ours()

        with torch.inference_mode():
            _, want = dense.search(width)
        drift = float(np.abs(want.numpy() - ours()).max())
        assert drift <= TOLERANCE, f"width={width}: the dense search differs by {drift:.1e}"

        @torch.inference_mode()
        def baseline(width: int = width) -> None:
            dense.search(width)

        found = timed_in_turn([ours, baseline, cold], budget_s, min_runs=3)
        case = f"BW={width} L={PROMPT_TOKENS} V={NUM_CODES} items={NUM_ITEMS}"
        for name, samples in (("dense", found[1]), ("no cache", found[2])):
            yield line_of(
                case, name, found[0], percentiles(samples)[0], TARGETS[name] if width == max(WIDTHS) else None
            )
        if with_transformers and width == min(WIDTHS):
            took_s = _transformers_s(decoder, trie, tokens, width, want)
            yield line_of(case, "transformers", found[0], took_s, TARGETS["transformers"])


def catalogue(random: np.random.Generator) -> Trie:
    """Random semantic IDs; their levels share one vocabulary."""
    sids = random.integers(0, NUM_CODES, (NUM_ITEMS, NUM_LEVELS))
    books = Codebooks((NUM_CODES,) * NUM_LEVELS, (0,) * NUM_LEVELS)
    return build_trie(sids, np.arange(NUM_ITEMS), books)


def line_of(case: str, baseline: str, ours_s: list[float], baseline_s: float, target: float | None) -> Line:
    """Make the line of a baseline; seconds."""
    median, p10, p90 = (value * 1e3 for value in percentiles(ours_s))
    ratio = baseline_s * 1e3 / median
    return Line(
        bench="generate",
        case=f"{case} vs {baseline}",
        ours=median,
        unit="ms",
        baseline=baseline,
        baseline_value=baseline_s * 1e3,
        ratio=ratio,
        target=target,
        ok=None if target is None else ratio >= target,
        p10=p10,
        p90=p90,
    )


def _transformers_s(decoder: Decoder, trie: Trie, tokens: I64, width: int, want: Tensor) -> float:
    """Seconds of one constrained beam search by Hugging Face transformers with our weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = decoder.config
    theirs: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.mlp_dim,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_tokens,
            rms_norm_eps=shape.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=False,
        )
    )
    theirs.load_state_dict({name: part.detach().cpu() for name, part in tensor_places(decoder).items()})
    return constrained_s(theirs, trie, tokens, width, want, len(tokens))


def constrained_s(theirs: Any, trie: Trie, tokens: I64, width: int, want: Tensor, num_before: int) -> float:
    """Seconds of one constrained beam search by Hugging Face transformers.

    Args:
        theirs: the model, with our weights.
        trie: of the catalogue.
        tokens: of the prompt.
        width: of the beam.
        want: [width] the scores that it must find, high to low.
        num_before: tokens of a sequence in front of its codes.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    theirs.eval()

    def allowed(_: int, sequence: Tensor) -> list[int]:
        state = np.zeros(1, np.int64)
        for level, code in enumerate(sequence[num_before:].tolist()):
            lo, degree = (int(column[0]) for column in trie.children(level, state))
            at = lo + int(np.searchsorted(trie.token[level][lo : lo + degree], code))
            if at >= lo + degree or trie.token[level][at] != code:
                return [0]  # a dead beam, which has left the trie: transformers needs some code, and any will do
            state = np.array([at])
        lo, degree = (int(column[0]) for column in trie.children(len(sequence) - num_before, state))
        found: list[int] = trie.token[len(sequence) - num_before][lo : lo + degree].tolist()
        return found

    began_at = time.perf_counter()
    with torch.inference_mode():
        out = theirs.generate(
            torch.from_numpy(tokens)[None],
            # else tokens equal to pad_token_id are padding
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=NUM_LEVELS,
            min_new_tokens=NUM_LEVELS,
            do_sample=False,
            length_penalty=0.0,
            prefix_allowed_tokens_fn=allowed,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    took_s = time.perf_counter() - began_at
    drift = float((out.sequences_scores.sort(descending=True).values - want).abs().max())
    assert drift <= TOLERANCE, f"transformers differs by {drift:.1e}"
    return took_s
