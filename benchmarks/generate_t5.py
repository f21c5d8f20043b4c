"""`python -m benchmarks generate --model t5`: the search of one request by an encoder-decoder, beside other ways.

    no cache      ours, but the prompt is encoded first
    transformers  the constrained beam search of Hugging Face, if it is installed; it encodes the prompt too, and runs
                  once

The weights are random, on which the times do not depend. All results are compared before anything is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import generate
from benchmarks.line import Line, percentiles, timed_in_turn
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.catalogue.trie import Trie
from npu_gr.core.arrays import I64
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, PromptKV, layout_of
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.pages import PageRun
from npu_gr.model import hf_t5
from npu_gr.model.t5 import T5
from npu_gr.model.t5_config import T5Config


def config() -> T5Config:
    """The shape of `bench generate`'s decoder: d 256, 4 layers a stack, 4 heads of 64."""
    return T5Config(
        vocab_size=generate.NUM_CODES,
        dim=256,
        num_encoder_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        head_dim=64,
        mlp_dim=1024,
        activation="relu",
        is_gated=False,
        num_buckets=32,
        max_distance=128,
        norm_eps=1e-6,
        start_token=0,
        scales_head=True,
    )


def lines(backend_name: BackendName, seed: int, budget_s: float, with_transformers: bool) -> Iterator[Line]:
    """One line for each baseline and beam width. The arguments are those of `generate.lines`.

    Raises:
        AssertionError: results differ; nothing was timed.
    """
    backend = choose(backend_name)
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = T5(config())
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model = model.to(backend.device).eval().requires_grad_(False)
    trie = generate.catalogue(random)
    tables = Tables.upload(trie, backend.device)
    layout = layout_of(model)
    arena = KVArena(layout, layout.pages(generate.PROMPT_TOKENS), backend.device)
    made = Generator(model, backend, max(generate.WIDTHS), generate.NUM_LEVELS)
    pages = PromptKV(arena, (PageRun(0, arena.num_pages),), generate.PROMPT_TOKENS)
    tokens = random.integers(0, generate.NUM_CODES, generate.PROMPT_TOKENS)
    made.encode(tokens, [], pages)
    for width in generate.WIDTHS:
        options = SearchOptions(width=width)

        def ours(options: SearchOptions = options, width: int = width) -> np.ndarray:
            return made.generate(trie, tables, tokens, [pages], options, width).scores

        def cold(ours: Callable[[], np.ndarray] = ours) -> np.ndarray:
            made.encode(tokens, [], pages)
            return ours()

        want = ours()
        drift = float(np.abs(cold() - want).max())
        assert drift <= generate.TOLERANCE, f"width={width}: a prompt that is encoded again differs by {drift:.1e}"
        found = timed_in_turn([ours, cold], budget_s, min_runs=3)
        case = f"T5 BW={width} L={generate.PROMPT_TOKENS} V={generate.NUM_CODES} items={generate.NUM_ITEMS}"
        yield generate.line_of(case, "no cache", found[0], percentiles(found[1])[0], None)
        if with_transformers and width == min(generate.WIDTHS):
            took_s = _transformers_s(model, trie, tokens, width, torch.from_numpy(want))
            yield generate.line_of(case, "transformers", found[0], took_s, None)


def _transformers_s(model: T5, trie: Trie, tokens: I64, width: int, want: Tensor) -> float:
    """Seconds of one constrained beam search by Hugging Face transformers with our weights."""
    from transformers import T5ForConditionalGeneration

    with tempfile.TemporaryDirectory() as folder:
        hf_t5.save(model, Path(folder))
        theirs = T5ForConditionalGeneration.from_pretrained(folder)  # nosec B615  (a folder)
    return generate.constrained_s(theirs, trie, tokens, width, want, num_before=1)
