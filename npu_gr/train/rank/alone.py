"""Does a source by itself order the validation better than the fitted order? Then it is named, and may be served.

The weights are fitted by likelihood, which also counts items that nobody sees. So NDCG@10 of each source is compared
with that of the fitted order, paired by user, on the users by whom the order was fitted. These favour the order, if
anything: what is better there is better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from npu_gr.model.order import WEIGHTS, Order
from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.paired import Difference, K, difference_of_users
from npu_gr.train.rank.neighbour_choice import ndcg_of_lists
from npu_gr.train.rank.order import ItemList

SOURCES = ("retrieval", "transitions", "neighbours", "popularity")  # the terms that find items too


def alone(order: Order, source: str) -> Order:
    """Let one source decide: weight 1 for it, and 0 for all others but `seen`.

    `seen` stays as fitted: it is 0 of every unseen item, so among these the order is the source's own.
    """
    weights = dict.fromkeys(WEIGHTS, 0.0) | {source: 1.0, "seen": order.weights["seen"]}
    return replace(order, weights=weights)


def better_alone(
    order: Order, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> dict[str, Difference]:
    """Compare every source alone with the fitted order.

    Args:
        order: fitted.
        log: with the users' histories.
        lists: of the targets.
        targets: the validation's next items.

    Returns:
        Source -> its NDCG@10 less the fitted order's, of the sources whose mean is above it, the highest first.
    """
    if not targets:
        return {}

    fitted = ndcg_of_lists(order, log, lists, targets)
    others = {source: ndcg_of_lists(alone(order, source), log, lists, targets) for source in SOURCES}
    gaps = {source: difference_of_users(figures, fitted) for source, figures in others.items()}
    best_first = sorted(gaps, key=lambda source: -gaps[source].mean)
    return {source: gaps[source] for source in best_first if gaps[source].mean > 0}


def to_serve(order: Order, better: Mapping[str, Difference]) -> Order:
    """Choose the order that is served: of one source alone where that is better by more than chance, else the fitted.

    Args:
        order: fitted.
        better: as `better_alone` returns them.
    """
    source = _surely(better)
    return order if source is None else alone(order, source)


def in_words(better: Mapping[str, Difference]) -> list[str]:
    """Warn of each source that is above the fitted order, and say which one is served in its place."""
    served = _surely(better)
    return [
        f"WARNING: {source} alone, less the fitted order, on the validation: NDCG@{K} {gap.mean:+.4f} "
        f"({gap.low:+.4f} .. {gap.high:+.4f})" + ("; its order is served" if source == served else "")
        for source, gap in better.items()
    ]


def _surely(better: Mapping[str, Difference]) -> str | None:
    """Name the best source whose interval excludes 0; None = there is none."""
    return next((source for source, gap in better.items() if gap.low > 0), None)
