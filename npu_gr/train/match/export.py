"""Turn a finished training into the vectors that `npu_gr.matching` serves."""

from __future__ import annotations

import numpy as np

from npu_gr.matching.vectors import Vectors
from npu_gr.train.match.domains import Domains, MatchData
from npu_gr.train.match.train import Result


def export(domains: Domains, data: MatchData, result: Result, figures: dict[str, float]) -> Vectors:
    """A training's result with the names and histories that serving needs; every known target edge counts as seen."""
    target = domains.target
    is_bridged = result.source_users is not None and result.bridge_items is not None
    order = np.argsort(target.users, kind="stable")
    return Vectors(
        user_names=domains.user_names,
        item_ids=domains.target_ids,
        users=result.users.numpy(),
        items=result.items.numpy(),
        in_target=data.target.degrees()[0] > 0,
        in_source=data.source.degrees()[0] > 0,
        source_users=result.source_users.numpy() if result.source_users is not None and is_bridged else None,
        bridge_items=result.bridge_items.numpy() if result.bridge_items is not None and is_bridged else None,
        popularity=target.degrees()[1],
        seen_starts=np.searchsorted(target.users[order], np.arange(target.num_users + 1)),
        seen_items=target.items[order].astype(np.int32),
        figures=figures,
        folding=result.folding,
    )
