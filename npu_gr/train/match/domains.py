"""Read two domains that share users, and split the target's edges into training, validation and test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.history import UserKey
from npu_gr.features.interactions import read_edges
from npu_gr.train.graph import Graph, unique_edges
from npu_gr.train.judge import HeldOut, Judge
from npu_gr.train.match.twins import Twins, are_twins, find_twins, owned_twins

MIN_EDGES_TO_TEST = 3  # edges that a user needs for one of them to be held out for the test


@dataclass(frozen=True, slots=True, eq=False)
class Domains:
    """Both domains. A user has the same row in both graphs."""

    source: Graph
    target: Graph
    users: list[UserKey]  # each row's
    source_ids: I64  # external id of each item row
    target_ids: I64
    test: HeldOut  # edges of the target that are not in its graph
    twins: Twins
    owned_twins: Graph  # target items that are twins of what each user has in the source

    @property
    def ids_are_apart(self) -> bool:
        """Whether no item id is in both domains: then an id says which domain its item is of."""
        return not np.isin(self.source_ids, self.target_ids).any()

    def judge(self) -> Judge:
        """Judge by the test's edges, those of twins left out; what a user has, and twins of it, do not compete."""
        judge = Judge.make(self.test, self.target, self.owned_twins)
        return judge.only(~are_twins(self.test, self.owned_twins))

    def judge_with_twins(self) -> Judge:
        """Judge by all of the test's edges; twins of what a user has compete like any other item."""
        return Judge.make(self.test, self.target)

    def about_twins(self) -> str | None:
        """Warn of the twins; None = there are none."""
        if not len(self.twins.source_items):
            return None
        tested = int(are_twins(self.test, self.owned_twins).sum())
        return (
            f"WARNING: {len(self.twins.source_items)} pairs of a source and a target item have nearly the same users, "
            f"as if one product were listed twice; {tested} of {len(self.test.users)} tested edges "
            f"({tested / max(1, len(self.test.users)):.1%}) ask for such a twin of what the user has. Figures are "
            "printed with them and without."
        )


@dataclass(frozen=True, slots=True, eq=False)
class MatchData:
    """The data of one training."""

    source: Graph
    target: Graph
    validation: HeldOut  # edges of the target that are not in its graph
    owned_twins: Graph  # target items that are twins of what each user has in the source

    def judge(self) -> Judge:
        """Judge by the validation's edges but twins'; what a user has, and twins of it, do not compete."""
        judge = Judge.make(self.validation, self.target, self.owned_twins)
        return judge.only(~are_twins(self.validation, self.owned_twins))

    def whole(self) -> MatchData:
        """The same with the validation's edges back in the target: what a model is refitted to when all is chosen."""
        both = (self.target, self.validation)
        target = Graph(
            np.concatenate([part.users for part in both]),
            np.concatenate([part.items for part in both]),
            self.target.num_users,
            self.target.num_items,
        )
        return replace(self, target=target)


def read_domains(
    source: Path,
    target: Path,
    test: Path | None = None,
    *,
    user_column: str = "user_id",
    item_column: str = "item_id",
    tenant: str = "",
    tenant_column: str | None = None,
) -> Domains:
    """Read the interaction files of two domains, and the test edges of the target.

    Args:
        source: `.jsonl`, a RecBole atomic file, or a TSV of user and item.
        target: in one of the same formats.
        test: in one of the same formats, one line a user; None: hold out one random edge of every user of the target
            who has at least `MIN_EDGES_TO_TEST`.
        user_column: name of the user's column, in files with named columns.
        item_column: name of the item's column.
        tenant: of all users, where there is no column of it. Users of two tenants are two users, whatever their names.
        tenant_column: name of the tenant's column.

    Raises:
        DataError: a line cannot be read (names the file and the line), a domain is empty, the domains share no user,
            or a user has several lines in `test`.
    """
    read = partial(
        read_edges, user_column=user_column, item_column=item_column, tenant=tenant, tenant_column=tenant_column
    )
    files = [source, target, *([test] if test else [])]
    tables = [read(path) for path in files]
    for path, (users, _) in zip(files, tables, strict=True):
        if not users:
            raise DataError(f"{path}: no interaction")
    codes = {user: row for row, user in enumerate(dict.fromkeys(user for users, _ in tables for user in users))}
    rows = [np.array([codes[user] for user in users], np.int64) for users, _ in tables]
    if not np.isin(rows[0], rows[1]).any():
        raise DataError(f"{source} and {target} share no user")
    source_ids = np.unique(tables[0][1])
    target_ids = np.unique(np.concatenate([items for _, items in tables[1:]]))
    graph = unique_edges(rows[1], np.searchsorted(target_ids, tables[1][1]), len(codes), len(target_ids))
    if test:
        if len(np.unique(rows[2])) != len(rows[2]):
            raise DataError(f"{test}: more than one line of a user")
        held_out = HeldOut(rows[2], np.searchsorted(target_ids, tables[2][1]))
    else:
        graph, held_out = hold_out(graph, np.random.default_rng(0), MIN_EDGES_TO_TEST, graph.num_users)
    source_graph = unique_edges(rows[0], np.searchsorted(source_ids, tables[0][1]), len(codes), len(source_ids))
    twins = find_twins(source_graph, graph)
    return Domains(
        source=source_graph,
        target=graph,
        users=list(codes),
        source_ids=source_ids,
        target_ids=target_ids,
        test=held_out,
        twins=twins,
        owned_twins=owned_twins(source_graph, graph, twins),
    )


def split(domains: Domains, density: float, num_validation: int, seed: int) -> MatchData:
    """Thin the target to a share of its edges, and hold out one edge each of some users for the validation.

    Args:
        domains: whole.
        density: share of the target's edges that is kept, in (0, 1].
        num_validation: most users to validate on; each keeps at least one edge.
        seed: of both choices.

    Raises:
        DataError: no user has two edges of the thinned target, or only twins are asked for.
    """
    random = np.random.default_rng(seed)
    target = domains.target
    if density < 1:
        target = _part(target, random.random(len(target.users)) < density)
    target, validation = hold_out(target, random, 2, num_validation)
    if not len(validation.users):
        raise DataError("no user has two target edges: there is nothing to validate on")
    data = MatchData(domains.source, target, validation, domains.owned_twins)
    for name, judge in (("validation", data.judge()), ("test", domains.judge())):
        if not len(judge.held_out.users):
            raise DataError(
                f"every edge of the {name} asks for a twin of what its user has in the source: is it one log?"
            )
    return data


def hold_out(graph: Graph, random: np.random.Generator, min_edges: int, num_users: int) -> tuple[Graph, HeldOut]:
    """Hold out one random edge each of some random users.

    Args:
        graph: is not changed.
        random: draws edges and users.
        min_edges: edges that a user needs to be drawn.
        num_users: most users to draw.

    Returns:
        The graph without the held-out edges, and those edges.
    """
    shuffled = random.permutation(len(graph.users))
    users, first = np.unique(graph.users[shuffled], return_index=True)
    chosen = shuffled[first][graph.degrees()[0][users] >= min_edges]
    chosen = np.sort(random.permutation(chosen)[:num_users])
    kept = np.ones(len(graph.users), np.bool_)
    kept[chosen] = False
    return _part(graph, kept), HeldOut(graph.users[chosen], graph.items[chosen])


def _part(graph: Graph, kept: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Graph:
    return Graph(graph.users[kept], graph.items[kept], graph.num_users, graph.num_items)
