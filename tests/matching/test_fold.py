"""A folded vector is the encoder's: of a trained user the trained one, of a new one what a node by hand gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.request import I64, Basis
from npu_gr.matching.fold import Folding
from npu_gr.matching.matcher import Matcher
from npu_gr.matching.vectors import load, save
from npu_gr.train.match.graph import Graph
from npu_gr.train.match.model import Encoder
from tests.matching.vectors import COLD, FIRST_ID, KNOWN, make_vectors

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


def make_encoder(kind: Any, norm: Any, activation: Any) -> Encoder:
    generator = torch.Generator().manual_seed(0)
    encoder = Encoder(make_graph(), DIM, 2, kind, norm, activation, None, generator)
    with torch.no_grad():
        for weight in encoder.weights:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
    return encoder


def by_hand(encoder: Encoder, graph: Graph, items: list[int], activation: str) -> torch.Tensor:
    """One more user, edge by edge, in double precision."""
    act = {"none": lambda x: x, "tanh": torch.tanh, "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2)}
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
            own = act[activation](own @ matrix[:DIM] + near @ matrix[DIM:])
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


def make_folding(num_users: int = 3, num_items: int = 40) -> Folding:
    random = np.random.default_rng(1)

    def rows(*shape: int) -> Any:
        return random.integers(-3, 4, shape).astype(np.float32)

    degrees = np.ones(num_items, np.int64)
    degrees[20] = 0
    return Folding(
        users=rows(num_users, 8),
        states=rows(2, num_items, 8),
        matrices=rows(2, 16, 8),
        degrees=degrees,
        norm="mean",
        activation="none",
    )


def ids(*rows: int) -> I64:
    return np.array([row * 2 + FIRST_ID for row in rows], np.int64)


def test_who_is_folded_and_what_is_found(tmp_path: Path) -> None:
    save(make_vectors(folding=make_folding()), tmp_path)
    vectors = load(tmp_path)
    matcher = Matcher(vectors, "exact", CPUBackend())
    assert vectors.folding is not None

    def search(user: str, *rows: int, **changes: Any) -> Any:
        asked: dict[str, Any] = {"exclude_seen": True, "allow_items": None, "deny_items": None} | changes
        return matcher.search_for(user, 6, history=ids(*rows), **asked)

    assert search("stranger").basis is Basis.POPULARITY
    assert search("stranger", 20, -3).basis is Basis.POPULARITY  # an item that learnt nothing, one that is unknown
    assert search(KNOWN, 1, 5).basis is Basis.TARGET  # nothing that the training did not know
    assert search(COLD).basis is Basis.SOURCE
    stranger, known, cold = search("stranger", 9, 3, 9, 20), search(KNOWN, 9), search(COLD, 3)
    assert [s.basis for s in (stranger, known, cold)] == [Basis.FOLDED] * 3
    assert known.history.tolist() == [1, 5, 7, 9]  # with what it had when trained
    assert stranger.hidden.tolist() == [3, 9, 20]
    few = search("stranger", 9, 3, allow_items=ids(3, 4, 6), exclude_seen=False)
    answers = matcher.run([stranger, search(KNOWN), known, few])
    for asked, found in zip((stranger, known), (answers[0], answers[2]), strict=True):
        scores = vectors.items @ vectors.folding.vector(asked.user, asked.history)
        best = [row for row in np.argsort(-scores, kind="stable") if row not in asked.hidden][:6]
        assert found.items.tolist() == best
    assert sorted(answers[3].items.tolist()) == [3, 4, 6]


def test_without_a_folding_users_stay_as_they_were_trained() -> None:
    matcher = Matcher(make_vectors(), "exact", CPUBackend())
    found = matcher.search_for("stranger", 5, True, None, None, ids(3, 9))
    assert found.basis is Basis.POPULARITY
    assert found.hidden.tolist() == [3, 9]
