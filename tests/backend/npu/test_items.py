"""The best items by `masked_topk` equal the reference: any sizes, blocks, ties, filters, no items.

The operator itself is its definition here; in the last test it is the kernel, on the emulator.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend.best_items import Hidden
from npu_gr.backend.npu import items as npu_items
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.core.errors import ConfigError
from npu_gr.vector_search.index import ExactIndex
from tests.backend.npu.fake_device import FakeRuntime
from tests.backend.test_best_items import job, same, sizes
from tests.ops.ascend_emulator import Emulator

REFERENCE = ReferenceBackend()


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)
    made = FakeRuntime()
    with made.recording():
        yield made


@settings(max_examples=80, deadline=None)
@given(**sizes, block=st.sampled_from([32, 64, 4096]))
def test_blocks_and_bits_give_what_sorting_gives(block: int, k: int, **size: int) -> None:
    ascend_ops.register()
    queries, items, hidden = job(**size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npu_items, "MIN_BLOCK_ITEMS", block)
        patch.setattr(npu_items, "BLOCK_SCORES", 1)
        got = npu_items.best_items(queries, items, k, hidden, torch.from_numpy)
    assert same(got, REFERENCE.best_items(queries, items, k, hidden))


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 199)), max_size=60),
    start=st.sampled_from([0, 32, 64]),
    num_items=st.integers(1, 130),
)
def test_words_are_the_packed_mask(
    pairs: list[tuple[int, int]], start: int, num_items: int
) -> None:
    """Pairs outside the block do not count; a pair may be there twice."""
    pairs.sort(key=lambda pair: pair[1])
    found = np.array(pairs, np.int64).reshape(-1, 2)
    hidden = Hidden(torch.from_numpy(found[:, 0].copy()), torch.from_numpy(found[:, 1].copy()))
    place, words = npu_items.hidden_words(hidden, start, num_items)
    mask = np.ones((5, -(-num_items // 32) * 32), np.bool_)
    for query, item in pairs:
        if start <= item < start + num_items:
            mask[query, item - start] = False
    want = np.packbits(mask, axis=1, bitorder="little").view(np.int32).ravel()
    got = np.full(len(want), -1, np.int32)
    got[place] = words
    assert np.array_equal(got, want)
    assert np.array_equal(place, np.flatnonzero(want != -1)), (
        "a word that is all set is not uploaded"
    )


def test_a_search_waits_for_its_result_alone(npu: FakeRuntime) -> None:
    """Over the index as it is served; the pairs go up page-locked, two launches a block."""
    generator = torch.Generator().manual_seed(0)
    items, queries = (torch.randn(n, 16, generator=generator) for n in (500, 3))
    hidden = Hidden(torch.tensor([1, 0, 1]), torch.tensor([7, 40, 41]))
    backend = NPUBackend(npu=npu.as_npu())
    index = ExactIndex(items.numpy(), backend)
    npu.host_waits.clear()
    got = index.search(queries, 20, hidden)
    assert same(got, REFERENCE.best_items(queries, items, 20, hidden))
    assert npu.host_waits == ["numpy"] * 3 + ["cpu"] * 2, (
        "three are host arrays already; then scores and items"
    )
    assert npu.uploads == [True] * 3
    assert backend.ops["best_items"] == "ascend_c"


def test_beyond_the_operators_limit_torch_searches_and_it_is_counted(npu: FakeRuntime) -> None:
    backend, fell = NPUBackend(npu=npu.as_npu()), list[str]()
    backend.on_fallback = fell.append
    queries, items, _ = job(90, 2, 4, 0, 2, 0)
    assert same(
        backend.best_items(queries, items, 2049, None),
        REFERENCE.best_items(queries, items, 2049, None),
    )
    assert fell == ["best_items"]
    nothing = backend.best_items(queries, items[:0], 3, None)
    assert nothing.items.tolist() == [[-1] * 3] * 2
    assert fell == ["best_items"], "a catalogue without items is no limit"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_kernel_finds_them_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search three blocks; each query has its own filter, and one filter hides a whole block."""
    try:
        emulator = Emulator()
    except ConfigError as error:
        pytest.skip(str(error))

    def masked_topk(
        scores: torch.Tensor, bits: torch.Tensor, k: int, bias: None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        value, index, _ = emulator.masked_topk(scores.numpy(), bits.numpy(), k)
        return torch.from_numpy(value), torch.from_numpy(index)

    ascend_ops.register()
    monkeypatch.setattr(torch.ops.npu_gr, "masked_topk", masked_topk)
    monkeypatch.setattr(npu_items, "BLOCK_SCORES", 1)
    queries, items, _ = job(9000, 3, 8, 0, 2, 1)
    every = torch.arange(9000)
    hidden_items = torch.cat([every[every % 3 == 0], every[4096:8192]]).sort().values
    hidden = Hidden(torch.arange(len(hidden_items)) % 3, hidden_items)
    got = npu_items.best_items(queries, items, 100, hidden, torch.from_numpy)
    assert same(got, REFERENCE.best_items(queries, items, 100, hidden))
