"""The linear baselines are their definitions, written densely; the spectrum has converged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npu_gr.core.errors import DataError
from npu_gr.train import linear
from npu_gr.train.evaluate import Graph, unique_edges
from npu_gr.train.linear import EASE, ItemKNN, PureSVD, spectrum


def make_graph(num_users: int, num_items: int, seed: int = 0) -> Graph:
    """The last item has no edge, nor has the last user."""
    random = np.random.default_rng(seed)
    users, items = random.integers(0, num_users - 1, 150), random.integers(0, num_items - 1, 150)
    return unique_edges(users, items, num_users, num_items)


def dense(graph: Graph) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    out = np.zeros((graph.num_users, graph.num_items))
    out[graph.users, graph.items] = 1
    return out


@pytest.mark.parametrize(("a", "b"), [(0.0, 0.5), (0.5, 0.0), (1.0, 1.0)])
def test_item_knn_is_its_formula(a: float, b: float) -> None:
    graph = make_graph(12, 20)
    x = dense(graph)
    of_users, of_items = x.sum(1).clip(1), x.sum(0).clip(1)
    want = (x * of_items**-b) @ (x.T @ (x / of_users[:, None] ** a)) * of_items**-0.5
    model = ItemKNN(graph, 15, a, b)
    np.testing.assert_allclose(model.scores(torch.arange(12)), want[:, :15], atol=1e-4)
    table = of_items[:, None] ** -b * (x.T @ (x / of_users[:, None] ** a)) * of_items**-0.5
    np.testing.assert_allclose(model.own, table.diagonal()[:15], atol=1e-5)
    np.fill_diagonal(table, 0)
    for start, stop in ((0, 7), (7, 15), (12, 20)):
        np.testing.assert_allclose(model.weights(start, stop), table[start:stop, :15], atol=1e-5)


# by users' kernel, by items' matrix
@pytest.mark.parametrize(("num_users", "num_items"), [(12, 20), (20, 12)])
def test_ease_is_its_formula(
    num_users: int, num_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "BLOCK_ROWS", 5)
    graph = make_graph(num_users, num_items)
    x = dense(graph)
    inverse = np.linalg.inv(x.T @ x + 3 * np.eye(num_items))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    model = EASE(graph, 10, 3.0)
    found = model.scores(torch.arange(num_users))
    np.testing.assert_allclose(found, (x @ weights)[:, :10], atol=1e-4)
    np.testing.assert_allclose(
        torch.cat([model.weights(0, 3), model.weights(3, 10)]), weights[:10, :10], atol=1e-5
    )


def test_ease_too_large_to_invert_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MAX_SIDE", 11)
    with pytest.raises(DataError, match=r"of at most 11 users or items, .* 12 users and 20"):
        EASE(make_graph(12, 20), 20, 1.0)


def test_the_spectrum_is_the_whole_decomposition() -> None:
    graph = make_graph(60, 40)
    x = dense(graph)
    columns = x.sum(0).clip(1) ** -0.25
    matrix = x / np.sqrt(x.sum(1).clip(1))[:, None] * columns
    _, values, _ = np.linalg.svd(matrix)
    found = spectrum(graph, 0.25, 8)
    np.testing.assert_allclose(found.values, values[:8], rtol=1e-4)
    np.testing.assert_allclose(found.columns, columns, rtol=1e-5)
    np.testing.assert_allclose(matrix @ found.items.numpy(), found.users * found.values, atol=1e-3)
    scores = PureSVD(found, 30, 4, 3.0).scores(torch.tensor([3, 1]))
    want = (found.users[[3, 1], :4] * found.values[:4] ** 3) @ found.items[:30, :4].T
    np.testing.assert_allclose(scores, want)
