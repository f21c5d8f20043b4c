"""The approximate index finds most of what the exact one finds, and never a hidden item."""

from __future__ import annotations

import pytest
import torch

from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.matching.index import ExactIndex, HnswIndex, recall


def test_hnsw_finds_most_and_never_a_hidden_item() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    generator = torch.Generator().manual_seed(0)
    queries, items = (torch.randn(n, 16, generator=generator) for n in (20, 5000))
    exact, near = ExactIndex(items.numpy(), CPUBackend()), HnswIndex(items.numpy())
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
