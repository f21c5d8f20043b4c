"""A folded vector is the encoder's: the trained one of a trained user.

Of a new user, one computed edge by edge.

Folders of earlier versions hold foldings of other encoders too: other weights, activations, and
none at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.train.evaluate import Graph
from npu_gr.train.match.model import GraphEncoder
from npu_gr.vector_search.fold import Folding

DIM, NUM_ITEMS, NUM_LAYERS = 8, 30, 2


def make_graph() -> Graph:
    """Items 27 and later have no edge."""
    random = np.random.default_rng(0)
    edges = np.unique(random.integers(0, 12 * 27, 80))
    return Graph(edges // 27, edges % 27, 12, NUM_ITEMS)


def by_hand(folding: Folding, items: list[int]) -> torch.Tensor:
    """One more user, edge by edge, in double precision."""
    activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda x: x,
        "tanh": torch.tanh,
        "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
    }
    own = total = torch.zeros(DIM, dtype=torch.float64)
    for layer, states in enumerate(torch.from_numpy(folding.states).double()):
        near = torch.zeros(DIM, dtype=torch.float64)
        for item in items:
            weight = (
                1 / len(items)
                if folding.norm == "mean"
                else (len(items) * folding.degrees[item]) ** -0.5
            )
            near = near + weight * states[item]
        if folding.matrices is not None:
            matrix = torch.from_numpy(folding.matrices[layer]).double()
            own = activations[folding.activation](own @ matrix[:DIM] + near @ matrix[DIM:])
        else:
            own = near
        total = total + own
    return total / (len(folding.states) + 1)


@torch.no_grad()
def test_it_is_the_encoder() -> None:
    graph, generator = make_graph(), torch.Generator().manual_seed(0)
    encoder = GraphEncoder(graph, DIM, NUM_LAYERS, generator)
    for weight in encoder.weights:
        weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    folding = encoder.folding(graph.degrees()[1])
    users, _ = encoder()
    for user in range(graph.num_users):
        items = graph.items[graph.users == user]
        if len(items):
            assert np.allclose(folding.vector(user, items), users[user].numpy(), atol=1e-5)
    sold = np.unique(graph.items)[[2, 5, 11]]
    items = folding.trained(np.array([*sold, 29]))
    assert items.tolist() == sold.tolist()
    assert np.allclose(
        folding.vector(-1, items), by_hand(folding, sold.tolist()).numpy(), atol=1e-5
    )


@pytest.mark.parametrize(
    ("norm", "activation", "has_matrices"),
    [("symmetric", "tanh", True), ("mean", "leaky_relu", True), ("symmetric", "none", False)],
)
def test_foldings_of_other_encoders_are_computed_as_they_were(
    norm: Any, activation: Any, has_matrices: bool
) -> None:
    random = np.random.default_rng(0)
    folding = Folding(
        users=None,
        states=random.normal(size=(NUM_LAYERS, NUM_ITEMS, DIM)).astype(np.float32),
        matrices=random.normal(size=(NUM_LAYERS, 2 * DIM, DIM)).astype(np.float32)
        if has_matrices
        else None,
        degrees=make_graph().degrees()[1],
        norm=norm,
        activation=activation,
    )
    items = np.unique(make_graph().items)[[2, 5, 11]]
    assert np.allclose(
        folding.vector(-1, items), by_hand(folding, items.tolist()).numpy(), atol=1e-5
    )
