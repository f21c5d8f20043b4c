"""Two domains that share users, and what of the target is trained on, validated on and tested on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.request import I64
from npu_gr.features.interactions import read_edges
from npu_gr.train.match.graph import Graph

MIN_EDGES_TO_TEST = 3  # of a user one of whose edges is held out


class Held(NamedTuple):
    """One held-out item a user, by rows; each user once."""

    users: I64  # [n]
    items: I64  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class Domains:
    """Everything that is known of both. A user has the same row in both graphs."""

    source: Graph
    target: Graph
    user_names: list[str]
    source_ids: I64  # external id of each item row
    target_ids: I64
    test: Held  # of the target; no edges of its graph


@dataclass(frozen=True, slots=True, eq=False)
class MatchData:
    """What one training sees."""

    source: Graph
    target: Graph
    validation: Held  # of the target; no edges of its graph


def read_domains(
    source: Path,
    target: Path,
    test: Path | None = None,
    *,
    user_column: str = "user_id",
    item_column: str = "item_id",
) -> Domains:
    """Read two interaction files, and the test edges of the target.

    Args:
        source: `.jsonl`, an atomic file, or a TSV of user and item.
        target: the same.
        test: the same, one line a user; None: one random edge of every user with three or more is held out.
        user_column: of the user, in files with named columns.
        item_column: of the item.

    Raises:
        DataError: names the file and the line; or a domain is empty, or the domains share no user.
    """
    columns = {"user_column": user_column, "item_column": item_column}
    files = [source, target, *([test] if test else [])]
    tables = [read_edges(path, **columns) for path in files]
    for path, (users, _) in zip(files, tables, strict=True):
        if not users:
            raise DataError(f"{path}: no interaction")
    codes = {name: row for row, name in enumerate(dict.fromkeys(name for users, _ in tables for name in users))}
    rows = [np.array([codes[name] for name in users], np.int64) for users, _ in tables]
    if not np.isin(rows[0], rows[1]).any():
        raise DataError(f"{source} and {target} share no user")
    source_ids, target_ids = np.unique(tables[0][1]), np.unique(np.concatenate([items for _, items in tables[1:]]))
    graph = _graph(rows[1], np.searchsorted(target_ids, tables[1][1]), len(codes), len(target_ids))
    if test:
        if len(np.unique(rows[2])) != len(rows[2]):
            raise DataError(f"{test}: more than one line of a user")
        held = Held(rows[2], np.searchsorted(target_ids, tables[2][1]))
    else:
        graph, held = hold_out(graph, np.random.default_rng(0), MIN_EDGES_TO_TEST, graph.num_users)
    return Domains(
        source=_graph(rows[0], np.searchsorted(source_ids, tables[0][1]), len(codes), len(source_ids)),
        target=graph,
        user_names=list(codes),
        source_ids=source_ids,
        target_ids=target_ids,
        test=held,
    )


def split(domains: Domains, density: float, num_validation: int, seed: int) -> MatchData:
    """The target thinned to a share of its edges, less one edge each of some users to validate on.

    Args:
        domains: both.
        density: share of the target's edges that is kept, in (0, 1].
        num_validation: users to validate on at most; each keeps at least one edge.
        seed: of both choices.

    Raises:
        DataError: no user is left to validate on.
    """
    random = np.random.default_rng(seed)
    target = domains.target
    if density < 1:
        target = _part(target, random.random(len(target.users)) < density)
    target, validation = hold_out(target, random, 2, num_validation)
    if not len(validation.users):
        raise DataError("no user has two target edges: there is nothing to validate on")
    return MatchData(domains.source, target, validation)


def hold_out(graph: Graph, random: np.random.Generator, min_edges: int, num_users: int) -> tuple[Graph, Held]:
    """The graph less one random edge each of at most so many random users that have enough."""
    shuffled = random.permutation(len(graph.users))
    users, first = np.unique(graph.users[shuffled], return_index=True)
    chosen = shuffled[first][graph.degrees()[0][users] >= min_edges]
    chosen = np.sort(random.permutation(chosen)[:num_users])
    kept = np.ones(len(graph.users), np.bool_)
    kept[chosen] = False
    return _part(graph, kept), Held(graph.users[chosen], graph.items[chosen])


def _graph(users: I64, items: I64, num_users: int, num_items: int) -> Graph:
    edges = np.unique(users * num_items + items)
    return Graph(edges // num_items, edges % num_items, num_users, num_items)


def _part(graph: Graph, kept: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Graph:
    return Graph(graph.users[kept], graph.items[kept], graph.num_users, graph.num_items)
