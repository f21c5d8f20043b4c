"""One native call for a forward pass gives the result of separate ops, in any chunks and batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from benchmarks.kernels_pass import SegmentWise
from npu_gr.backend.calls import FusedForwardCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import Native, supported
from npu_gr.core.arrays import F32, I64
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.rank_engine import FindPass, RankEngine, RankPass
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU
from tests.models import tiny_model

DTYPES = (torch.float32, torch.bfloat16)
# largest difference from the segment-wise pass, as a share of the largest number; bf16 rounds at
# fewer places
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
NOTHING: I64 = np.empty(0, np.int64)
SHOWN_AT = 1_700_000_000
PAGES = (PageRun(9, 1), PageRun(2, 2), PageRun(5, 3))  # of 64 tokens


class Whole(CPUBackend):
    """The CPU, which must take every pass."""

    def fused_forward(self, call: FusedForwardCall) -> F32 | None:
        found = super().fused_forward(call)
        assert found is not None
        return found


def engine(model: HSTU, backend: CPUBackend, **changes: Any) -> RankEngine:
    shape = model.config
    settings = {
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "qk_dim": shape.qk_dim,
        "v_dim": shape.v_dim,
        "page_tokens": 64, "dtype": str(model.dtype).removeprefix("torch."), "arrangement": "tiles",
    }  # fmt: skip
    layout = KVLayout(**{**settings, **changes})
    return RankEngine(
        model,
        backend,
        None,  # type: ignore[arg-type]
        KVArena(layout, 24, backend.device, pack=backend.pack_kv),
    )


def tokens(count: int, seed: int, is_interleaved: bool = False) -> Tokens:
    random = np.random.default_rng(seed)
    rows = random.integers(0, 300, count)
    actions = np.where(
        np.arange(count) % 2, random.integers(0, 3, count), -1 if is_interleaved else 1
    )
    # some go back in time
    steps = random.integers(-1000, random.choice([4, 1000, 100_000]) + 1, count)
    history = Events(rows + 1000, actions.astype(np.int16), 1_600_000_000 + np.cumsum(steps))
    return Tokens(history, rows, HistoryReport(fingerprint="", num_tokens=count))


class Case(NamedTuple):
    """A model and a history; the seed decides everything."""

    model: HSTU
    tokens: Tokens
    cut: int
    candidates: I64

    @classmethod
    def of(cls, seed: int, dtype: torch.dtype) -> Case:
        random = np.random.default_rng(seed)

        def pick(*values: Any) -> Any:
            return values[random.integers(len(values))]

        model = tiny_model(
            dtype, seed, item_features=(), num_layers=pick(1, 2, 3), num_heads=pick(1, 2, 3),
            dim=pick(8, 20, 33, 64),
            qk_dim=pick(1, 2, 5, 8, 33), v_dim=pick(3, 16, 20, 48), head_dim=pick(7, 24, 80),
            position_buckets=pick(2, 40, 130), activation=pick("u", "uvqk"), residual=pick("add",
            "concat"),
            norm=pick("layer", "group"), positions=pick("none", "none", "start"),
            token=pick("sum", "sum", "interleaved"), relative_bias=pick("position_time", "none"),
            head_activation=pick("silu", "silu", "relu"), head_scale=pick(1.0, 1.0, 2.0),
            alpha=pick(None, 0.3),
            norm_eps=pick(1e-6, 1e-3),
        )  # fmt: skip
        count = pick(0, 1, 17, 63, 64, 65, 130, 200)
        own = tokens(count, seed, model.config.is_interleaved)
        return cls(
            model,
            own,
            int(random.integers(count + 1)),
            random.integers(0, 300, pick(1, 5, 6, 7, 31)),
        )

    def cold(self) -> RankPass:
        return RankPass(self.tokens, 0, self.candidates, SHOWN_AT)

    def prefill(self, first: int, last: int, pages: tuple[PageRun, ...] = PAGES) -> RankPass:
        cached = CachedPrefix(pages, first) if first else None
        return RankPass(self.tokens[:last], 0, NOTHING, 0, cached=cached, keep=pages)

    def ways(self) -> list[RankPass]:
        """Rank with a prefix; compute the rest; compute and store it; compute everything."""
        begun = CachedPrefix(PAGES, self.cut) if self.cut else None
        cold = self.cold()
        delta = cold.leasing(begun, None)
        whole = CachedPrefix(PAGES, len(self.tokens)) if len(self.tokens) else None
        return [cold, delta, delta.leasing(begun, PAGES), cold.leasing(whole, None)]


def off(got: F32, want: F32) -> float:
    """The largest difference, as a share of the largest number."""
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-3)) if want.size else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_gives_the_numbers_of_the_other_pass_and_one_pattern_of_bits(
    native: Native, dtype: torch.dtype
) -> None:
    for seed in range(12):
        case = Case.of(seed, dtype)
        whole, apart = (
            engine(case.model, Whole(isa=native.isa)),
            engine(case.model, SegmentWise(isa=native.isa)),
        )
        for own in (whole, apart):
            own.forward([case.prefill(0, case.cut)])
        found = [whole.forward([way])[0] for way in case.ways()]
        for scores in found[1:]:
            assert scores.tobytes() == found[0].tobytes(), seed
        want = apart.forward([case.cold()])[0]
        apart.forward([case.ways()[2]])
        assert off(found[0], want) <= TOLERANCE[dtype], seed
        # the pages hold what the other pass keeps
        for got, kept in zip(whole.arena.copies(PAGES), apart.arena.copies(PAGES), strict=True):
            assert off(got.float().numpy(), kept.float().numpy()) <= TOLERANCE[dtype], seed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_company_and_steps_change_no_bit(native: Native, dtype: torch.dtype) -> None:
    model = Case.of(1, dtype).model
    one = engine(model, Whole(isa=native.isa))
    interleaved = model.config.is_interleaved
    cases = [
        Case(model, tokens(n, n, interleaved), cut, np.arange(c))
        for n, cut, c in ((130, 64, 7), (0, 0, 3), (65, 1, 100), (200, 130, 1))
    ]
    pages = [
        (PageRun(0, 4),),
        (PageRun(4, 1),),
        (PageRun(8, 1), PageRun(10, 1)),
        (PageRun(13, 2), PageRun(20, 2)),
    ]
    alone = [one.forward([case.cold()])[0] for case in cases]
    one.forward([case.prefill(0, case.cut, own) for case, own in zip(cases, pages, strict=True)])
    batch = [
        case.cold().leasing(
            CachedPrefix(own, case.cut) if case.cut else None, own if case.cut != 64 else None
        )
        for case, own in zip(cases, pages, strict=True)
    ]
    prefill_only = cases[0].prefill(0, 50, (PageRun(22, 1),))
    for got, want in zip(one.forward([prefill_only, *batch])[1:], alone, strict=True):
        assert got.tobytes() == want.tobytes()
    last = cases[-1]
    whole, steps = (PageRun(0, 4),), (PageRun(5, 4),)
    one.forward([last.prefill(0, 200, whole)])
    for start, stop in ((0, 1), (1, 64), (64, 65), (65, 200)):
        one.forward([last.prefill(start, stop, steps)])
    for a, b in zip(one.arena.copies(whole), one.arena.copies(steps), strict=True):
        # keys behind the last token mean nothing
        assert torch.equal(a[:, :3], b[:, :3])
    again = [
        one.forward([last.cold().leasing(CachedPrefix(own, 200), None)])[0]
        for own in (whole, steps)
    ]
    assert again[0].tobytes() == again[1].tobytes() == alone[-1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_next_and_features_go_the_same_way(native: Native, dtype: torch.dtype) -> None:
    """NEXT alone has its own head; together with candidates, the call returns rows."""
    model = tiny_model(dtype, retrieval=True)
    one, other = engine(model, Whole(isa=native.isa)), engine(model, SegmentWise(isa=native.isa))
    history = RankPass(tokens(70, 0), 0, NOTHING, SHOWN_AT)
    work = FindPass(history, 0, NOTHING)
    u = one.find_all([work])[0].vector
    assert off(u, other.find_all([work])[0].vector) <= TOLERANCE[dtype]
    rank = changed(history, candidates=np.arange(5))
    (following,), (asked,) = (
        one._batches.tensors(one.backend, [work], is_next=is_next)
        for work, is_next in ((history, True), (rank, False))
    )
    segments = [following, asked]
    both = [scores.float().numpy() for scores in model(one.backend, segments)]
    assert off(both[0][0], u) <= 1e-5  # the head by torch ops
    assert off(both[1], one.forward([rank])[0]) <= 1e-5


@pytest.fixture
def model() -> HSTU:
    return tiny_model()


def rank(seed: int = 0, candidates: int = 9) -> RankPass:
    return RankPass(tokens(70, seed), 0, np.arange(candidates), SHOWN_AT)


needs_kernels = pytest.mark.skipif(not supported(), reason="no kernels")


@needs_kernels
def test_a_weight_that_is_written_to_or_replaced_is_read_again(model: HSTU) -> None:
    one, other = engine(model, Whole()), engine(model, SegmentWise())
    weights = dict(model.named_parameters())
    read = (
        "norm_in.weight",
        "uvqk.weight",
        "uvqk.bias",
        "out.weight",
        "norm_attention.bias",
        "time_bias",
        "head.0.bias",
    )
    for name in (name for name in weights if name.endswith(read)):
        before = one.forward([rank()])[0]
        with torch.no_grad():
            weights[name].add_(0.25)
        after = one.forward([rank()])[0]
        assert off(after, other.forward([rank()])[0]) <= 1e-5, name
        weights[name].data = weights[name].data + 0.25
        again = one.forward([rank()])[0]
        assert off(again, other.forward([rank()])[0]) <= 1e-5, name
        assert not np.array_equal(before, after), name
        assert not np.array_equal(after, again), name


@needs_kernels
def test_weights_without_a_version_counter_go_segment_by_segment() -> None:
    with torch.inference_mode():
        model = tiny_model()
    backend = CPUBackend()
    one, other = engine(model, backend), engine(model, SegmentWise())
    assert one.forward([rank()])[0].tobytes() == other.forward([rank()])[0].tobytes()
    ours = tiny_model()
    begun = engine(ours, backend)
    begun.forward([rank()])
    with torch.inference_mode():  # a weight is replaced by such a one while it serves
        ours.layers[0].uvqk.weight = torch.nn.Parameter(torch.ones_like(ours.layers[0].uvqk.weight))  # type: ignore[arg-type, union-attr]
    assert (
        begun.forward([rank()])[0].tobytes()
        == engine(ours, SegmentWise()).forward([rank()])[0].tobytes()
    )


@needs_kernels
def test_what_is_outside_is_rejected_by_name(model: HSTU) -> None:
    one = engine(model, Whole())
    good = rank()
    for wrong, kind, says in (
        (changed(good, candidates=np.array([0, 300])), IndexError, "item row"),
        (changed(good, candidates=np.array([-1])), IndexError, "item row"),
        (
            changed(good, tokens=changed(good.tokens, rows=good.tokens.rows + 300)),
            IndexError,
            "item row",
        ),
        (changed(good, keep=(PageRun(0, 1),)), ValueError, "fewer pages than tokens"),
        (changed(good, keep=(PageRun(23, 2),)), ValueError, "outside of its arena"),
        (changed(good, keep=(PageRun(-1, 2),)), ValueError, "outside of its arena"),
    ):
        with pytest.raises(kind, match=says):
            one.forward([wrong])
    actions = good.tokens.events.actions.copy()
    actions[3] = 4
    history = changed(good.tokens, events=changed(good.tokens.events, actions=actions))
    with pytest.raises(IndexError, match="an action"):
        one.forward([changed(good, tokens=history)])
    (segment,) = one._batches.tensors(one.backend, [good], is_next=False)
    assert segment.host is not None
    with pytest.raises(ValueError, match="ids are not those of its rows"):
        model(one.backend, [replace(segment, host=segment.host._replace(ids=None))])
    assert one.forward([good])[0].shape == (9, 2)


@needs_kernels
def test_what_the_call_does_not_know_goes_segment_by_segment() -> None:
    """Another dtype, other pages, other layers, a scale of each request."""
    backend = CPUBackend()
    for changes, layout in (
        ({"dtype": torch.float64}, {}),
        ({}, {"arrangement": "natural"}),
        ({}, {"dtype": "bfloat16"}),
        ({"norm": "head"}, {}),
        ({"scaling": "runtime"}, {}),
    ):
        model = tiny_model(**changes)
        if model.dtype == torch.float64:
            layout = {"arrangement": "natural"}
        answers = list[object]()

        class Noted(CPUBackend):
            def fused_forward(self, call: FusedForwardCall) -> F32 | None:
                answers.append(super().fused_forward(call))  # noqa: B023  (called in this round alone)
                return answers[-1]  # type: ignore[return-value]  # noqa: B023

        one, other = engine(model, Noted(), **layout), engine(model, backend, **layout)
        kept = changed(rank(), keep=PAGES)
        assert off(one.forward([kept])[0], other.forward([kept])[0]) == 0
        assert not any(answer is not None for answer in answers), (changes, layout)


@needs_kernels
def test_threads_at_once_and_scratch_that_grows(model: HSTU) -> None:
    one = engine(model, Whole())
    passes = [[rank(seed, 1 + 37 * seed) for seed in range(first, first + 2)] for first in range(6)]
    want = [one.forward(batch) for batch in passes]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(one.forward, passes * 3))
    for found, expected in zip(got, want * 3, strict=True):
        for a, b in zip(found, expected, strict=True):
            assert a.tobytes() == b.tobytes()


def test_the_call_releases_the_lock(native: Native) -> None:
    """A ctypes function type that keeps the interpreter's lock has the flag of the Python API."""
    keeps_lock = 4
    assert not type(native.kernels.hstu_pass)._flags_ & keeps_lock


@needs_kernels
def test_a_rank_makes_no_tensor(model: HSTU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives the interpreter up to let a tensor go, and a busy event loop has it for long."""
    backend = Whole()
    one = engine(model, backend)
    one.forward([changed(rank(), keep=PAGES)])
    cached = changed(rank(), cached=CachedPrefix(PAGES, len(rank().tokens)))
    want = one.forward([cached, rank(1, 40)])

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("a tensor is made")

    monkeypatch.setattr(backend, "upload", fails)
    for name in ("from_numpy", "empty", "tensor", "cat", "zeros"):
        monkeypatch.setattr(torch, name, fails)
    got = one.forward([cached, rank(1, 40)])
    assert [own.tobytes() for own in got] == [own.tobytes() for own in want]
