"""The NPU backend on a fake device: ranks and generates equal the CPU's, without races or waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.backend.calls import Continuations, TopkCall
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.catalogue.trie import Trie
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import HistoryReport
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import (
    GeneratedItems,
    Generator,
    ItemSearch,
    PromptKV,
    layout_of,
    make_prompt,
)
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix, PageCopy
from npu_gr.engine.queue import JobOrder, SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.sanity import parity
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.history_tokenizer import Tokens
from tests.backend.npu.fake_device import FakeRuntime
from tests.engine.test_beam_search import model
from tests.engine.test_generate_engine import catalogue
from tests.models import CPU, events, tiny_model
from tests.serving import FIRST_ID, columns, serving

FAR = float("inf")
REFERENCE = ReferenceBackend()


@pytest.fixture
def npu() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    with made.recording():
        yield made


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a library is loaded: the definitions run at the operator's own level."""
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)


# ---- one operator at a time


def some_logits(rows: int = 3, codes: int = 11) -> tuple[torch.Tensor, torch.Tensor, Continuations]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, codes, generator=generator)
    acc = torch.tensor([-1.0, float("-inf"), -0.5])
    lo, degree = torch.tensor([0, 4, 4]), torch.tensor([4, 0, 2])
    return (
        logits,
        acc,
        Continuations(lo, degree, torch.tensor([1, 3, 4, 9, 0, 7], dtype=torch.int32)),
    )


def test_a_requests_own_filter_is_obeyed_without_a_graph(native: None, npu: FakeRuntime) -> None:
    backend = NPUBackend(npu=npu.as_npu())
    logits, acc, follow = some_logits()
    follow = follow._replace(allowed=torch.tensor([True, False, True, True, False, True]))
    want = CPU.beam_topk(TopkCall(logits, acc, follow, 8))
    got = backend.beam_topk(TopkCall(logits, acc, follow, 8))
    assert torch.equal(got.edge[: len(want.edge)], want.edge)
    assert not got.score[len(want.edge) :].isfinite().any()
    assert not npu.graphs


@pytest.mark.parametrize(
    "how", [{}, {"over": "valid", "scale": 0.5}, {"codes": slice(0, 10)}], ids=str
)
def test_native_selection_is_the_cpus_with_empty_places_last(
    native: None, npu: FakeRuntime, how: dict[str, Any]
) -> None:
    backend = NPUBackend(npu=npu.as_npu())
    logits, acc, follow = some_logits()
    want = CPU.beam_topk(TopkCall(logits, acc, follow, 8, **how))
    for _ in range(3):  # eager and captured, replayed, replayed
        got = backend.beam_topk(TopkCall(logits, acc, follow, 8, **how))
        torch.testing.assert_close(got.score[: len(want.score)], want.score)
        assert torch.equal(got.edge[: len(want.edge)], want.edge)
        assert torch.equal(got.parent[: len(want.edge)], want.parent)
        assert got.score[len(want.score) :].tolist() == [float("-inf")] * (8 - len(want.score))
        assert not got.edge[len(want.score) :].any()


def test_replays_see_new_values_and_leave_old_results(native: None, npu: FakeRuntime) -> None:
    backend = NPUBackend(npu=npu.as_npu())
    logits, acc, follow = some_logits()
    backend.beam_topk(TopkCall(logits, acc, follow, 4))
    first = backend.beam_topk(TopkCall(logits, acc, follow, 4))
    kept = first.score.clone()
    second = backend.beam_topk(TopkCall(-logits, acc, follow, 4))
    torch.testing.assert_close(second.score, CPU.beam_topk(TopkCall(-logits, acc, follow, 4)).score)
    assert torch.equal(first.score, kept)
    replays = [call for call in npu.calls if call[0] == "replay"]
    assert len(replays) == 3 + 1  # and the proof of the capture
    other = follow._replace(code=follow.code.clone())  # another version of the catalogue
    assert torch.equal(backend.beam_topk(TopkCall(logits, acc, other, 4)).score, kept)
    assert sorted(map(len, backend._graphs._of.values())) == [1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["capture_fails", "capture_lies"])
def test_a_graph_that_fails_or_lies_is_not_used(native: None, npu: FakeRuntime, how: str) -> None:
    setattr(npu, how, True)
    backend = NPUBackend(npu=npu.as_npu())
    logits, acc, follow = some_logits()
    results = [backend.beam_topk(TopkCall(logits, acc, follow, 8)) for _ in range(3)]
    for got in results:
        assert torch.equal(got.score, results[0].score)
    (known,) = backend._graphs._of.values()  # type: ignore[union-attr]
    assert list(known.values()) == [None]


