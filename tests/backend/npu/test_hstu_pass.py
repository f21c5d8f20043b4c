"""An HSTU pass by the kernels gives TorchOps' logits; caches and batches do not change the bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.backend.npu import hstu_slots
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.npu.hstu_slots import (
    graph_shapes,
    graph_slots,
    key_slots,
    row_slots,
    tight_slots,
)
from npu_gr.backend.npu.limits import MAX_SCORE_BYTES, Slots, VectorUnits, hstu_limit
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.model.hstu import HSTU, batch_on_host, fused_layers
from npu_gr.model.hstu_layer import HostTokens, Past, Segment
from tests.backend.npu.fake_device import FakeRuntime
from tests.backend.npu.on_emulator import NAMES, HstuOnEmulator
from tests.backend.npu.placement import Recorder
from tests.models import events, tiny_model
from tests.ops.ascend_emulator import Emulator, Machine, NoPlanError
from tests.ops.hstu_emulator import HstuSizes, hstu_finish, hstu_rows, hstu_scores

PLAIN = TorchOps()
RUNS = [PageRun(5, 4), PageRun(20, 6)]
OTHER_RUNS = [PageRun(9, 8)]  # what a pass writes, no request of it reads
LAYERS = 3
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "u", "residual": "concat", "norm": "group"},
)


@pytest.fixture
def npu() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    with made.recording():
        yield made


@pytest.fixture
def backend(npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> NPUBackend:
    """As if a library were loaded: the operators' definitions answer for it."""
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)
    made = NPUBackend(npu=npu.as_npu())
    made.on_fallback = pytest.fail
    return made


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the CPU emulator of the Ascend C kernels cannot be built")
    return Emulator()


class User:
    """A history whose pages lie in two runs, and candidates."""

    def __init__(self, model: HSTU, num_tokens: int = 120, num_layers: int = LAYERS) -> None:
        config = model.config
        layout = KVLayout(
            num_layers=num_layers, num_heads=config.num_heads, qk_dim=config.qk_dim,
            v_dim=config.v_dim, page_tokens=16,
            dtype=str(model.dtype).removeprefix("torch."),
        )  # fmt: skip
        self.arena = KVArena(layout, 30, torch.device("cpu"))
        self.events = events(num_tokens)
        self.rows = torch.from_numpy(np.random.default_rng(1).integers(0, 300, 37))

    def segment(
        self,
        cached: int,
        new: int,
        candidates: int,
        keeps: bool = False,
        runs: Sequence[PageRun] = RUNS,
    ) -> Segment:
        e = self.events
        part = slice(cached, cached + new)

        def slabs(layer: int) -> Any:
            return self.arena.slabs(layer, runs, cached)

        pages = self.arena.paged(runs) if cached or keeps else None
        return Segment(
            items=torch.from_numpy(e.items[part].copy()),
            actions=torch.from_numpy(e.actions[part].astype(np.int64)),
            times=torch.from_numpy(e.timestamps[part].copy()),
            candidates=self.rows[:candidates],
            candidate_time=int(e.timestamps[-1]) + 50,
            past=Past(torch.from_numpy(e.timestamps[:cached].copy()), slabs) if cached else None,
            sink=self.arena.sink(runs, cached) if keeps else None,
            host=HostTokens(e.timestamps[: cached + new], pages),
        )

    def prefill(self, model: HSTU, backend: Any, *stops: int) -> None:
        for start, stop in zip((0, *stops[:-1]), stops, strict=True):
            assert len(model(backend, [self.segment(start, stop - start, 0, keeps=True)])[0]) == 0


def plainly(model: HSTU, segment: Segment) -> torch.Tensor:
    found: torch.Tensor = model(PLAIN, [replace(segment, host=None)])[0]
    return found


def check_whole(backend: NPUBackend, dtype: torch.dtype, how: dict[str, Any]) -> None:
    model = tiny_model(dtype, qk_dim=16, **how)
    user = User(model)
    cold = model(backend, [user.segment(0, 120, 37)])[0]
    want = plainly(model, user.segment(0, 120, 37))
    torch.testing.assert_close(cold, want, rtol=0, atol=2e-5 if dtype == torch.float32 else 0.1)
    user.prefill(model, backend, 70, 120)
    cached = user.segment(120, 0, 37)
    assert torch.equal(model(backend, [cached])[0], cold)
    torch.testing.assert_close(
        plainly(model, cached), cold, rtol=0, atol=2e-5 if dtype == torch.float32 else 0.1
    )
    batch = [
        cached,
        user.segment(70, 50, 20),
        user.segment(0, 120, 37, keeps=True, runs=OTHER_RUNS),
    ]
    for alone, own in zip(batch, model(backend, batch), strict=True):
        assert torch.equal(own, cold[: len(alone.candidates)])
    again = user.segment(120, 0, 37, runs=OTHER_RUNS)
    assert torch.equal(model(backend, [again])[0], cold), "a full pass keeps what chunks keep"


