"""The baselines of matching: ItemKNN, EASE and PureSVD, on the target alone and on both domains side by side.

Each has a popularity exponent and a popularity term, and is chosen on the validation that SCCDR has. Then the chosen
one is refitted to all edges, the validation's among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import Generic, NamedTuple, TypeVar

from npu_gr.train.baselines.linear import EASE, ItemKNN, LinearModel, PureSVD, ease_is_too_large, spectrum
from npu_gr.train.baselines.tune import Candidate, Tuned, tune
from npu_gr.train.graph import Graph
from npu_gr.train.match.domains import MatchData

EXPONENTS = (0.0, 0.5)  # of users and of items, of ItemKNN
RIDGES = (10.0, 100.0, 1000.0)  # of EASE
ITEM_EXPONENT = 0.25  # of the decomposition
FILTERS = ((8, 1.0), (16, 1.0), (32, 1.0), (64, 1.0), (64, 3.0))  # singular values, and their power for the users

M = TypeVar("M", bound=LinearModel, covariant=True)
Models = Callable[[MatchData, bool], Iterator[Candidate[M]]]  # of both domains, or of the target


class FittedLinear(NamedTuple, Generic[M]):
    """A model before and after its refit."""

    chosen: Tuned[M]  # does not know the validation's edges
    served: Tuned[M]  # the same settings, of all edges


def fit(models: Models[M], data: MatchData, both: bool) -> FittedLinear[M] | None:
    """Choose by the validation, and refit; None = there is nothing to choose among.

    Args:
        models: the candidates, the same ones for any data.
        data: to fit to.
        both: use both domains side by side, not the target alone.
    """
    candidates = models(data, both)
    first = next(candidates, None)
    if first is None:
        return None
    judge = data.judge()
    chosen = tune(chain([first], candidates), data.target.degrees()[1], judge)
    whole = data.whole()
    return FittedLinear(chosen, chosen.refitted(models(whole, both), whole.target.degrees()[1], judge.held_out.users))


def item_knns(data: MatchData, both: bool) -> Iterator[Candidate[ItemKNN]]:
    """List the candidates of ItemKNN."""
    graph = _joined(data, both)
    for of_user, of_item in product(EXPONENTS, EXPONENTS):
        make = partial(ItemKNN, graph, data.target.num_items, of_user, of_item)
        yield Candidate(f"user exponent {of_user:g}, item exponent {of_item:g}", make)


def eases(data: MatchData, both: bool) -> Iterator[Candidate[EASE]]:
    """List the candidates of EASE; none if it is too large to invert."""
    graph = _joined(data, both)
    if ease_is_too_large(graph) is None:
        for ridge in RIDGES:
            yield Candidate(f"ridge {ridge:g}", partial(EASE, graph, data.target.num_items, ridge))


def pure_svds(data: MatchData, both: bool) -> Iterator[Candidate[PureSVD]]:
    """List the candidates of PureSVD.

    Both domains have the same weight: the users to validate on have more target edges than others, and would have the
    source count for less than it is worth to those who need it.
    """
    found = spectrum(_joined(data, both), ITEM_EXPONENT, max(FILTERS)[0])
    for num_values, power in FILTERS:
        make = partial(PureSVD, found, data.target.num_items, num_values, power)
        yield Candidate(f"{num_values} values to the power {power:g}", make)


def fit_joint_svd(data: MatchData) -> FittedLinear[PureSVD]:
    """Decompose both domains side by side, choose and refit."""
    found = fit(pure_svds, data, both=True)
    assert found is not None, "there is a candidate"
    return found


def _joined(data: MatchData, both: bool) -> Graph:
    return data.target.beside(data.source) if both else data.target


BASELINES: dict[str, Callable[[MatchData], FittedLinear[LinearModel] | None]] = {
    f"{name}, {where}": partial(fit, models, both=both)
    for where, both in (("target", False), ("both", True))
    for name, models in (("ItemKNN", item_knns), ("EASE", eases), ("PureSVD", pure_svds))
}
