"""Compare whole ranks and generates with the CPU's, and time them. Random weights, no files.

`doctor` compares single ops, this module compares requests, prefix KV in both tiers included: small ones in fp32, which
must be equal but for rounding, and ones of a service's size in bf16. `acceptance_steps.py` runs them as steps; nothing
here needs a checkpoint, a catalogue or a network.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.checks import Finding, FindingState
from npu_gr.backend.choose import choose
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.names import BackendName
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.arrays import F32
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.attention import PLAIN, Trial, choose_way, possible, told
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import GeneratedItems, Generator, PromptKV, layout_of, make_prompt
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.config import HSTUConfig
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.model.history_tokens import Tokens
from npu_gr.model.hstu import HSTU

ITEMS = 5000


class Sizes(NamedTuple):
    """How large models and requests are."""

    dtype: torch.dtype
    tolerance: float  # of a logit, in the logits' standard deviations
    search_tolerance: float  # of an item's log-probability, in nats
    shared_items: float  # share of the items that two searches must have in common; 1 = all, but for equal scores
    tokens: int  # of a history
    cached: int  # of them in pages
    candidates: int
    layers: int
    head_dim: int  # of 4 heads
    codes: int  # of each of three levels
    searches: tuple[tuple[int, int], ...]  # items of a history, beams

    @property
    def ranker(self) -> HSTUConfig:
        """The ranker's configuration."""
        return HSTUConfig(
            num_items=1000,
            actions=("view", "buy"),
            tasks=("click", "buy"),
            dim=4 * self.head_dim,
            num_layers=self.layers,
            num_heads=4,
            qk_dim=self.head_dim,
            v_dim=self.head_dim,
            scaling_seqlen=512,
        )

    @property
    def decoder(self) -> DecoderConfig:
        """The generator's configuration."""
        return DecoderConfig(
            vocab_size=3 * self.codes,
            dim=4 * self.head_dim,
            num_layers=self.layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=self.head_dim,
            mlp_dim=8 * self.head_dim,
            max_tokens=2048,
            rope_theta=1e4,
            norm_eps=1e-6,
            qk_norm=True,
            qkv_bias=False,
            tied_head=False,
        )


EXACT = Sizes(
    torch.float32, 1e-3, 1e-3, 1.0, 300, 250, 50, 3, 32, 64, ((40, 16), (100, 128))
)  # one attention stage, and two
# bf16 on a CPU differs from fp32 by .04 of the spread, .22 nats, and 2 % of the items
PRODUCTION = Sizes(torch.bfloat16, 0.2, 0.5, 0.9, 4096, 3968, 512, 8, 64, 8192, ((300, 512),))


class ShapeLatency(NamedTuple):
    """Latency of a shape, from the host's call to the result in host memory."""

    name: str
    p50_ms: float
    p90_ms: float


