"""What was written is read back in token order, and a copy between tiers is bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.tiles import natural
from npu_gr.engine.kv_cache import arena as arena_module
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from tests.backend.npu.fake_device import FakeRuntime

CPU = torch.device("cpu")


def layout(dtype: str = "float32", page_tokens: int = 4) -> KVLayout:
    return KVLayout(
        num_layers=2, num_heads=2, qk_dim=3, v_dim=5, page_tokens=page_tokens, dtype=dtype
    )


@st.composite
def runs(draw: st.DrawFn, num_pages: int, arena_pages: int = 16) -> tuple[PageRun, ...]:
    order = draw(st.permutations(range(arena_pages)))[:num_pages]
    return tuple(PageRun(page, 1) for page in order)


def test_sizes() -> None:
    shape = KVLayout(
        num_layers=8, num_heads=4, qk_dim=64, v_dim=64, page_tokens=64, dtype="bfloat16"
    )
    assert shape.bytes(2048) == 16 * 2**20  # 8 KiB a token
    assert shape.pages(1) == 1
    assert shape.pages(65) == 2
    assert layout("bfloat16").layout_id != layout("float32").layout_id


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data(), num_tokens=st.integers(1, 24))
def test_write_in_parts_and_read(data: st.DataObject, num_tokens: int) -> None:
    arena = KVArena(layout(), 16, CPU)
    where = data.draw(runs(arena.layout.pages(num_tokens)))
    k, v = torch.randn(num_tokens, 2, 3), torch.randn(num_tokens, 2, 5)
    cut = data.draw(st.integers(0, num_tokens))
    for part, start in ((slice(0, cut), 0), (slice(cut, num_tokens), cut)):
        arena.write(1, where, start, k[part], v[part])
    read = arena.views(1, where, num_tokens)
    assert torch.equal(torch.cat([slab[0] for slab in read]), k)
    assert torch.equal(torch.cat([slab[1] for slab in read]), v)
    assert not arena.views(0, where, num_tokens)[0][0].any()


def test_views_are_not_copies() -> None:
    arena = KVArena(layout(), 8, CPU)
    ((k, _),) = arena.views(0, (PageRun(2, 3),), 10)
    assert k.shape == (10, 2, 3)
    assert k.is_contiguous()
    k.fill_(7)
    assert bool((arena.views(0, (PageRun(2, 3),), 10)[0][0] == 7).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(deadline=None, derandomize=True, max_examples=25)
@given(data=st.data(), num_tokens=st.integers(1, 40))
def test_the_round_trip_is_bit_exact(dtype: str, data: st.DataObject, num_tokens: int) -> None:
    """Over random pages, NaN payloads included."""
    shape = layout(dtype)
    hbm, dram = KVArena(shape, 16, CPU), KVArena(shape, 16, CPU)
    there, back = data.draw(runs(shape.pages(num_tokens))), data.draw(runs(shape.pages(num_tokens)))
    first = data.draw(runs(shape.pages(num_tokens)))
    bits = torch.int32 if dtype == "float32" else torch.int16
    limit = 2**31 - 1 if dtype == "float32" else 2**15 - 1
    k = torch.randint(-limit, limit, (num_tokens, 2, 3), dtype=bits)
    v = torch.randint(-limit, limit, (num_tokens, 2, 5), dtype=bits)
    for layer in range(2):
        hbm.write(layer, first, 0, k.view(shape.torch_dtype), v.view(shape.torch_dtype))
    dram.copy_tokens_from(hbm, first, there, num_tokens)
    hbm.zero(first)
    assert not any(slab[0].any() for slab in hbm.views(0, first, num_tokens))
    hbm.copy_tokens_from(dram, there, back, num_tokens)
    for layer in range(2):
        read = hbm.views(layer, back, num_tokens)
        assert torch.equal(torch.cat([slab[0] for slab in read]).view(bits), k)
        assert torch.equal(torch.cat([slab[1] for slab in read]).view(bits), v)


def tiled(dtype: str = "float32", page_tokens: int = 64) -> KVLayout:
    return KVLayout(
        num_layers=2,
        num_heads=2,
        qk_dim=3,
        v_dim=5,
        page_tokens=page_tokens,
        dtype=dtype,
        arrangement="tiles",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(deadline=None, derandomize=True, max_examples=25)
@given(data=st.data(), num_tokens=st.integers(1, 400), page_tokens=st.sampled_from((64, 128)))
def test_tiles_written_in_parts_and_copied(
    dtype: str, data: st.DataObject, num_tokens: int, page_tokens: int
) -> None:
    shape = tiled(dtype, page_tokens)
    hbm, dram = (KVArena(shape, 8, CPU, pack=CPUBackend().pack_kv) for _ in range(2))
    where, there = (data.draw(runs(shape.pages(num_tokens), 8)) for _ in range(2))
    k, v = (torch.randn(num_tokens, 2, width).to(shape.torch_dtype) for width in (3, 5))
    cut = data.draw(st.integers(0, num_tokens))
    for part, start in ((slice(0, cut), 0), (slice(cut, num_tokens), cut)):
        hbm.write(1, where, start, k[part], v[part])
    dram.copy_tokens_from(hbm, where, there, num_tokens)
    for arena, pages in ((hbm, where), (dram, there)):
        read = natural(arena.slabs(1, pages, num_tokens))
        assert torch.equal(torch.cat([slab[0] for slab in read]), k)
        assert torch.equal(torch.cat([slab[1] for slab in read]), v)
    hbm.zero(where)
    assert not any(slab[0].any() for slab in natural(hbm.slabs(1, where, num_tokens)))


def test_layouts_never_meet() -> None:
    assert (
        tiled().layout_id
        != KVLayout(num_layers=2, num_heads=2, qk_dim=3, v_dim=5, page_tokens=64).layout_id
    )
    assert tiled().token_bytes == 2 * 2 * (4 + 16) * 4  # padded
    with pytest.raises(ValueError, match="page_tokens: 32 is no multiple"):
        tiled(page_tokens=32)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data(), num_tokens=st.integers(1, 40), chunk_pages=st.integers(1, 5))
def test_page_locked_memory_is_in_chunks_and_copies_cross_them(
    data: st.DataObject, num_tokens: int, chunk_pages: int
) -> None:
    """Copies from a device to small chunks, to others and back are bit for bit, for any runs."""
    shape = layout()
    page_bytes = 2 * 4 * 2 * 5 * 4  # layers x tokens x heads x the wider of keys and values x bytes
    npu = FakeRuntime()
    with pytest.MonkeyPatch.context() as patch, npu.recording():
        patch.setattr(arena_module, "PINNED_CHUNK_BYTES", chunk_pages * page_bytes)
        device, back = KVArena(shape, 16, CPU), KVArena(shape, 16, CPU)
        first, second = KVArena(shape, 16, CPU, pinned=True), KVArena(shape, 13, CPU, pinned=True)
    for chunk in (*first._keys, *first._values):
        assert chunk.nbytes <= chunk_pages * page_bytes
        assert chunk.shape[1] <= chunk_pages
    assert sum(chunk.shape[1] for chunk in second._keys) == 13
    pages = shape.pages(num_tokens)
    where, there, elsewhere, home = (data.draw(runs(pages, size)) for size in (16, 16, 13, 16))
    k, v = torch.randn(num_tokens, 2, 3), torch.randn(num_tokens, 2, 5)
    device.write(1, where, 0, k, v)
    first.copy_tokens_from(device, where, there, num_tokens)
    second.copy_tokens_from(first, there, elsewhere, num_tokens)
    first.zero(there)
    assert not any(chunk.any() for chunk in (*first._keys, *first._values))
    back.copy_tokens_from(second, elsewhere, home, num_tokens)
    read = back.views(1, home, num_tokens)
    assert torch.equal(torch.cat([slab[0] for slab in read]), k)
    assert torch.equal(torch.cat([slab[1] for slab in read]), v)


def test_a_run_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of pages, as the pools give them, cut where chunks end."""
    monkeypatch.setattr(arena_module, "PINNED_CHUNK_BYTES", 3 * 2 * 4 * 2 * 5 * 4)
    device = KVArena(layout(), 12, CPU)
    with FakeRuntime().recording():
        host = KVArena(layout(), 12, CPU, pinned=True)
    k = torch.randn(40, 2, 3)
    device.write(0, (PageRun(1, 10),), 0, k, torch.randn(40, 2, 5))
    host.copy_tokens_from(device, (PageRun(1, 10),), (PageRun(2, 10),), 40)
    device.zero((PageRun(0, 12),))
    device.copy_tokens_from(host, (PageRun(2, 10),), (PageRun(0, 4), PageRun(6, 6)), 40)
    assert torch.equal(
        torch.cat([slab[0] for slab in device.views(0, (PageRun(0, 4), PageRun(6, 6)), 40)]), k
    )
    with pytest.raises(AssertionError, match="several chunks"):
        host.views(0, (PageRun(0, 1),), 1)


def test_the_chunk_is_under_128_mb() -> None:
    assert arena_module.PINNED_CHUNK_BYTES < 128e6
    assert arena_module.PINNED_CHUNK_BYTES & (arena_module.PINNED_CHUNK_BYTES - 1) == 0