@pytest.mark.parametrize("how", VARIANTS, ids=("paper", "meta"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_definition(backend: NPUBackend, dtype: torch.dtype, how: dict[str, Any]) -> None:
    check_whole(backend, dtype, how)


@pytest.mark.parametrize(
    ("dtype", "how"), [(torch.bfloat16, VARIANTS[1]), (torch.float32, VARIANTS[0])], ids=str
)
def test_by_the_kernels(
    backend: NPUBackend, emulator: Emulator, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    library = torch.library.Library("npu_gr", "IMPL")
    on_emulator = HstuOnEmulator(emulator)
    try:
        for name in ("hstu_rows", "hstu_scores", "hstu_finish"):
            library.impl(name, getattr(on_emulator, name), "CPU")
        check_whole(backend, dtype, how)
    finally:
        library._destroy()


def test_a_head_of_no_power_of_four_scales_the_scores(backend: NPUBackend) -> None:
    model = tiny_model()
    user = User(model)
    segment = user.segment(0, 50, 9)
    torch.testing.assert_close(
        model(backend, [segment])[0], plainly(model, segment), rtol=0, atol=2e-5
    )


def test_a_layer_is_few_launches_and_a_pass_one_graph(
    backend: NPUBackend, npu: FakeRuntime
) -> None:
    """Whatever the batch: the same launches, and from the second pass on one replay."""
    model = tiny_model(torch.bfloat16, qk_dim=16)
    user = User(model)
    user.prefill(model, backend, 120)
    names = []
    launched = npu.launched

    def listen(func: Any, args: Any, kwargs: Any) -> Any:
        names.append(func._schema.name.split("::")[1])
        return launched(func, args, kwargs)

    npu.launched = listen  # type: ignore[method-assign]
    for batch in (
        [user.segment(120, 0, 37)],
        [user.segment(70, 50, 20)] * 3,
        [user.segment(60, 60, 0, keeps=True)],
    ):
        assert backend._passes is not None
        graphs, backend._passes.graphs = backend._passes.graphs, None
        names.clear()
        model(backend, batch)
        attention = [n for n in names if n in ("hstu_rows", "hstu_scores", "bmm")]
        full = LAYERS if batch[0].candidates.numel() else LAYERS - 1
        assert attention == ["hstu_rows", "bmm", "hstu_scores", "bmm"] * full + ["hstu_rows"] * (
            LAYERS - full
        )
        assert names.count("hstu_finish") == full
        backend._passes.graphs = graphs
        model(backend, batch)
        before = npu.calls.count(("replay", npu.current_stream().index))
        again = model(backend, batch)
        assert npu.calls.count(("replay", npu.current_stream().index)) == before + 1
        for one, two in zip(again, model(backend, batch), strict=True):
            assert torch.equal(one, two)


def test_a_pass_of_too_many_rows_is_launched_without_a_graph(
    backend: NPUBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(torch.bfloat16, qk_dim=16)
    user = User(model)
    user.prefill(model, backend, 70)
    segment = user.segment(70, 0, 37)
    padded: list[tuple[str, int, int]] = []
    backend.on_padding = lambda *sizes: padded.append(sizes)
    (by_graph,) = model(backend, [segment])
    assert padded == [("scores", 37 * (70 + 37), 512 * 2048)]
    assert backend._passes is not None
    assert backend._passes.graphs is not None
    counted: list[str] = []
    monkeypatch.setattr(backend._passes.graphs, "counted", counted.append)
    monkeypatch.setattr(hstu_slots, "GRAPH_ROWS", (32,))
    (launched,) = model(backend, [segment])
    assert (counted, len(padded)) == (["launched"], 1)
    torch.testing.assert_close(launched, by_graph, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("dtype", "a model in torch.float64"),
        ("width", "no whole number of 32 bytes"),
        ("span", "spans 2^31 seconds"),
        ("pages", "a past that is not in pages"),
        ("arenas", "pages of several arenas"),
    ],
)
def test_what_does_not_fit_is_counted_and_goes_segment_by_segment(
    backend: NPUBackend, caplog: pytest.LogCaptureFixture, change: str, says: str
) -> None:
    fell = list[str]()
    backend.on_fallback = fell.append
    dtype = torch.float64 if change == "dtype" else torch.float32
    model = tiny_model(dtype, qk_dim=12 if change == "width" else 16)
    user = User(model)
    user.prefill(model, PLAIN, 100)
    segments = [user.segment(100, 20, 5)]
    if change == "span":
        times = segments[0].times.clone()
        times[-1] = int(user.events.timestamps[0]) + 2**31
        host = HostTokens(
            np.concatenate([user.events.timestamps[:100], times.numpy()]), user.arena.paged(RUNS)
        )
        segments = [replace(segments[0], times=times, host=host)]
    elif change == "pages":
        segments = [replace(segments[0], host=HostTokens(user.events.timestamps[:120], None))]
    elif change == "arenas":
        other = User(model)
        other.prefill(model, PLAIN, 100)
        segments.append(other.segment(100, 20, 5))
    got = model(backend, segments)
    assert fell == ["hstu_attention"]
    assert says in caplog.text
    for own, segment in zip(got, segments, strict=True):
        torch.testing.assert_close(own, plainly(model, segment), rtol=0, atol=0.1)


def test_pages_of_another_dtype_do_not_fit(
    backend: NPUBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.on_fallback = lambda _op: None
    model = tiny_model(torch.bfloat16, qk_dim=16)
    segment = User(tiny_model(qk_dim=16)).segment(100, 20, 5)
    batch = batch_on_host(model.config, [segment])
    assert batch is not None
    assert fused_layers(model.config, model.attention_scale, model.dtype, backend, batch) is None
    assert "pages in torch.float32 under a model in torch.bfloat16" in caplog.text


def test_segments_that_the_host_does_not_know_or_scales_that_differ(backend: NPUBackend) -> None:
    model = tiny_model(qk_dim=16, scaling="runtime")
    user = User(model)
    segments = [user.segment(0, 50, 5), user.segment(0, 60, 5)]
    for batch in (segments, [replace(segments[0], host=None)], segments[1:]):
        for own, segment in zip(model(backend, batch), batch, strict=True):
            torch.testing.assert_close(own, plainly(model, segment), rtol=0, atol=2e-5)


def test_slots_leave_little_empty() -> None:
    for count in range(1, 40_000, 37):
        rows, keys = row_slots(count), key_slots(count)
        assert rows >= count
        assert rows % 32 == 0
        assert rows < 2 * max(count, 32)
        assert keys >= count
        assert keys % 256 == 0
        assert keys <= max(1.07 * count, count + 256)
    assert row_slots(0) == 32
    assert key_slots(4672) == 4864


class Planner:
    """The kernels' plans: `rejections` runs them with nothing to do."""

    def __init__(self, emulator: Emulator, units: VectorUnits) -> None:
        self.emulator = emulator
        self.on = Machine(1, ub_bytes=units.ub_bytes)

    def rejections(self, slots: Slots, ids: int, group: int) -> list[str]:
        sizes = HstuSizes(*slots[:6], NAMES[slots.dtype])
        kind = np.float32 if slots.dtype == torch.float32 else np.uint16
        nothing = np.zeros((1, 1), kind)
        empty = np.zeros((slots.requests, 8), np.int32)
        plane = np.zeros((1, 64, slots.num_heads, slots.qk_dim), kind)
        times = (
            np.zeros((slots.requests, slots.rows), np.int32),
            np.zeros((slots.requests, slots.keys), np.int32),
        )
        bounds = np.zeros((slots.requests, slots.rows // 32 + slots.keys // 256, 2), np.int32)
        tables = (
            np.zeros((slots.num_heads, 2, 64), np.float32),
            np.zeros((slots.num_heads, 8, 577), np.float32),
        )
        norm = np.zeros((2, group), np.float32)
        page_ids = np.zeros(ids, np.int32)
        runs: list[Callable[[], object]] = [
            lambda: hstu_rows(
                self.emulator,
                sizes,
                nothing,
                empty,
                page_ids,
                (plane, plane),
                (nothing,) * 4,
                on=self.on,
            ),
            lambda: hstu_scores(
                self.emulator, sizes, nothing, empty, bounds, *times, *tables, on=self.on
            ),
            lambda: hstu_finish(
                self.emulator,
                sizes,
                nothing,
                nothing,
                norm,
                empty,
                nothing[None],
                scale=1,
                eps=1,
                on=self.on,
            ),
        ]
        found = []
        for run in runs:
            try:
                run()
            except NoPlanError as error:
                found.append(str(error))
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_limits_are_those_of_the_planner(emulator: Emulator, dtype: torch.dtype) -> None:
    """Where the planner has no plan on the least machine, Python has a reason; and only there."""
    units = VectorUnits()
    planner = Planner(emulator, units)
    answers = set()
    for heads, dim, requests, of_row, ids in product(
        (1, 4, 16), (16, 20, 640), (1, 8), (True, False), (0, 40_000)
    ):
        slots = Slots(requests, 512, 4096, heads, dim, dim, dtype)
        group = heads * dim if of_row else dim
        rejected = planner.rejections(slots, ids, group)
        limit = hstu_limit(slots, 64, ids, group, False, units)
        answers.add(limit)
        assert (limit is None) == (not rejected), (slots, limit, rejected)
        assert limit is None or limit in rejected
    assert len(answers) >= 3


def test_scores_larger_than_their_workspace_are_made_in_blocks(
    backend: NPUBackend, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By requests and by rows, candidates of one request in several blocks: the same bits."""
    model = tiny_model(qk_dim=16)
    user = User(model)
    user.prefill(model, PLAIN, 120)
    batch = [
        user.segment(120, 0, 37),
        user.segment(70, 50, 20),
        user.segment(0, 120, 33),
        user.segment(118, 2, 1),
    ]
    passes = backend._passes
    assert passes is not None
    passes.graphs = None
    want = model(backend, batch)
    library = torch.library.Library("npu_gr", "IMPL")
    on_emulator = HstuOnEmulator(emulator)
    heads, keys = model.config.num_heads, key_slots(153)
    try:
        for rows_together, parts in ((2 * row_slots(153), 2), (row_slots(153), 4), (32, 11)):
            most = 4 * heads * keys * rows_together
            monkeypatch.setattr(hstu_slots, "MAX_SCORE_BYTES", most)
            for number, (own, right) in enumerate(zip(model(backend, batch), want, strict=True)):
                torch.testing.assert_close(own, right, rtol=0, atol=1e-5, msg=f"request {number}")
            slots = Slots(4, row_slots(153), keys, heads, 16, 16, torch.float32)
            blocks = hstu_slots.score_blocks(slots, [37, 70, 153, 3])
            assert len(blocks) == parts
        for name in ("hstu_rows", "hstu_scores", "hstu_finish"):
            library.impl(name, getattr(on_emulator, name), "CPU")
        for own, right in zip(model(backend, batch), want, strict=True):
            torch.testing.assert_close(own, right, rtol=0, atol=2e-5)
    finally:
        library._destroy()


def test_eight_long_cached_ranks_stay_on_the_kernels(
    backend: NPUBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What eight ranks of 15k tokens are to the limit, these are to a small one."""
    monkeypatch.setattr(hstu_slots, "MAX_SCORE_BYTES", 1 << 17)
    model = tiny_model(torch.bfloat16, qk_dim=16)
    user = User(model)
    user.prefill(model, backend, 70)
    recorder = Recorder()
    assert backend._passes is not None
    backend._passes.graphs = None
    with recorder:
        made = model(backend, [user.segment(70, 0, 37)] * 8)
    assert not recorder.off_the_ai_core()
    assert {"npu_gr::hstu_scores"} <= {kernel.op for kernel in recorder.seen}
    (alone,) = model(backend, [user.segment(70, 0, 37)])
    for each in made:
        assert torch.equal(each, alone)


def test_no_pass_that_the_scheduler_forms_exceeds_a_limit() -> None:
    """Any requests, rows and keys of the shipped limits, and of four times those, in both slots."""
    random = np.random.default_rng(3)
    for _ in range(300):
        requests = int(random.integers(1, 17))
        rows = int(random.integers(1, 8193))
        keys = rows + int(random.integers(0, 65_536))
        for choose in (graph_slots, tight_slots):
            padded = choose(requests, rows, keys)
            slots = Slots(padded.requests, padded.rows, padded.keys, 4, 64, 64, torch.bfloat16)
            ids = padded.requests * -(-padded.keys // 128)
            assert hstu_limit(slots, 128, ids, 256, True) is None, slots
            for block in hstu_slots.score_blocks(slots, [rows] * padded.requests):
                count = (block.end - block.first) * (block.end_row - block.first_row)
                assert 0 < 2 * 4 * count * padded.keys <= MAX_SCORE_BYTES


def test_sixty_graphs_are_enough_for_a_trace() -> None:
    """Of ranks of 200 to 15k tokens in batches of 1 to 8, and the chunks of their prefills."""
    shapes = {shape[:3] for shape in graph_shapes(8, 15_000, 1024)}
    assert len(list(graph_shapes(8, 15_000, 1024))) < 60
    random = np.random.default_rng(5)
    for _ in range(2000):
        requests = int(random.integers(1, 9))
        rows = int(random.integers(1, 1025))
        padded = graph_slots(requests, rows, rows + int(random.integers(0, 15_001)))
        assert padded.is_graph
        assert padded[:3] in shapes
    assert not graph_slots(1, 1025, 2000).is_graph


def test_only_a_backend_with_kernels_and_graphs_captures(backend: NPUBackend) -> None:
    assert backend._passes is not None
    assert backend.graph_shapes(8, 15_000, 1024) == tuple(graph_shapes(8, 15_000, 1024))
    backend._passes.graphs = None
    assert backend.graph_shapes(8, 15_000, 1024) == ()
    assert backend.running("torch").graph_shapes(8, 15_000, 1024) == ()
