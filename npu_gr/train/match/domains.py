"""Read two domains that share users, split the target's edges, and find near-duplicates.

A near-duplicate is a target item with nearly the same users as a source item: most likely one
product that is listed in both domains. Near-duplicates leak across the domains: a user who owns the
source item has no use for the target item, yet it is easy to predict. So near-duplicates of what a
user owns are never matched in service, and figures are printed with and without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.history import UserKey
from npu_gr.history_store.interactions import read_edges
from npu_gr.train.evaluate import Evaluator, Graph, HeldOut, unique_edges

MIN_EDGES_TO_TEST = 3  # edges that a user needs for one of them to be held out for the test
MOST_TESTED = 50_000  # users of the test, of the baselines too; drawn at random of more


@dataclass(frozen=True, slots=True, eq=False)
class Domains:
    """Both domains. A user has the same row in both graphs."""

    source: Graph
    target: Graph
    users: list[UserKey]  # user of each row
    source_ids: I64  # external id of each item row
    target_ids: I64
    test: HeldOut  # edges of the target that are not in its graph
    num_testable: int  # users of whom `test` is a sample, or all
    near_duplicates: NearDuplicates
    # target items that are near-duplicates of what each user has in the source
    owned_near_duplicates: Graph

    @property
    def ids_are_apart(self) -> bool:
        """Whether no item id is in both domains, so that an id identifies its domain."""
        return not np.isin(self.source_ids, self.target_ids).any()

    def evaluator(self) -> Evaluator:
        """Return an evaluator on the test's edges, without edges to near-duplicates.

        A user's items, and near-duplicates of them, are excluded from the ranking.
        """
        evaluator = Evaluator.make(self.test, self.target, self.owned_near_duplicates)
        return evaluator.only(~are_near_duplicates(self.test, self.owned_near_duplicates))

    def evaluator_with_near_duplicates(self) -> Evaluator:
        """Return an evaluator on all of the test's edges.

        Near-duplicates of a user's items are ranked like any other item.
        """
        return Evaluator.make(self.test, self.target)

    def about_near_duplicates(self) -> str | None:
        """Warn of the near-duplicates; None = there are none."""
        if not len(self.near_duplicates.source_items):
            return None
        tested = int(are_near_duplicates(self.test, self.owned_near_duplicates).sum())
        return (
            f"WARNING: {len(self.near_duplicates.source_items)} pairs of a source and a target "
            "item have nearly the same users, as if one product were listed in both domains. "
            f"{tested} of {len(self.test.users)} tested edges "
            f"({tested / max(1, len(self.test.users)):.1%}) ask for a near-duplicate of an item "
            "that the user has, which is easy to predict and of no use. Figures are printed with "
            "and without these edges; use those without."
        )


@dataclass(frozen=True, slots=True, eq=False)
class MatchData:
    """The data of one training."""

    source: Graph
    target: Graph
    validation: HeldOut  # edges of the target that are not in its graph
    # target items that are near-duplicates of what each user has in the source
    owned_near_duplicates: Graph

    def evaluator(self) -> Evaluator:
        """Return an evaluator on the validation's edges, without edges to near-duplicates.

        A user's items, and near-duplicates of them, are excluded from the ranking.
        """
        evaluator = Evaluator.make(self.validation, self.target, self.owned_near_duplicates)
        return evaluator.only(~are_near_duplicates(self.validation, self.owned_near_duplicates))

    def with_validation(self) -> MatchData:
        """Return the data with the validation's edges in the target, for the refit."""
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
        source: Path of a `.jsonl`, a RecBole atomic file, or a TSV of user and item.
        target: Path of a file in one of the same formats.
        test: Path of a file in one of the same formats, one line per user; None = hold out one
            random edge of target users with at least `MIN_EDGES_TO_TEST` edges. Of more than
            `MOST_TESTED` users some are drawn at random.
        user_column: Name of the user's column, in files with named columns.
        item_column: Name of the item's column.
        tenant: Tenant of all users, if there is no `tenant_column`. Users of two tenants are
            different users even if their names are equal.
        tenant_column: Name of the tenant's column.

    Raises:
        DataError: a line cannot be read (names the file and the line), a domain is empty, the
            domains share no user, or a user has several lines in `test`.
    """
    read = partial(
        read_edges,
        user_column=user_column,
        item_column=item_column,
        tenant=tenant,
        tenant_column=tenant_column,
    )
    files = [source, target, *([test] if test else [])]
    tables = [read(path) for path in files]
    for path, (users, _) in zip(files, tables, strict=True):
        if not users:
            raise DataError(f"{path}: has no interaction")
    codes = {
        user: row
        for row, user in enumerate(dict.fromkeys(user for users, _ in tables for user in users))
    }
    rows = [np.array([codes[user] for user in users], np.int64) for users, _ in tables]
    if not np.isin(rows[0], rows[1]).any():
        raise DataError(f"{source} and {target} share no user")
    source_ids = np.unique(tables[0][1])
    target_ids = np.unique(np.concatenate([items for _, items in tables[1:]]))
    graph = unique_edges(
        rows[1], np.searchsorted(target_ids, tables[1][1]), len(codes), len(target_ids)
    )
    if test:
        if len(np.unique(rows[2])) != len(rows[2]):
            raise DataError(f"{test}: more than one line of a user; a test has one edge per user")
        num_testable = len(rows[2])
        some = np.sort(np.random.default_rng(0).permutation(num_testable)[:MOST_TESTED])
        held_out = HeldOut(rows[2][some], np.searchsorted(target_ids, tables[2][1])[some])
    else:
        num_testable = int((graph.degrees()[0] >= MIN_EDGES_TO_TEST).sum())
        graph, held_out = hold_out(graph, np.random.default_rng(0), MIN_EDGES_TO_TEST, MOST_TESTED)
    source_graph = unique_edges(
        rows[0], np.searchsorted(source_ids, tables[0][1]), len(codes), len(source_ids)
    )
    near_duplicates = find_near_duplicates(source_graph, graph)
    return Domains(
        source=source_graph,
        target=graph,
        users=list(codes),
        source_ids=source_ids,
        target_ids=target_ids,
        test=held_out,
        num_testable=num_testable,
        near_duplicates=near_duplicates,
        owned_near_duplicates=owned_near_duplicates(source_graph, graph, near_duplicates),
    )


def split(domains: Domains, density: float, num_validation: int, seed: int) -> MatchData:
    """Sample the target's edges, and hold out one edge each of some users for the validation.

    Args:
        domains: All known edges.
        density: Share of the target's edges to keep, in (0, 1].
        num_validation: Most users to validate on; each keeps at least one edge.
        seed: Seed of both samples.

    Raises:
        DataError: no user has two of the sampled edges, or all held-out edges lead to
            near-duplicates.
    """
    random = np.random.default_rng(seed)
    target = domains.target
    if density < 1:
        target = _part(target, random.random(len(target.users)) < density)
    target, validation = hold_out(target, random, 2, num_validation)
    if not len(validation.users):
        raise DataError(
            "no user has two edges in the target domain, so there is nothing to validate on"
        )
    data = MatchData(domains.source, target, validation, domains.owned_near_duplicates)
    for name, evaluator in (("validation", data.evaluator()), ("test", domains.evaluator())):
        if not len(evaluator.held_out.users):
            raise DataError(
                f"every edge of the {name} asks for a near-duplicate of what its user has in the "
                "source: is it one log? Give two different domains."
            )
    return data


def hold_out(
    graph: Graph, random: np.random.Generator, min_edges: int, num_users: int
) -> tuple[Graph, HeldOut]:
    """Hold out one random edge each of some random users; `graph` stays unchanged.

    Args:
        graph: Edges to draw from.
        random: Generator that draws edges and users.
        min_edges: Fewest edges of a user who can be drawn.
        num_users: Most users to draw.

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


