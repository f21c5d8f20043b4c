"""A folded vector is the encoder's: the trained one of a trained user; of a new user, one computed edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.train.judge import Graph
from npu_gr.train.match.model import GraphEncoder

DIM, NUM_ITEMS = 8, 30
ENCODERS = [
    ("sage", "symmetric", "none"),
    ("sage", "symmetric", "tanh"),
    ("sage", "mean", "leaky_relu"),
    ("lightgcn", "symmetric", "none"),
]


def make_graph() -> Graph:
    """Items 27 and later have no edge."""
    random = np.random.default_rng(0)
    edges = np.unique(random.integers(0, 12 * 27, 80))
    return Graph(edges // 27, edges % 27, 12, NUM_ITEMS)


def make_encoder(kind: Any, norm: Any, activation: Any) -> GraphEncoder:
    generator = torch.Generator().manual_seed(0)
    encoder = GraphEncoder(make_graph(), DIM, 2, kind, norm, activation, None, generator)
    with torch.no_grad():
        for weight in encoder.weights:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    return encoder


def by_hand(encoder: GraphEncoder, graph: Graph, items: list[int], activation: str) -> torch.Tensor:
    """One more user, edge by edge, in double precision."""
    activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda x: x,
        "tanh": torch.tanh,
        "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
    }
    degrees = graph.degrees()[1]
    states = [items.double() for _, items in encoder.states()]
    own = total = torch.zeros(DIM, dtype=torch.float64)
    for layer in range(encoder.num_layers):
        near = torch.zeros(DIM, dtype=torch.float64)
        for item in items:
            weight = 1 / len(items) if encoder.norm == "mean" else (len(items) * degrees[item]) ** -0.5
            near = near + weight * states[layer][item]
        if encoder.weights:
            matrix = encoder.weights[layer].double()
            own = activations[activation](own @ matrix[:DIM] + near @ matrix[DIM:])
        else:
            own = near
        total = total + own
    return total / (encoder.num_layers + 1)


@pytest.mark.parametrize(("kind", "norm", "activation"), ENCODERS)
@torch.no_grad()
def test_it_is_the_encoder(kind: str, norm: str, activation: str) -> None:
    graph, encoder = make_graph(), make_encoder(kind, norm, activation)
    folding = encoder.folding(graph.degrees()[1])
    users, _ = encoder()
    for user in range(graph.num_users):
        items = graph.items[graph.users == user]
        if len(items):
            assert np.allclose(folding.vector(user, items), users[user].numpy(), atol=1e-5)
    sold = np.unique(graph.items)[[2, 5, 11]]
    items = folding.trained(np.array([*sold, 29]))
    assert items.tolist() == sold.tolist()
    want = by_hand(encoder, graph, sold.tolist(), activation)
    assert np.allclose(folding.vector(-1, items), want.numpy(), atol=1e-5)
