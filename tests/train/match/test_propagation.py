"""Sparse propagation, Katz centrality and row products against dense definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npu_gr.train.evaluate import Graph
from npu_gr.train.match.model import dots, katz, propagation, times


def random_graph(seed: int, num_users: int = 9, num_items: int = 7) -> Graph:
    random = np.random.default_rng(seed)
    edges = np.unique(random.integers(0, num_users * (num_items - 1), 20))
    # the last item has no edge
    return Graph(edges // (num_items - 1), edges % (num_items - 1), num_users, num_items)


def dense(graph: Graph) -> torch.Tensor:
    matrix = torch.zeros(graph.num_users, graph.num_items, dtype=torch.float64)
    matrix[torch.from_numpy(graph.users), torch.from_numpy(graph.items)] = 1
    return matrix


def test_propagation_and_its_gradient_are_the_dense_ones() -> None:
    graph = random_graph(0)
    matrix = dense(graph).float()
    want = (
        matrix
        / (
            matrix.sum(1, keepdim=True).clamp(min=1) * matrix.sum(0, keepdim=True).clamp(min=1)
        ).sqrt()
    )
    to_users, to_items = propagation(graph)
    for ours, transposed, expected in ((to_users, to_items, want), (to_items, to_users, want.T)):
        x = torch.randn(expected.shape[1], 5, requires_grad=True)
        weight = torch.randn(expected.shape[0], 5)
        out = times(ours, x, transposed)
        torch.testing.assert_close(out, expected @ x)
        (grad,) = torch.autograd.grad((out * weight).sum(), x)
        torch.testing.assert_close(grad, expected.T @ weight)


def test_katz_is_the_solution_of_the_linear_system_on_the_union_graph() -> None:
    one, two = random_graph(1), random_graph(2, num_items=5)
    users, items = 9, 7 + 5
    adjacency = torch.zeros(users + items, users + items, dtype=torch.float64)
    adjacency[:users, users : users + 7], adjacency[:users, users + 7 :] = dense(one), dense(two)
    adjacency += adjacency.T.clone()
    beta = 0.85 / torch.linalg.eigvalsh(adjacency)[-1]
    want = torch.linalg.solve(
        torch.eye(users + items, dtype=torch.float64) - beta * adjacency, torch.ones(21).double()
    )
    of_users, of_items = katz([one, two])
    torch.testing.assert_close(
        torch.cat([of_users, *of_items]).double(), want, rtol=1e-3, atol=1e-3
    )


def test_dots_are_the_gathered_products_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("npu_gr.train.match.model.CHUNK_BYTES", 200)  # several chunks
    left, right = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    of_left, of_right = torch.randint(6, (11,)), torch.randint(6, (11, 3))
    weight = torch.randn(11, 3)
    ours = dots(left, right, of_left, of_right)
    want = (left[of_left][:, None] * right[of_right]).sum(-1)
    torch.testing.assert_close(ours, want)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), (left, right)),
        torch.autograd.grad((want * weight).sum(), (left, right)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
