"""`python -m benchmarks generate`: semantic-ID beam search of one request, against plain torch.

    shared prefix  the strongest baseline in plain torch: the prompt's keys and values are computed
                   once for all beams, the trie is a table of children whose log-probabilities are
                   gathered, one topk a step. Its attention is the faster of two:
                   `scaled_dot_product_attention` over the prompt's keys broadcast to the beams, and
                   two products over the shared and each beam's own part with one softmax
    no cache       ours, but the prompt is encoded first

The weights are random, on which the times do not depend. All results are compared before anything
is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.frame import (
    BACKEND,
    SEED,
    THREADS,
    Line,
    option,
    percentiles,
    timed,
    timed_for,
    timed_in_turn,
)
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, PromptKV, layout_of
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.model.decoder import Decoder, DecoderConfig, DecoderLayer
from npu_gr.model.t5 import T5, T5Config

OPTIONS = (
    BACKEND,
    THREADS,
    SEED,
    timed_for(5.0, "Seconds of each beam width."),
    option(
        "--model",
        type=click.Choice(["decoder", "t5"]),
        default="decoder",
        help="Model; t5 has no shared-prefix baseline.",
    ),
)
NUM_CODES = 8192  # one vocabulary for all levels
NUM_LEVELS = 3
PROMPT_TOKENS = 1024
NUM_ITEMS = 1_000_000
WIDTHS = (128, 512)
TARGETS = {"shared prefix": 1.0, "no cache": 1.3}  # at the largest width
TOLERANCE = 1e-3  # tolerance of a log-probability


def decoder_config() -> DecoderConfig:
    """Return the shape to which the targets apply: d 256, 4 layers, 4 heads of 64, 2 KV heads."""
    return DecoderConfig(
        vocab_size=NUM_CODES, dim=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
        mlp_dim=768, max_tokens=4096, rope_theta=1e4, norm_eps=1e-6, qk_norm=True, qkv_bias=False,
        tied_head=False,
    )  # fmt: skip


def t5_config() -> T5Config:
    """Return the same size: d 256, 4 layers a stack, 4 heads of 64."""
    return T5Config(
        vocab_size=NUM_CODES, dim=256, num_encoder_layers=4, num_decoder_layers=4, num_heads=4,
        head_dim=64, mlp_dim=1024, activation="relu", is_gated=False, num_buckets=32,
        max_distance=128, norm_eps=1e-6, start_token=0, scales_head=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Constrained beam search in plain torch after one prompt's keys and values."""

    decoder: Decoder
    # per level: first edge of each state, code of each edge
    children: list[tuple[Tensor, Tensor]]
    num_prompt: int
    kv: list[tuple[Tensor, Tensor]]  # per layer, [n, Hkv, D]
    hidden: Tensor  # [1, dim] of the last token

    @classmethod
    def encode(
        cls, decoder: Decoder, trie: Trie, prompt: Tensor, backend: BackendName
    ) -> SharedPrefix:
        """Compute a prompt's keys and values."""
        kv: dict[int, tuple[Tensor, Tensor]] = {}
        hidden = decoder.prefill(
            choose(backend), prompt, 0, None, lambda layer, k, v: kv.update({layer: (k, v)})
        )
        device = prompt.device
        tables = [
            tuple(torch.from_numpy(column.astype(np.int64)).to(device) for column in level)
            for level in zip(trie.indptr, trie.token, strict=True)
        ]
        return cls(decoder, tables, len(prompt), [kv[layer] for layer in range(len(kv))], hidden)  # type: ignore[arg-type]

    @torch.inference_mode()
    def search(self, width: int, by_sdpa: bool) -> Tensor:
        """Return the log-probabilities of the best `width` items.

        Args:
            width: Beam width.
            by_sdpa: Use `scaled_dot_product_attention`; False: products.
        """
        states = torch.zeros(1, dtype=torch.int64, device=self.hidden.device)
        acc = torch.zeros(1, device=self.hidden.device)
        hidden = self.hidden
        own: list[tuple[Tensor, Tensor]] = []
        for level, (first, codes) in enumerate(self.children):
            logits = self.decoder.logits(hidden)
            lo = first[states]
            degree = first[states + 1] - lo
            row = torch.repeat_interleave(torch.arange(len(states)), degree)
            edge = torch.arange(len(row)) + (lo - degree.cumsum(0) + degree)[row]
            score = logits[row, codes[edge]] + (acc - logits.logsumexp(1))[row]
            acc, chosen = score.topk(min(width, len(edge)))
            states, parent = edge[chosen], row[chosen]
            if level < NUM_LEVELS - 1:
                own = [(k[parent], v[parent]) for k, v in own]
                hidden = self._step(codes[states], self.num_prompt + level, own, by_sdpa)
        return acc

    def _step(
        self, tokens: Tensor, position: int, own: list[tuple[Tensor, Tensor]], by_sdpa: bool
    ) -> Tensor:
        model = self.decoder
        shape = model.config
        cos, sin = shape.angles(position, 1, tokens.device)
        x = model.embedding(tokens)
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.project(x, cos, sin)
            mine = k[:, None], v[:, None]
            if index < len(own):
                old = own[index]
                mine = torch.cat([old[0], mine[0]], 1), torch.cat([old[1], mine[1]], 1)
                own[index] = mine
            else:
                own.append(mine)
            queries = q.unflatten(1, (shape.num_kv_heads, -1))  # [W, Hkv, group, D]
            attend = _by_sdpa if by_sdpa else _by_products
            x = layer.finish(x, attend(queries, *self.kv[index], *mine).flatten(1, 2))
        hidden: Tensor = model.norm(x)
        return hidden