MIN_JACCARD = 0.5  # least Jaccard index of the two items' users, without the user in question
MIN_COMMON = 2  # least number of common users: one common user of two rare items is no evidence
BLOCK_PAIRS = 4_000_000  # pairs of a source and a target item of one user, in memory at once


class NearDuplicates(NamedTuple):
    """Pairs of a source and a target item, by source item. p = pairs."""

    source_items: I64  # [p] rows, ascending
    target_items: I64  # [p] rows


def find_near_duplicates(source: Graph, target: Graph) -> NearDuplicates:
    """Find the near-duplicates by the Jaccard index of their users.

    The user for whom a target item is predicted has the source item and not the target item. This
    user is no evidence, so one user is taken off the union:

        users of both / (users of either - 1) >= MIN_JACCARD

    Args:
        source: All known edges of the source.
        target: All known edges of the target; a user has the same row in both graphs.
    """
    of_source, of_target = source.degrees()[1], target.degrees()[1]
    found = [np.empty((2, 0), np.int64)]
    for pairs, common in _common_users(source, target):
        one, other = np.divmod(pairs, target.num_items)
        either = of_source[one] + of_target[other] - common
        is_near_duplicate = (common >= MIN_COMMON) & (common >= MIN_JACCARD * (either - 1))
        found.append(np.stack([one[is_near_duplicate], other[is_near_duplicate]]))
    joined = np.concatenate(found, axis=1)
    return NearDuplicates(*joined[:, np.lexsort((joined[1], joined[0]))])


def owned_near_duplicates(source: Graph, target: Graph, near_duplicates: NearDuplicates) -> Graph:
    """List, for each user, the target items that are near-duplicates of the user's source items."""
    starts = np.searchsorted(near_duplicates.source_items, source.items)
    counts = np.searchsorted(near_duplicates.source_items, source.items, "right") - starts
    places = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    users = np.repeat(source.users, counts)
    return unique_edges(
        users, near_duplicates.target_items[places], target.num_users, target.num_items
    )


def are_near_duplicates(held_out: HeldOut, owned: Graph) -> npt.NDArray[np.bool_]:
    """Whether each held-out item is a near-duplicate of what its user owns: bool [n]."""
    mine = held_out.users * owned.num_items + held_out.items
    return np.isin(mine, owned.users * owned.num_items + owned.items)


def _common_users(source: Graph, target: Graph) -> Iterator[tuple[I64, I64]]:
    """Count the common users of every (source, target) pair that has any, in blocks of items.

    Yields:
        source item * num_target_items + target item, and the count, both int64 [pairs].
    """
    by_user = np.argsort(target.users, kind="stable")
    starts = np.searchsorted(target.users[by_user], np.arange(target.num_users + 1))
    by_item = np.argsort(source.items, kind="stable")
    users, items = source.users[by_item], source.items[by_item]
    counts = (starts[1:] - starts[:-1])[users]
    blocks = np.cumsum(counts) // BLOCK_PAIRS
    first_of_item = np.searchsorted(items, items)  # all edges of an item are in one block
    for block in np.split(
        np.arange(len(users)), np.flatnonzero(np.diff(blocks[first_of_item])) + 1
    ):
        mine = counts[block]
        places = np.arange(mine.sum()) + np.repeat(
            starts[users[block]] - (np.cumsum(mine) - mine), mine
        )
        pairs = np.repeat(items[block], mine) * target.num_items + target.items[by_user[places]]
        found, common = np.unique(pairs, return_counts=True)
        yield found, common
