"""No op of a request runs on the AI CPU or synchronizes; the kernels of a layer are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from npu_gr.backend.best_items import Hidden
from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.catalogue.filters import allow_items
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, PromptKV, layout_of, make_prompt
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import FindPass, RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model import t5
from npu_gr.vector_search.index import ExactIndex
from tests.backend.npu.fake_device import FakeRuntime
from tests.backend.npu.placement import Recorder
from tests.backend.npu.test_backend import tokens
from tests.backend.npu.test_hstu_pass import User
from tests.engine import test_whole_prompts
from tests.engine.test_beam_search import model
from tests.engine.test_generate_engine import catalogue
from tests.models import tiny_model


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """With the native operators: their definitions answer, and count as one op each."""
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)
    made = FakeRuntime()
    monkeypatch.delattr(FakeRuntime, "NPUGraph")  # every kernel is seen, not a replay
    with made.recording():
        yield made


def recorded(work: Callable[[], object]) -> Recorder:
    recorder = Recorder()
    with torch.inference_mode(), recorder:
        work()
    return recorder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalise", ["vocabulary", "codebook", "valid"])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_generate_stays_on_the_ai_core(
    npu: FakeRuntime, dtype: torch.dtype, normalise: str, filtered: bool
) -> None:
    """The prompt in two parts, so that new rows attend to cached ones.

    Two requests share the rounds.
    """
    decoder, trie = model(20).to(dtype), catalogue()
    generator = Generator(decoder, NPUBackend(npu=npu.as_npu()), 20, 3)
    arena = KVArena(layout_of(decoder, page_tokens=4), 11, torch.device("cpu"))
    tokens = make_prompt(trie, np.array([0, 7, 21, 70, 7]), 18).tokens
    first, second = (
        PromptKV(arena, (PageRun(0, 3),), 6),
        PromptKV(arena, (PageRun(3, 5),), len(tokens) - 6),
    )
    tables = Tables.upload(trie, torch.device("cpu"))
    allow = allow_items(trie, np.arange(0, 200, 14)) if filtered else None

    def work() -> None:
        generator.encode(tokens[:6], [], first)
        generator.encode(tokens[6:], [first], second)
        options = SearchOptions(width=20, normalise=normalise)  # type: ignore[arg-type]
        generator.generate(trie, tables, tokens, [first, second], options, 10, allow)

    seen = recorded(work)
    assert seen.off_the_ai_core() == Counter()
    assert {"npu_gr::csr_gather_topk", "npu_gr::beam_fork_", "linear"} <= {
        each.op for each in seen.seen
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_generate_of_a_t5_stays_on_the_ai_core(
    npu: FakeRuntime, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its encoder in several parts, its answers behind the start token."""
    monkeypatch.setattr(t5, "ROWS", 7)
    made, trie = test_whole_prompts.model(dtype=dtype), test_whole_prompts.catalogue()
    generator = Generator(made, NPUBackend(npu=npu.as_npu()), 20, 3)
    arena = KVArena(layout_of(made, page_tokens=4), 11, torch.device("cpu"))
    tokens = make_prompt(trie, np.array([0, 7, 21, 70, 7]), 18, is_divisible=False).tokens
    pages, tables = (
        PromptKV(arena, (PageRun(0, 4),), len(tokens)),
        Tables.upload(trie, torch.device("cpu")),
    )

    def work() -> None:
        generator.encode(tokens, [], pages)
        generator.generate(trie, tables, tokens, [pages], SearchOptions(width=20), 10)

    seen = recorded(work)
    assert seen.off_the_ai_core() == Counter()
    assert {"npu_gr::csr_gather_topk", "npu_gr::beam_fork_", "linear"} <= {
        each.op for each in seen.seen
    }


def test_a_match_stays_on_the_ai_core(npu: FakeRuntime) -> None:
    """A block takes 7 kernels: product, three for bits, selection, merge, a cast of the rows."""
    generator = torch.Generator().manual_seed(0)
    items, queries = (torch.randn(n, 16, generator=generator) for n in (300, 3))
    index = ExactIndex(items.numpy(), NPUBackend(npu=npu.as_npu()))
    hidden = Hidden(torch.tensor([0, 2]), torch.tensor([5, 9]))
    seen = recorded(lambda: index.search(queries, 10, hidden))
    assert seen.off_the_ai_core() == Counter()
    assert seen.num_kernels - 2 * len(npu.uploads) == 7, (
        "what the fake device uploads is a cast and a copy"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ["rank", "chunk", "batch"])