def _by_sdpa(q: Tensor, prompt_k: Tensor, prompt_v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
    """Attend from q [W, Hkv, g, D] to the prompt [n, Hkv, D] and own tokens [W, t, Hkv, D]."""
    keys, values = (
        torch.cat([shared.expand(len(q), *shared.shape), own], 1).transpose(1, 2)
        for shared, own in ((prompt_k, own_k), (prompt_v, own_v))
    )
    return scaled_dot_product_attention(q, keys, values)


def _by_products(
    q: Tensor, prompt_k: Tensor, prompt_v: Tensor, own_k: Tensor, own_v: Tensor
) -> Tensor:
    """Attend alike, with all beams as rows of one product with the prompt, and one softmax."""
    width, heads, group, dim = q.shape
    rows = q.transpose(0, 1).reshape(heads, width * group, dim)
    shared = torch.bmm(rows, prompt_k.permute(1, 2, 0))  # [Hkv, W g, n]
    own = torch.einsum("whgd,wthd->hwgt", q, own_k).reshape(heads, width * group, -1)
    weights = (torch.cat([shared, own], 2) * dim**-0.5).softmax(2)
    n = prompt_k.shape[0]
    out = (
        torch.bmm(weights[..., :n], prompt_v.transpose(0, 1))
        .view(heads, width, group, dim)
        .transpose(0, 1)
    )
    return out + torch.einsum(
        "hwgt,wthd->whgd", weights[..., n:].view(heads, width, group, -1), own_v
    )


def lines(backend: BackendName, seed: int, seconds: float, model: str) -> Iterator[Line]:
    """Yield a line for each baseline and beam width.

    Raises:
        AssertionError: Results differ; nothing was timed.
    """
    device = choose(backend)
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    made = Decoder(decoder_config()) if model == "decoder" else T5(t5_config())
    if isinstance(made, T5):
        for parameter in made.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    made = made.to(device.device).eval().requires_grad_(False)
    sids = random.integers(0, NUM_CODES, (NUM_ITEMS, NUM_LEVELS))
    # the levels share one vocabulary
    books = Codebooks((NUM_CODES,) * NUM_LEVELS, (0,) * NUM_LEVELS)
    trie = build_trie(sids, np.arange(NUM_ITEMS), books)
    tables = Tables.upload(trie, device.device)
    layout = layout_of(made)
    arena = KVArena(layout, layout.pages(PROMPT_TOKENS), device.device)
    generator = Generator(made, device, max(WIDTHS), NUM_LEVELS)
    pages = PromptKV(arena, (PageRun(0, arena.num_pages),), PROMPT_TOKENS)
    tokens = random.integers(0, NUM_CODES, PROMPT_TOKENS)
    generator.encode(tokens, [], pages)
    shared = None
    if isinstance(made, Decoder):
        shared = SharedPrefix.encode(
            made, trie, torch.from_numpy(tokens).to(device.device), backend
        )
    for width in WIDTHS:

        def ours(width: int = width) -> np.ndarray:
            return generator.generate(
                trie, tables, tokens, [pages], SearchOptions(width=width), width
            ).scores

        def cold(ours: Callable[[], np.ndarray] = ours) -> np.ndarray:
            generator.encode(tokens, [], pages)
            return ours()

        others: dict[str, Callable[[], np.ndarray]] = {"no cache": cold}
        if shared is not None:
            others["sdpa"] = lambda width=width: shared.search(width, True).numpy(force=True)  # type: ignore[misc]
            others["products"] = lambda width=width: shared.search(width, False).numpy(force=True)  # type: ignore[misc]
        want = ours()
        for name, search in others.items():
            drift = float(np.abs(search() - want).max())
            assert drift <= TOLERANCE, f"width={width}: {name} differs by {drift:.1e}"
        mine, *rest = timed_in_turn([ours, *others.values()], seconds, min_runs=3)
        times = dict(zip(others, rest, strict=True))
        case = f"{model} BW={width} L={PROMPT_TOKENS} V={NUM_CODES} items={NUM_ITEMS}"
        rows = [("no cache", "no cache", times.pop("no cache"))]
        if times:
            faster = min(times, key=lambda name: percentiles(times[name])[0])
            rows.insert(
                0, ("shared prefix", f"torch, shared prefix, the faster: {faster}", times[faster])
            )
        for name, baseline, took_s in rows:
            target = TARGETS[name] if width == max(WIDTHS) and shared is not None else None
            yield timed("generate", f"{case} vs {name}", mine, baseline, took_s, target)
