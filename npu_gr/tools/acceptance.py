"""Accept a device: whole ranks and generates must equal the CPU's; then time them. Random weights, no files.

`doctor` compares single ops, this module compares requests, prefix KV in both tiers included. `npu-gr doctor --backend
NAME --acceptance` runs both; neither needs a checkpoint, a catalogue or a network.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.checks import Finding, FindingState
from npu_gr.backend.choose import choose
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.names import BackendName
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.tokens import Tokens
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.request import F32, Events, HistoryReport
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import GeneratedItems, Generator, PromptKV, layout_of, make_prompt
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import KVLayout, PageRun
from npu_gr.model.config import HSTUConfig
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.model.hstu import HSTU

TOLERANCE = 1e-3  # of the logits' standard deviation; of a log-probability in nats
CODES = (64, 64, 64)
RANKER = HSTUConfig(
    num_items=1000,
    actions=("view", "buy"),
    tasks=("click", "buy"),
    dim=128,
    num_layers=3,
    num_heads=4,
    qk_dim=32,
    v_dim=32,
    scaling_seqlen=512,
)
DECODER = DecoderConfig(
    vocab_size=sum(CODES),
    dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=256,
    max_tokens=2048,
    rope_theta=1e4,
    norm_eps=1e-6,
    qk_norm=True,
    qkv_bias=False,
    tied_head=False,
)


class ShapeLatency(NamedTuple):
    """Latency of a shape, from the host's call to the result in host memory."""

    name: str
    p50_ms: float
    p90_ms: float


class AcceptanceRig:
    """A ranker and a generator over one backend, without a scheduler: the calls of a device thread, made here."""

    def __init__(self, backend: Backend) -> None:
        torch.manual_seed(0)
        self.backend = backend
        device = backend.device
        self.ranker = HSTU(RANKER)
        decoder = Decoder(DECODER)
        with torch.no_grad():
            for module in (self.ranker, decoder):
                for parameter in module.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=0.1)
        self.ranker.to(device).eval().freeze_items()
        layout = KVLayout(
            num_layers=RANKER.num_layers,
            num_heads=RANKER.num_heads,
            qk_dim=RANKER.qk_dim,
            v_dim=RANKER.v_dim,
            arrangement=backend.arrangement(torch.float32, 64),
        )
        self.pages = KVArena(layout, 40, device, pack=backend.pack_kv)
        self.host = KVArena(layout, 40, torch.device("cpu"), backend.pins_host_memory, backend.pack_kv)
        self.engine = RankEngine(self.ranker, backend, Scheduler(SchedulerConfig()), self.pages)
        sids = np.random.default_rng(0).integers(0, 64, (5000, 3))
        self.trie: Trie = build_trie(sids, np.arange(5000), Codebooks.stacked(list(CODES)))
        self.generator = Generator(decoder.to(device).eval(), backend, 128, len(CODES))
        self.tables = Tables.upload(self.trie, device)
        self.prompts = KVArena(layout_of(decoder), 40, device)

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
        history = np.random.default_rng(1).integers(0, 5000, num_items)
        tokens = make_prompt(self.trie, history, DECODER.max_tokens - 2).tokens
        part = PromptKV(self.prompts, (PageRun(0, self.prompts.num_pages),), len(tokens))
        self.generator.encode(tokens, [], part)
        options = SearchOptions(width=width)
        return self.generator.generate(self.trie, self.tables, tokens, [part], options, width)


def _history(num_tokens: int) -> Tokens:
    random = np.random.default_rng(2)
    items = random.integers(0, RANKER.num_items, num_tokens)
    events = Events.make(items, random.integers(0, 2, num_tokens), np.cumsum(random.integers(0, 86_400, num_tokens)))
    return Tokens(events, items, HistoryReport(fingerprint="", num_tokens=num_tokens))


def accept(name: BackendName) -> list[Finding]:
    """Compare requests on the backend with the same requests on the CPU's plain torch ops."""
    ours = AcceptanceRig(choose(name))
    cpu = AcceptanceRig(CPUBackend("off"))
    with ours.backend.stream():  # a device thread has its own stream; on the default stream no graph is captured
        return _compared(ours, cpu)


def _compared(ours: AcceptanceRig, cpu: AcceptanceRig) -> list[Finding]:
    want = cpu.rank(300, 50)
    findings = []
    for what, cached_tokens, tier in (("cold", 0, ""), ("from HBM", 250, "hbm"), ("from DRAM", 250, "dram")):
        drift = float(np.abs(ours.rank(300, 50, cached_tokens, tier) - want).max() / want.std())
        findings.append(_check(f"rank {what}", drift, "of the logits' spread"))
    for num_items, width in ((40, 16), (100, 128)):  # one attention stage, and two
        want_items = cpu.generate(num_items, width)
        try:
            difference = _distance(ours.generate(num_items, width), want_items)
        except FloatingPointError:  # a search ends so when its logits are not numbers
            difference = float("inf")
        findings.append(_check(f"generate, {width} beams", difference, "nats"))
    return findings


def _check(name: str, difference: float, unit: str) -> Finding:
    is_ok = difference <= TOLERANCE
    remedy = "" if is_ok else "do not serve with this backend: report this line"
    return Finding(
        name,
        FindingState.OK if is_ok else FindingState.BROKEN,
        f"differs from the CPU by {difference:.1e} {unit}",
        remedy,
    )


def _distance(got: GeneratedItems, want: GeneratedItems) -> float:
    """Return the largest difference of a score; an item that one search missed is compared with that search's last."""
    if len(got.scores) != len(want.scores):
        return float("inf")
    scores = [dict(zip(one.item_ids.tolist(), one.scores.tolist(), strict=True)) for one in (got, want)]
    last = [min(one.values(), default=0.0) for one in scores]
    return max(
        (abs(scores[0].get(item, last[0]) - scores[1].get(item, last[1])) for item in {*scores[0], *scores[1]}),
        default=0.0,
    )


def latencies(name: BackendName, runs: int = 20) -> list[ShapeLatency]:
    """Time a few shapes on the host; the first runs, which capture and compile, are not counted."""
    rig = AcceptanceRig(choose(name))
    cases: dict[str, Callable[[], object]] = {}
    for num_tokens in (512, 2048):
        cases[f"rank {num_tokens} tokens, 100 items"] = lambda n=num_tokens: rig.rank(n, 100)  # type: ignore[misc]
    for width in (32, 128):
        cases[f"generate 300 tokens, {width} beams"] = lambda w=width: rig.generate(100, w)  # type: ignore[misc]
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