def test_a_logit_that_is_no_number_ends_the_search(native: None, npu: FakeRuntime) -> None:
    backend = NPUBackend(npu=npu.as_npu())
    for bad in (float("nan"), float("inf")):
        logits, acc, follow = some_logits()
        logits[2, 5] = bad
        assert backend.beam_topk(TopkCall(logits, acc, follow, 3)).score.isnan().all()
    got = backend.beam_topk(
        TopkCall(*some_logits()[:1], torch.full((3,), float("nan")), some_logits()[2], 3)
    )
    assert got.score.isnan().all(), "and stays so in the next round"
    decoder = model(20).float()
    with torch.no_grad():
        decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not a number"):
        generated(Generator(decoder, backend, 20, 3), catalogue(), [0, 7])


def test_what_the_native_operator_rejects_runs_as_torch_ops(
    native: None, npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, fell = NPUBackend(npu=npu.as_npu()), list[str]()
    backend.on_fallback = fell.append
    logits, acc, follow = some_logits()
    want = CPU.beam_topk(TopkCall(logits, acc, follow, 8))
    assert torch.equal(backend.beam_topk(TopkCall(logits.double(), acc, follow, 8)).edge, want.edge)

    wide = logits.repeat(1, 6000)  # a row of 66,000 logits does not fit the buffer
    want = CPU.beam_topk(TopkCall(wide, acc, follow, 8))
    assert torch.equal(backend.beam_topk(TopkCall(wide, acc, follow, 8)).edge, want.edge)
    assert fell == ["beam_topk", "beam_topk"]


def test_an_error_of_the_native_operators_is_an_error(
    native: None, npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its message says: what the operators cannot do is known before they are called."""

    def lost(*_: object, **_named: object) -> None:
        raise RuntimeError("the device is lost; npu_gr's torch composition has no such limit")

    backend, fell = NPUBackend(npu=npu.as_npu()), list[str]()
    backend.on_fallback = fell.append
    monkeypatch.setattr("npu_gr.backend.npu.backend._select", lost)
    monkeypatch.setattr(torch.ops.npu_gr, "beam_fork_", lost)
    logits, acc, follow = some_logits()
    with pytest.raises(RuntimeError, match="lost"):
        backend.beam_topk(TopkCall(logits, acc, follow, 8))
    planes = torch.randn(2, 5, 3, 1, 4), torch.randn(2, 5, 3, 1, 4)
    with pytest.raises(RuntimeError, match="lost"):
        backend.beam_fork_(*planes, torch.tensor([0, 0, 1]), 2)
    assert not fell


def test_a_fork_beyond_the_native_operators_limits_is_done(native: None, npu: FakeRuntime) -> None:
    backend, fell = NPUBackend(npu=npu.as_npu()), list[str]()
    backend.on_fallback = fell.append
    # 2048 beams at most
    keys, values = torch.randn(2, 2049, 2, 1, 4), torch.randn(2, 2049, 2, 1, 4)
    parent = torch.tensor([0, 0, 1])
    want = keys[:, parent, :1].clone()
    backend.beam_fork_(keys, values, parent, 1)
    assert torch.equal(keys[:, :3, :1], want)
    assert fell == ["beam_fork"]


# ---- the library


def test_a_missing_library_is_said_or_required(
    npu: FakeRuntime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = NPUBackend(npu=npu.as_npu(), folder=tmp_path)
    assert backend.ops["beam_topk"] == backend.ops["beam_fork"] == "torch"
    assert "build them with ops/ascendc/build.sh" in caplog.text
    with pytest.raises(
        ConfigError,
        match=r"native: the Ascend C operators are required, but no "
        r"native ops at",
    ):
        NPUBackend("require", npu.as_npu(), tmp_path)
    with pytest.raises(ConfigError, match="required, but no native ops for Ascend310P3"):
        NPUBackend("require", npu.as_npu("Ascend310P3"), tmp_path)


# ---- the whole of a request


def generated(generator: Generator, trie: Trie, history: list[int], **how: Any) -> GeneratedItems:
    tokens = make_prompt(trie, np.array(history), 18).tokens
    arena = KVArena(layout_of(generator.model, page_tokens=4), 11, generator.backend.device)
    part = PromptKV(arena, (PageRun(0, 5),), len(tokens))
    generator.encode(tokens, [], part)
    tables = Tables.upload(trie, generator.backend.device)
    options = SearchOptions(width=generator.max_beams, **how)
    return generator.generate(trie, tables, tokens, [part], options, 10)


@pytest.mark.parametrize("normalise", ["vocabulary", "codebook"])
@pytest.mark.parametrize("width", [7, 20, 100])
def test_generate_is_the_cpus_and_waits_once(
    native: None, npu: FakeRuntime, normalise: str, width: int
) -> None:
    decoder, trie, history = model(20).float(), catalogue(), [0, 7, 21, 70, 7]
    want = generated(Generator(decoder, CPU, width, 3), trie, history, normalise=normalise)
    generator = Generator(decoder, NPUBackend(npu=npu.as_npu()), width, 3)
    arena = KVArena(layout_of(decoder, page_tokens=4), 11, torch.device("cpu"))
    tokens = make_prompt(trie, np.array(history), 18).tokens
    part, tables = (
        PromptKV(arena, (PageRun(0, 5),), len(tokens)),
        Tables.upload(trie, torch.device("cpu")),
    )
    options = SearchOptions(width=width, normalise=normalise)  # type: ignore[arg-type]

    def searched() -> GeneratedItems:
        npu.host_waits.clear()
        npu.uploads.clear()
        npu.calls.clear()
        generator.encode(tokens, [], part)
        return generator.generate(trie, tables, tokens, [part], options, 10)

    searched()  # captures its graphs, as the warm-up does
    got = searched()
    assert [call for call, _ in npu.calls] == ["replay"] * (3 + 2 * 3), (
        "three selections, two steps through two layers"
    )
    assert set(npu.host_waits) == {"cpu", "numpy"}
    assert npu.host_waits[0] == "cpu"
    assert len(npu.host_waits) == 4, "scores and leaves, fetched at the end"
    assert npu.uploads == [True, True]
    assert np.array_equal(got.item_ids, want.item_ids)
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)
    assert got.is_cut is want.is_cut


def test_generate_without_the_library_is_the_cpus_too(npu: FakeRuntime, tmp_path: Path) -> None:
    decoder, trie, history = model(20).float(), catalogue(), [0, 7, 21, 70, 7]
    want = generated(Generator(decoder, CPU, 20, 3), trie, history)
    got = generated(Generator(decoder, NPUBackend("off", npu.as_npu()), 20, 3), trie, history)
    assert np.array_equal(got.item_ids, want.item_ids)


class Ranker:
    """An engine over the device, with both tiers."""

    def __init__(self, npu: FakeRuntime, streams: int) -> None:
        self.backend = NPUBackend("off", npu.as_npu())
        self.scheduler = Scheduler(SchedulerConfig(streams=streams), self.backend.stream)
        shape = tiny_model().config
        layout = KVLayout(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
        )
        self.arena = KVArena(layout, 8, self.backend.device)
        self.dram = KVArena(layout, 8, torch.device("cpu"), pinned=self.backend.pins_host_memory)
        for plane in (*self.arena._keys, *self.arena._values, *self.dram._keys, *self.dram._values):
            npu.watch(plane, plane[0, 0].numel())
        self.engine = RankEngine(tiny_model(), self.backend, self.scheduler, self.arena)


def tokens(num: int) -> Tokens:
    history = events(num)
    return Tokens(history, history.items, HistoryReport(fingerprint="f", num_tokens=num))


@pytest.mark.parametrize("streams", [1, 2])
async def test_both_tiers_over_streams_give_cold_scores_and_nothing_races(
    npu: FakeRuntime, streams: int
) -> None:
    """Prefill, spill, erase, reload and rank two users at once, on any thread."""
    it = Ranker(npu, streams)
    assert npu.pinned_bytes == sum(chunk.nbytes for chunk in (*it.dram._keys, *it.dram._values))
    it.scheduler.start()
    try:
        pages = (PageRun(0, 4),)
        assert await parity(it.engine, pages, it.dram, pages, tokens(200), np.arange(30)) <= 1e-5

        async def user(first_page: int, num: int) -> None:
            runs, history = (PageRun(first_page, 4),), tokens(num)
            work = RankPass(history, 0, np.arange(9), 10**9)
            cold = await it.engine.rank(work, FAR)
            for _ in range(3):
                await it.engine.prefill(history, runs, FAR, JobOrder(FAR))
                await it.engine.copy(PageCopy(it.arena, runs, it.dram, runs, num), FAR)
                await it.engine.zero(it.arena, runs)
                await it.engine.copy(PageCopy(it.dram, runs, it.arena, runs, num), FAR)
                hit = await it.engine.rank(
                    RankPass(history, 0, np.arange(9), 10**9, CachedPrefix(runs, num)), FAR
                )
                np.testing.assert_allclose(hit.logits, cold.logits, rtol=1e-4, atol=1e-5)

        await asyncio.gather(user(0, 150), user(4, 201))
    finally:
        await it.scheduler.stop()
    assert not npu.races
    assert len(npu.streams) == 2 + streams, "the default one, the copies', one a device thread"
    copies = it.backend._copies.index
    order = [call for call in npu.calls if call in (("wait_event", copies), ("record", copies))]
    assert streams > 1 or order == [("wait_event", copies), ("record", copies)] * (len(order) // 2)
    assert len(order) >= 2 * 2 * 6
    assert all(npu.uploads)


def test_a_rank_waits_once_for_its_scores(npu: FakeRuntime) -> None:
    it = Ranker(npu, 1)
    want = it.engine.forward([RankPass(tokens(100), 0, np.arange(30), 10**9)])
    npu.host_waits.clear()
    got = it.engine.forward([RankPass(tokens(100), 0, np.arange(30), 10**9)])
    assert npu.host_waits == ["to", "numpy"]
    npu.host_waits.clear()
    it.engine.forward([RankPass(tokens(100), 0, np.arange(0), 10**9, keep=(PageRun(0, 2),))])
    assert npu.host_waits[0] == "stream.synchronize", "a prefill is read by others once it is done"
    assert np.array_equal(got[0], want[0])


def test_the_recorder_sees_a_missing_fence(npu: FakeRuntime) -> None:
    plane = torch.zeros(4)
    npu.watch(plane, 4)
    one, other = npu.Stream(), npu.Stream()

    def race(*, fenced: bool) -> int:
        npu.races.clear()
        with npu.stream(one):
            plane.add_(1)
        done = npu.Event()
        done.record(one)
        if fenced:
            other.wait_event(done)
        with npu.stream(other):
            plane.clone()
        return len(npu.races)

    assert not race(fenced=True)
    assert race(fenced=False)


async def test_a_cancelled_copy_holds_its_pages_until_the_bytes_are_there() -> None:
    scheduler, go = Scheduler(SchedulerConfig()), threading.Event()

    def wait() -> None:
        go.wait(10)

    waiting = asyncio.ensure_future(scheduler.finished(wait))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_served_instance_ranks_as_on_the_cpu_and_exports_its_ops(
    npu: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, started as configured: signal, rank, the parity self-test and the metrics."""
    history = events(60, 3)
    body = {
        "user_id": "u",
        "history": columns(history),
        "candidates": list(range(FIRST_ID, FIRST_ID + 20)),
        "timestamp": int(history.timestamps[-1]) + 5,
    }

    async def scores() -> tuple[Any, str, Any]:
        async with serving(tmp_path) as (client, _):
            answer = await client.post("/v1/rank", json=body)
            assert answer.status == 200, await answer.text()
            health = await (await client.get("/healthz")).json()
            return (
                (await answer.json())["scores"],
                await (await client.get("/metrics")).text(),
                health,
            )

    want, _, health = await scores()
    assert (health["device"], health["ops"]["hstu_attention"]) == ("cpu", health["kernels"])
    monkeypatch.setattr("npu_gr.service.app.choose", lambda *_: NPUBackend("off", npu.as_npu()))
    got, exported, health = await scores()
    assert (health["device"], health["ops"]["hstu_attention"]) == ("npu", "torch")
    assert [model["ops"]["hstu_attention"] for model in health["models"]] == ["torch"]
    for task in want:
        np.testing.assert_allclose(got[task], want[task], rtol=1e-4, atol=1e-5)
    assert 'npu_gr_backend_op_info{impl="torch",op="hstu_attention"} 1.0' in exported
    assert 'npu_gr_backend_fallbacks_total{op="beam_topk"} 0.0' in exported
    assert not npu.races


def test_requests_of_one_pass_fork_their_own_rows(
    native: None, npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator takes contiguous planes alone, and rows of one request of several are not."""
    forked = ascend_ops.beam_fork_

    def picky(
        keys: torch.Tensor, values: torch.Tensor, parent: torch.Tensor, num_slots: int
    ) -> None:
        assert keys.is_contiguous()
        assert values.is_contiguous()
        forked(keys, values, parent, num_slots)

    monkeypatch.setattr(torch.ops.npu_gr, "beam_fork_", picky)
    decoder, trie = model(20).float(), catalogue()
    backend = NPUBackend(npu=npu.as_npu())
    found: dict[str, list[list[int]]] = {}
    for made in (backend, CPU):
        generator = Generator(decoder, made, 20, 3, 1, 40)
        arena = KVArena(layout_of(decoder, page_tokens=4), 12, torch.device("cpu"))
        asks = []
        for first, history in ((0, [0, 7, 21]), (6, [70, 7, 14, 28])):
            tokens = make_prompt(trie, np.array(history), 18).tokens
            part = PromptKV(arena, (PageRun(first, 6),), len(tokens))
            generator.encode(tokens, [], part)
            tables = Tables.upload(trie, made.device)
            asks.append(ItemSearch(trie, tables, tokens, [part], SearchOptions(width=20), 10))
        found[made.name] = [each.item_ids.tolist() for each in generator.generate_all(asks)]
    assert found["npu"] == found["cpu"]
