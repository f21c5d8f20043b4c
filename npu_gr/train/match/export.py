"""Turn a finished training into the vectors that `npu_gr.matching` serves."""

from __future__ import annotations

import numpy as np

from npu_gr.matching.vectors import Vectors
from npu_gr.train.match.domains import Domains, MatchData
from npu_gr.train.match.train import TrainedVectors


def export(domains: Domains, data: MatchData, trained: TrainedVectors, figures: dict[str, float]) -> Vectors:
    """Join trained vectors with the names and histories that serving needs.

    Args:
        domains: every target edge in them counts as seen.
        data: that the training saw: it decides which users have vectors.
        trained: its result.
        figures: metrics to keep beside the vectors, by name.
    """
    target = domains.target
    is_bridged = trained.source_users is not None and trained.bridge_items is not None
    order = np.argsort(target.users, kind="stable")
    return Vectors(
        user_keys=domains.users,
        item_ids=domains.target_ids,
        users=trained.users.numpy(),
        items=trained.items.numpy(),
        in_target=data.target.degrees()[0] > 0,
        in_source=data.source.degrees()[0] > 0,
        source_users=trained.source_users.numpy() if trained.source_users is not None and is_bridged else None,
        bridge_items=trained.bridge_items.numpy() if trained.bridge_items is not None and is_bridged else None,
        popularity=target.degrees()[1],
        seen_starts=np.searchsorted(target.users[order], np.arange(target.num_users + 1)),
        seen_items=target.items[order].astype(np.int32),
        figures=figures,
        folding=trained.folding,
    )
