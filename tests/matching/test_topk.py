"""Exact top-k: brute force in every block size, also among ties, with hidden items, and with fewer items than k."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.matching.index import ExactIndex, HnswIndex, recall
from npu_gr.matching.topk import Best, Hidden, reference_top_k, top_k


def hide(num_queries: int, num_items: int, n: int, generator: torch.Generator) -> Hidden:
    items = torch.randint(num_items, (n,), generator=generator).sort().values
    return Hidden(torch.randint(num_queries, (n,), generator=generator), items)


@settings(max_examples=80, deadline=None)
@given(
    num_items=st.integers(1, 90),
    num_queries=st.integers(1, 6),
    k=st.integers(1, 100),
    block=st.integers(1, 40),
    num_hidden=st.integers(0, 60),
    levels=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_it_is_brute_force(
    num_items: int, num_queries: int, k: int, block: int, num_hidden: int, levels: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, items = (
        torch.randint(-levels, levels + 1, (n, 3), generator=generator).float() for n in (num_queries, num_items)
    )  # few values: many ties
    hidden = hide(num_queries, num_items, num_hidden, generator) if num_hidden else None
    ours, want = top_k(queries, items, k, hidden, block), reference_top_k(queries, items, k, hidden)
    assert torch.equal(ours.items, want.items)
    assert torch.equal(ours.scores, want.scores)


def test_a_request_gets_the_same_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, items = (torch.randint(-4, 5, (n, 8), generator=generator).float() for n in (33, 20_000))
    together = top_k(queries, items, 50)
    for row in (0, 17, 32):
        alone = top_k(queries[row : row + 1], items, 50)
        assert torch.equal(alone.items[0], together.items[row])


def test_hnsw_finds_most_and_never_a_hidden_item() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    generator = torch.Generator().manual_seed(0)
    queries, items = (torch.randn(n, 16, generator=generator) for n in (20, 5000))
    exact, near = ExactIndex(items.numpy(), torch.device("cpu")), HnswIndex(items.numpy())
    assert recall(near.search(queries, 20), exact.search(queries, 20)) >= 0.95
    best = exact.search(queries, 5)
    order = best.items.flatten().argsort(stable=True)
    hidden = Hidden(torch.arange(20).repeat_interleave(5)[order], best.items.flatten()[order])
    found, want = near.search(queries, 20, hidden), exact.search(queries, 20, hidden)
    assert not (found.items[:, :, None] == best.items[:, None]).any()
    assert recall(found, want) >= 0.95
    assert near.search(queries, 6000).items.shape == (20, 6000)


def test_recall_counts_shares() -> None:
    def best(rows: list[list[int]]) -> Best:
        return Best(torch.zeros(len(rows), len(rows[0])), torch.tensor(rows))

    assert recall(best([[1, 2, 9]]), best([[1, 2, 3]])) == pytest.approx(2 / 3)
    assert recall(best([[1, -1, -1]]), best([[1, -1, -1]])) == 1
