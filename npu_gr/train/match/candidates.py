"""The baselines of matching: ItemKNN, EASE and PureSVD, on the target alone and on both domains side by side.

Each has a popularity exponent and a popularity term, and is chosen on the validation that SCCDR has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from npu_gr.train.baselines.linear import EASE, ItemKNN, LinearModel, PureSVD, ease_is_too_large, spectrum
from npu_gr.train.baselines.tune import Candidate, Tuned, tune
from npu_gr.train.graph import Graph
from npu_gr.train.match.domains import MatchData

EXPONENTS = (0.0, 0.5)  # of users and of items, of ItemKNN
RIDGES = (10.0, 100.0, 1000.0)  # of EASE
ITEM_EXPONENT = 0.25  # of the decomposition
FILTERS = ((8, 1.0), (16, 1.0), (32, 1.0), (64, 1.0), (64, 3.0))  # singular values, and their power for the users

Fit = Callable[[MatchData], Tuned[LinearModel] | None]


def _joined(data: MatchData, both: bool) -> Graph:
    return data.target.beside(data.source) if both else data.target


def item_knn(data: MatchData, both: bool) -> Tuned[ItemKNN]:
    """Fit and choose ItemKNN, on both domains or on the target."""
    graph = _joined(data, both)

    def candidates() -> Iterator[Candidate[ItemKNN]]:
        for of_user, of_item in product(EXPONENTS, EXPONENTS):
            make = partial(ItemKNN, graph, data.target.num_items, of_user, of_item)
            yield Candidate(f"user exponent {of_user:g}, item exponent {of_item:g}", make)

    return tune(candidates(), data.target.degrees()[1], data.judge())


def ease(data: MatchData, both: bool) -> Tuned[EASE] | None:
    """Fit and choose EASE, on both domains or on the target; None = it is too large to invert."""
    graph = _joined(data, both)
    if ease_is_too_large(graph) is not None:
        return None
    found = (Candidate(f"ridge {r:g}", partial(EASE, graph, data.target.num_items, r)) for r in RIDGES)
    return tune(found, data.target.degrees()[1], data.judge())


def pure_svd(data: MatchData, both: bool) -> Tuned[PureSVD]:
    """Decompose and choose, on both domains or on the target."""
    graph = _joined(data, both)

    def candidates() -> Iterator[Candidate[PureSVD]]:
        # Both domains have the same weight: the users to validate on have more target edges than others, and would have
        # the source count for less than it is worth to those who need it.
        found = spectrum(graph, ITEM_EXPONENT, max(FILTERS)[0])
        for num_values, power in FILTERS:
            make = partial(PureSVD, found, data.target.num_items, num_values, power)
            yield Candidate(f"{num_values} values to the power {power:g}", make)

    return tune(candidates(), data.target.degrees()[1], data.judge())


BASELINES: dict[str, Fit] = {
    f"{name}, {where}": partial(fit, both=both)
    for where, both in (("target", False), ("both", True))
    for name, fit in (("ItemKNN", item_knn), ("EASE", ease), ("PureSVD", pure_svd))
}