class AcceptanceRig:
    """A ranker and a generator over one backend, without a scheduler: the calls of a device thread, made here."""

    def __init__(self, backend: Backend, sizes: Sizes = EXACT) -> None:
        torch.manual_seed(0)
        self.backend = backend
        self.sizes = sizes
        device = backend.device
        self.ranker = HSTU(sizes.ranker)
        decoder = Decoder(sizes.decoder)
        with torch.no_grad():
            for module in (self.ranker, decoder):
                for parameter in module.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=0.1)
        if sizes.dtype != torch.float32:
            self.ranker.cast(sizes.dtype)
            decoder.to(sizes.dtype)
        self.ranker.to(device).eval().freeze_items()
        shape = sizes.ranker
        layout = KVLayout(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            dtype=str(sizes.dtype).removeprefix("torch."),
            arrangement=backend.arrangement(sizes.dtype, 64),
        )
        pages = layout.pages(sizes.tokens) + 8
        self.pages = KVArena(layout, pages, device, pack=backend.pack_kv)
        self.host = KVArena(layout, pages, torch.device("cpu"), backend.pins_host_memory, backend.pack_kv)
        self.engine = RankEngine(self.ranker, backend, Scheduler(SchedulerConfig()), self.pages)
        sids = np.random.default_rng(0).integers(0, sizes.codes, (ITEMS, 3))
        self.trie: Trie = build_trie(sids, np.arange(ITEMS), Codebooks.stacked([sizes.codes] * 3))
        most = max(width for _, width in sizes.searches)
        self.generator = Generator(decoder.to(device).eval(), backend, most, 3)
        self.tables = Tables.upload(self.trie, device)
        prompt = layout_of(decoder)
        self.prompts = KVArena(prompt, prompt.pages(sizes.decoder.max_tokens), device)

    def rank(self, num_tokens: int, num_candidates: int, cached_tokens: int = 0, tier: str = "hbm") -> F32:
        """Rank once.

        Args:
            num_tokens: length of the history.
            num_candidates: c.
            cached_tokens: how many of the first tokens are read from pages; 0 = none.
            tier: "hbm", or "dram" to send the pages through the host first.

        Returns:
            [c, tasks] logits.
        """
        history = _history(num_tokens)
        candidates = np.arange(num_candidates, dtype=np.int64)
        cached = None
        if cached_tokens:
            runs = (PageRun(0, self.pages.layout.pages(cached_tokens)),)
            self.engine.forward([RankPass(history[:cached_tokens], 0, candidates[:0], 0, keep=runs)])
            if tier == "dram":
                self.backend.copy(lambda: self.host.copy_tokens_from(self.pages, runs, runs, cached_tokens))()
                self.pages.zero(runs)
                self.backend.synchronize()
                self.backend.copy(lambda: self.pages.copy_tokens_from(self.host, runs, runs, cached_tokens))()
            cached = CachedPrefix(runs, cached_tokens)
        return self.engine.forward([RankPass(history, 0, candidates, 10**9, cached)])[0]

    def generate(self, num_items: int, width: int) -> GeneratedItems:
        """Search after a history of `num_items` items."""
        history = np.random.default_rng(1).integers(0, ITEMS, num_items)
        tokens = make_prompt(self.trie, history, self.sizes.decoder.max_tokens - 2).tokens
        part = PromptKV(self.prompts, (PageRun(0, self.prompts.num_pages),), len(tokens))
        self.generator.encode(tokens, [], part)
        options = SearchOptions(width=width)
        return self.generator.generate(self.trie, self.tables, tokens, [part], options, width)


def _history(num_tokens: int, seed: int = 2) -> Tokens:
    random = np.random.default_rng(seed)
    items = random.integers(0, 1000, num_tokens)
    events = Events.make(items, random.integers(0, 2, num_tokens), np.cumsum(random.integers(0, 86_400, num_tokens)))
    return Tokens(events, items, HistoryReport(fingerprint="", num_tokens=num_tokens))


def accept(name: BackendName, sizes: Sizes = EXACT, kinds: Sequence[str] = ("rank", "generate")) -> list[Finding]:
    """Compare requests on the backend with the same requests on the CPU's plain torch ops, which compute in fp32."""
    ours = AcceptanceRig(choose(name), sizes)
    cpu = AcceptanceRig(CPUBackend("off"), sizes._replace(dtype=torch.float32))
    with ours.backend.stream():  # a device thread has its own stream; on the default stream no graph is captured
        return [finding for kind in kinds for finding in _COMPARED[kind](ours, cpu)]


def _ranked(ours: AcceptanceRig, cpu: AcceptanceRig) -> list[Finding]:
    sizes = ours.sizes
    want = cpu.rank(sizes.tokens, sizes.candidates)
    findings = []
    for what, cached, tier in (("cold", 0, ""), ("from HBM", sizes.cached, "hbm"), ("from DRAM", sizes.cached, "dram")):
        drift = float(np.abs(ours.rank(sizes.tokens, sizes.candidates, cached, tier) - want).max() / want.std())
        findings.append(_check(f"rank {what}", drift, sizes.tolerance, "of the logits' spread"))
    return findings


def _generated(ours: AcceptanceRig, cpu: AcceptanceRig) -> list[Finding]:
    sizes = ours.sizes
    findings = []
    for num_items, width in sizes.searches:
        want_items = cpu.generate(num_items, width)
        try:
            difference = _distance(ours.generate(num_items, width), want_items, sizes.shared_items)
        except FloatingPointError:  # a search ends so when its logits are not numbers
            difference = float("inf")
        findings.append(_check(f"generate, {width} beams", difference, sizes.search_tolerance, "nats"))
    return findings


