"""What was written is read back in token order, and a copy between tiers is bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.tiles import natural
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import KVLayout, PageRun

CPU = torch.device("cpu")


def layout(dtype: str = "float32", page_tokens: int = 4) -> KVLayout:
    return KVLayout(num_layers=2, num_heads=2, qk_dim=3, v_dim=5, page_tokens=page_tokens, dtype=dtype)


@st.composite
def runs(draw: st.DrawFn, num_pages: int, arena_pages: int = 16) -> tuple[PageRun, ...]:
    order = draw(st.permutations(range(arena_pages)))[:num_pages]
    return tuple(PageRun(page, 1) for page in order)


def test_sizes() -> None:
    shape = KVLayout(num_layers=8, num_heads=4, qk_dim=64, v_dim=64, page_tokens=64, dtype="bfloat16")
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
        num_layers=2, num_heads=2, qk_dim=3, v_dim=5, page_tokens=page_tokens, dtype=dtype, arrangement="tiles"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(deadline=None, derandomize=True, max_examples=25)
@given(data=st.data(), num_tokens=st.integers(1, 400), page_tokens=st.sampled_from((64, 128)))
def test_tiles_written_in_parts_and_copied(dtype: str, data: st.DataObject, num_tokens: int, page_tokens: int) -> None:
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
    assert tiled().layout_id != KVLayout(num_layers=2, num_heads=2, qk_dim=3, v_dim=5, page_tokens=64).layout_id
    assert tiled().token_bytes == 2 * 2 * (4 + 16) * 4  # padded
    with pytest.raises(ValueError, match="page_tokens: 32 is no multiple"):
        tiled(page_tokens=32)