def test_a_layer_is_ten_kernels_on_the_ai_core(
    npu: FakeRuntime, dtype: torch.dtype, what: str
) -> None:
    """Attention takes 4 kernels for a cached rank, for a prefill chunk and for a batch of both."""
    backend = NPUBackend(npu=npu.as_npu())
    ranker = tiny_model(dtype, qk_dim=16, v_dim=16, num_layers=4)
    user = User(ranker, num_layers=4)
    user.prefill(ranker, backend, 70)
    rank = user.segment(70, 0, 37)
    batch = {
        "rank": [rank],
        "chunk": [user.segment(70, 50, 0, keeps=True)],
        "batch": [rank, user.segment(70, 9, 20)],
    }
    seen = recorded(lambda: ranker(backend, batch[what]))
    assert seen.off_the_ai_core() == Counter()
    starts = [at for at, each in enumerate(seen.seen) if each.op == "npu_gr::hstu_rows"]
    layer = seen.seen[starts[1] : starts[2]]  # of the first, the pass's own memory is made
    assert sum(each.kernels for each in layer) <= 10, [each.op for each in layer]
    attention = [
        each.kernels
        for each in layer
        if each.op in ("npu_gr::hstu_rows", "npu_gr::hstu_scores", "bmm")
    ]
    assert attention == [1, 1, 1, 1], "no operand of a product is copied"


def test_a_recommend_stays_on_the_ai_core(npu: FakeRuntime) -> None:
    """The ranker's own vector finds items, one is hidden, and the candidates are scored with it."""
    ranker, backend = tiny_model(retrieval=True, qk_dim=16, v_dim=16), NPUBackend(npu=npu.as_npu())
    shape = ranker.config
    layout = KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
    )
    engine = RankEngine(
        ranker, backend, Scheduler(SchedulerConfig()), KVArena(layout, 8, backend.device)
    )
    history = RankPass(tokens(100), 0, np.empty(0, np.int64), 10**9)
    found = engine.find_all([FindPass(history, 5, np.array([3]))])
    assert len(found[0].rows) == 5

    def work() -> None:
        engine.find_all([FindPass(history, 5, np.array([3]))])
        engine.forward([replace(history, candidates=found[0].rows, vector=found[0].vector)])

    assert recorded(work).off_the_ai_core() == Counter()


def test_the_table_knows_what_was_wrong(npu: FakeRuntime) -> None:
    """Detect ops off the AI core: selection without native operators, and those of a review."""
    generator = torch.Generator().manual_seed(0)
    items, queries = (torch.randn(n, 16, generator=generator) for n in (300, 3))
    index = ExactIndex(items.numpy(), NPUBackend("off", npu.as_npu()))
    seen = recorded(
        lambda: index.search(queries, 10, Hidden(torch.tensor([0, 2]), torch.tensor([5, 9])))
    )
    found = {op for op, _ in seen.off_the_ai_core()}
    assert {"searchsorted", "bincount", "cumsum", "sort"} <= found
    times = torch.arange(4)
    seen = recorded(lambda: (times >> 1, torch.argsort(times), torch.bucketize(times, times)))
    assert sum(seen.off_the_ai_core().values()) == 3


def layer_call(rows: int, cached: int, *, targets: bool = False) -> HstuCall:
    """Four heads of 64 in bf16, 256 position buckets."""
    random = torch.Generator().manual_seed(0)

    def some(count: int) -> torch.Tensor:
        return torch.randn(count, 4, 64, generator=random).bfloat16()

    bias = BiasTables(*(torch.randn(4, width, generator=random).bfloat16() for width in (256, 64)))
    times = torch.arange(cached if targets else cached + rows) * 60
    slabs = [(some(cached), some(cached))] if cached else []
    return HstuCall(some(rows), some(rows), some(rows), slabs, times, bias, 0.125, query_time=10**9)


@pytest.mark.parametrize(
    ("op", "rows", "cached", "launches"),
    [
        ("hstu_causal", 4096, 0, 439),
        ("hstu_causal", 512, 3584, 74),
        ("hstu_targets", 512, 4096, 33),
    ],
)
def test_what_torch_ops_take_for_a_layers_attention(
    op: str, rows: int, cached: int, launches: int
) -> None:
    """Where no operator is installed: hundreds of launches, more kernels than that, and AI CPU."""
    call = layer_call(rows, cached, targets=op == "hstu_targets")
    seen = recorded(lambda: getattr(TorchOps(), op)(call))
    assert seen.num_launches == launches
    assert seen.num_kernels > launches
    assert ("__rshift__", "int32") in seen.off_the_ai_core()
