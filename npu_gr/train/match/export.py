"""Turn a finished training into the vectors that `npu_gr.matching` serves."""

from __future__ import annotations

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.matching.fold import SourceItems
from npu_gr.matching.vectors import Vectors
from npu_gr.train.graph import Graph
from npu_gr.train.match.domains import Domains, MatchData
from npu_gr.train.match.joined import JoinedVectors


def export(domains: Domains, data: MatchData, joined: JoinedVectors, figures: dict[str, float]) -> Vectors:
    """Join vectors with the names and histories that serving needs.

    Args:
        domains: every edge in them counts as seen.
        data: that the training saw: it decides which users have vectors.
        joined: the vectors.
        figures: metrics to keep beside the vectors, by name.
    """
    target_starts, target_items = _by_user(domains.target)
    source_starts, source_items = _by_user(domains.source)
    num_source = domains.source.num_items
    knows_source = joined.folding.source_states is not None
    return Vectors(
        user_keys=domains.users,
        item_ids=domains.target_ids,
        users=joined.users.numpy(),
        items=joined.items.numpy(),
        in_target=data.whole().target.degrees()[0] > 0,
        in_source=(data.source.degrees()[0] > 0) & knows_source,
        popularity=domains.target.degrees()[1],
        seen_starts=target_starts,
        seen_items=target_items.astype(np.int32),
        figures=figures,
        folding=joined.folding,
        source=SourceItems(
            ids=domains.source_ids if domains.ids_are_apart else None,
            seen_starts=source_starts,
            seen_items=source_items.astype(np.int32),
            twin_starts=np.searchsorted(domains.twins.source_items, np.arange(num_source + 1)),
            twin_items=domains.twins.target_items.astype(np.int32),
        ),
    )


def _by_user(graph: Graph) -> tuple[I64, I64]:
    order = np.argsort(graph.users, kind="stable")
    return np.searchsorted(graph.users[order], np.arange(graph.num_users + 1)), graph.items[order]