_COMPARED: dict[str, Callable[[AcceptanceRig, AcceptanceRig], list[Finding]]] = {
    "rank": _ranked,
    "generate": _generated,
}


async def attention_ways(name: BackendName, sizes: Sizes = PRODUCTION) -> list[Finding]:
    """Try what can run a ranker's attention, as a service's warm-up does, and say which is taken."""
    backend = choose(name)
    rig = AcceptanceRig(backend, sizes)
    scheduler = Scheduler(SchedulerConfig(), backend.stream)
    engine = RankEngine(rig.ranker, backend, scheduler, rig.pages)
    runs = (PageRun(0, rig.pages.layout.pages(sizes.tokens)),)
    chunk = min(sizes.cached, scheduler.config.prefill_chunk_tokens)
    candidates = np.arange(sizes.candidates, dtype=np.int64)
    trial = Trial(_history(sizes.tokens), sizes.cached, chunk, candidates, runs, _history(sizes.tokens, seed=3))
    scheduler.start()
    try:
        tried = await choose_way(engine, backend, possible(engine, backend, "auto"), trial)
    finally:
        await scheduler.stop()
    taken = engine.backend.ops.get("hstu_attention", PLAIN)
    return [
        Finding(
            f"attention by {way.name}",
            FindingState.BROKEN if way.refused else FindingState.OK,
            told(way) + (", taken" if way.name == taken else ""),
            "report this line; a service runs without it" if way.refused else "",
        )
        for way in tried
    ]


def _check(name: str, difference: float, tolerance: float, unit: str) -> Finding:
    is_ok = difference <= tolerance
    remedy = "" if is_ok else "do not serve with this backend: report this line"
    return Finding(
        name,
        FindingState.OK if is_ok else FindingState.BROKEN,
        f"differs from the CPU by {difference:.1e} {unit}",
        remedy,
    )


def _distance(got: GeneratedItems, want: GeneratedItems, shared_items: float) -> float:
    """Return the largest difference of a score.

    If all items must be shared, one that a search missed is compared with that search's last: they may be equal. Else
    those that one search missed are left out, if they are few enough.
    """
    if len(got.scores) != len(want.scores):
        return float("inf")
    scores = [dict(zip(one.item_ids.tolist(), one.scores.tolist(), strict=True)) for one in (got, want)]
    shared = scores[0].keys() & scores[1].keys()
    if shared_items < 1.0:
        is_enough = len(shared) >= shared_items * len(want.scores)
        return (
            max((abs(scores[0][item] - scores[1][item]) for item in shared), default=0.0) if is_enough else float("inf")
        )
    last = [min(one.values(), default=0.0) for one in scores]
    return max(
        (abs(scores[0].get(item, last[0]) - scores[1].get(item, last[1])) for item in {*scores[0], *scores[1]}),
        default=0.0,
    )


def latencies(name: BackendName, sizes: Sizes = PRODUCTION, runs: int = 20) -> list[ShapeLatency]:
    """Time requests on the host; the first runs, which capture and compile, are not counted."""
    rig = AcceptanceRig(choose(name), sizes)
    shape = f"{sizes.tokens} tokens, {sizes.candidates} items"
    cases: dict[str, Callable[[], object]] = {
        f"prefill and rank {shape}": lambda: rig.rank(sizes.tokens, sizes.candidates, sizes.cached),
        f"rank cold {shape}": lambda: rig.rank(sizes.tokens, sizes.candidates),
    }
    for num_items, width in sizes.searches:
        what = f"generate {3 * num_items} tokens, {width} beams"
        cases[what] = lambda n=num_items, w=width: rig.generate(n, w)  # type: ignore[misc]
    with rig.backend.stream():
        return [_timed(case, run, runs) for case, run in cases.items()]


def _timed(name: str, run: Callable[[], object], runs: int) -> ShapeLatency:
    taken_ms = []
    for _ in range(runs + 3):
        began_at = time.perf_counter()
        run()
        taken_ms.append((time.perf_counter() - began_at) * 1e3)
    deciles = statistics.quantiles(taken_ms[3:], n=10)
    return ShapeLatency(name, deciles[4], deciles[8])
