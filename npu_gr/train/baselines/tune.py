"""Choose among models on a validation, each with a popularity exponent and a popularity term.

    score(u, i) = part(u, i) d_i^g + b log(d_i + 1/2)

d are the items' edges. Both terms are scaled to a root mean square of 1, so that weights mean the same for every model.
A model without the two is at a disadvantage: most of what is bought is bought because it is popular.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.train.baselines.linear import LinearModel
from npu_gr.train.judge import Judge, smooth_hit

EXPONENTS = (0.0, 0.5, 0.75)  # g
WEIGHTS = (0.0, 0.2, 0.5, 1.0)  # b
SCALE_USERS = 256  # users whose scores decide the scale

M = TypeVar("M", bound=LinearModel, covariant=True)
_Setting = tuple[float, float, Tensor, Tensor]  # g, b, factors, terms


class Candidate(NamedTuple, Generic[M]):
    """A model to choose."""

    name: str  # its settings in words
    make: Callable[[], M]


@dataclass(frozen=True, slots=True, eq=False)
class Tuned(Generic[M]):
    """A model with its popularity exponent and term. I = scored items."""

    model: M
    name: str  # the model's settings in words
    exponent: float
    weight: float
    validation: float  # smooth HIT; 0: nothing was validated
    factors: Tensor  # float32 [I] multiply the model's scores
    terms: Tensor  # float32 [I] are added

    @property
    def settings(self) -> str:
        """What was chosen, in words."""
        return f"{self.name}, popularity exponent {self.exponent:g} and weight {self.weight:g}"

    def scores(self, users: Tensor) -> Tensor:
        """Score the items for some users: int64 [n] rows -> float32 [n, I]."""
        return torch.addcmul(self.terms, self.model.scores(users), self.factors)

    def refitted(self, candidates: Iterable[Candidate[M]], degrees: I64, users: I64) -> Tuned[M]:
        """Make the same of other data.

        Args:
            candidates: of the other data, with the same names.
            degrees: int64 [I] edges of each scored item in it.
            users: some whose scores decide the scale.
        """
        model = next(make for name, make in candidates if name == self.name)()
        factors = _factors(_sample(model, users), degrees, self.exponent)
        return replace(self, model=model, factors=factors, terms=_terms(degrees, self.weight))


def tune(candidates: Iterable[Candidate[M]], degrees: I64, judge: Judge) -> Tuned[M]:
    """Choose by smooth HIT; of equals the first.

    Args:
        candidates: at least one; one model is held at a time beside the best so far.
        degrees: int64 [I] edges of each scored item.
        judge: of the validation.
    """
    best: Tuned[M] | None = None
    for name, make in candidates:
        model = make()
        sample = _sample(model, judge.held_out.users)
        grid = [(g, b, _factors(sample, degrees, g), _terms(degrees, b)) for g, b in product(EXPONENTS, WEIGHTS)]

        def tables(users: Tensor, model: LinearModel = model, grid: list[_Setting] = grid) -> Iterator[Tensor]:
            scores = model.scores(users)
            return (torch.addcmul(terms, scores, factors) for _, _, factors, terms in grid)

        hits = [smooth_hit(ranks) for ranks in judge.ranks_of_each(tables)] if len(sample) else [0.0]
        place = int(np.argmax(hits))
        if best is None or hits[place] > best.validation:
            best = Tuned(model, name, *grid[place][:2], hits[place], *grid[place][2:])
    assert best is not None, "there is a candidate"
    return best


def log_popularity(degrees: I64) -> Tensor:
    """Compute how popular items are as a term of a score: log(d + 1/2) less its mean, float32 [I]."""
    logs = torch.from_numpy(np.log(degrees + 0.5).astype(np.float32))
    return logs - logs.mean()


def root_mean_square(x: Tensor) -> float:
    """Compute the size of scores; 1 of none or of zeros, so that it may divide."""
    return (float(x.square().mean().sqrt()) if x.numel() else 0.0) or 1.0


def _sample(model: LinearModel, users: I64) -> Tensor:
    return model.scores(torch.from_numpy(users[:SCALE_USERS]))


def _factors(sample: Tensor, degrees: I64, exponent: float) -> Tensor:
    """Compute the factors d^exponent, scaled so that the sample's scores have a root mean square of 1."""
    factors = torch.from_numpy(np.maximum(degrees, 1).astype(np.float32)) ** exponent
    return factors / root_mean_square(sample * factors)


def _terms(degrees: I64, weight: float) -> Tensor:
    popularity = log_popularity(degrees)
    return popularity * (weight / root_mean_square(popularity))
