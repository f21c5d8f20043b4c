"""Where SCCDR's separation of the domains pays: synthetic pairs with three knobs.

    overlap     share of a user's taste that both domains see; the rest is each domain's own
    edges       target edges of a user, of which `DENSITY` is trained on; the source has `SOURCE`
    popularity  exponent of the items' popularity: 0 = all are equally popular

A user u and an item i have unit vectors; u's taste in a domain is sqrt(overlap) times the shared
vector and sqrt(1 - overlap) times an own one. A user's items are drawn without repetition by
exp(SHARPNESS u . i) rank^-popularity.

SCCDR does not mix the domains in one model, as the simple models of both domains do.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.history import UserKey
from npu_gr.train.evaluate import Graph, HeldOut, unique_edges
from npu_gr.train.match.domains import Domains, NearDuplicates
from npu_gr.train.metrics import F64

USERS, ITEMS, SOURCE = 1500, 400, 30
TASTES = 8  # dimensions of a taste
SHARPNESS = 6.0


class Knob(NamedTuple):
    """One setting of a synthetic pair."""

    overlap: float
    edges: int
    popularity: float

    @property
    def name(self) -> str:
        """Name in lines of the bench."""
        return f"overlap {self.overlap:g}, {self.edges} edges, popularity {self.popularity:g}"


KNOBS = tuple(map(Knob._make, product((0.1, 0.3, 0.5, 0.7, 0.9), (6, 20), (0.0, 1.0))))


def planted_pair(knob: Knob, seed: int, num_users: int = USERS, num_items: int = ITEMS) -> Domains:
    """Draw a pair of domains with the same users; one target edge of each is held out.

    Args:
        knob: Its setting.
        seed: Seed of all draws.
        num_users: Users, who are in both domains.
        num_items: Items of each domain.
    """
    random = np.random.default_rng(seed)
    shared = _units(random, num_users)
    source, target = (
        _edges(random, shared, knob, num_items, count) for count in (SOURCE, knob.edges)
    )
    kept = np.ones(target.shape, np.bool_)
    kept[np.arange(num_users), random.integers(0, target.shape[1], num_users)] = False
    users = np.arange(num_users)
    rest = target[kept].reshape(num_users, -1)
    none = np.empty(0, np.int64)
    graph = _graph(rest, num_items)
    return Domains(
        source=_graph(source, num_items),
        target=graph,
        users=[UserKey("", str(user)) for user in users],
        source_ids=np.arange(num_items) + num_items,
        target_ids=np.arange(num_items),
        test=HeldOut(users, target[~kept]),
        num_testable=num_users,
        near_duplicates=NearDuplicates(none, none),
        owned_near_duplicates=graph.none(),
    )


def _units(random: np.random.Generator, count: int) -> F64:
    rows = random.normal(size=(count, TASTES))
    units: F64 = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return units


def _edges(random: np.random.Generator, shared: F64, knob: Knob, num_items: int, count: int) -> I64:
    """Draw `count` items of each user: int64 [users, count]."""
    own = _units(random, len(shared))
    tastes = np.sqrt(knob.overlap) * shared + np.sqrt(1 - knob.overlap) * own
    logits = SHARPNESS * tastes @ _units(random, num_items).T
    logits -= knob.popularity * np.log(1 + random.permutation(num_items))
    drawn: I64 = np.argsort(-(logits + random.gumbel(size=logits.shape)), axis=1)[:, :count]
    return drawn


def _graph(items: I64, num_items: int) -> Graph:
    users = np.repeat(np.arange(len(items)), items.shape[1])
    return unique_edges(users, items.ravel(), len(items), num_items)
