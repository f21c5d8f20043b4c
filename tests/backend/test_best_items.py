"""Every backend finds the best items as the reference does: any sizes, ties, filters, few items."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.backend.best_items import Best, Hidden, top_k
from npu_gr.backend.cpu.items import NativeItems
from npu_gr.backend.cpu.library import Native
from npu_gr.backend.reference import ReferenceBackend

REFERENCE = ReferenceBackend()

sizes = {
    "num_items": st.integers(1, 90),
    "num_queries": st.integers(1, 6),
    "dim": st.sampled_from([1, 3, 16, 21, 32, 64]),
    "k": st.integers(1, 100),
    "num_hidden": st.integers(0, 60),
    "levels": st.integers(1, 4),
    "seed": st.integers(0, 1000),
}


def job(
    num_items: int, num_queries: int, dim: int, num_hidden: int, levels: int, seed: int
) -> tuple[Tensor, Tensor, Hidden | None]:
    """Few values, so many ties, and sums that are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    queries, items = (
        torch.randint(-levels, levels + 1, (n, dim), generator=generator).float()
        for n in (num_queries, num_items)
    )
    rows = torch.randint(num_items, (num_hidden,), generator=generator).sort().values
    hidden = Hidden(torch.randint(num_queries, (num_hidden,), generator=generator), rows)
    return queries, items, hidden if num_hidden else None


def same(got: Best, want: Best) -> bool:
    return torch.equal(got.items, want.items) and torch.equal(got.scores, want.scores)


@settings(max_examples=80, deadline=None)
@given(**sizes, block=st.integers(1, 40))
def test_blocks_give_what_sorting_gives(block: int, k: int, **size: int) -> None:
    queries, items, hidden = job(**size)
    assert same(
        top_k(queries, items, k, hidden, block), REFERENCE.best_items(queries, items, k, hidden)
    )


@settings(max_examples=80, deadline=None)
@given(**sizes)
def test_the_kernel_gives_what_sorting_gives(native: Native, k: int, **size: int) -> None:
    queries, items, hidden = job(**size)
    assert same(
        NativeItems(native)(queries, items, k, hidden),
        REFERENCE.best_items(queries, items, k, hidden),
    )


@pytest.mark.parametrize("dim", [40, 64])
def test_a_query_gets_the_same_bits_alone_and_in_a_batch(native: Native, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    queries, items = (torch.randn(n, dim, generator=generator) for n in (5, 20_003))
    find = NativeItems(native)
    together = find(queries, items, 50, None)
    want = REFERENCE.best_items(queries.double(), items.double(), 50, None)
    assert torch.allclose(together.scores.double(), want.scores, atol=1e-4)
    for row in range(5):
        alone = find(queries[row : row + 1], items, 50, None)
        assert torch.equal(alone.scores[0], together.scores[row])
        assert torch.equal(alone.items[0], together.items[row])


@pytest.mark.parametrize("dim", [1, 24, 40, 64, 128])
def test_a_product_has_the_bits_that_the_search_gives(native: Native, dim: int) -> None:
    """Wherever the item stands, the last ones too, which fill no register."""
    generator = torch.Generator().manual_seed(dim)
    queries, items = (torch.randn(n, dim, generator=generator) for n in (3, 205))
    kernel = NativeItems(native)
    best = kernel(queries, items, 205, None)
    for query, scores, rows in zip(queries, best.scores, best.items, strict=True):
        assert torch.equal(kernel.products(query, items, rows), scores)
        want = REFERENCE.item_products(query.double(), items.double(), rows)
        assert torch.allclose(scores.double(), want, atol=1e-4)
    assert kernel.products(queries[0], items, rows[:0]).shape == (0,)
    for wrong in (-1, 205):
        with pytest.raises(IndexError, match="outside of the 205 items"):
            kernel.products(queries[0], items, torch.tensor([0, wrong]))


def test_blocks_give_a_query_the_same_alone_and_in_a_batch() -> None:
    queries, items, _ = job(20_000, 33, 8, 0, 4, 0)
    together = top_k(queries, items, 50)
    for row in (0, 17, 32):
        assert torch.equal(top_k(queries[row : row + 1], items, 50).items[0], together.items[row])


def test_rising_scores_and_nothing_but_hidden_items(native: Native) -> None:
    """The threshold never helps, and a query may have no item at all."""
    items = torch.arange(5000.0)[:, None].expand(5000, 16).contiguous()
    found = NativeItems(native)(torch.full((1, 16), 0.0625), items, 3, None)
    assert found.items.tolist() == [[4999, 4998, 4997]]
    hidden = Hidden(torch.zeros(5000, dtype=torch.int64), torch.arange(5000))
    found = NativeItems(native)(torch.ones(2, 16), items, 2, hidden)
    assert found.items.tolist() == [[-1, -1], [4999, 4998]]
    assert found.scores[0].tolist() == [-torch.inf, -torch.inf]
